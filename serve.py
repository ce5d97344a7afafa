"""
Serving: many requests at a time, for models that loop over depth (relaxed, mor).

    python serve.py out/relaxed_exit requests=FILE.jsonl exit=confidence:0.9
    python serve.py out/mor_tiny requests=FILE.jsonl batching=depth slots=32
    python serve.py out/mor_tiny prompt="def read(self, "   one text, coloured by loops
    python serve.py help                                    every key with its meaning

A line of FILE is a JSON object, of which only the prompt is needed:

    {"prompt": "def ", "max_new_tokens": 50, "id": "a"}

The answer is a JSON line with the id (or the line's number), text, tokens, exits (the loop from
which each token was predicted) and seconds (from the start to the answer).

A token takes loop 1, then may exit or take loop 2 (model_mor says recursion). Two slots are
decoding requests A and B; C comes next. A column is a step in time, A2: loop 2 of a token of A,
.: the slot waits.

    sequence    A1 A2 A1 .  A1 A2       all slots take the same loop of one token each, and a
                B1 .  B1 B2 C1 C2       slot whose token has exited waits for the others
    depth       A1 A2 A1 A1 A2          a slot whose token exits starts its next token at once:
                B1 B1 B2 C1 C2          with share=cycle all loops use the same blocks

Depth is the paper's continuous depth-wise batching (Bae et al. 2024, 2410.20672, Section 2.4).
Up to rounding, each answer is what its request would get alone.

A token that exits early has no keys and values in the deeper loops, which later tokens need.
The paper leaves them to future work: it simulates the batching, with exits that an oracle
chooses. Here the token waits until a later one goes there: with fill=exact it takes that loop,
too, with fill=propagate its state is frozen, and only keys and values are projected from it.

Words. A request is decoded in a slot. What a slot feeds to the model is its prompt at first (a
prefill), then one token of the answer at a time. In relaxed a rule decides where a fed token
exits (exit=), but a prefill takes all loops; in mor a router decides, of a prefill's tokens too.

The models' attention and MLP run as they are: a row of their batch is a token of some slot. What
they cannot know stands here: where its keys are (SlotContext) and, in relaxed, that rows differ
in their loop (mixed_block).

Shapes: N tokens of a call are R rows of T tokens (T = 1, or R = 1), S keys, G key/value heads,
D head size, C width, V vocabulary, r rank. Loops count from 1, the layers of a loop from 0.
"""
import copy
import functools
import itertools
import json
import math
import os
import sys
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))    # PYTHONSAFEPATH leaves it out

from common.checkpoint import load_run
from common.keys import UserError, asks_help, choice, help_text, read_text, run_cli, typed_config
from common.process import pick_device
from common.sampling import (Decoding, Sampling, check_prompts, loop_fractions, next_tokens,
                             read_arguments)
from model_gpt import apply_rope, compute_dtype, rope_tables, upcast


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
    if asks_help(argv):
        return print(help_text(ServeConfig))
    path, cfg = read_arguments(argv, ServeConfig)
    if bool(cfg.requests) == bool(cfg.prompt):
        raise UserError("give requests=FILE.jsonl (one JSON object a line) or prompt=TEXT")
    model, tokenizer, _ = load_run(path, pick_device(cfg.device), fast=cfg.fast)
    if cfg.requests:
        requests, write = read_requests(model, tokenizer, cfg), write_answers
    else:       # one request has nobody to wait for, and batching=sequence takes every share
        cfg = replace(cfg, batching="sequence")
        request = make_request(model, tokenizer, cfg, cfg.prompt, cfg.max_new_tokens)
        requests, write = [request], write_coloured
    engine = Engine(model, min(cfg.slots, len(requests)), None, cfg.batching, cfg.exit, cfg.fill,
                    eot=tokenizer.eot if cfg.stop else None, vocab_size=tokenizer.vocab_size)
    start = time.perf_counter()
    write(engine, requests, tokenizer)
    seconds = time.perf_counter() - start
    exits = [loop for request in requests for loop in request.exits]
    print(f"{len(requests)} requests, {len(exits)} tokens in {seconds:.2f} s: "
          f"{len(exits) / seconds:.1f} tokens/s; exited after loop "
          f"{loop_fractions(exits, engine.n_loop)}", file=sys.stderr)


