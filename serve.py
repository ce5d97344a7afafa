"""
Serving: many requests at a time, for models that loop over depth (relaxed, mor).

    python serve.py out/relaxed_exit requests=FILE.jsonl exit=confidence:0.9
    python serve.py out/mor_tiny requests=FILE.jsonl batching=sequence slots=32
    python serve.py out/mor_tiny prompt="def read(self, "   tokens by loop 1 blue, 2 magenta, 3 cyan
    python serve.py help                                    every key with its meaning

A line of FILE is {"prompt": "def ", "max_new_tokens": 50, "id": "a"}; the prompt is enough. The
answer is a JSON line: the id (or the line's number), text, tokens, exits (the loop that predicted
each) and seconds (since the start). It ends where the context is full; sample.py goes on.

A token takes loop 1, then may exit or take loop 2 (model_mor says recursion). Two slots are
decoding requests A and B; C comes next. A column is a step, A2: loop 2 of a token of A.

    sequence    A1 A2 A1 .  A1 A2       a step is one loop of all: slots whose tokens have exited
                B1 .  B1 B2 C1 C2       wait (.) for the others
    depth       A1 A2 A1 A1 A2          nobody waits: all loops have the same blocks (of mor with
                B1 B1 B2 C1 C2          a cycle), so a step takes tokens in different loops

Depth is the paper's continuous depth-wise batching (Bae et al. 2024, 2410.20672, Section 2.4).
Up to rounding, each answer is what its request would get alone.

A slot first feeds its prompt to the model (a prefill), then one token of the answer at a time. In
mor a router decides how deep each token goes; in a recursion it attends to those that went there.
In relaxed a rule (exit=) chooses where a token of the answer exits (a prompt takes all loops), but
later tokens need its keys and values in deeper loops. So it waits until one of them goes there:
with fill=exact it takes that loop, too, as if it had not exited; with fill=propagate its state is
frozen, and only keys and values are made from it. (The paper simulates the batching, with exits
that an oracle chooses.)

Shapes: N tokens of a call are R rows of T tokens (T = 1, or R = 1), S keys, G key/value heads,
D head size, C width, V vocabulary, r rank. Loops count from 1, the layers of a loop from 0.
"""
import contextlib
import itertools
import json
import math
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from common.checkpoint import load_run
from common.keys import (UserError, check_known, choice, read_text, run_cli, split_args,
                         typed_config)
from common.process import pick_device
from model_gpt import apply_rope, compute_dtype, rope_tables, upcast
from sample import Decoding, Sampling, check_finite, check_prompts, next_tokens


# ---- the engine: who goes next ----

@dataclass(eq=False)
class Request:
    """A prompt to continue, and what has become of it."""
    prompt: list                    # token ids
    max_new_tokens: int
    id: object = None
    sampling: tuple = (0.0, 0, 1.0)                 # temperature, top_k, top_p
    generator: torch.Generator = None               # of its own, to sample
    tokens: list = field(default_factory=list)      # the answer, without end-of-text
    exits: list = field(default_factory=list)       # the loop that predicted each of them
    reason: str = None              # why it has ended: stop (at end-of-text) or length


@dataclass(eq=False)
class Token:
    """A token that a slot feeds to the model."""
    slot: "Slot"
    pos: int
    h: torch.Tensor                 # its state (C,)
    loop: int = 0                   # how many loops it has taken
    exited: bool = False            # whether the next token has been predicted from it
    h1: torch.Tensor = None         # mor: its state before loop 1


@dataclass(eq=False)
class Slot:
    """The place where one request is decoded.

    All tokens that a slot runs in a step have taken the same number of loops: the newest, and
    before them those that have exited and need the same loop. So along `unfinished` the number of
    loops never rises."""
    number: int
    request: Request = None
    fed: list = None                # the newest tokens: a prompt, or one token of the answer
    unfinished: list = field(default_factory=list)  # tokens that take another loop, by position

    def feed(self, x, start):
        """Embeddings x (T, C) of tokens at positions start, start + 1, .. take loop 1 next."""
        self.fed = [Token(self, pos, h) for pos, h in enumerate(x, start)]
        self.unfinished += self.fed

    def depth(self):
        """How many loops the newest tokens have taken. The slot runs the next one."""
        return self.unfinished[-1].loop

    def take(self):
        """Remove the tokens that run the slot's next loop from unfinished, and return them."""
        depth, taken = self.depth(), []
        while self.unfinished and self.depth() == depth:
            taken.append(self.unfinished.pop())
        return taken[::-1]


