"""
Serving: many requests at a time, for models that loop over depth (relaxed, mor).

    python serve.py out/relaxed_exit requests=FILE.jsonl exit=confidence:0.9
    python serve.py out/mor_tiny requests=FILE.jsonl batching=depth slots=32
    python serve.py out/mor_tiny prompt="def read(self, "   one text, coloured by loops
    python serve.py help                                    every key with its meaning

A line of FILE is a JSON object, of which only the prompt is needed:

    {"prompt": "def ", "max_new_tokens": 50, "id": "a"}

The answer is a JSON line with the id (or the line's number), text, tokens, exits (the loop after
which each token exited) and seconds (from the start to the answer).

A token takes loop 1, then may exit or take loop 2. Two slots decode requests A, B and C (A2: loop
2 of a token of A; .: the slot waits). In static and sequence, all slots take the same loop:

    static      A1 A2 A1 .  A1 A2 .     a batch starts when all of the one before have ended
                B1 .  B1 B2 .  .  C1
    sequence    A1 A2 A1 .  A1 A2 .     a slot whose request has ended takes the next at once
                B1 .  B1 B2 C1 .  C1
    depth       A1 A2 A1 A1 A2          a slot whose token exits starts its next token at once:
                B1 B1 B2 C1 C1          with share=cycle all loops use the same blocks

Depth is the paper's continuous depth-wise batching (Bae et al. 2024, 2410.20672, Section 2.4).
Up to rounding, each answer is what its request would get alone.

A token that exits early has no keys and values in the deeper loops, which later tokens need.
The paper leaves them to future work: it simulates the batching, with exits that an oracle
chooses. Here, with fill=exact the token's state waits until a later token goes there, and takes
that loop with it; with fill=propagate keys and values are projected from the state at the exit.
A prefill takes all loops, and so does the first new token, which is predicted from it (relaxed).

Words: a request is decoded in a slot. Its new tokens are its prompt at first, then one at a time.
A call of the model takes packed tokens: those of several slots, one behind the other; a row is one
slot's part of them. Loops count from 1; level 0 stands before them and n_loop + 1 behind (mor).
Shapes: N packed tokens, R rows, T tokens of the longest row, S keys, H query heads, G key/value
heads, D head size, C width, V vocabulary.
"""
import functools
import json
import math
import sys
import time
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from common.checkpoint import load_run
from common.keys import UserError, asks_help, help_text, read_text, run_cli, typed_config
from common.process import pick_device
from common.sampling import Sampling, check_prompts, loop_fractions, next_tokens, read_arguments
from model_gpt import apply_rope, attend, compute_dtype, rope_tables, upcast


# ---- requests in, answers out ----

@dataclass
class ServeConfig(Sampling):
    requests: str = ""              # the file of requests, one JSON object a line
    prompt: str = ""                # or one text to continue, in colours
    batching: str = "depth"         # static | sequence | depth
    slots: int = 16                 # requests decoded at a time
    exit: str = ""                  # relaxed: static:LOOP | confidence:P | margin:P
    fill: str = ""                  # relaxed: deeper keys after an exit: exact | propagate

    def __post_init__(self):
        super().__post_init__()
        self.between(slots=(1, 4096))
        self.one_of("batching", "static", "sequence", "depth")
        self.one_of("fill", "", "exact", "propagate")


def main(argv):
    if asks_help(argv):
        return print(help_text(ServeConfig))
    path, cfg = read_arguments(argv, ServeConfig)
    if bool(cfg.requests) == bool(cfg.prompt):
        raise UserError("give requests=FILE.jsonl (one JSON object a line) or prompt=TEXT")
    model, tokenizer, _ = load_run(path, pick_device(cfg.device), fast=cfg.fast)
    write = write_answers if cfg.requests else write_coloured
    print(write(model, tokenizer, cfg), file=sys.stderr)


