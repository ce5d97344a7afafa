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
decoding requests A and B; C comes next. A column is a call of the model, A2: loop 2 of a token
of A, .: the slot waits.

    sequence    A1 A2 A1 .  A1 A2       all slots take the same loop of one token each, and a
                B1 .  B1 B2 C1 C2       slot whose token has exited waits for the others
    depth       A1 A2 A1 A1 A2          a slot whose token exits starts its next token at once:
                B1 B1 B2 C1 C2          with share=cycle all loops use the same blocks

Depth is the paper's continuous depth-wise batching (Bae et al. 2024, 2410.20672, Section 2.4).
Up to rounding, each answer is what its request would get alone.

A token that exits early has no keys and values in the deeper loops, which later tokens need.
The paper leaves them to future work: it simulates the batching, with exits that an oracle
chooses. Here the token's state waits until a later token goes there: with fill=exact it takes
that loop, too, with fill=propagate only its keys and values are projected from the state.

Words. A request is decoded in a slot. What a slot feeds to the model is its prompt at first (a
prefill), then one token of the answer at a time. In relaxed a rule decides where a fed token
exits (exit=), but a prefill takes all loops; in mor a router decides, of a prefill's tokens too.
Between two calls of the model a token waits for its next loop, until its slot goes there.

The models' attention and MLP run as they are: a row of their batch is a token of some slot. What
they cannot know stands here: where its keys are (SlotContext) and, in relaxed, that rows differ
in their loop (mixed_block).

Shapes: N tokens of a call are R rows of T tokens (T = 1, or R = 1), S keys, G key/value heads,
D head size, C width, V vocabulary, r rank. Loops count from 1.
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
from common.keys import UserError, asks_help, help_text, read_text, run_cli, typed_config
from common.process import pick_device
from common.sampling import (Decoding, Sampling, check_prompts, loop_fractions, next_tokens,
                             read_arguments)
from model_gpt import apply_rope, compute_dtype, rope_tables, upcast


# ---- requests in, answers out ----

@dataclass
class EngineKeys(Decoding):
    """The keys that serve.py and lab.page share."""
    batching: str = "depth"         # sequence | depth
    slots: int = 16                 # requests decoded at a time
    exit: str = ""                  # relaxed: static:LOOP | confidence:P
    fill: str = ""                  # relaxed: deeper keys after an exit: exact | propagate

    def __post_init__(self):
        self.between(slots=(1, 4096))
        self.one_of("batching", "sequence", "depth")
        self.one_of("fill", "", "exact", "propagate")


@dataclass
class ServeConfig(Sampling, EngineKeys):
    requests: str = ""              # the file of requests, one JSON object a line
    prompt: str = ""                # or one text to continue, in colours

    def __post_init__(self):
        Sampling.__post_init__(self)
        EngineKeys.__post_init__(self)


def main(argv):
    if asks_help(argv):
        return print(help_text(ServeConfig))
    path, cfg = read_arguments(argv, ServeConfig)
    if bool(cfg.requests) == bool(cfg.prompt):
        raise UserError("give requests=FILE.jsonl (one JSON object a line) or prompt=TEXT")
    model, tokenizer, _ = load_run(path, pick_device(cfg.device), fast=cfg.fast)
    if cfg.requests:
        requests, write = read_requests(model, tokenizer, cfg), write_answers
    else:       # one request has nobody to wait for, and sequence takes share=sequence too
        cfg = replace(cfg, batching="sequence")
        requests, write = [make_request(model, tokenizer, cfg, asked=cfg)], write_coloured
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
        keys |= {**json.loads(line)}
    except (ValueError, TypeError, RecursionError):
        raise UserError("not a JSON object") from None
    id = keys.pop("id")
    asked = typed_config(RequestLine, keys, free_text=("prompt",))
    return make_request(model, tokenizer, cfg, asked, n, id)