class Engine:
    """Decodes requests in `slots` slots. Prompt and answer together have up to max_len tokens
    (None: the model's limit or, without one, 8 times block_size)."""
    # see run_layers. 1 takes 14 % longer with prompts of 4 to 16 tokens; so does no limit, with
    # prompts of 40 to 120
    MANY = 16

    def __init__(self, model, slots, max_len=None, batching="depth", exit="", fill="exact",
                 eot=None, vocab_size=None):
        self.model, self.adapter, self.n_loop = model, adapter_of(model), model.loops_to_run
        if not 1 <= slots <= 4096:
            raise UserError(f"slots={slots} must be at least 1 and at most 4096")
        if (exit or fill != "exact") and self.adapter.routed:
            raise UserError("exit and fill are for relaxed: in a mor the router decides")
        self.batching, self.eot, self.vocab_size = batching, eot, vocab_size
        self.rule, self.propagate = exit_rule(exit, self.n_loop), fill == "propagate"
        self.slots = [Slot(n) for n in range(slots)]
        self.max_len = max_len or model.context_limit or 8 * model.cfg.block_size
        self.device = model.wte.weight.device
        self.make_cache(model.cfg, compute_dtype(model.wte.weight))

    def make_cache(self, cfg, dtype):
        """Keys and values of (lanes, 2, G, max_len, D) a layer. A slot has a lane for each loop,
        number + (loop - 1) slots: entry p is its token at position p, if that took the loop
        (model_mor's own cache has no such gaps, so it is smaller). mor's first and last layer, -2
        and -1, have the lanes of loop 1 alone, as all tokens take both."""
        zeros, n = partial(torch.zeros, device=self.device, dtype=dtype), len(self.slots)
        shape = 2, cfg.n_kv_head, self.max_len, cfg.head_dim
        self.kv = [zeros(n * self.n_loop, *shape) for _ in range(cfg.n_stored)]
        self.kv += [zeros(n, *shape) for _ in range(getattr(cfg, "n_outside", 0))]
        self.taken = zeros(n * self.n_loop, self.max_len, dtype=torch.bool)     # whether it did
        pos = torch.arange(self.max_len, device=self.device)
        self.rope = cfg.pos == "rope" and rope_tables(pos, cfg.head_dim, cfg.rope_theta, dtype)

    def run(self, requests):
        """Yields each of the requests (a list of Request) when it is answered."""
        queue = deque(requests)
        while queue or self.busy():
            self.admit(queue)
            yield from self.step()

    def busy(self):
        return [slot for slot in self.slots if slot.request is not None]

    @torch.inference_mode()
    def admit(self, queue):
        """Give free slots to the requests that wait in a queue, and feed their prompts. A slot is
        zeroed before: a NaN poisons sums, even under a mask."""
        for slot in self.slots:
            if slot.request is None and queue:
                slot.request = queue.popleft()
                for lanes in (self.taken, *self.kv):
                    lanes[slot.number::len(self.slots)] = 0
                slot.unfinished.clear()
                slot.feed(self.embed(slot.request.prompt), 0)

    def embed(self, ids):
        return self.model.wte(torch.tensor(ids, dtype=torch.long, device=self.device))

    @torch.inference_mode()
    def step(self):
        """Run one loop: of all slots or, in sequence batching, of those that are deepest. Returns
        the requests that are answered."""
        # 1. Who goes: in sequence batching a slot that is back at loop 1 waits for the others.
        slots, adapter = self.busy(), self.adapter
        if self.batching == "sequence":
            deepest = max((slot.depth() for slot in slots), default=0)      # no slot: lab.page
            slots = [slot for slot in slots if slot.depth() == deepest]
        tokens = [token for slot in slots for token in slot.take()]

        # 2. They take the loop. Keys of frozen tokens come first, as the others attend to them.
        self.run_layers(adapter.before_loops, [token for token in tokens if token.loop == 0])
        self.run_layers(adapter.write_keys, filter(self.frozen, tokens))
        self.run_layers(adapter.run_loop, itertools.filterfalse(self.frozen, tokens))
        for token in tokens:
            token.loop += 1

        # 3. Who goes on: in mor the router's choice, in relaxed all, also tokens that have exited.
        for token in adapter.go_on([token for token in tokens if token.loop < self.n_loop]):
            token.slot.unfinished.append(token)

        # 4. Who is done: slots without an unfinished token. In mor the tokens of a prompt may have
        # left the loops in earlier steps; here they come together again for the last layer.
        done = [slot for slot in slots if not slot.unfinished]
        fed = [token for slot in done for token in slot.fed]
        self.run_layers(adapter.after_loops, fed, loop=1)

        # 5. Slots that are done, or whose newest token exits, get the next token.
        return self.predict(slots)

    def frozen(self, token):
        """Whether the state of a token stays as it is, because it has exited (fill=propagate)."""
        return self.propagate and token.exited

    def run_layers(self, layers, tokens, loop=None):
        """layers: a method of the adapter, or None. loop: see SlotContext. All slots share a call,
        in which each token is a row, T = 1. There each has a copy of its slot's keys, so a slot
        with more than MANY tokens (a long prompt) has a call of its own, R = 1."""
        slots = [list(its) for _, its in itertools.groupby(tokens, lambda token: token.slot)]
        calls = [(len(its), its) for its in slots if len(its) > self.MANY]
        calls.append((1, [token for its in slots if len(its) <= self.MANY for token in its]))
        for T, call in calls:
            if layers and call:
                x = torch.stack([token.h for token in call]).unflatten(0, (-1, T))  # (R, T, C)
                x = layers(x, SlotContext(self, call, T, loop))
                for token, h in zip(call, x.flatten(0, 1)):
                    token.h = h

    def predict(self, slots):
        """Answer the slots that are done with the loops, and those whose newest token exits by the
        rule; a prompt takes all loops. Returns the requests that end."""
        asked = [slot for slot in slots if not slot.unfinished
                 or (self.rule and slot.request.tokens)]
        if not asked:
            return []
        h = self.model.norm(torch.stack([slot.fed[-1].h for slot in asked]))        # (R, C)
        logits = upcast(self.model.head(h))[:, :self.vocab_size]
        if self.rule:
            likeliest = logits.softmax(-1).amax(-1).tolist()
            exits = [self.rule(slot.fed[-1].loop, p) for slot, p in zip(asked, likeliest)]
            asked, logits = list(itertools.compress(asked, exits)), logits[exits]
        ids = self.pick(asked, logits)
        requests = [slot.request for slot in asked]
        for slot, id, x in zip(asked, ids, self.embed(ids).split(1)):
            self.answer(slot, id, x)
        return [request for request in requests if request.reason]

    def answer(self, slot, id, x):
        """Add the token id to a slot's answer and feed its embedding x (1, C), or end the answer.
        The token that predicted it has exited; before the last loop it stays unfinished, so that
        it takes the deeper loops together with the first later token that goes there."""
        request, last = slot.request, slot.fed[-1]
        last.exited = True
        if id == self.eot:
            return self.end(slot, "stop")
        request.tokens.append(id)
        request.exits.append(last.loop)
        if len(request.tokens) == request.max_new_tokens:
            return self.end(slot, "length")
        slot.feed(x, last.pos + 1)

    def pick(self, slots, logits):
        """A token for each slot: the likeliest, for all at once, or a sampled one."""
        check_finite(logits)
        tokens = logits.argmax(-1).tolist()
        for n, r in enumerate(slot.request for slot in slots):
            if r.sampling != Request.sampling:      # the default
                tokens[n] = int(next_tokens(logits[n:n + 1], *r.sampling, r.generator))
        return tokens

    def end(self, slot, reason):
        slot.request.reason = reason
        slot.request = None


