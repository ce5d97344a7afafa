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
chooses. Here, with fill=exact the token's state waits until a later token goes there, and takes
that loop with it; with fill=propagate keys and values are projected from the state at the exit.

Words. A request is decoded in a slot. What a slot feeds to the model is its prompt at first (a
prefill), then one token of the answer at a time. In relaxed a rule decides where a fed token
exits (exit=), but a prefill takes all loops; in mor a router decides, of a prefill's tokens too.
A call of the model takes packed tokens: those of several slots, one behind the other; a row is
one slot's part of them. Loops count from 1; in mor, level 0 is the first layer, before them, and
level n_loop + 1 the last layer, behind them.

Shapes: N packed tokens, R rows, T tokens of the longest row, S keys, H query heads, G key/value
heads, D head size, C width, V vocabulary.
"""
import functools
import json
import math
import os
import sys
import time
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))    # PYTHONSAFEPATH leaves it out

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
    batching: str = "depth"         # sequence | depth
    slots: int = 16                 # requests decoded at a time
    exit: str = ""                  # relaxed: static:LOOP | confidence:P
    fill: str = ""                  # relaxed: deeper keys after an exit: exact | propagate

    def __post_init__(self):
        super().__post_init__()
        self.between(slots=(1, 4096))
        self.one_of("batching", "sequence", "depth")
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
    requests, exits = read_requests(model, tokenizer, cfg), []
    engine, start = make_engine(model, tokenizer, cfg, requests), time.perf_counter()
    for r in engine.run(requests):
        text, seconds = "".join(tokenizer.stream(r.tokens)), round(r.seconds, 4)
        print(json.dumps({"id": r.id, "text": text, "tokens": r.tokens, "exits": r.exits,
                          "seconds": seconds}), flush=True)
        exits += r.exits
    seconds = time.perf_counter() - start
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


def make_engine(model, tokenizer, cfg, requests):
    return Engine(model, min(cfg.slots, len(requests)), None, cfg.batching, cfg.exit, cfg.fill,
                  eot=tokenizer.eot if cfg.stop else None, vocab_size=tokenizer.vocab_size)


COLOURS = (34, 36, 32, 33, 35, 31)      # of the terminal: blue, cyan, green, yellow, magenta, red


def coloured(text, loop, n_loop):
    """text in the colour of a token that was predicted from loop `loop` of n_loop."""
    colour = COLOURS[(loop - 1) * (len(COLOURS) - 1) // max(1, n_loop - 1)]
    return f"\033[{colour}m{text}\033[0m" if text else ""


def write_coloured(model, tokenizer, cfg):
    """Continue a prompt, each token in the colour of its loop. Returns a summary."""
    # one request has nobody to wait for, and sequence takes share=sequence too
    cfg = replace(cfg, batching="sequence")
    request = make_request(model, tokenizer, cfg, asked=cfg)
    engine = make_engine(model, tokenizer, cfg, [request])
    print(tokenizer.decode(request.prompt), end="", flush=True)
    for n, text in enumerate(tokenizer.stream(answer_tokens(engine, request))):
        # the stream's last piece, an unfinished character, belongs to no token
        loop = request.exits[n] if n < len(request.exits) else 1
        print(coloured(text, loop, model.loops_to_run), end="", flush=True)
    print()
    legend = [coloured(str(b), b, model.loops_to_run) for b in range(1, model.loops_to_run + 1)]
    return (f"{len(request.tokens)} tokens; exited after loop "
            f"{loop_fractions(request.exits, model.loops_to_run)} {' '.join(legend)}")


def answer_tokens(engine, request):
    """Yields the tokens of the answer as they come."""
    engine.admit(deque([request]))
    while engine.busy():
        known = len(request.tokens)
        engine.step()
        yield from request.tokens[known:]


# ---- the engine: who goes next ----

@dataclass(eq=False)
class Slot:
    """Where one request is decoded."""
    number: int
    request: Request = None
    fed: range = None                # positions of the tokens that are fed now
    loop: int = 1                    # that they take next
    exit_after: int = 0              # the loop after which the newest of them exited
    # {level: [(positions (n,), states (n, .)), ..]}: where tokens stand between two calls
    # of the model; with fill=exact those that have exited stay here
    waiting: dict = field(default_factory=dict)

    @property
    def prefills(self):
        return self.fed.start == 0

    def feed(self, positions):
        self.fed, self.loop = positions, 1

    def wait(self, level, positions, states):
        """These tokens take the level when the slot goes there."""
        self.waiting.setdefault(level, []).append((positions, states))

    def take(self, level):
        """All tokens that wait for the level, in order: positions, states."""
        pairs = self.waiting.pop(level)
        if len(pairs) == 1:
            return pairs[0]
        positions, states = zip(*pairs)
        positions = np.concatenate(positions)
        order = positions.argsort()     # mor's last layer takes those that any loop let go
        return positions[order], torch.cat(states)[torch.from_numpy(order)]   # (n,), (n, .)


class Engine:
    """Decodes requests in `slots` slots, each of max_len tokens. max_len None: the model's limit
    or, without one, 8 times block_size. A sequence that outgrows max_len goes on from its last
    max_len tokens, as in sample.py: each of these steps is a prefill, slow and without early
    exits."""

    def __init__(self, model, slots, max_len=None, batching="depth", exit="", fill="", eot=None,
                 vocab_size=None):
        cfg, w, self.adapter = model.cfg, model.wte.weight, adapter_of(model)
        if (exit or fill) and self.adapter.routed:
            raise UserError("exit and fill are for relaxed: in a mor the router decides which "
                            "tokens exit")
        if batching == "depth" and not cfg.share.endswith("cycle"):
            raise UserError(f"batching=depth needs loops over the same blocks, so share=cycle or "
                            f"middle_cycle, not {cfg.share}")
        self.model, self.n_loop, self.device = model, model.loops_to_run, w.device
        self.batching, self.eot, self.vocab_size = batching, eot, vocab_size
        self.rule, self.fill = exit_rule(exit, self.n_loop), fill or getattr(cfg, "fill", "")
        self.slots, self.done = [Slot(n) for n in range(slots)], []
        self.max_len = max_len or model.context_limit or 8 * cfg.block_size
        self.cache = SlotCache(slots, self.n_loop + 2, self.max_len, cfg.n_kv_head, cfg.head_dim,
                               w.device, compute_dtype(w))
        self.rope = None
        if cfg.pos == "rope":           # of all positions, (max_len, D / 2) each
            pos = torch.arange(self.max_len, device=w.device)
            self.rope = rope_tables(pos, cfg.head_dim, cfg.rope_theta, w.dtype)

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
        self.cache.reset(slot.number)
        slot.waiting = {}
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
        """One loop for what the slots feed. A slot that leaves the loops has its next token
        then, and feeds it from loop 1 on. Returns the slots that stay."""
        first = [slot for slot in slots if slot.loop == 1]
        if first:
            self.embed(first)
        at, states = zip(*(slot.take(slot.loop) for slot in slots))
        context = self.append(slots, [slot.loop for slot in slots], at)
        h = self.adapter.run_loop(torch.cat(states), context)   # (N, .)
        leave = self.leave_by_router if self.adapter.routed else self.leave_by_rule
        left = set(leave(slots, at, h, context))
        stay = [slot for slot in slots if slot not in left]
        for slot in stay:
            slot.loop += 1
        return stay

    def embed(self, slots):
        """The fed tokens of the slots, which are their newest, wait for loop 1."""
        at = [np.array(slot.fed) for slot in slots]
        ids = [id for slot in slots for id in slot.request.ids[-len(slot.fed):]]  # (N,)
        context = self.append(slots, 0, at) if self.adapter.routed else None
        h = self.adapter.embed(torch.tensor(ids, device=self.device), context)  # (N, .)
        for slot, positions, states in zip(slots, at, h.split([*map(len, at)])):
            slot.wait(1, positions, states)

    def append(self, slots, level, at):
        """Tokens at positions at[r] of slots[r] get the next entries of the sequences at level
        (one, or each row's): once for each token and level. Returns their attention context."""
        number = np.array([slot.number for slot in slots])      # (R,)
        n = np.array([len(positions) for positions in at])      # (R,)
        level = np.broadcast_to(level, len(n))                  # (R,)
        return RaggedBatch(self.cache, level, number, n, np.concatenate(at), self.rope,
                           self.model.cfg.fast)

    # After a loop: its tokens, of states h (N, .) at positions at[r] of slots[r], wait for the
    # level that they take next. Slots that leave the loops get their next token; returns them.

    def leave_by_rule(self, slots, at, h, context):
        """relaxed: the newest tokens exit by a rule, or after the last loop."""
        states = h.split(context.n)                             # of each slot
        leaving, logits = self.ask_rule(slots, [rows[-1:] for rows in states])
        exited = []
        for slot, *tokens in zip(slots, at, states):
            if self.fill == "propagate" and slot in leaving:
                exited.append((slot, *tokens))
            elif slot.loop < self.n_loop:
                # exact: a token that exits waits too, and a later one takes it along
                slot.wait(slot.loop + 1, *tokens)
        self.propagate(exited)
        self.emit(leaving, logits)          # who leaves goes on with another token
        return leaving

    def ask_rule(self, slots, newest):
        """The slots whose newest tokens, of states newest[r] (1, C), exit after this loop, and
        their logits (R, V). A prefill takes all loops, so that its keys are complete."""
        asked = [(slot, h) for slot, h in zip(slots, newest)
                 if slot.loop == self.n_loop or self.rule and not slot.prefills]
        if not asked:                   # the others need no logits
            return [], None
        slots, newest = zip(*asked)         # from here on those that are asked
        logits, loop = self.logits(torch.cat(newest)), torch.tensor([s.loop for s in slots])
        exits = loop == self.n_loop     # (R,)
        if self.rule:
            exits |= self.rule(logits, loop).cpu()
        leaving = [slot for slot, out in zip(slots, exits.tolist()) if out]
        for slot in leaving:
            slot.exit_after = slot.loop
        return leaving, logits[exits]

    def propagate(self, exited):
        """The exited tokens, (slot, positions, states) each, get keys and values in all deeper
        loops."""
        for loop in range(2, self.n_loop + 1):
            lacking = [tokens for tokens in exited if tokens[0].loop < loop]
            if lacking:
                slots, at, states = zip(*lacking)       # a row each
                self.adapter.propagate(torch.cat(states), self.append(slots, loop, at))

    def leave_by_router(self, slots, at, h, context):
        """mor: a token that exits waits for the last layer, which takes all that a slot feeds
        together, when none of them takes another loop."""
        goes_on, leaving = self.adapter.goes_on(h, context.loop + 1).cpu(), []
        for slot, positions, states, on in zip(slots, at, h.split(context.n),
                                               goes_on.split(context.n)):
            # in a prefill the newest token may exit before others do
            if positions[-1] == slot.fed[-1] and not on[-1]:
                slot.exit_after = slot.loop
            for level, mask in (slot.loop + 1, on), (self.n_loop + 1, ~on):
                if mask.any():
                    slot.wait(level, positions[mask.numpy()], states[mask])
            if not on.any():
                leaving.append(slot)
        if leaving:
            self.run_last(leaving)
        return leaving

    def run_last(self, slots):
        """The last layer takes all that the slots feed; the newest token of each predicts the
        next."""
        at, states = zip(*(slot.take(self.n_loop + 1) for slot in slots))
        context = self.append(slots, self.n_loop + 1, at)
        h = self.adapter.run_last(torch.cat(states), context)   # (N, C)
        newest = np.cumsum(context.n) - 1                       # (R,)
        self.emit(slots, self.logits(h[torch.from_numpy(newest)]))

    # the answers

    def logits(self, h):
        """h (R, C), states of newest tokens -> (R, V)."""
        return upcast(self.model.head(self.model.norm(h)))[:, :self.vocab_size]

    def emit(self, slots, logits):
        """Each slot gets the next token of its answer and feeds it, or the answer ends."""
        if not slots:
            return
        for slot, token in zip(slots, self.pick(slots, logits)):
            ends = token == self.eot
            if not ends:
                ends = slot.request.add(token, slot.exit_after)
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


# ---- attention of packed tokens ----

class SlotCache:
    """Keys and values of every (level, slot), a sequence each. kv[level, layer] grows with its
    longest sequence, so a level that few tokens reach is small."""

    def __init__(self, slots, levels, max_len, n_kv_head, head_dim, device, dtype):
        self.slots, self.max_len, self.device, self.dtype = slots, max_len, device, dtype
        self.n_kv_head, self.head_dim = n_kv_head, head_dim
        self.kv = {}        # (level, layer): (slots, 2, G, room, D)
        self.count = np.zeros((levels, slots), np.int64)    # tokens there

    def buffer(self, level, layer, need):
        """kv[level, layer] with room for at least `need` tokens."""
        heads = self.slots, 2, self.n_kv_head
        kv = self.kv.get((level, layer), torch.empty(*heads, 0, self.head_dim))
        room = kv.size(3)
        if need > room:     # make it twice as long
            more = min(self.max_len, max(need, 2 * room, 32))
            longer = torch.zeros(*heads, more, self.head_dim, device=self.device,
                                 dtype=self.dtype)
            longer[:, :, :, :room] = kv
            self.kv[level, layer] = kv = longer
        return kv

    def reset(self, number):
        """Empty a slot for a new sequence. It is zeroed: a NaN poisons sums, even under a mask."""
        for kv in self.kv.values():
            kv[number] = 0
        self.count[:, number] = 0


def spread(n):
    """Row and number in the row of each packed token, (N,) both, of n (R,) tokens a row.
    [3, 1, 2] -> [0 0 0 1 2 2], [0 1 2 0 0 1]."""
    row = np.arange(len(n)).repeat(n)
    return row, np.arange(len(row)) - (n.cumsum() - n)[row]


class RaggedBatch:
    """The attention context of packed tokens, which it appends to the sequences of the cache: n[r]
    more of slot number[r] at level[r], row after row, at positions pos (N,). Each attends to its
    sequence up to itself."""

    def __init__(self, cache, level, number, n, pos, rope, fast):
        self.n, at = n.tolist(), torch.from_numpy(pos).to(cache.device)
        self.loop = torch.from_numpy(level.repeat(n))                   # (N,)
        self.rope = rope and [table[at][:, None] for table in rope]     # (N, 1, D / 2) each
        row, step = spread(n)                                   # (N,) both
        entry = cache.count[level, number][row] + step      # (N,): where each stands there
        cache.count[level, number] += n                         # a call counts once
        # one call of attention takes the rows of a level; those of one token have a call of
        # their own, as a prefill would pad them to its length
        kinds, self.groups = [*zip(level, n > 1)], []
        for kind in sorted(set(kinds)):
            rows = np.array([kind == other for other in kinds])         # (R,)
            packed = np.flatnonzero(rows[row])                          # (N',)
            group = RowGroup(cache, kind[0], number[rows], n[rows], packed, entry[packed], fast)
            self.groups.append(group)

    def attend(self, layer, q, k, v):
        """q (N, H, D); k, v (N, G, D) -> (N, H, D)."""
        q, out = self.rotated(q), torch.empty_like(q)
        self.write(layer, k, v)
        for group in self.groups:
            out[group.packed] = group.attend(layer, q[group.packed])
        return out

    def write(self, layer, k, v):
        kv = torch.stack([self.rotated(k), v], 1)                       # (N, 2, G, D)
        for group in self.groups:
            group.write(layer, kv[group.packed])

    def rotated(self, x):
        return apply_rope(x, *self.rope) if self.rope else x


class RowGroup:
    """Rows of a RaggedBatch at one level: n[r] tokens of slot number[r]. Their queries, padded to
    (R, T), attend to (R, S) keys. packed (N',): their numbers among all packed tokens."""

    def __init__(self, cache, level, number, n, packed, entry, fast):
        self.cache, self.level, self.fast = cache, int(level), fast
        tensor = lambda x: torch.from_numpy(x).to(cache.device)
        (row, step), self.padded = spread(n), (len(n), int(n.max()))
        self.S = int(entry.max()) + 1           # keys that are read
        # the last key of each query, (R, T); padding attends to all
        self.last_key = np.full(self.padded, self.S)
        self.last_key[row, step] = entry
        self.slot, self.token_slot = tensor(number), tensor(number[row])    # (R,), (N',)
        self.packed, self.entry = tensor(packed), tensor(entry)         # (N',)
        self.place = tensor(row), tensor(step)      # of each token in (R, T)

    @functools.cached_property
    def bias(self):
        """-inf where a query does not attend to a key. Made once for all layers."""
        hidden = np.arange(self.S) > self.last_key[..., None]           # (R, T, S)
        bias = torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0)))
        return bias[:, None].to(self.cache.device, self.cache.dtype)    # (R, 1, T, S)

    def write(self, layer, new):
        """new (N', 2, G, D) goes to the cache."""
        kv = self.cache.buffer(self.level, layer, self.S)
        kv[self.token_slot, :, :, self.entry] = new.to(kv.dtype)

    def attend(self, layer, q):
        """q (N', H, D) -> (N', H, D)"""
        kv = self.cache.buffer(self.level, layer, self.S)[:, :, :, :self.S]
        k, v = kv.index_select(0, self.slot).to(q.dtype).unbind(1)      # (R, G, S, D)
        rows = q.new_zeros(*self.padded, *q.shape[1:])                  # (R, T, H, D)
        rows[self.place] = q
        y = attend(rows.transpose(1, 2), k, v, self.bias, self.fast)    # (R, H, T, D)
        return y.transpose(1, 2)[self.place]