@dataclass(eq=False)
class Request:
    """A prompt to continue, and what has become of it."""
    prompt: list                     # token ids
    max_new_tokens: int
    id: object = None
    sampling: tuple = (0.0, 0, 1.0, 1.0)            # temperature, top_k, top_p, penalty
    generator: torch.Generator = None               # of its own, to sample
    tokens: list = field(default_factory=list)      # the answer, without end-of-text
    exits: list = field(default_factory=list)       # the loop that predicted each of them
    seconds: float = 0.0             # from the start to the answer

    @property
    def ids(self):
        return self.prompt + self.tokens

    def add(self, token, exit_after):
        """A token of the answer. Returns whether it is the last."""
        self.tokens.append(token)
        self.exits.append(exit_after)
        return len(self.tokens) == self.max_new_tokens


@dataclass
class RequestLine:
    """What a line of the file may hold, beside its id."""
    prompt: str
    max_new_tokens: int

    def __post_init__(self):
        Sampling(max_new_tokens=self.max_new_tokens)    # checks its bounds


def read_requests(model, tokenizer, cfg):
    """The requests in a file. UserError names the line that holds none."""
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
    """The Request in line n."""
    keys = {"id": n, "prompt": "", "max_new_tokens": cfg.max_new_tokens}
    try:
        keys |= {**json.loads(line)}        # a TypeError for a list
    except (ValueError, TypeError, RecursionError):
        raise UserError("not a JSON object") from None
    id = keys.pop("id")
    given = typed_config(RequestLine, keys, free_text=("prompt",))
    return make_request(model, tokenizer, cfg, given.prompt, given.max_new_tokens, n, id)


def make_request(model, tokenizer, cfg, text, max_new_tokens, n=1, id=None):
    """The n-th Request: text is to be continued."""
    prompt, random = tokenizer.encode(text), generator(cfg.seed, n, model.wte.weight.device)
    check_prompts([prompt], tokenizer.vocab_size)
    return Request(prompt, max_new_tokens, id, cfg.how(), random)


def generator(seed, n, device):
    """The random numbers of the n-th request, whatever its neighbours are."""
    [word] = np.random.SeedSequence([seed, n]).generate_state(1, np.uint64).tolist()
    return torch.Generator(device).manual_seed(word >> 1)       # a seed has 63 bits


def write_answers(engine, requests, tokenizer):
    """A JSON line for each request when it is answered."""
    for r in engine.run(requests):
        text, seconds = "".join(tokenizer.stream(r.tokens)), round(r.seconds, 4)
        print(json.dumps({"id": r.id, "text": text, "tokens": r.tokens, "exits": r.exits,
                          "seconds": seconds}), flush=True)


COLOURS = (34, 31, 32, 35, 36, 33)      # of the terminal: blue, red, green, magenta, cyan, yellow


def coloured(text, loop):
    return f"\033[{COLOURS[(loop - 1) % len(COLOURS)]}m{text}\033[0m" if text else ""


def write_coloured(engine, requests, tokenizer):
    """The prompt, and each token when it comes, in the colour of the loop that predicted it."""
    [request] = requests
    print(tokenizer.decode(request.prompt), end="", flush=True)
    for n, text in enumerate(tokenizer.stream(answer_tokens(engine, request))):
        # the stream's last piece, an unfinished character, belongs to no token
        loop = request.exits[n] if n < len(request.exits) else 1
        print(coloured(text, loop), end="", flush=True)
    print()
    legend = [coloured(f"loop {loop}", loop) for loop in range(1, engine.n_loop + 1)]
    print(*legend, file=sys.stderr)