def exit_rule(exit, n_loop):
    """What exit= names: whether a token exits after a loop, of whose prediction the likeliest
    token has probability p (Schuster et al. 2022). None without a rule."""
    kind, _, bound = exit.partition(":")
    with contextlib.suppress(ValueError):       # of float
        if kind == "static" and float(bound) in range(1, n_loop + 1):
            return lambda loop, p: loop >= float(bound)
        if kind == "confidence" and 0 <= float(bound) <= 1:
            return lambda loop, p: p > float(bound) or loop == n_loop
    if exit:
        raise UserError(f"exit={exit}: static:1 to static:{n_loop}, confidence:P (0 to 1) allowed")


class SlotContext:
    """The context of a call of R T tokens, as model_gpt's Context: each attends to the tokens of
    its slot that have taken the same loop (or `loop`, if given), up to itself. relaxed and mor have
    neither ALiBi nor a window."""

    def __init__(self, engine, tokens, T, loop=None):
        self.tokens, self.kv = tokens, engine.kv
        tensor = partial(torch.tensor, device=engine.device)
        self.loop = tensor([loop or token.loop + 1 for token in tokens[::T]])   # (R,)
        self.lane = tensor([token.slot.number for token in tokens[::T]])        # (R,)
        self.lane += (self.loop - 1) * len(engine.slots)
        self.pos = tensor([token.pos for token in tokens]).view(-1, T)          # (R, T)
        self.S = max(token.pos for token in tokens) + 1
        engine.taken[self.lane[:, None], self.pos] = True
        visible = torch.arange(self.S, device=engine.device) <= self.pos[..., None]
        visible = visible & engine.taken[self.lane, None, :self.S]              # (R, T, S)
        self.bias = torch.where(visible, 0.0, -math.inf)[:, None]               # (R, 1, T, S)
        self.kept = torch.ones_like(self.pos, dtype=torch.bool)     # as model_mor has it: all
        self.rope = engine.rope and [x[self.pos][:, None] for x in engine.rope]

    def extend(self, layer, k, v):
        """k, v (R, G, T, D) of the tokens -> (R, G, S, D), those of all so far."""
        self.write(layer, k, v)
        kv = self.kv[layer][:, :, :, :self.S].index_select(0, self.lane)
        return kv.to(k.dtype).unbind(1)

    def write(self, layer, k, v):
        kv, new = self.kv[layer], torch.stack([k, v], 1).permute(0, 3, 1, 2, 4)
        kv[self.lane[:, None], :, :, self.pos] = new.to(kv.dtype)           # (R, T, 2, G, D)