# ---- the models: blocks on packed tokens ----

def run_block(block, h, layer, context, call):
    """model_gpt's Block, Attention and MLP once more, for packed tokens h (N, C) and without
    dropout: a change there is to be made here too. call(part, x): a linear layer or a QK-norm of
    the block, as each token's loop has it. layer: its number in a loop."""
    attn, mlp, n = block.attn, block.mlp, block.norm1(h)
    q = call(attn.wq, n).unflatten(-1, (-1, attn.cfg.head_dim))         # (N, H, D)
    q = call(attn.q_norm, q)
    k, v = keys_values(block, n, call)                                  # (N, G, D) both
    h = h + call(attn.wo, context.attend(layer, q, k, v).flatten(1))    # (N, C)
    m = block.norm2(h)                                                  # (N, C)
    act, up = mlp.act, call(mlp.w_up, m)                                # (N, n_mlp)
    return h + call(mlp.w_down, act(call(mlp.w_gate, m)) * up if mlp.gated else act(up))


def keys_values(block, n, call):
    """k, v (N, G, D) of n (N, C), the normed states."""
    attn, D = block.attn, block.attn.cfg.head_dim
    k, v = (call(part, n).unflatten(-1, (-1, D)) for part in (attn.wk, attn.wv))
    return call(attn.k_norm, k), v