def answer_tokens(engine, request):
    """Yields the tokens of the answer as they come."""
    engine.admit(deque([request]))
    while engine.busy():
        known = len(request.tokens)
        engine.step()
        yield from request.tokens[known:]


# ---- the engine: who goes next ----

@dataclass(eq=False)
class Token:
    """A token that a slot feeds to the model."""
    slot: "Slot"
    pos: int                        # in the cache
    id: int
    h: torch.Tensor = None          # its state (C,)
    h1: torch.Tensor = None         # mor: its state before loop 1
    loop: int = 0                   # that it has taken last
    frozen: bool = False            # fill=propagate: it has exited, h stays as it is


@dataclass(eq=False)
class Slot:
    """Where one request is decoded."""
    number: int
    request: Request = None
    fed: list = None                # tokens: a prefill, or one
    newest: Token = None            # the last of them
    loop: int = 1                   # that they take next
    # {loop: tokens that take it when the slot goes there next}, in relaxed exited ones, too
    waiting: dict = field(default_factory=lambda: defaultdict(list))

    def feed(self, ids, start):
        """Tokens at positions start, start + 1, .. begin with loop 1."""
        self.fed = [Token(self, pos, id) for pos, id in enumerate(ids, start)]
        self.newest, self.loop, self.waiting[1] = self.fed[-1], 1, self.fed

    def take(self):
        """The tokens that take the slot's next loop now."""
        tokens = self.waiting.pop(self.loop)
        self.loop += 1
        for token in tokens:
            token.loop += 1
        return tokens