def write_answers(model, tokenizer, cfg):
    """Answer the requests of a file, a JSON line each. Returns a summary."""
    requests = read_requests(model, tokenizer, cfg)
    engine, start = make_engine(model, tokenizer, cfg, requests), time.perf_counter()
    for r in engine.run(requests):
        answer = {"id": r.id, "text": "".join(tokenizer.stream(r.tokens)), "tokens": r.tokens,
                  "exits": r.exits, "seconds": round(r.seconds, 4)}
        print(json.dumps(answer), flush=True)
    seconds, exits = time.perf_counter() - start, [loop for r in requests for loop in r.exits]
    return (f"{len(requests)} requests, {len(exits)} tokens in {seconds:.2f} s: "
            f"{len(exits) / seconds:.1f} tokens/s; exited after loop "
            f"{loop_fractions(exits, model.loops_to_run)}")


@dataclass(eq=False)
class Request:
    """A prompt to continue, and what has become of it."""
    prompt: list                     # token ids
    max_new_tokens: int
    id: object = None
    sampling: tuple = (0.0, 0, 1.0, 1.0)            # temperature, top_k, top_p, penalty
    generator: torch.Generator = None               # of its own, to sample
    tokens: list = field(default_factory=list)      # the answer, without end-of-text
    exits: list = field(default_factory=list)       # the loop after which each exited
    seconds: float = 0.0             # from the start to the answer

    @property
    def ids(self):
        return self.prompt + self.tokens

    def add(self, token, exit):
        """A token of the answer. Returns whether it is the last."""
        self.tokens.append(token)
        self.exits.append(exit)
        return len(self.tokens) == self.max_new_tokens


@dataclass
class RequestLine:
    """What a line of the file may hold, beside its id."""
    prompt: str
    max_new_tokens: int


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
    try:
        keys = {"id": n, "prompt": "", "max_new_tokens": cfg.max_new_tokens, **json.loads(line)}
    except (ValueError, TypeError, RecursionError):
        raise UserError("not a JSON object") from None
    id, asked = keys.pop("id"), typed_config(RequestLine, keys, free_text=("prompt",))
    cfg = typed_config(ServeConfig, vars(asked), vars(cfg), free_text=("prompt",))
    return make_request(model, tokenizer, cfg, n, id)


def make_request(model, tokenizer, cfg, n=1, id=None):
    """The n-th Request, to continue cfg.prompt."""
    prompt, random = tokenizer.encode(cfg.prompt), generator(cfg.seed, n, model.wte.weight.device)
    check_prompts([prompt], tokenizer.vocab_size)
    return Request(prompt, cfg.max_new_tokens, id, cfg.how(), random)


def generator(seed, n, device):
    """The random numbers of the n-th request, whatever its neighbours are."""
    word = np.random.SeedSequence([seed, n]).generate_state(1, np.uint64)[0]
    return torch.Generator(device).manual_seed(int(word >> np.uint64(1)))


def make_engine(model, tokenizer, cfg, requests):
    return Engine(model, min(cfg.slots, len(requests)), None, cfg.batching, cfg.exit, cfg.fill,
                  eot=tokenizer.eot if cfg.stop else None, vocab_size=tokenizer.vocab_size)


COLOURS = (34, 36, 32, 33, 35, 31)      # of the terminal: blue, cyan, green, yellow, magenta, red