class LoopAdapter:
    """What the engine asks of a model. context is the RaggedBatch of a call, context.loop (N,)
    the loop of each token. Loops differ only with batching=depth, where all have the same blocks.

        embed(idx, context)         idx (N,) -> states (N, .) before loop 1
        run_loop(states, context)   -> states after the loop
    where a rule decides, on states (N, C) that the head can read:
        propagate(states, context)  writes keys and values of a loop that they do not take
    where a router decides, and outer layers are levels 0 and n_loop + 1:
        goes_on(states, loop)       -> (N,) bool: which tokens take loop (N,), from 2 on
        run_last(states, context)   -> (N, C), which the head can read
    """
    routed = False          # whether a router decides

    def __init__(self, model):
        self.model, self.cfg = model, model.cfg


class RelaxedAdapter(LoopAdapter):
    """States are h (N, C)."""

    def embed(self, idx, context):
        return self.model.wte(idx)

    def run_loop(self, h, context):
        for layer, (block, call) in enumerate(self.layers(h, context.loop)):
            h = run_block(block, h, layer, context, call)
        return h

    def propagate(self, h, context):
        for layer, (block, call) in enumerate(self.layers(h, context.loop)):
            context.write(layer, *keys_values(block, block.norm1(h), call))

    def layers(self, h, loop):
        """(stored block, call) of each layer of loop (N,), see run_block."""
        first, K, own = int(loop[0]), self.cfg.n_stored, None
        if not (loop == first).all():
            # share=cycle: blocks k are those of every loop, and own stands for u
            own = F.one_hot(loop - 1, self.cfg.n_loop).to(h)[..., None]     # (N, n_loop, 1)
        for layer in range((first - 1) * K, first * K):
            k, u = self.cfg.block_and_use(layer)
            yield self.model.blocks[k], functools.partial(relaxed_part, u=u, own=own)