class Engine:
    """Decodes requests in `slots` slots, each of max_len tokens. max_len None: the model's limit
    or, without one, 8 times block_size. A text that outgrows max_len goes on from its last
    max_len tokens, as in sample.py: each of these steps is a prefill, slow and without early
    exits."""

    def __init__(self, model, slots, max_len=None, batching="depth", exit="", fill="exact",
                 eot=None, vocab_size=None):
        cfg, self.adapter = model.cfg, adapter_of(model)
        if not 1 <= slots <= 4096:
            raise UserError(f"slots={slots} must be at least 1 and at most 4096")
        if (exit or fill != "exact") and self.adapter.routed:
            raise UserError("exit and fill are for relaxed: in a mor the router decides which "
                            "tokens exit")
        if batching == "depth" and not cfg.share.endswith("cycle"):
            raise UserError(f"batching=depth needs loops over the same blocks, so share=cycle or "
                            f"middle_cycle, not {cfg.share}")
        self.model, self.n_loop, self.device = model, model.loops_to_run, model.wte.weight.device
        self.batching, self.eot, self.vocab_size = batching, eot, vocab_size
        self.rule, self.fill = exit_rule(exit, self.n_loop), fill
        self.slots, self.done = [Slot(n) for n in range(slots)], []
        self.max_len = max_len or model.context_limit or 8 * cfg.block_size
        self.cache = SlotCache(model, slots)

    def run(self, requests):
        """Yields each of the requests (a list of Request) when it is answered."""
        queue, start = deque(requests), time.perf_counter()
        while queue or self.busy():
            self.admit(queue)
            self.step()
            done, self.done = self.done, []
            for request in done:
                request.seconds = time.perf_counter() - start
                yield request

    def busy(self):
        return [slot for slot in self.slots if slot.request is not None]

    @torch.inference_mode()
    def admit(self, queue):
        """Give free slots to the requests that wait in a queue."""
        for slot in self.slots:
            if slot.request is None and queue:
                slot.request = queue.popleft()
                self.prefill(slot)

    def prefill(self, slot):
        """Feed all tokens of the slot's request or, of a long one, the last max_len."""
        longest = len(slot.request.prompt) + slot.request.max_new_tokens
        self.cache.reset(slot.number, min(longest, self.max_len))
        slot.waiting.clear()
        slot.feed(slot.request.ids[-self.max_len:], 0)

    @torch.inference_mode()
    def step(self):
        """One loop for the tokens that wait for it. A slot whose newest token exits gets the next
        token of its answer, and feeds it from loop 1 on."""
        slots = self.busy()
        if self.batching == "sequence":     # slots in loop 1 wait for those that are deeper
            deepest = max((slot.loop for slot in slots), default=1)
            slots = [slot for slot in slots if slot.loop == deepest]
        tokens = [token for slot in slots for token in slot.take()]
        self.embed([token for token in tokens if token.loop == 1])
        self.run_loop(tokens)
        self.route(tokens)
        through = [slot for slot in slots if slot.loop not in slot.waiting]
        self.leave_loops(through)
        exiting, logits = self.exiting(slots, through)
        if exiting:
            self.emit(exiting, logits)

    def embed(self, tokens):
        ids = torch.tensor([token.id for token in tokens], dtype=torch.long, device=self.device)
        for token, h in zip(tokens, self.model.wte(ids)):
            token.h = h
        if self.adapter.routed:
            self.run_layers(self.adapter.before_loops, tokens)
        for token in tokens:
            token.h1 = token.h

    def run_loop(self, tokens):
        frozen = [token for token in tokens if token.frozen]
        if frozen:      # first, as the others attend to their keys
            self.run_layers(self.adapter.project, frozen)
        self.run_layers(self.adapter.run_loop, [token for token in tokens if not token.frozen])

    def route(self, tokens):
        """Those that need another loop wait for it; in relaxed also one that exits now."""
        deeper = [token for token in tokens if token.loop < self.n_loop]
        needed = self.adapter.need_next_loop(deeper) if deeper else []
        for token in itertools.compress(deeper, needed):
            token.slot.waiting[token.loop + 1].append(token)

    def leave_loops(self, slots):
        """What follows the loops takes all that a slot feeds together."""
        if self.adapter.routed:
            tokens = [token for slot in slots for token in slot.fed]
            self.run_layers(self.adapter.after_loops, tokens, loop=1)   # see SlotCache

    def run_layers(self, layers, tokens, loop=None):
        """layers: a function of the tokens' states x (R, T, C) and their context, which returns
        the next states. loop: whose keys they attend to (None: those of each token's own)."""
        for T, call in calls(tokens):
            x = torch.stack([token.h for token in call]).unflatten(0, (-1, T))      # (R, T, C)
            x = layers(x, SlotContext(self.cache, call, T, loop))
            for token, h in zip(call, x.flatten(0, 1)):
                token.h = h

    def exiting(self, slots, through):
        """The slots whose newest tokens exit after this loop, and these tokens' logits (R, V).
        Those that are through do; of the others, but no prefill, those that a rule chooses."""
        asked = [slot for slot in slots if slot in through or self.rule and slot.fed[0].pos > 0]
        if not asked:
            return [], None
        h = self.model.norm(torch.stack([slot.newest.h for slot in asked]))         # (R, C)
        logits = upcast(self.model.head(h))[:, :self.vocab_size]
        if not self.rule:
            return asked, logits
        loops = [slot.newest.loop for slot in asked]
        chosen = self.rule(logits, torch.tensor(loops, device=self.device))         # (R,)
        return list(itertools.compress(asked, chosen.tolist())), logits[chosen]

    def emit(self, slots, logits):
        """Each slot gets the next token of its answer and feeds it, or the answer ends."""
        for slot, token in zip(slots, self.pick(slots, logits)):
            slot.newest.frozen = self.fill == "propagate"
            ends = token == self.eot
            if not ends:
                ends = slot.request.add(token, slot.newest.loop)
            if ends:
                self.end(slot)
            elif slot.newest.pos + 1 < self.max_len:
                slot.feed([token], slot.newest.pos + 1)
            else:                   # a full context
                self.prefill(slot)

    def end(self, slot):
        self.done.append(slot.request)
        slot.request = None

    def pick(self, slots, logits):
        """A token for each slot, a list: the likeliest, which is found for all at once, or a
        sampled one."""
        tokens = logits.argmax(-1).tolist()
        for n, r in enumerate(slot.request for slot in slots):
            temperature, *_, penalty = r.sampling
            if temperature > 0 or penalty != 1:
                row = logits[n:n + 1]
                tokens[n] = int(next_tokens(row, [r.ids], *r.sampling, r.generator))
        return tokens