# ---- the models: what the engine asks of them ----
# routed: whether a router decides which tokens exit; go_on(tokens): those that take another loop.
# The others: states x (R, T, C) and their SlotContext -> the next states. Rows may differ in loop.

class RelaxedAdapter:
    routed, before_loops, after_loops = False, None, None

    def __init__(self, model):
        self.model, self.cfg = model, model.cfg

    def run_loop(self, x, context):
        u = self.use(x, context)
        for k, block in enumerate(self.model.blocks):
            x = block(x, k, context, u)
        return x

    def write_keys(self, x, context):
        """Write the keys and values that the next loop makes of states x, which stay."""
        u, D = self.use(x, context), self.cfg.head_dim
        for layer, block in enumerate(self.model.blocks):
            n, attn = block.norm1(x), block.attn
            k = attn.wk(n, u).unflatten(-1, (-1, D)).transpose(1, 2)        # (R, G, T, D)
            v = attn.wv(n, u).unflatten(-1, (-1, D)).transpose(1, 2)        # (R, G, T, D)
            if self.cfg.qk_norm:
                k = attn.k_norm(k, u)
            k = apply_rope(k, *context.rope) if context.rope else k
            context.write(layer, k, v)
        return x

    def use(self, x, context):
        """The use of a stored block in loop 1, 2, .. is 0, 1, ..: an int if all rows have the same,
        so that deltas can be merged, else one for each row (R,)."""
        uses = {token.loop for token in context.tokens}
        if len(uses) == 1:
            return uses.pop()
        return F.one_hot(context.loop - 1, self.cfg.n_loop).to(x)

    def go_on(self, tokens):
        return tokens