def relaxed_part(part, x, u, own):
    """A part of a relaxed block on x (N, ...), as use u or, with own (N, n_loop, 1), each token as
    the use where that is 1: one product applies the A of all uses, and own keeps each token's."""
    if isinstance(part, nn.Identity):   # no QK-norm
        return x
    if own is None:
        return part(x, u)
    if hasattr(part, "weights"):        # model_relaxed's HeadNorm: x (N, heads, D)
        weight = own[..., 0] @ torch.stack([*part.weights])             # (N, D)
        return F.rms_norm(x, x.shape[-1:], eps=part.eps) * weight[:, None]
    y = F.linear(x, part.weight)        # W' x
    if not part.rank:
        return y
    low = F.linear(x, part.a.flatten(0, 1)).view(len(x), -1, part.rank)     # (N, n_loop, r)
    return torch.addmm(y, (low * own).flatten(1), part.b.flatten(0, 1))


class MoRAdapter(LoopAdapter):
    """States are h and h_1 beside it (N, 2 C): router=token decides by h_1, and so does (2.2)."""
    routed = True

    def __init__(self, model):
        super().__init__(model)
        if self.cfg.kv != "recursion":
            raise UserError(f"kv={self.cfg.kv} is not served: sample.py decodes it")

    def run_blocks(self, blocks, h, context):
        for layer, block in enumerate(blocks):
            h = run_block(block, h, layer, context, lambda part, x: part(x))
        return h

    def embed(self, idx, context):
        h = self.run_blocks(self.model.first, self.model.wte(idx), context)     # (N, C)
        return torch.cat([h, h], -1)

    def run_loop(self, states, context):
        (h, h1), loop = states.chunk(2, -1), context.loop       # (N, C) both; (N,)
        # where loops differ, they have the same layers
        y = self.run_blocks(self.model.layers_of[int(loop[0]) - 1], h, context)  # (N, C)
        if self.cfg.router == "expert":
            gate = self.model.gate(self.scores(self.model.routers, h, loop))
            y = h + (gate[:, None] * y).to(h.dtype)                     # (2.1)
        return torch.cat([y, h1], -1)

    def scores(self, routers, h, loop):
        """Each token's score (N,) by the router of its loop."""
        s = torch.cat([router(h) for router in routers], 1)             # (N, n_loop)
        return s.gather(1, loop[:, None].to(h.device) - 1)[:, 0]

    def goes_on(self, states, loop):
        (h, h1), loop = states.chunk(2, -1), loop.to(states.device)
        if self.cfg.router == "none":
            return loop <= self.model.loops_to_run
        if self.cfg.router == "token":
            return loop <= self.model.choose_depth(h1)[2]
        routers = self.model.aux_routers if self.cfg.causal == "aux_router" else self.model.routers
        s = self.scores(routers, h, loop.clamp(max=self.model.loops_to_run))
        return (s >= 0) & (loop <= self.model.loops_to_run)

    def run_last(self, states, context):
        h, h1 = states.chunk(2, -1)                             # (N, C) both
        if self.cfg.router == "token":
            _, p, depth = self.model.choose_depth(h1)
            h = self.model.exit(h1, h, p, depth)                        # (2.2)
        return self.run_blocks(self.model.last, h, context)


ADAPTERS = {"model_relaxed": RelaxedAdapter, "model_mor": MoRAdapter}


def adapter_of(model):
    """The adapter of a model; UserError if it has no loops."""
    name = type(model).__module__
    if name not in ADAPTERS:
        raise UserError(f"only models that loop over depth are served (relaxed, mor), not a {name}")
    return ADAPTERS[name](model)


if __name__ == "__main__":
    run_cli(main)