def exit_rule(exit, n_loop):
    """What exit= names: a function of logits (R, V) after loop (R,) that tells which tokens exit
    there, (R,) bool, all after the last loop; None without a rule. static: after this loop;
    confidence: where the likeliest token's probability is above P (Schuster et al. 2022)."""
    if not exit:
        return None
    kind, _, value = exit.partition(":")
    try:
        bound = float(value)
    except ValueError:
        bound = math.nan                # which no condition takes
    if kind == "static" and bound in range(1, n_loop + 1):
        return lambda logits, loop: loop >= bound
    if kind == "confidence" and 0 <= bound <= 1:
        return lambda logits, loop: (logits.softmax(-1).amax(-1) > bound) | (loop == n_loop)
    raise UserError(f"exit={exit}: static:LOOP, confidence:P are allowed, LOOP from 1 to {n_loop}, "
                    f"P from 0 to 1")


# ---- attention ----

MANY = 16       # tokens


def calls(tokens):
    """Yields (T, tokens) of each call of the model, whose states are R rows of T tokens. All slots
    share one call, in which each token is a row, T = 1. There each has a copy of its slot's keys,
    so a slot with many tokens (a long prompt) has a call of its own, R = 1."""
    few = []
    for _, group in itertools.groupby(tokens, lambda token: token.slot):
        of_slot = list(group)
        if len(of_slot) > MANY:
            yield len(of_slot), of_slot
        else:
            few += of_slot
    if few:
        yield 1, few


class SlotCache:
    """Keys and values. A slot has a lane for each loop; its entry p is the token at position p, if
    that took the loop (model_mor's own cache has no such gaps, so it is smaller). mor's first and
    last layer, -2 and -1, count to loop 1, as all tokens take both."""

    def __init__(self, model, slots):
        cfg, n_loop, w = model.cfg, model.loops_to_run, model.wte.weight
        self.cfg, self.slots, self.dtype = cfg, slots, compute_dtype(w)
        zeros = functools.partial(torch.zeros, device=w.device, dtype=self.dtype)
        outside, shape = getattr(cfg, "n_outside", 0), (2, cfg.n_kv_head, 0, cfg.head_dim)
        self.kv = {layer: zeros(slots * (n_loop if layer >= 0 else 1), *shape)
                   for layer in range(-outside, cfg.n_stored)}      # (lanes, 2, G, room, D)
        self.taken = zeros(slots * n_loop, 0, dtype=torch.bool)     # (lanes, room)

    def reset(self, slot, need):
        """Empty a slot, for `need` tokens. It is zeroed: a NaN poisons sums, even under a mask."""
        more = need - self.taken.size(1)
        if more > 0:
            self.kv = {layer: F.pad(kv, (0, 0, 0, more)) for layer, kv in self.kv.items()}
            self.taken = F.pad(self.taken, (0, more))       # last: memory may have been short
        for lanes in (self.taken, *self.kv.values()):
            lanes[slot::self.slots] = 0