def coloured(text, loop, n_loop):
    """text in the colour of a token that exited after loop `loop` of n_loop."""
    colour = COLOURS[(loop - 1) * (len(COLOURS) - 1) // max(1, n_loop - 1)]
    return f"\033[{colour}m{text}\033[0m" if text else ""


def write_coloured(model, tokenizer, cfg):
    """Continue a prompt; each token has the colour of the loop after which it exited. Returns a
    summary."""
    cfg = replace(cfg, batching="sequence")     # of one request, for every model
    request = make_request(model, tokenizer, cfg)
    engine = make_engine(model, tokenizer, cfg, [request])
    print(tokenizer.decode(request.prompt), end="", flush=True)
    for n, text in enumerate(tokenizer.stream(new_tokens(engine, request))):
        loop, *_ = [*request.exits[n:], 1]      # once more than there are tokens
        print(coloured(text, loop, model.loops_to_run), end="", flush=True)
    print()
    legend = [coloured(str(b), b, model.loops_to_run) for b in range(1, model.loops_to_run + 1)]
    return (f"{len(request.tokens)} tokens; exited after loop "
            f"{loop_fractions(request.exits, model.loops_to_run)} {' '.join(legend)}")


def new_tokens(engine, request):
    """Yields the tokens of the answer as they come."""
    engine.admit(deque([request]))
    while engine.busy():
        known = len(request.tokens)
        engine.step()
        yield from request.tokens[known:]


# ---- the engine: who goes next ----

@dataclass(eq=False)
class Slot:
    """Where one request is decoded. Between two levels of the model its tokens wait: positions
    (n,) and states (n, .)."""
    number: int
    request: Request = None
    at: range = None                 # positions of the new tokens: from 0 on, they are a prefill
    loop: int = 1                    # that they take next
    exit: int = 0                    # the loop after which the last of them exited
    waiting: dict = field(default_factory=dict)     # {level: [(positions, states), ...]}

    def begin(self, at):
        self.at, self.loop, self.exit = at, 1, 0

    def wait(self, level, positions, states):
        """These tokens take the level when the slot goes there."""
        self.waiting.setdefault(level, []).append((positions, states))

    def take(self, level):
        """All tokens that wait for the level: positions, states."""
        pairs = self.waiting.pop(level)
        if len(pairs) == 1:
            return pairs[0]
        positions, states = zip(*pairs)
        return np.concatenate(positions), torch.cat(states)


class Engine:
    """Decodes requests in `slots` slots. A router (mor) or a rule (exit=) decides where tokens
    exit. A sequence that outgrows max_len goes on from its last max_len tokens, as in sample.py.
    max_len None: the model's limit or, as one long sequence makes all slots as long, 8 times
    block_size."""

    def __init__(self, model, slots, max_len=None, batching="depth", exit="", fill="", eot=None,
                 vocab_size=None):
        cfg, w, self.loops = model.cfg, model.wte.weight, loops_of(model)
        if (exit or fill) and self.loops.routed:
            raise UserError("exit and fill are for relaxed: in a mor the router decides which "
                            "tokens exit")
        if batching == "depth" and not cfg.share.endswith("cycle"):
            raise UserError(f"batching=depth needs loops over the same blocks, so share=cycle or "
                            f"middle_cycle, not {cfg.share}")
        self.model, self.n_loop, self.device = model, model.loops_to_run, w.device
        self.max_len = max_len or model.context_limit or 8 * cfg.block_size
        self.batching, self.eot, self.vocab_size = batching, eot, vocab_size
        self.rule, self.fill = exit_rule(exit, self.n_loop), fill or getattr(cfg, "fill", "exact")
        self.slots, self.done = [Slot(n) for n in range(slots)], []
        self.cache = SlotCache(slots, self.n_loop + 2, self.max_len, cfg.n_kv_head, cfg.head_dim,
                               w.device, compute_dtype(w))
        self.rope = None
        if cfg.pos == "rope":           # of all positions, (max_len, D / 2) each
            at = torch.arange(self.max_len, device=w.device)
            self.rope = rope_tables(at, cfg.head_dim, cfg.rope_theta, w.dtype)

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
        if self.batching == "static" and self.busy():
            return
        for slot in self.slots:
            if slot.request is None and queue:
                slot.request = queue.popleft()
                self.prefill(slot)

    def prefill(self, slot):
        """All tokens of the slot's request are new; of a long one, as many as it may hold."""
        self.cache.reset(slot.number)
        slot.waiting = {}
        slot.begin(range(min(len(slot.request.ids), self.max_len)))

    @torch.inference_mode()
    def step(self):
        """depth: one loop for all requests. static, sequence: one token for each."""
        slots = self.busy()
        for slot in slots:
            if slot.at.stop > self.max_len:     # a full context
                self.prefill(slot)
        while slots:                    # sequence: until the last token has exited
            slots = self.advance(slots)
            if self.batching == "depth":
                return

    def advance(self, slots):
        """One loop for the new tokens of the slots. Returns the slots that take another."""
        first = [slot for slot in slots if slot.loop == 1]
        if first:
            self.embed(first)
        exit = self.exit_by_router if self.loops.routed else self.exit_by_rule
        out = set(exit(slots, self.loop(slots)))
        stay = [slot for slot in slots if slot not in out]
        for slot in stay:
            slot.loop += 1
        return stay

    def embed(self, slots):
        """The new tokens of the slots, embedded, wait for loop 1."""
        at = [np.array(slot.at) for slot in slots]
        ids = [id for slot in slots for id in slot.request.ids[-len(slot.at):]]
        idx = torch.tensor(ids, device=self.device)
        context = self.context(slots, [0] * len(slots), at) if self.loops.routed else None
        h = self.loops.embed(idx, context)
        for slot, positions, states in zip(slots, at, h.split([*map(len, at)])):
            slot.wait(1, positions, states)

    def loop(self, slots):
        """All that waits in the slots for their loops takes these. Returns (positions, states) of
        each slot."""
        at, states = zip(*(slot.take(slot.loop) for slot in slots))
        level = [slot.loop for slot in slots]
        loop, n = each_token(level, at)
        h = self.loops.loop(torch.cat(states), loop, self.context(slots, level, at))
        return [*zip(at, h.split(n))]

    def context(self, slots, level, at):
        """The attention context of tokens at positions at[r] of the slots, at level[r]."""
        cfg, n, level = self.model.cfg, np.array([*map(len, at)]), np.array(level)
        slot, pos, reads = np.array([slot.number for slot in slots]), np.concatenate(at), level
        if getattr(cfg, "kv", "") == "share":   # all read the keys of loop 1
            reads, entry = np.where(level % (self.n_loop + 1), 1, level), pos
        else:                                   # those of the tokens that took the same loop
            entry = self.cache.reserve(level, slot, n)
        return RaggedBatch(self.cache, slot, n, pos, entry, reads, reads == level, self.rope,
                           cfg.fast)

    # a rule decides: relaxed

    def exit_by_rule(self, slots, after):
        """The slots whose newest tokens exit after this loop. after: (positions, states) of each.
        All wait for the next: with fill=exact a token that exits is taken along by a later one.
        A prefill takes all loops, so that its keys are complete."""
        end = self.n_loop
        for slot, (positions, states) in zip(slots, after):
            if slot.loop < end:
                slot.wait(slot.loop + 1, positions, states)
        asked = [(slot, states[-1:]) for slot, (_, states) in zip(slots, after)
                 if slot.loop == end or self.rule and slot.at.start > 0]
        if not asked:                   # for the others no logits are needed
            return []
        slots, newest = zip(*asked)
        logits, loop = self.logits(torch.cat(newest)), torch.tensor([s.loop for s in slots])
        exits = loop == end
        if self.rule:
            exits |= self.rule(logits, loop).cpu()
        out = [slot for slot, exit in zip(slots, exits.tolist()) if exit]
        for slot in out:
            slot.exit = slot.loop
        if self.fill == "propagate":
            self.propagate([slot for slot in out if slot.loop < end])
        self.emit(out, logits[exits])
        return out

    def propagate(self, slots):
        """fill=propagate: tokens that have exited get keys and values in all deeper loops."""
        waiting = [(slot, *slot.take(slot.loop + 1)) for slot in slots]
        for loop in range(2, self.n_loop + 1):
            if some := [token for token in waiting if token[0].loop < loop]:
                slots, at, states = zip(*some)
                context = self.context(slots, [loop] * len(slots), at)
                self.loops.propagate(torch.cat(states), loop, context)

    # a router decides: mor

    def exit_by_router(self, slots, after):
        """The slots of which no token takes another loop. after: (positions, states) of each. A
        token that exits waits for the last layer, which all of a slot take together."""
        routes = self.route(slots, after)
        for slot, (positions, states), goes in zip(slots, after, routes):
            if positions[-1] == slot.at[-1] and not goes[-1]:
                slot.exit = slot.loop
            for level, mask in (slot.loop + 1, goes), (self.n_loop + 1, ~goes):
                if mask.any():
                    slot.wait(level, positions[mask], states[torch.from_numpy(mask)])
        out = [slot for slot, goes in zip(slots, routes) if not goes.any()]
        if out:
            self.last(out)
        return out

    def route(self, slots, after):
        """Which tokens the router sends through the next loop: (n,) bool of each slot."""
        at, states = zip(*after)
        loop, n = each_token([slot.loop + 1 for slot in slots], at)
        goes = self.loops.takes(torch.cat(states), loop.clamp(max=self.n_loop)).cpu()
        return [mask.numpy() for mask in (goes & (loop <= self.n_loop)).split(n)]

    def last(self, slots):
        """The last layer takes the tokens of the slots, in order, and the newest of each is
        predicted from."""
        at, states = zip(*(slot.take(self.n_loop + 1) for slot in slots))
        order = [positions.argsort() for positions in at]
        h = torch.cat([h[torch.from_numpy(n)] for h, n in zip(states, order)])
        at = [positions[n] for positions, n in zip(at, order)]
        h = self.loops.last(h, self.context(slots, [self.n_loop + 1] * len(slots), at))
        newest = np.cumsum([*map(len, at)]) - 1             # (R,)
        self.emit(slots, self.logits(h[torch.from_numpy(newest)]))

    # the answers

    def logits(self, h):
        """h (R, C), states of newest tokens -> (R, V)."""
        return upcast(self.model.head(self.model.norm(h)))[:, :self.vocab_size]

    def emit(self, slots, logits):
        """Give each slot its next token, and end what is answered."""
        for slot, token in zip(slots, self.pick(slots, logits)):
            last = token == self.eot or slot.request.add(token, slot.exit)
            slot.begin(range(slot.at.stop, slot.at.stop + 1))
            if last:
                self.end(slot)

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
                tokens[n] = int(next_tokens(logits[n:n + 1], [r.ids], *r.sampling, r.generator))
        return tokens


def each_token(level, at):
    """level[r] of each packed token, (N,), and how many there are in each row, a list."""
    n = [*map(len, at)]
    return torch.tensor(level).repeat_interleave(torch.tensor(n)), n


def exit_rule(text, n_loop):
    """What exit= names: a function of logits (R, V) after loop (R,) that tells which tokens exit
    there, (R,) bool; None where every token takes all loops. confidence: the likeliest token's
    probability is above P; margin: it is above the second one's by more than P (Schuster et al.
    2022)."""
    if not text:
        return None
    kind, _, value = text.partition(":")
    try:
        bound = int(value) if kind == "static" else float(value)
    except ValueError:
        bound = math.nan
    top = lambda logits, k: logits.softmax(-1).topk(k).values           # (R, k)
    if kind == "static" and 1 <= bound <= n_loop:
        return lambda logits, loop: loop >= bound
    if kind == "confidence" and 0 <= bound <= 1:
        return lambda logits, loop: top(logits, 1)[:, 0] > bound
    if kind == "margin" and 0 <= bound <= 1:
        return lambda logits, loop: -top(logits, 2).diff()[:, 0] > bound
    raise UserError(f"exit={text}: static:LOOP, confidence:P, margin:P are allowed, LOOP from 1 "
                    f"to {n_loop}, P from 0 to 1")


# ---- attention of packed tokens ----

class SlotCache:
    """Keys and values of every (level, slot), a sequence each. kv[level, layer] grows with its
    longest sequence, so a level that few tokens reach is small."""

    def __init__(self, slots, levels, max_len, n_kv_head, head_dim, device, dtype):
        self.slots, self.max_len, self.device, self.dtype = slots, max_len, device, dtype
        self.shape = n_kv_head, head_dim
        self.kv = {}        # (level, layer): (slots, 2, G, room, D)
        self.count = np.zeros((levels, slots), np.int64)    # tokens there

    def buffer(self, level, layer, need):
        """kv[level, layer] with room for at least `need` tokens."""
        G, D = self.shape
        kv = self.kv.get((level, layer), torch.empty(self.slots, 2, G, 0, D))
        room = kv.size(3)
        if need > room:     # make it twice as long
            more = min(self.max_len, max(need, 2 * room, 32))
            longer = torch.zeros(self.slots, 2, G, more, D, device=self.device, dtype=self.dtype)
            longer[:, :, :, :room] = kv
            self.kv[level, layer] = kv = longer
        return kv

    def reserve(self, level, slot, n):
        """Count n[r] more tokens of slot[r] at level[r]. Returns where each stands in its
        sequence, (N,)."""
        row, step = spread(n)
        entry = self.count[level, slot][row] + step
        self.count[level, slot] += n
        return entry

    def reset(self, slot):
        """Empty a slot for a new sequence. It is zeroed: a NaN poisons sums, even under a mask."""
        for kv in self.kv.values():
            kv[slot] = 0
        self.count[:, slot] = 0


def spread(n):
    """Row and number in the row of each packed token, (N,) both, of n (R,) tokens a row.
    [3, 1, 2] -> [0 0 0 1 2 2], [0 1 2 0 0 1]."""
    row = np.arange(len(n)).repeat(n)
    return row, np.arange(len(row)) - (n.cumsum() - n)[row]


class RaggedBatch:
    """The attention context of packed tokens: n[r] new ones of slot[r], row after row, at
    positions pos (N,). A row attends to the keys of its slot at level reads[r], each token to the
    entries of that sequence up to its own, entry (N,). writes[r]: whether the row's tokens write
    their keys there."""

    def __init__(self, cache, slot, n, pos, entry, reads, writes, rope, fast):
        at = torch.from_numpy(pos).to(cache.device)
        self.rope = rope and [table[at][:, None] for table in rope]     # (N, 1, D / 2) each
        # one call of attention takes rows that are alike in this
        kinds, self.groups = [*zip(reads, n > 1, writes)], []
        for level, several, write in sorted(set(kinds)):
            rows = np.array([kind == (level, several, write) for kind in kinds])    # (R,)
            tokens = np.flatnonzero(rows.repeat(n))                     # (N',)
            group = RowGroup(cache, level, slot[rows], n[rows], tokens, entry[tokens], write, fast)
            self.groups.append(group)

    def attend(self, layer, q, k, v):
        """q (N, H, D); k, v (N, G, D) -> (N, H, D)."""
        q, out = self.rotated(q), torch.empty_like(q)
        self.write(layer, k, v)
        for group in self.groups:
            out[group.tokens] = group.attend(layer, q[group.tokens])
        return out

    def write(self, layer, k, v):
        new = torch.stack([self.rotated(k), v], 1)                      # (N, 2, G, D)
        for group in self.groups:
            group.write(layer, new[group.tokens])

    def rotated(self, x):
        return apply_rope(x, *self.rope) if self.rope else x


class RowGroup:
    """Rows of a RaggedBatch that attend to the same level: n[r] tokens of slot[r]. Their queries,
    padded to (R, T), attend to (R, S) keys. tokens (N',): their numbers among all packed ones."""

    def __init__(self, cache, level, slot, n, tokens, entry, writes, fast):
        self.cache, self.level, self.writes, self.fast = cache, int(level), writes, fast
        tensor = lambda x: torch.from_numpy(x).to(cache.device)
        (row, step), self.shape = spread(n), (len(n), int(n.max()))
        self.S = int(entry.max()) + 1
        self.last = np.full(self.shape, self.S)     # the last key of each query; padding has all
        self.last[row, step] = entry
        self.slot, self.token_slot = tensor(slot), tensor(slot[row])    # (R,), (N',)
        self.tokens, self.entry = tensor(tokens), tensor(entry)         # (N',)
        self.place = tensor(row), tensor(step)      # of each token in (R, T)

    @functools.cached_property
    def bias(self):
        """-inf where a query does not attend to a key. Made once for all layers."""
        hidden = np.arange(self.S) > self.last[..., None]               # (R, T, S)
        bias = torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0)))
        return bias[:, None].to(self.cache.device, self.cache.dtype)    # (R, 1, T, S)

    def write(self, layer, new):
        """new (N', 2, G, D) goes to the cache."""
        if self.writes:
            kv = self.cache.buffer(self.level, layer, self.S)
            kv[self.token_slot, :, :, self.entry] = new.to(kv.dtype)

    def attend(self, layer, q):
        """q (N', H, D) -> (N', H, D)"""
        kv = self.cache.buffer(self.level, layer, self.S)[:, :, :, :self.S]
        k, v = kv.index_select(0, self.slot).to(q.dtype).unbind(1)      # (R, G, S, D)
        padded = q.new_zeros(*self.shape, *q.shape[1:])                 # (R, T, H, D)
        padded[self.place] = q
        y = attend(padded.transpose(1, 2), k, v, self.bias, self.fast)  # (R, H, T, D)
        return y.transpose(1, 2)[self.place]