def make_request(model, tokenizer, cfg, asked, n=1, id=None):
    """The n-th Request, for asked.max_new_tokens tokens after asked.prompt."""
    prompt, random = tokenizer.encode(asked.prompt), generator(cfg.seed, n, model.wte.weight.device)
    check_prompts([prompt], tokenizer.vocab_size)
    return Request(prompt, asked.max_new_tokens, id, cfg.how(), random)


def generator(seed, n, device):
    """The random numbers of the n-th request, whatever its neighbours are."""
    word = np.random.SeedSequence([seed, n]).generate_state(1, np.uint64)[0]
    return torch.Generator(device).manual_seed(int(word >> np.uint64(1)))


def write_answers(engine, requests, tokenizer):
    """A JSON line for each request when it is answered."""
    for r in engine.run(requests):
        text, seconds = "".join(tokenizer.stream(r.tokens)), round(r.seconds, 4)
        print(json.dumps({"id": r.id, "text": text, "tokens": r.tokens, "exits": r.exits,
                          "seconds": seconds}), flush=True)


COLOURS = (34, 36, 32, 33, 35, 31)      # of the terminal: blue, cyan, green, yellow, magenta, red


def write_coloured(engine, requests, tokenizer):
    """The prompt, and each token when it comes, in the colour of the loop that predicted it."""
    def coloured(text, loop):
        colour = COLOURS[(loop - 1) * (len(COLOURS) - 1) // max(1, engine.n_loop - 1)]
        return f"\033[{colour}m{text}\033[0m" if text else ""

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
    pos: int
    h: torch.Tensor                 # its state (C,)
    h1: torch.Tensor = None         # mor: its state before loop 1
    loop: int = 1                   # that it takes, or has taken last
    frozen: bool = False            # fill=propagate: it has exited, h stays as it is


@dataclass(eq=False)
class Slot:
    """Where one request is decoded."""
    number: int
    request: Request = None
    fed: range = None               # positions of the tokens that are fed now
    newest: Token = None            # the last of them
    loop: int = 1                   # that they take next
    # {loop: tokens that take it when the slot goes there}; with fill=exact exited ones, too
    waiting: dict = field(default_factory=lambda: defaultdict(list))
    left: list = field(default_factory=list)    # fed tokens that have left the loops

    def feed(self, positions):
        self.fed, self.loop, self.left = positions, 1, []


class Engine:
    """Decodes requests in `slots` slots, each of max_len tokens. max_len None: the model's limit
    or, without one, 8 times block_size. A sequence that outgrows max_len goes on from its last
    max_len tokens, as in sample.py: each of these steps is a prefill, slow and without early
    exits."""

    def __init__(self, model, slots, max_len=None, batching="depth", exit="", fill="", eot=None,
                 vocab_size=None):
        cfg, self.adapter = model.cfg, adapter_of(model)
        if (exit or fill) and self.adapter.routed:
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
        slot.feed(range(min(len(slot.request.ids), self.max_len)))

    @torch.inference_mode()
    def step(self):
        """depth: one loop for all slots. sequence: one token for each."""
        slots = self.busy()
        for slot in slots:
            if slot.fed.stop > self.max_len:    # a full context
                self.prefill(slot)
        while slots:                    # sequence: until the last token has exited
            slots = self.advance(slots)
            if self.batching == "depth":
                return

    def advance(self, slots):
        """One loop for the tokens that wait for it. A slot whose newest token exits gets the next
        token of its answer, and feeds it from loop 1 on. Returns the slots that stay."""
        self.embed([slot for slot in slots if slot.loop == 1])
        tokens = [token for slot in slots for token in slot.waiting.pop(slot.loop)]
        for token in tokens:
            token.loop = token.slot.loop
        if self.fill == "propagate":
            self.run_layers(self.adapter.project, [token for token in tokens if token.frozen])
        self.run_layers(self.adapter.run_loop, [token for token in tokens if not token.frozen])
        for token, goes_on in zip(tokens, self.adapter.goes_on(tokens)):
            slot = token.slot
            if goes_on and slot.loop < self.n_loop:
                slot.waiting[slot.loop + 1].append(token)
            else:
                slot.left.append(token)
        exiting, logits = self.exiting(slots)
        for slot in exiting:
            slot.newest.frozen = self.fill == "propagate"
        if exiting:
            self.emit(exiting, logits)
        stay = [slot for slot in slots if slot not in exiting]
        for slot in stay:
            slot.loop += 1
        return stay

    def embed(self, slots):
        """The fed tokens of the slots, which are their newest, wait for loop 1."""
        ids = [id for slot in slots for id in slot.request.ids[-len(slot.fed):]]
        places = [(slot, pos) for slot in slots for pos in slot.fed]
        h = self.model.wte(torch.tensor(ids, dtype=torch.long, device=self.device))     # (N, C)
        tokens = [Token(*place, state) for place, state in zip(places, h)]
        if self.adapter.routed:
            self.run_layers(self.adapter.run_first, tokens)
        for token in tokens:
            token.h1, token.slot.newest = token.h, token
            token.slot.waiting[1].append(token)

    def run_layers(self, layers, tokens, loop=None):
        """layers: a function of the tokens' states x (R, T, C) and their context, which returns
        the next states. loop: where their keys and values belong (None: each token's)."""
        for T, call in calls(tokens):
            x = torch.stack([token.h for token in call]).unflatten(0, (-1, T))      # (R, T, C)
            x = layers(x, SlotContext(self.cache, call, T, loop))
            for token, h in zip(call, x.flatten(0, 1)):
                token.h = h

    def exiting(self, slots):
        """The slots whose newest tokens exit after this loop, and these tokens' logits (R, V)."""
        # slots that are through have no token that waits for the next loop
        asked = through = [slot for slot in slots if slot.loop + 1 not in slot.waiting]
        if self.adapter.routed:     # the last layer takes all that a slot feeds together
            left = [token for slot in through for token in slot.left]
            self.run_layers(self.adapter.run_last, left, loop=1)
        if self.rule:       # not for a prefill, which takes all loops
            asked = [slot for slot in slots if slot in through or slot.fed.start > 0]
        if not asked:       # the others need no logits
            return [], None
        logits = self.logits(torch.stack([slot.newest.h for slot in asked]))
        exits = torch.tensor([slot in through for slot in asked])       # (R,)
        if self.rule:
            exits |= self.rule(logits, torch.tensor([slot.loop for slot in asked])).cpu()
        return [slot for slot, out in zip(asked, exits.tolist()) if out], logits[exits]

    # the answers

    def logits(self, h):
        """h (R, C), states of newest tokens -> (R, V)."""
        return upcast(self.model.head(self.model.norm(h)))[:, :self.vocab_size]

    def emit(self, slots, logits):
        """Each slot gets the next token of its answer and feeds it, or the answer ends."""
        for slot, token in zip(slots, self.pick(slots, logits)):
            ends = token == self.eot
            if not ends:
                ends = slot.request.add(token, slot.newest.loop)
            if ends:
                self.end(slot)
            else:
                slot.feed(range(slot.fed.stop, slot.fed.stop + 1))

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
    there, (R,) bool; None where every token takes all loops. static: after this loop; confidence:
    where the likeliest token's probability is above P (Schuster et al. 2022)."""
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
        return lambda logits, loop: logits.softmax(-1).amax(-1) > bound
    raise UserError(f"exit={exit}: static:LOOP, confidence:P are allowed, LOOP from 1 to {n_loop}, "
                    f"P from 0 to 1")


# ---- attention ----

MANY = 16       # tokens


def calls(tokens):
    """Yields (T, tokens) of each call of the model, whose states are R rows of T tokens. All slots
    share one call, in which each token is a row, T = 1. There each has a copy of its slot's keys,
    so a slot with many tokens (a long prompt) has a call of its own, R = 1."""
    few = []
    for _, its in itertools.groupby(tokens, lambda token: token.slot):
        its = list(its)
        if len(its) > MANY:
            yield len(its), its
        else:
            few += its
    if few:
        yield 1, few


class SlotCache:
    """Keys and values. A sequence is a slot in a loop; its entry p is the token at position p, if
    that took the loop (model_mor's own cache has no such gaps, so it is smaller). Layers -2 and -1
    are mor's first and last, outside the loops."""

    def __init__(self, model, slots):
        cfg, n_loop, w = model.cfg, model.loops_to_run, model.wte.weight
        self.cfg, self.slots, self.dtype = cfg, slots, compute_dtype(w)
        zeros = functools.partial(torch.zeros, device=w.device, dtype=self.dtype)
        outside, shape = getattr(cfg, "n_outside", 0), (2, cfg.n_kv_head, 0, cfg.head_dim)
        self.kv = {layer: zeros(slots * (n_loop if layer >= 0 else 1), *shape)
                   for layer in range(-outside, cfg.n_stored)}      # (sequences, 2, G, room, D)
        self.taken = zeros(slots * n_loop, 0, dtype=torch.bool)     # (sequences, room)

    def reset(self, slot, need):
        """Empty a slot, for `need` tokens. It is zeroed: a NaN poisons sums, even under a mask."""
        more = need - self.taken.size(1)
        if more > 0:
            self.taken = F.pad(self.taken, (0, more))
            self.kv = {layer: F.pad(kv, (0, 0, 0, more)) for layer, kv in self.kv.items()}
        for sequences in (self.taken, *self.kv.values()):
            sequences[slot::self.slots] = 0


class SlotContext:
    """The context of a call, as model_gpt's Context: each token attends to the tokens of its slot
    that have taken the same loop, up to itself."""

    def __init__(self, cache, tokens, T, loop=None):
        """tokens: R T of them. loop: where their keys and values belong (None: each token's)."""
        self.tokens, self.kv, cfg, device = tokens, cache.kv, cache.cfg, cache.taken.device
        tensor = functools.partial(torch.tensor, device=device)
        self.loop = tensor([loop or token.loop for token in tokens[::T]])       # (R,)
        slot = tensor([token.slot.number for token in tokens[::T]])             # (R,)
        self.sequence = (self.loop - 1) * cache.slots + slot                    # (R,)
        self.pos = tensor([token.pos for token in tokens]).view(-1, T)          # (R, T)
        self.S = max(token.pos for token in tokens) + 1
        cache.taken[self.sequence[:, None], self.pos] = True
        visible = torch.arange(self.S, device=device) <= self.pos[..., None]    # (R, T, S)
        visible = visible & cache.taken[self.sequence, None, :self.S]
        self.bias = torch.where(visible, 0.0, -math.inf)[:, None]               # (R, 1, T, S)
        self.rope = None
        if cfg.pos == "rope":           # (R, 1, T, D / 2) each
            tables = rope_tables(self.pos, cfg.head_dim, cfg.rope_theta, cache.dtype)
            self.rope = [table[:, None] for table in tables]

    def extend(self, layer, k, v):
        """k, v (R, G, T, D) of the tokens -> (R, G, S, D), those of all so far."""
        self.write(layer, k, v)
        kv = self.kv[layer][:, :, :, :self.S].index_select(0, self.sequence)
        return kv.to(k.dtype).unbind(1)

    def write(self, layer, k, v):
        kv, new = self.kv[layer], torch.stack([k, v], 1).permute(0, 3, 1, 2, 4)
        kv[self.sequence[:, None], :, :, self.pos] = new.to(kv.dtype)           # (R, T, 2, G, D)


# ---- the models ----

class LoopAdapter:
    """What the engine asks of a model: layers as functions of states x (R, T, C) and their
    SlotContext, which return the next states.

        run_loop                the loop of each row; those that differ have the same blocks
        project                 relaxed: writes keys and values of that loop, returns x
        run_first, run_last     mor: the layers outside the loops
    """
    routed = False      # whether a router decides which tokens exit

    def __init__(self, model):
        self.model, self.cfg = model, model.cfg

    def goes_on(self, tokens):
        """For each token, whether it takes the next loop, if there is one."""
        return [True] * len(tokens)


class RelaxedAdapter(LoopAdapter):
    """All tokens take all loops: with fill=exact later, if they have exited."""

    def __init__(self, model):
        super().__init__(model)
        self.mixed = [mixed_block(block) for block in model.blocks]

    def run_loop(self, x, context):
        for layer, (block, u) in enumerate(self.layers(x, context.loop)):
            x = x + block.attn(block.norm1(x), layer, u, context)
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
        """(block, u) of each layer in the loops (R,) of the rows."""
        cfg, first, K = self.cfg, int(loop[0]), self.cfg.n_stored
        if not cfg.rank or (loop == first).all():       # rank 0: all uses are the same
            uses = [cfg.block_and_use(layer) for layer in range((first - 1) * K, first * K)]
            return [(self.model.blocks[k], u) for k, u in uses]
        u = F.one_hot(loop - 1, cfg.n_loop)[:, None].to(x)              # (R, 1, n_loop)
        return [(block, u) for block in self.mixed]


def mixed_block(block):
    """A copy of a relaxed block, with the same weights, that takes for u (R, 1, n_loop): each row
    has a 1 at its use."""
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
    """Blocks are called with -2 and -1 as the numbers of the first and the last layer."""
    routed = True

    def __init__(self, model):
        super().__init__(model)
        if self.cfg.kv != "recursion":
            raise UserError(f"kv={self.cfg.kv} is not served: sample.py decodes it")

    def run_first(self, x, context):
        for block in self.model.first:
            x = block(x, -2, context)
        return x

    def run_loop(self, x, context):
        y, model = x, self.model
        for layer, block in enumerate(model.layers_of[int(context.loop[0]) - 1]):
            y = block(y, layer, context)
        if self.cfg.router != "expert":
            return y
        gate = model.gate(self.scores(model.routers, x, context.loop))  # (R, T, 1)
        return x + (gate * y).to(x.dtype)                               # (2.1)

    def scores(self, routers, x, loop):
        """x (R, T, C) -> (R, T, 1), by the routers of the rows' loops (R,)."""
        s = torch.cat([router(x) for router in routers], -1)            # (R, T, n_loop)
        return s.take_along_dim(loop[:, None, None] - 1, -1)

    def goes_on(self, tokens):
        model, cfg = self.model, self.cfg
        if cfg.router == "none":
            return super().goes_on(tokens)
        if cfg.router == "token":
            _, _, depth = model.choose_depth(torch.stack([token.h1 for token in tokens]))
            return [token.loop < d for token, d in zip(tokens, depth.tolist())]
        x = torch.stack([token.h for token in tokens])[:, None]         # (N, 1, C)
        loop = torch.tensor([min(token.loop + 1, cfg.n_loop) for token in tokens], device=x.device)
        routers = model.aux_routers if cfg.causal == "aux_router" else model.routers
        return (self.scores(routers, x, loop) >= 0).flatten().tolist()

    def run_last(self, x, context):
        if self.cfg.router == "token":
            h1 = torch.stack([token.h1 for token in context.tokens]).view_as(x)
            _, p, depth = self.model.choose_depth(h1)
            x = self.model.exit(h1, x, p, depth)                        # (2.2)
        for block in self.model.last:
            x = block(x, -1, context)
        return x


ADAPTERS = {"model_relaxed": RelaxedAdapter, "model_mor": MoRAdapter}


def adapter_of(model):
    """The adapter of a model; UserError if it has no loops."""
    name = type(model).__module__
    if name not in ADAPTERS:
        raise UserError(f"only models that loop over depth are served (relaxed, mor), not a {name}")
    return ADAPTERS[name](model)


if __name__ == "__main__":
    run_cli(main)