class MoRAdapter:
    routed, write_keys = True, None

    def __init__(self, model):
        self.model, self.cfg = model, model.cfg
        if not self.cfg.share.endswith("cycle"):
            raise UserError(f"share={self.cfg.share} is not served: sample.py decodes it")
        if self.cfg.kv != "recursion":
            raise UserError(f"kv={self.cfg.kv} is not served: sample.py decodes it")

    def before_loops(self, x, context):
        for block in self.model.first:
            x = block(x, -2, context)
        for token, h in zip(context.tokens, x.flatten(0, 1)):
            token.h1 = h
        return x

    def run_loop(self, x, context):
        expert = self.cfg.router == "expert"
        s = self.scores(self.model.routers, x, context.loop) if expert else None
        return self.model.recursion(1, x, context, s)   # all recursions have the same blocks

    def after_loops(self, x, context):
        if self.cfg.router == "token":
            h1 = torch.stack([token.h1 for token in context.tokens]).view_as(x)
            _, p, depth = self.model.choose_depth(h1, self.model.loops_to_run)
            x = self.model.exit(h1, x, p, depth)        # model_mor's (2.2)
        for block in self.model.last:
            x = block(x, -1, context)
        return x

    def go_on(self, tokens):
        model, cfg = self.model, self.cfg
        if cfg.router == "none" or not tokens:
            return tokens
        if cfg.router == "token":
            h1 = torch.stack([token.h1 for token in tokens])
            _, _, depth = model.choose_depth(h1, model.loops_to_run)
            return [token for token, d in zip(tokens, depth.tolist()) if token.loop < d]
        routers = model.aux_routers if cfg.causal == "aux_router" else model.routers
        x = torch.stack([token.h for token in tokens])[:, None]             # (N, 1, C)
        next_loop = torch.tensor([token.loop + 1 for token in tokens], device=x.device)
        goes_on = self.scores(routers, x, next_loop)[:, 0] >= 0             # (N,)
        return itertools.compress(tokens, goes_on.tolist())

    def scores(self, routers, x, loop):
        """x (R, T, C) -> (R, T), by the routers of loops (R,)."""
        s = torch.cat([router(x) for router in routers], -1)                # (R, T, n_loop)
        return s.take_along_dim(loop[:, None, None] - 1, -1)[..., 0]


def adapter_of(model):
    """The adapter of a model; UserError if it has no loops, or none over the same blocks."""
    name, adapters = type(model).__module__, {"model_relaxed": RelaxedAdapter,
                                              "model_mor": MoRAdapter}
    if name not in adapters:
        raise UserError(f"only models that loop over depth are served (relaxed, mor), not a {name}")
    return adapters[name](model)


# ---- requests in, answers out ----

@dataclass
class EngineKeys(Decoding):
    """The keys that serve.py and lab.page share."""
    batching: str = choice("depth", "sequence")
    slots: int = 16                 # requests decoded at a time
    exit: str = ""                  # relaxed: static:LOOP | confidence:P
    fill: str = choice("exact", "propagate")    # relaxed: deeper keys of a token that has exited


@dataclass
class ServeConfig(Sampling, EngineKeys):
    requests: str = ""              # the file of requests, one JSON object a line
    prompt: str = ""                # or one text to continue, in colours