# ---- the models: blocks on packed tokens ----

def run_block(block, h, layer, context, call):
    """model_gpt's Block on packed tokens h (N, C). call(part, x): a linear layer or a QK-norm of
    the block, as each token's loop has it. layer: its number in a loop."""
    attn, mlp, n = block.attn, block.mlp, block.norm1(h)
    q = call(attn.q_norm, heads(attn, call(attn.wq, n)))                # (N, H, D)
    k, v = keys_values(block, n, call)
    h = h + call(attn.wo, context.attend(layer, q, k, v).flatten(1))
    m = block.norm2(h)
    up = call(mlp.w_up, m)
    return h + call(mlp.w_down, F.silu(call(mlp.w_gate, m)) * up if mlp.gated else F.gelu(up))


def keys_values(block, n, call):
    """k, v (N, G, D) of n (N, C), the normed states."""
    attn = block.attn
    k = call(attn.k_norm, heads(attn, call(attn.wk, n)))
    return k, heads(attn, call(attn.wv, n))


def heads(attn, x):
    """(N, heads D) -> (N, heads, D)"""
    return x.unflatten(-1, (-1, attn.cfg.head_dim))


class RelaxedLoops:
    """model_relaxed: states are h (N, C). A rule decides where tokens exit."""
    routed = False

    def __init__(self, model):
        self.model, self.cfg = model, model.cfg

    def embed(self, idx, context):
        return self.model.wte(idx)

    def loop(self, h, loop, context):
        """h after loop (N,): each token's own (share=sequence: the same one)."""
        for layer, (block, call) in enumerate(self.layers(loop, h)):
            h = run_block(block, h, layer, context, call)
        return h

    def propagate(self, h, loop, context):
        """Write keys and values of a loop, projected from states h (N, C) of earlier loops."""
        for layer, (block, call) in enumerate(self.layers(torch.tensor([loop]), h)):
            context.write(layer, *keys_values(block, block.norm1(h), call))

    def layers(self, loop, h):
        """(stored block, call) of each layer of loop (N,), see run_block."""
        first, K = int(loop[0]), self.cfg.n_stored
        alike = bool((loop == first).all())
        own = None if alike else F.one_hot(loop - 1, self.cfg.n_loop).to(h)[..., None]
        for layer in range((first - 1) * K, first * K):
            k, u = self.cfg.block_and_use(layer)
            yield self.model.blocks[k], functools.partial(relaxed_part, u=u, own=own)