class SlotContext:
    """The context of a call, as model_gpt's Context: each token attends to the tokens of its slot
    that have taken the same loop, up to itself. relaxed and mor have neither ALiBi nor a window."""

    def __init__(self, cache, tokens, T, loop=None):
        """tokens: R T of them. loop: whose keys they attend to (None: each those of its own)."""
        self.tokens, self.kv, cfg, device = tokens, cache.kv, cache.cfg, cache.taken.device
        tensor = functools.partial(torch.tensor, device=device)
        self.loop = tensor([loop or token.loop for token in tokens[::T]])       # (R,)
        slot = tensor([token.slot.number for token in tokens[::T]])             # (R,)
        self.lane = (self.loop - 1) * cache.slots + slot                        # (R,)
        self.pos = tensor([token.pos for token in tokens]).view(-1, T)          # (R, T)
        self.S = max(token.pos for token in tokens) + 1
        cache.taken[self.lane[:, None], self.pos] = True
        visible = torch.arange(self.S, device=device) <= self.pos[..., None]    # (R, T, S)
        visible = visible & cache.taken[self.lane, None, :self.S]
        self.bias = torch.where(visible, 0.0, -math.inf)[:, None]               # (R, 1, T, S)
        self.rope = None
        if cfg.pos == "rope":           # (R, 1, T, D / 2) each
            tables = rope_tables(self.pos, cfg.head_dim, cfg.rope_theta, cache.dtype)
            self.rope = [table[:, None] for table in tables]

    def extend(self, layer, k, v):
        """k, v (R, G, T, D) of the tokens -> (R, G, S, D), those of all so far."""
        self.write(layer, k, v)
        kv = self.kv[layer][:, :, :, :self.S].index_select(0, self.lane)
        return kv.to(k.dtype).unbind(1)

    def write(self, layer, k, v):
        kv, new = self.kv[layer], torch.stack([k, v], 1).permute(0, 3, 1, 2, 4)
        kv[self.lane[:, None], :, :, self.pos] = new.to(kv.dtype)           # (R, T, 2, G, D)


# ---- the models ----

class LoopAdapter:
    """What the engine asks of a model: layers as functions of states x (R, T, C) and their
    SlotContext, which return the next states.

        run_loop        the loop of each row; loops that differ have the same blocks
        project         relaxed: writes keys and values of that loop, returns x
        before_loops    mor: the first layer
        after_loops     mor: the gate of token choice, the last layer
    """
    routed = False      # whether a router decides which tokens exit

    def __init__(self, model):
        self.model, self.cfg = model, model.cfg

    def need_next_loop(self, tokens):
        """For each token, whether it takes another loop. In relaxed all do: with fill=exact those
        that have exited, too, and frozen ones for their keys and values."""
        return [True] * len(tokens)


class RelaxedAdapter(LoopAdapter):
    def __init__(self, model):
        super().__init__(model)
        self.mixed = [mixed_block(block) for block in model.blocks]

    def run_loop(self, x, context):
        for layer, (block, u) in enumerate(self.layers(x, context.loop)):
            x = x + block.attn(block.norm1(x), layer, u, context)   # as Block, which chooses u
            x = x + block.mlp(block.norm2(x), u)
        return x

    def project(self, x, context):
        for layer, (block, u) in enumerate(self.layers(x, context.loop)):
            n, attn, D = block.norm1(x), block.attn, self.cfg.head_dim
            k = attn.wk(n, u).unflatten(-1, (-1, D)).transpose(1, 2)    # (R, G, T, D)
            v = attn.wv(n, u).unflatten(-1, (-1, D)).transpose(1, 2)    # (R, G, T, D)
            if self.cfg.qk_norm:
                k = attn.k_norm(k, u)
            if context.rope:
                k = apply_rope(k, *context.rope)
            context.write(layer, k, v)
        return x

    def layers(self, x, loop):
        """(block, u) of each layer, for rows in loops (R,). u: their use of the block, as in
        model_relaxed; where they differ (R, 1, n_loop), a 1 at each row's."""
        first, K = int(loop[0]), self.cfg.n_stored
        if self.cfg.rank and (loop != first).any():
            u = F.one_hot(loop - 1, self.cfg.n_loop)[:, None].to(x)
            return [(block, u) for block in self.mixed]
        unrolled = range((first - 1) * K, first * K)    # rank 0: all uses are the same
        uses = [self.cfg.block_and_use(layer) for layer in unrolled]
        return [(self.model.blocks[k], u) for k, u in uses]