def main(argv):
    (path,), keys = split_args(argv, least=1, most=1)
    cfg = typed_config(ServeConfig, keys)
    if bool(cfg.requests) == bool(cfg.prompt):
        raise UserError("give requests=FILE.jsonl (one JSON object a line) or prompt=TEXT")
    model, tokenizer, _ = load_run(path, pick_device(cfg.device), fast=cfg.fast)
    requests = read_requests(model, tokenizer, cfg)
    longest = max(len(r.prompt) + r.max_new_tokens for r in requests)
    engine = Engine(model, min(cfg.slots, len(requests)), longest, cfg.batching, cfg.exit,
                    cfg.fill, tokenizer.eot if cfg.stop else None, tokenizer.vocab_size)
    start = time.perf_counter()
    for r in engine.run(requests):
        seconds = time.perf_counter() - start
        answer = as_json(r, tokenizer, seconds) if cfg.requests else in_colours(r, tokenizer)
        print(answer, flush=True)
    exits = [loop for request in requests for loop in request.exits]
    print(f"{len(requests)} requests, {len(exits)} tokens in {seconds:.2f} s: "
          f"{len(exits) / seconds:.1f} tokens/s; exited after loop "
          f"{loop_fractions(exits, engine.n_loop)}", file=sys.stderr)


def loop_fractions(loops, n_loop):
    """How many of loops, one for each token, are 1, 2, .. n_loop: 1: 60%, 2: 40%."""
    return ", ".join(f"{b}: {loops.count(b) / max(1, len(loops)):.0%}"
                     for b in range(1, n_loop + 1))


def read_requests(model, tokenizer, cfg):
    """The requests of the file, or of prompt=. UserError names the line that holds none."""
    if cfg.prompt:
        return [read_request(json.dumps({"prompt": cfg.prompt}), 1, model, tokenizer, cfg)]
    text, requests = read_text(cfg.requests, f"requests={cfg.requests}"), []
    for n, line in enumerate(text.split("\n"), 1):
        try:
            if line.strip():
                requests.append(read_request(line, n, model, tokenizer, cfg))
        except UserError as e:
            raise UserError(f"{cfg.requests}, line {n}: {e}") from None
    if not requests:
        raise UserError(f"requests={cfg.requests} is empty: one JSON object a line")
    return requests


def read_request(line, n, model, tokenizer, cfg):
    """The Request in line n, no longer than the model's context."""
    given = {"id": n, "max_new_tokens": cfg.max_new_tokens}
    try:
        given |= {**json.loads(line)}       # a TypeError for a list
    except (ValueError, TypeError, RecursionError):
        raise UserError("not a JSON object") from None
    check_known(given, ["prompt", "max_new_tokens", "id"])
    id, device = given.pop("id"), model.wte.weight.device
    asked = typed_config(ServeConfig, given)
    prompt, limit = tokenizer.encode(asked.prompt), model.context_limit or math.inf
    check_prompts([prompt], tokenizer.vocab_size)
    if len(prompt) >= limit:
        raise UserError(f"{len(prompt)} tokens leave no room for an answer: block_size={limit}")
    n_new = min(asked.max_new_tokens, limit - len(prompt))
    how = cfg.temperature, cfg.top_k, cfg.top_p
    return Request(prompt, n_new, id, how, generator(cfg.seed, n, device))


def generator(seed, n, device):
    """The random numbers of the n-th request, whatever its neighbours are."""
    [word] = np.random.SeedSequence([seed, n]).generate_state(1, np.uint64).tolist()
    return torch.Generator(device).manual_seed(word >> 1)       # a seed has 63 bits


def as_json(r, tokenizer, seconds):
    return json.dumps({"id": r.id, "text": "".join(tokenizer.stream(r.tokens)),
                       "tokens": r.tokens, "exits": r.exits, "seconds": round(seconds, 4)})


def in_colours(r, tokenizer):
    pieces = zip(tokenizer.stream(r.tokens), [*r.exits, 1])     # the last belongs to no token
    new = [f"\033[{31 + (loop + 2) % 6}m{text}\033[0m" for text, loop in pieces]
    return tokenizer.decode(r.prompt) + "".join(new)


if __name__ == "__main__":
    run_cli(main, ServeConfig)