def relaxed_part(part, x, u, own):
    """A part of a relaxed block on x (N, ...), as use u or, with own (N, n_loop, 1), each token as
    the use where that is 1: one product applies the A of all uses, and own keeps each token's."""
    if isinstance(part, nn.Identity):
        return x
    if own is None:
        return part(x, u)
    if hasattr(part, "weights"):        # QK-norm: x (N, heads, D)
        weight = own[..., 0] @ torch.stack([*part.weights])             # (N, D)
        return F.rms_norm(x, x.shape[-1:], eps=part.eps) * weight[:, None]
    y = F.linear(x, part.weight)        # W' x
    if not part.rank:
        return y
    low = F.linear(x, part.a.flatten(0, 1)).view(len(x), -1, part.rank)     # (N, n_loop, r)
    return torch.addmm(y, (low * own).flatten(1), part.b.flatten(0, 1))


class MoRLoops:
    """model_mor: states are h and h_1 (N, 2 C). Its router decides which tokens go on."""
    routed = True

    def __init__(self, model):
        self.model, self.cfg = model, model.cfg
        if self.cfg.kv == "share_update":
            raise UserError("kv=share_update is not served: sample.py decodes it")

    def run(self, blocks, h, context):
        for layer, block in enumerate(blocks):
            h = run_block(block, h, layer, context, lambda part, x: part(x))
        return h

    def embed(self, idx, context):
        h = self.run(self.model.first, self.model.wte(idx), context)    # (N, C)
        return torch.cat([h, h], -1)

    def loop(self, state, loop, context):
        h, h1 = state.chunk(2, -1)
        y = self.run(self.model.layers_of[int(loop[0]) - 1], h, context)
        if self.cfg.router == "expert":
            gate = self.model.gate(self.scores(self.model.routers, h, loop))
            y = h + (gate[:, None] * y).to(h.dtype)
        return torch.cat([y, h1], -1)

    def scores(self, routers, h, loop):
        """Each token's score (N,) by the router of its loop."""
        s = torch.cat([router(h) for router in routers], 1)
        return s.gather(1, loop[:, None].to(h.device) - 1)[:, 0]

    def takes(self, state, loop):
        """Whether each token goes on to its loop > 1, (N,) bool."""
        h, h1 = state.chunk(2, -1)
        if self.cfg.router == "none":
            return torch.ones_like(loop, dtype=torch.bool)
        if self.cfg.router == "token":
            return self.model.choose_depth(h1)[2] >= loop.to(h.device)
        learned = self.cfg.causal == "aux_router"
        return self.scores(self.model.aux_routers if learned else self.model.routers, h, loop) >= 0

    def last(self, state, context):
        """h (N, C) behind the last layer."""
        h, h1 = state.chunk(2, -1)
        if self.cfg.router == "token":
            _, p, depth = self.model.choose_depth(h1)
            h = self.model.exit(h1, h, p, depth)
        return self.run(self.model.last, h, context)


LOOPS = {"model_relaxed": RelaxedLoops, "model_mor": MoRLoops}


def loops_of(model):
    """The adapter of a model; UserError if it has no loops."""
    name = type(model).__module__
    if name not in LOOPS:
        raise UserError(f"only models that loop over depth are served (relaxed, mor), not a {name}")
    return LOOPS[name](model)


if __name__ == "__main__":
    run_cli(main)