def mixed_block(block):
    """A copy of a relaxed block, with the same weights, that takes u (R, 1, n_loop)."""
    block = copy.deepcopy(block, {id(p): p for p in block.parameters()})
    for part in block.modules():
        if hasattr(part, "rank"):       # model_relaxed's RelaxedLinear
            part.forward = functools.partial(mixed_linear, part)
        elif hasattr(part, "weights"):  # its HeadNorm
            part.forward = functools.partial(mixed_norm, part)
    return block


def mixed_linear(part, x, u):
    """x (R, 1, in) -> (R, 1, out). One product applies the A of all uses, u keeps each row's."""
    low = F.linear(x, part.a.flatten(0, 1)).unflatten(-1, (-1, part.rank))      # (R, 1, n_loop, r)
    return F.linear(x, part.weight) + (low * u[..., None]).flatten(2) @ part.b.flatten(0, 1)


def mixed_norm(part, x, u):
    """QK-norm of x (R, heads, 1, D)."""
    weight = u @ torch.stack([*part.weights])                           # (R, 1, D)
    return F.rms_norm(x, x.shape[-1:], eps=part.eps) * weight[:, None]


class MoRAdapter(LoopAdapter):
    routed = True

    def __init__(self, model):
        super().__init__(model)
        if self.cfg.kv != "recursion":
            raise UserError(f"kv={self.cfg.kv} is not served: sample.py decodes it")

    def before_loops(self, x, context):
        for block in self.model.first:
            x = block(x, -2, context)
        return x

    def run_loop(self, x, context):
        y, any_loop = x, int(context.loop[0])       # those that differ have the same blocks
        for layer, block in enumerate(self.model.layers_of[any_loop - 1]):
            y = block(y, layer, context)
        if self.cfg.router != "expert":
            return y
        gate = self.model.gate(self.scores(self.model.routers, x, context.loop))    # (R, T, 1)
        return x + (gate * y).to(x.dtype)           # model_mor's (2.1)

    def after_loops(self, x, context):
        if self.cfg.router == "token":
            h1 = torch.stack([token.h1 for token in context.tokens]).view_as(x)
            _, p, depth = self.model.choose_depth(h1)
            x = self.model.exit(h1, x, p, depth)    # model_mor's (2.2)
        for block in self.model.last:
            x = block(x, -1, context)
        return x

    def need_next_loop(self, tokens):
        model, cfg = self.model, self.cfg
        if cfg.router == "none":
            return super().need_next_loop(tokens)
        if cfg.router == "token":
            _, _, depth = model.choose_depth(torch.stack([token.h1 for token in tokens]))
            return [token.loop < d for token, d in zip(tokens, depth.tolist())]
        routers = model.aux_routers if cfg.causal == "aux_router" else model.routers
        x = torch.stack([token.h for token in tokens])[:, None]                 # (N, 1, C)
        next_loop = torch.tensor([token.loop + 1 for token in tokens], device=x.device)
        return (self.scores(routers, x, next_loop) >= 0).flatten().tolist()

    def scores(self, routers, x, loop):
        """x (R, T, C) -> (R, T, 1), by the routers of loops (R,)."""
        s = torch.cat([router(x) for router in routers], -1)                    # (R, T, n_loop)
        return s.take_along_dim(loop[:, None, None] - 1, -1)


def adapter_of(model):
    """The adapter of a model; UserError if it has no loops."""
    name, adapters = type(model).__module__, {"model_relaxed": RelaxedAdapter,
                                              "model_mor": MoRAdapter}
    if name not in adapters:
        raise UserError(f"only models that loop over depth are served (relaxed, mor), not a {name}")
    return adapters[name](model)


if __name__ == "__main__":
    run_cli(main)
