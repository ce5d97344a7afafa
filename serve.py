"""
Serving: many requests at a time, for models that loop over depth (relaxed, mor).

    python serve.py out/relaxed_exit requests=FILE.jsonl exit=confidence:0.9
    python serve.py out/mor_tiny requests=FILE.jsonl batching=depth slots=32
    python serve.py help                                   every key with its meaning

A line of FILE is a JSON object: {"prompt": "def ", "max_new_tokens": 50, "arrival": 1.5, "id": "a"}.
Only the prompt must be there; arrival is in seconds after the start. Its answer is a JSON line,
written when it is ready, with the id (or the line's number), text, tokens, exits (the loop after which
each token left) and latency (seconds since its arrival). A line that is no such object is answered by
a line with "error". Everything else goes to stderr.

All loops use the same blocks, so one call may run tokens of several loops. Three kinds of batching,
with three slots; 1 and 2 are the loops of a token, a token may exit after loop 1:

    static     slot 0   1 2 1 . 1 2          a batch starts when the one before has ended; rows wait (.)
               slot 1   1 . 1 2 1 .          for the others' loops
    sequence   the same, but a slot whose request has ended takes the next one at once
    depth      slot 0   1 2 1 1 2 1          a row whose token exits starts its next token at once
               slot 1   1 1 2 1 1 2          (Bae et al. 2024, 2410.20672, Section 2.4)

The answers do not depend on the batching: each is what its request would get alone.

A token that exits early has no keys and values for the deeper loops of later tokens. fill=exact keeps
its state, and runs it through the deeper loop together with the next token that goes there;
fill=propagate projects keys and values from the state it exited with.

What a model offers for this: n_loop, embed, loop, finish, logits; relaxed also propagate, mor also
takes (its router decides who goes on, so exit and fill mean nothing to it).

Shapes: N packed tokens (of several requests side by side), R rows, T tokens of the longest row, S keys,
H query heads, G key/value heads, D head size, C width, V vocabulary.
"""
import json
import math
import sys
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from tqdm import tqdm

from limits import check_text_fits
from model_gpt import (BaseConfig, apply_rope, attention_fast, attention_naive, compute_dtype,
                       rope_tables)
from prepare import (UserError, asks_help, help_text, read_bytes, run_cli, split_args,
                     typed_config)


# -------------------------------------------------------------------------------------------------
# keys and values of packed tokens

class SlotCache:
    """Keys and values of every (slot, level) pair, a sequence each. Level 0 is what stands before the
    loops, level b loop b, the last what stands behind. kv[level, layer] (slots, 2, G, room, D) is
    made when first written to, and grows with its longest sequence: so a level that few tokens reach
    is small. count[level, slot] is the number of tokens of a sequence."""

    def __init__(self, slots, levels, max_len, n_kv_head, head_dim, device, dtype):
        self.slots, self.max_len, self.device, self.dtype = slots, max_len, device, dtype
        self.shape = n_kv_head, head_dim
        self.kv, self.count = {}, np.zeros((levels, slots), np.int64)

    def buffer(self, level, layer, need):
        """kv[level, layer] with room for at least `need` tokens."""
        G, D = self.shape
        old = self.kv.get((level, layer), torch.empty(self.slots, 2, G, 0, D))
        room = old.size(3)
        if need > room:
            more = min(self.max_len, max(need, 2 * room, 32))
            new = torch.zeros(self.slots, 2, G, more, D, device=self.device, dtype=self.dtype)
            new[:, :, :, :room] = old
            self.kv[level, layer] = old = new
        return old

    def reset(self, slot):
        """Empty a slot for a new text. It is zeroed: a NaN under a mask would still poison sums."""
        for kv in self.kv.values():
            kv[slot] = 0
        self.count[:, slot] = 0

    def copy(self, slot, at, source, targets):
        """Copy the keys and values at positions `at` of a slot to deeper levels."""
        for level, layer in [key for key in self.kv if key[0] == source]:
            for target in targets:
                new = self.kv[source, layer][slot, :, :, at]
                self.buffer(target, layer, max(at) + 1)[slot, :, :, at] = new

    def nbytes(self):
        return sum(kv.nbytes for kv in self.kv.values())


def spread(n):
    """Of n (R,) tokens a row, packed: each one's row, and its number in the row, (N,) both."""
    row = np.arange(len(n)).repeat(n)
    return row, np.arange(len(row)) - (n.cumsum() - n)[row]


class RowGroup:
    """Rows of a RaggedBatch at one level, with one token each or with several: attention takes them
    in one call. slot, n (R,); tokens (N',): which of the packed tokens are theirs; entry (N',): the
    place of each in its sequence. A query attends to the entries up to its own."""

    def __init__(self, cache, level, slot, n, tokens, entry, writes, fast):
        self.cache, self.level, self.writes = cache, level, writes
        self.attention = attention_fast if fast else attention_naive
        tensor = lambda x: torch.from_numpy(x).to(cache.device)
        row, step = spread(n)
        R, T, self.S = len(n), int(n.max()), int(entry.max()) + 1
        self.tokens, self.entry, self.slot = tensor(tokens), tensor(entry), tensor(slot[row])
        # many rows with one token each: all slots are read where they lie, which is cheaper than
        # gathering most of them; the other slots' results are dropped
        self.in_place = T == 1 and 2 * R > cache.slots
        self.rows = self.slot if T == 1 else tensor(slot)               # (R,)
        if self.in_place:
            row, R = slot, cache.slots
        self.shape, self.place = (R, T), (tensor(row), tensor(step))    # of the tokens in (R, T)
        last = np.full((R, T), self.S)                      # padding attends to anything
        last[row, step] = entry
        visible = np.arange(self.S) <= last[..., None]                  # (R, T, S)
        bias = np.where(visible, np.float32(0), np.float32(-np.inf))
        self.bias = tensor(bias)[:, None].to(cache.dtype)               # (R, 1, T, S)

    def write(self, layer, new):
        """new (N, 2, G, D): keys and values of all packed tokens; write those of this group."""
        kv = self.cache.buffer(self.level, layer, self.S)
        kv[self.slot, :, :, self.entry] = new.index_select(0, self.tokens).to(kv.dtype)

    def attend(self, layer, q, new, out):
        """q (N, H, D), new (N, 2, G, D) -> out (N, H, D), of this group's tokens."""
        if self.writes and new is not None:
            self.write(layer, new)
        kv = self.cache.buffer(self.level, layer, self.S)[:, :, :, :self.S]
        kv = kv if self.in_place else kv.index_select(0, self.rows)             # (R, 2, G, S, D)
        k, v = kv.unbind(1)
        (R, T), H, G, D = self.shape, q.size(1), k.size(1), q.size(2)
        padded = q.new_zeros(R, T, H, D)
        padded[self.place] = q[self.tokens]
        if T == 1:      # the H / G query heads of a key head stand as its queries: quicker
            y = self.attention(padded.view(R, G, H // G, D), k, v, self.bias).view(R, T, H, D)
        else:
            y = self.attention(padded.transpose(1, 2), k, v, self.bias).transpose(1, 2)
        out[self.tokens] = y[self.place]


class RaggedBatch:
    """The attention context of packed tokens: n[r] new ones of slot[r] at level[r], one row behind the
    other, at positions `at` (N,) of their texts. attend means the same as model_gpt.Context's.

    entry (N,): where in its sequence each token's key stands; without it, behind those there.
    writes=False: the tokens only read (mor's kv=share)."""

    def __init__(self, cache, level, slot, n, at, rope, fast, entry=None, reads=None):
        self.cache, self.level, self.slot, self.n, self.fast = cache, level, slot, n, fast
        self.at, self.entry, self.reads = at, entry, level if reads is None else reads
        index = torch.from_numpy(at).to(cache.device)
        self.rope = rope and [table[index] for table in rope]           # (N, D)
        self.groups = None

    def plan(self):
        """Reserve the tokens' places and form the groups, when the first layer needs them."""
        row, step = spread(self.n)
        start = self.cache.count[self.level, self.slot]
        self.cache.count[self.level, self.slot] += self.n
        entry = start[row] + step if self.entry is None else self.entry
        writes = self.level == self.reads
        kind = 4 * self.reads + 2 * (self.n > 1) + writes               # (R,): rows alike in all
        self.groups = []
        for value in np.unique(kind):
            some = kind == value
            tokens = np.flatnonzero(some[row])
            self.groups.append(RowGroup(
                self.cache, int(value) // 4, self.slot[some], self.n[some], tokens, entry[tokens],
                bool(value % 2), self.fast))

    def pack(self, k, v):
        """(1, G, N, D) both, k not yet rotated -> (N, 2, G, D)."""
        return torch.stack([self.rotated(k)[0].transpose(0, 1), v[0].transpose(0, 1)], 1)

    def rotated(self, x):
        return apply_rope(x, *self.rope) if self.rope else x

    def attend(self, layer, q, k, v):
        """q (1, H, N, D), k, v (1, G, N, D), or None where nothing is written -> (1, H, N, D)."""
        if self.groups is None:
            self.plan()
        q = self.rotated(q)[0].transpose(0, 1)                          # (N, H, D)
        out, new = torch.empty_like(q), None if k is None else self.pack(k, v)
        for group in self.groups:
            group.attend(layer, q, new, out)
        return out.transpose(0, 1)[None]

    def write(self, layer, k, v):
        """Write k, v (1, G, N, D) without attending."""
        if self.groups is None:
            self.plan()
        for group in self.groups:
            group.write(layer, self.pack(k, v))


# -------------------------------------------------------------------------------------------------
# choosing a token, and when it may exit

def next_tokens(logits, seen, temperature, top_k, top_p, repetition_penalty, generator):
    """One token a row from logits (B, V): (B,) int64. seen (B, V) marks the tokens of each row so far.
    Order: penalty (Keskar et al. 2019: positive logits divided, negative multiplied), temperature,
    top_k, top_p (Holtzman et al. 2020: the smallest set of likeliest tokens that reaches top_p)."""
    if repetition_penalty != 1:
        divided, multiplied = logits / repetition_penalty, logits * repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, divided, multiplied), logits)
    if temperature == 0 or top_k == 1:
        return logits.argmax(-1)
    logits = logits / max(temperature, 1e-6)
    if 0 < top_k < logits.size(-1):
        kth = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        p = ordered.softmax(-1)
        enough = p.cumsum(-1) - p >= max(top_p, 1e-9)                   # the first always stays
        ordered = ordered.masked_fill(enough, -torch.inf)
        logits = torch.empty_like(logits).scatter_(-1, order, ordered)
    return logits.softmax(-1).multinomial(1, generator=generator).squeeze(-1)


def check_prompts(model, prompts):
    """UserError for a prompt without tokens, or with a token that the model does not have."""
    V = model.cfg.vocab_size
    for prompt in prompts:
        if not prompt:
            raise UserError("the prompt is empty: give at least one character")
        if not 0 <= min(prompt) <= max(prompt) < V:
            raise UserError(f"the prompt has a token outside the model's vocabulary of {V}")


EXITS = "static:LOOP, confidence:P, margin:P, oracle"


def exit_rule(text, n_loop):
    """What exit= names: a function of logits (R, V) after loop depth (R,), from 0, that tells which
    tokens exit there, (R,) bool; None where every token takes all loops.

    confidence: the likeliest token's probability is above P; margin: it is above the second one's by
    more than P (Schuster et al. 2022). oracle, for measuring: the earliest loop whose likeliest token
    is the last loop's. It needs the last loop, so nothing exits early; the Engine counts."""
    kind, _, value = text.partition(":")
    if text in ("", "oracle"):
        return None
    try:
        bound = int(value) if kind == "static" else float(value)
    except ValueError:
        bound = math.nan
    if kind == "static" and 1 <= bound <= n_loop:
        return lambda logits, depth: depth >= bound - 1
    if kind == "confidence" and 0 <= bound <= 1:
        return lambda logits, depth: (logits.softmax(-1).amax(-1) > bound).cpu()
    if kind == "margin" and 0 <= bound <= 1:
        top = lambda logits: logits.softmax(-1).topk(2).values
        return lambda logits, depth: (top(logits).diff(dim=-1)[:, 0] < -bound).cpu()
    raise UserError(f"exit={text}: {EXITS} are allowed, LOOP from 1 to {n_loop}, P from 0 to 1")


# -------------------------------------------------------------------------------------------------
# the engine

@dataclass
class Request:
    """A text to continue, and what has become of it."""
    prompt: list                     # token ids
    max_new_tokens: int
    arrival: float = 0.0             # seconds after the start
    id: object = None
    tokens: list = field(default_factory=list)      # the answer, without end-of-text
    exits: list = field(default_factory=list)       # the loop after which each left, from 1
    latency: float = 0.0             # seconds from arrival to the last token


@dataclass
class Slot:
    """Where one request is decoded. Its newest tokens are in work: a prompt, then one at a time."""
    number: int
    request: Request = None
    text: list = None                # prompt and answer
    generator: torch.Generator = None               # the request's own random numbers
    held: int = 0                    # tokens in the cache
    new: int = 0                     # tokens in work, the last of the text
    prompt: bool = False             # they are a prompt: all of them take all loops
    depth: int = 0                   # the loop that they go through next, from 0
    h: torch.Tensor = None           # (new, C): their states between loops
    going: np.ndarray = None         # mor: which of them go through it, indices
    taken: int = 0                   # loops that the newest token took
    waiting: dict = field(default_factory=dict)     # fill=exact: {depth: [(position, state)]}
    early: tuple = None              # of a prompt: (depth, logits) where its last token would exit
    guesses: list = field(default_factory=list)     # oracle: the likeliest token after each loop

    def start(self, text, max_len):
        """Begin with a text, of which as much is kept as the cache has room for."""
        self.text, self.held, self.depth = text, 0, 0
        self.new, self.prompt = min(len(text), max_len), True
        self.waiting = {}

    def newest(self):
        """Positions of the tokens in work."""
        return range(self.held - self.new, self.held)


class Engine:
    """Decodes requests in `slots` slots. A router (mor) or a rule (exit=) decides where tokens exit.

    What a request is answered depends on no other: when sampling, it has the random numbers of its
    place in the queue. Under a rule prompts take all loops, so that their keys are complete. A text
    that outgrows max_len goes on from its last max_len tokens, as in sample.py."""

    def __init__(self, model, slots, max_len, batching="depth", exit="", eot=None, vocab_size=None,
                 temperature=0.0, top_k=0, top_p=1.0, repetition_penalty=1.0, seed=1337,
                 clock=time.perf_counter, sleep=time.sleep, on_token=None, fill=""):
        cfg = model.cfg
        if batching == "depth" and not cfg.share.endswith("cycle"):
            raise UserError(f"batching=depth needs loops over the same blocks, so share=cycle, "
                            f"not {cfg.share}")
        self.model, self.batching, self.max_len = model, batching, max_len
        self.eot, self.vocab_size, self.on_token = eot, vocab_size, on_token
        self.routed, self.n_loop = hasattr(model, "takes"), model.n_loop
        self.fill = fill or getattr(cfg, "fill", "exact")
        self.oracle, self.rule = exit == "oracle", exit_rule(exit, self.n_loop)
        self.sampling, self.seed = (temperature, top_k, top_p, repetition_penalty), seed
        self.clock, self.sleep = clock, sleep
        weight = model.wte.weight
        self.device = weight.device
        self.cache = SlotCache(slots, self.n_loop + 2, max_len, cfg.n_kv_head, cfg.head_dim,
                               self.device, compute_dtype(weight))
        self.rope = None
        if cfg.pos == "rope":
            positions = torch.arange(max_len, device=self.device)
            self.rope = rope_tables(positions, cfg.head_dim, cfg.rope_theta, weight.dtype)
        self.slots, self.done, self.admitted = [Slot(n) for n in range(slots)], [], 0

    @torch.inference_mode()
    def run(self, requests):
        """Yields each of the requests (a list of Request) when it is answered."""
        queue = deque(sorted(requests, key=lambda r: r.arrival))
        start = self.clock()
        while queue or self.busy():
            now = self.clock() - start
            if not self.busy() and queue[0].arrival > now:
                self.sleep(queue[0].arrival - now)
                continue
            self.admit(queue, now)
            self.step()
            now, done, self.done = self.clock() - start, self.done, []
            for request in done:
                request.latency = now - request.arrival
                yield request

    def busy(self):
        return [slot for slot in self.slots if slot.request is not None]

    def admit(self, queue, now):
        """Give free slots to the requests that have arrived."""
        if self.batching == "static" and self.busy():
            return
        for slot in self.slots:
            if slot.request is None and queue and queue[0].arrival <= now:
                slot.request = queue.popleft()
                slot.generator = self.generator(self.admitted)
                self.admitted += 1
                self.start(slot, list(slot.request.prompt))

    def start(self, slot, text):
        self.cache.reset(slot.number)
        slot.start(text, self.max_len)

    def generator(self, n):
        """The random numbers of the n-th request: its own, so that its neighbours do not matter."""
        word = np.random.SeedSequence([self.seed, n]).generate_state(1, np.uint64)[0]
        return torch.Generator(self.device).manual_seed(int(word >> np.uint64(1)))

    def step(self):
        """depth: one loop for all requests in work. static, sequence: one token for each."""
        slots = self.busy()
        for slot in slots:
            if len(slot.text) > self.max_len and slot.depth == 0 and not slot.prompt:
                self.start(slot, slot.text)
        while slots:
            slots = self.advance(slots)
            if self.batching == "depth":
                return

    def advance(self, slots):
        """One loop for the tokens of the slots. Returns the slots whose tokens take another."""
        fresh = [slot for slot in slots if slot.depth == 0]
        if fresh:
            self.embed(fresh)
        self.loop(slots)
        left = self.routed_away(slots) if self.routed else self.ruled_away(slots)
        stay = [slot for slot, gone in zip(slots, left) if not gone]
        for slot in stay:
            slot.depth += 1
        return stay

    # the model's calls ---------------------------------------------------------------------------

    def context(self, slots, level, at, by_position=False, reads=None):
        """The attention context of the tokens at positions at[r] (lists) of the slots."""
        number, n = (np.array(x) for x in zip(*((s.number, len(x)) for s, x in zip(slots, at))))
        flat = np.array([position for positions in at for position in positions])
        return RaggedBatch(self.cache, np.array(level), number, n, flat, self.rope,
                           self.model.cfg.fast, flat if by_position else None, reads)

    def embed(self, slots):
        """Embed the newest tokens of the slots."""
        for slot in slots:
            slot.held, slot.taken = slot.held + slot.new, 0
            slot.going = np.arange(slot.new) if self.routed else None   # all take the first loop
        idx = [token for slot in slots for token in slot.text[-slot.new:]]
        context = self.context(slots, [0] * len(slots), [slot.newest() for slot in slots])
        h = self.model.embed(torch.tensor(idx, device=self.device), context)
        for slot, states in zip(slots, h.split([slot.new for slot in slots])):
            slot.h = states

    def loop(self, slots):
        """One loop for the slots' tokens, and for those that wait for it."""
        waiting = [slot.waiting.pop(slot.depth, []) for slot in slots]
        states, at = [], []
        for slot, wait in zip(slots, waiting):
            new = slot.newest()
            if slot.going is not None:                                  # mor: not all go
                new = [new[n] for n in slot.going]
            states += [h for _, h in wait]
            states.append(slot.h if slot.going is None else slot.h[slot.going])
            at.append([position for position, _ in wait] + list(new))
        n = [len(positions) for positions in at]
        depth = torch.tensor([slot.depth for slot in slots]).repeat_interleave(torch.tensor(n))
        h = self.model.loop(torch.cat(states), depth, self.loop_context(slots, at))
        for slot, wait, new in zip(slots, waiting, h.split(n)):
            if wait and slot.depth < self.n_loop - 1:                   # they wait for the next
                old = zip([position for position, _ in wait], new.split(1))
                slot.waiting.setdefault(slot.depth + 1, []).extend(old)
            new = new[len(wait):]
            if slot.going is None:
                slot.h = new
            else:
                slot.h = slot.h.index_copy(0, self.index(slot.going), new)
            slot.taken += slot.going is None or slot.new - 1 in slot.going

    def index(self, x):
        return torch.from_numpy(x).to(self.device)

    # a rule decides: relaxed ---------------------------------------------------------------------

    def ruled_away(self, slots):
        """Which of the slots' newest tokens exit after this loop, a list of bools; those are
        predicted from."""
        last = [slot.depth == self.n_loop - 1 for slot in slots]
        asked = slots
        if self.rule is None and not self.oracle:
            asked = [slot for slot, end in zip(slots, last) if end]
        if not asked:
            return last
        h = torch.cat([slot.h[-1:] for slot in asked])                  # (R, C)
        logits = self.logits(h, None)
        left = self.decide(asked, logits)
        out = [n for n, gone in enumerate(left) if gone]
        self.leave([asked[n] for n in out if asked[n].depth < self.n_loop - 1])
        depths = [asked[n].depth for n in out]
        if out:
            self.emit([asked[n] for n in out], depths, logits[out])
        return left if asked is slots else last

    def logits(self, h, context):
        return self.model.logits(self.model.finish(h, context))[:, :self.vocab_size]

    def decide(self, slots, logits):
        """Which tokens exit, with logits (R, V) after the loop just taken. The last token of a prompt
        goes on with the others, but what it is predicted from is where it would exit alone."""
        depth = torch.tensor([slot.depth for slot in slots])
        last = (depth == self.n_loop - 1).tolist()
        if self.oracle:
            for slot, guess in zip(slots, logits.argmax(-1).tolist()):
                slot.guesses.append(guess)
        if self.rule is None:
            return last
        left = self.rule(logits, depth).tolist()
        for n, slot in enumerate(slots):
            if slot.prompt and (left[n] or last[n]):
                slot.early = slot.early or (slot.depth, logits[n])
                left[n] = False
        return [a or b for a, b in zip(left, last)]

    def leave(self, slots):
        """The newest token of each slot exits here: see to its keys at the deeper loops."""
        if self.fill == "exact":
            for slot in slots:
                state = (slot.held - 1, slot.h[-1:])
                slot.waiting.setdefault(slot.depth + 1, []).append(state)
            return
        for depth in range(1, self.n_loop):
            some = [slot for slot in slots if slot.depth < depth]
            if some:
                at = [[slot.held - 1] for slot in some]
                context = self.context(some, [depth + 1] * len(some), at)
                self.model.propagate(torch.cat([slot.h for slot in some]), depth, context)

    # a router decides: mor -----------------------------------------------------------------------

    def loop_context(self, slots, at):
        """Level b holds the keys of loop b. mor: those of the tokens that took it (kv=recursion); or
        all read the first loop's (share); or those that take a loop have keys of their own there, and
        the others the first loop's (share_update)."""
        level, kv = np.array([slot.depth + 1 for slot in slots]), getattr(self.model.cfg, "kv", "")
        return self.context(slots, level, at, by_position=kv.startswith("share"),
                            reads=np.ones_like(level) if kv == "share" else None)

    def routed_away(self, slots):
        """Which of the slots have no token that takes another loop, a list of bools; those run the
        last layer and are predicted from."""
        self.route(slots)
        out = [slot for slot in slots if not len(slot.going)]
        if out:
            at = [slot.newest() for slot in out]
            context = self.context(out, [self.n_loop + 1] * len(out), at)
            h = self.model.finish(torch.cat([slot.h for slot in out]), context)     # (N, C)
            newest = np.cumsum([slot.new for slot in out]) - 1
            logits = self.model.logits(h[self.index(newest)])[:, :self.vocab_size]
            self.emit(out, [slot.taken - 1 for slot in out], logits)
        return [slot in out for slot in slots]

    def route(self, slots):
        """Keep in `going` the tokens that the router sends through the next loop."""
        on = [slot for slot in slots if slot.depth < self.n_loop - 1]
        taking = {}
        if on:
            n = [len(slot.going) for slot in on]
            h = torch.cat([slot.h[slot.going] for slot in on])
            depth = torch.tensor([slot.depth + 1 for slot in on]).repeat_interleave(torch.tensor(n))
            takes = self.model.takes(h, depth).cpu().numpy()
            taking = dict(zip((slot.number for slot in on), np.split(takes, np.cumsum(n)[:-1])))
        for slot in slots:
            takes = taking.get(slot.number, np.zeros(len(slot.going), bool))
            left, slot.going = slot.going[~takes], slot.going[takes]
            if self.model.cfg.kv == "share_update" and len(left):
                at, deeper = slot.held - slot.new + left, range(slot.depth + 2, self.n_loop + 1)
                self.cache.copy(slot.number, at.tolist(), 1, deeper)

    # the answers ---------------------------------------------------------------------------------

    def emit(self, slots, depths, logits):
        """Give each slot its next token from logits (R, V), and end what is answered."""
        for n, slot in enumerate(slots):
            if slot.early:
                (depths[n], logits[n]), slot.early = slot.early, None
        for slot, depth, token in zip(slots, depths, self.pick(slots, logits)):
            request, slot.depth, slot.new, slot.prompt = slot.request, 0, 1, False
            if self.oracle:
                depth, slot.guesses = slot.guesses.index(slot.guesses[-1]), []
            if token != self.eot:
                request.tokens.append(token)
                request.exits.append(depth + 1)
                slot.text.append(token)
                if self.on_token is not None:
                    self.on_token(request)
            if token == self.eot or len(request.tokens) == request.max_new_tokens:
                slot.request = None
                self.done.append(request)

    def pick(self, slots, logits):
        """A token for each slot, a list: the likeliest, or a sampled one."""
        temperature, top_k, top_p, penalty = self.sampling
        if temperature == 0 and penalty == 1:
            return logits.argmax(-1).tolist()
        tokens = []
        for slot, row in zip(slots, logits.split(1)):
            seen = torch.zeros_like(row, dtype=torch.bool)
            if penalty != 1:
                seen[0, slot.text] = True
            tokens.append(int(next_tokens(row, seen, temperature, top_k, top_p, penalty,
                                          slot.generator)))
        return tokens


# -------------------------------------------------------------------------------------------------
# requests in, answers out

@dataclass
class Sampling:
    """Keys that sample.py has too."""
    max_new_tokens: int = 500       # tokens to write after a prompt
    temperature: float = 0.8        # 0 takes the likeliest token; 1 samples the model's distribution
    top_k: int = 0                  # sample among the k likeliest tokens (0: all)
    top_p: float = 1.0              # sample among the likeliest with this probability together
    repetition_penalty: float = 1.0  # above 1 makes tokens that the text already has less likely
    stop: bool = True               # end at the end-of-text token
    seed: int = 1337                # of the sampling
    exit: str = ""                  # relaxed: static:LOOP | confidence:P | margin:P | oracle
    fill: str = ""                  # relaxed: deeper keys after an exit: exact | propagate
    device: str = "auto"            # auto (cuda, mps or cpu, in this order) | cpu | mps | cuda:N
    fast: bool = True               # the model's fast path; false: its naive one, the same text

    def __post_init__(self):
        self.at_least(1, "max_new_tokens")
        self.at_least(0, "temperature", "top_k", "top_p", "seed")
        self.one_of("fill", "", "exact", "propagate")
        if self.top_p > 1 or self.seed >= 2 ** 63:
            raise ValueError(f"top_p={self.top_p}, seed={self.seed}: at most 1, and less than 2^63")
        if not 0.01 <= self.repetition_penalty <= 100:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must lie between 0.01 "
                             f"and 100 (1: none)")

    at_least = BaseConfig.at_least

    def one_of(self, name, *allowed):
        if getattr(self, name) not in allowed:
            words = ", ".join(filter(None, allowed))
            raise ValueError(f"{name}={getattr(self, name)} must be one of: {words}")


@dataclass
class ServeConfig(Sampling):
    requests: str = ""              # the file of requests, one JSON object a line
    batching: str = "depth"         # static | sequence | depth
    slots: int = 16                 # requests in work at a time
    max_len: int = 0                # most tokens of a request without RoPE (0: 8 block_size)

    def __post_init__(self):
        super().__post_init__()
        self.at_least(0, "max_len")
        self.one_of("batching", "static", "sequence", "depth")
        if not 1 <= self.slots <= 4096:
            raise ValueError(f"slots={self.slots} must be at least 1 and at most 4096")


def read_requests(path, tokenizer, model, max_new_tokens, longest=None):
    """The requests in a file, of at most `longest` tokens each, and answers for the lines that hold
    none: (list of Request, list of dict). UserError where there is no such file, or it is empty."""
    try:
        lines = read_bytes(path).split(b"\n")
    except OSError as e:
        raise UserError(f"requests={path} cannot be read: {e.strerror}") from e
    requests, errors = [], []
    for n, line in enumerate(lines, 1):
        if not line.strip():
            continue
        given = None
        try:
            given = json.loads(line.decode())
            found = parse_request(given, n, tokenizer, model, max_new_tokens, longest)
            requests.append(found)
        except (UserError, ValueError, OverflowError, RecursionError) as e:
            name = given.get("id", n) if isinstance(given, dict) else n
            what = str(e) if isinstance(e, UserError) else "not a line of JSON in UTF-8"
            errors.append({"id": name if is_id(name) else n, "line": n,
                           "error": " ".join(what.split())})
    if not requests and not errors:
        raise UserError(f"requests={path} is empty: one JSON object a line")
    return requests, errors


def is_id(value):
    """Whether a JSON value can name a request: a text, a number that JSON can write, or null."""
    finite = isinstance(value, float) and math.isfinite(value)
    return value is None or isinstance(value, (str, int)) or finite


def parse_request(given, n, tokenizer, model, max_new_tokens, longest=None):
    """The Request of line n's JSON value; UserError where it is none."""
    kinds = {"prompt": str, "max_new_tokens": int, "arrival": (int, float), "id": object}
    if not isinstance(given, dict):
        raise UserError("a request is a JSON object")
    for key, value in given.items():
        if key not in kinds:
            raise UserError(f"unknown key {key!r:.60}: the keys are {', '.join(kinds)}")
        good = isinstance(value, kinds[key]) and not isinstance(value, bool)
        if not good or key == "id" and not is_id(value):
            raise UserError(f"{key} has a wrong type: {value!r:.60}")
    if not given.get("prompt"):
        raise UserError("the prompt is empty: give at least one character")
    count = given.get("max_new_tokens", max_new_tokens)
    arrival = given.get("arrival", 0.0)
    if not 1 <= count <= 1 << 20:
        raise UserError(f"max_new_tokens={count} must be at least 1 and at most {1 << 20}")
    if not 0 <= arrival < 1e9:
        raise UserError(f"arrival={arrival!r:.60} must be seconds, 0 or more")
    prompt = tokenizer.encode(given["prompt"])
    check_prompts(model, [prompt])
    if longest is not None and len(prompt) + count > longest:   # every slot would grow as long
        raise UserError(f"max_new_tokens={count} after a prompt of {len(prompt)} is more than "
                        f"max_len={longest}")
    return Request(prompt, count, float(arrival), given.get("id", n))


def check_loops(model, cfg, path, keys):
    """UserError where one of `keys` is given that the model cannot serve."""
    given = [key for key in keys if getattr(cfg, key)]
    if given and not hasattr(model, "loop"):
        raise UserError(f"{given[0]}={getattr(cfg, given[0])} is for a model that loops over depth "
                        f"(relaxed, mor), {path} is not")
    for key in ("exit", "fill"):
        if getattr(cfg, key) and hasattr(model, "takes"):
            raise UserError(f"{key}={getattr(cfg, key)} is for relaxed: of {path}, a mor, the router "
                            f"decides who leaves")
    if cfg.exit:
        exit_rule(cfg.exit, model.n_loop)


def engine_for(model, tokenizer, cfg, requests, slots, **options):
    """An Engine as large as the requests need. cfg: sample.py's keys or this file's."""
    need = max(len(r.prompt) + r.max_new_tokens for r in requests)
    slots = min(slots, len(requests))
    check_text_fits(model, slots, need, model.wte.weight.device,
                    f"slots={slots} and requests of {need} tokens")
    return Engine(model, slots, min(need, model.context_limit or need), exit=cfg.exit,
                  fill=cfg.fill, eot=tokenizer.eot if cfg.stop else None,
                  vocab_size=tokenizer.vocab_size, temperature=cfg.temperature, top_k=cfg.top_k,
                  top_p=cfg.top_p, repetition_penalty=cfg.repetition_penalty, seed=cfg.seed,
                  **options)


def serve(model, tokenizer, cfg):
    """Answer the requests of a file, a JSON line each. Returns a summary."""
    longest = None if model.context_limit else cfg.max_len or 8 * model.cfg.block_size
    requests, errors = read_requests(cfg.requests, tokenizer, model, cfg.max_new_tokens, longest)
    for error in errors:
        print(json.dumps(error), flush=True)
    if not requests:
        return f"no request in {cfg.requests}, {len(errors)} errors"
    engine = engine_for(model, tokenizer, cfg, requests, cfg.slots, batching=cfg.batching)
    start = time.perf_counter()
    with tqdm(total=len(requests), unit="request", desc=cfg.batching) as bar:
        for r in engine.run(requests):
            answer = {"id": r.id, "text": tokenizer.decode(r.tokens), "tokens": r.tokens,
                      "exits": r.exits, "latency": round(r.latency, 4)}
            print(json.dumps(answer), flush=True)
            bar.update()
    seconds = time.perf_counter() - start
    latencies = sorted(r.latency for r in requests)
    count = sum(len(r.tokens) for r in requests)
    return (f"{len(requests)} requests, {len(errors)} errors, {count} tokens in {seconds:.2f} s: "
            f"{count / seconds:.1f} tokens/s; latency {latencies[len(latencies) // 2]:.2f} s "
            f"(median), {latencies[int(0.95 * len(latencies))]:.2f} s (95 %); "
            f"{exit_fractions(requests, model.n_loop)}; cache {engine.cache.nbytes():,} bytes")


def exit_fractions(requests, n_loop):
    """How many of the tokens left after each loop, in words."""
    loops = [loop for r in requests for loop in r.exits]
    return f"left after loop {loop_fractions(loops, n_loop)}"


def loop_fractions(loops, n_loop):
    """How many of loops, one for each token, are 1, 2, .. n_loop: 1: 60%, 2: 40%."""
    return ", ".join(f"{b}: {loops.count(b) / max(1, len(loops)):.0%}" for b in range(1, n_loop + 1))


def read_arguments(argv, config, program):
    """(path of the run, config) from `PATH key=value ...`."""
    paths = [a for a in argv if "=" not in a]
    if len(paths) != 1:
        raise UserError(f"give one run folder or checkpoint: python {program} out/NAME "
                        f"[key=value ...]")
    keys = split_args([a for a in argv if "=" in a])
    return paths[0], typed_config(config, keys, free_text=("prompt",))


def main(argv):
    from train import load_run, pick_device     # train.py imports sample.py, which imports this file
    if asks_help(argv):
        return print(help_text(ServeConfig))
    path, cfg = read_arguments(argv, ServeConfig, "serve.py")
    if not cfg.requests:
        raise UserError("requests=FILE.jsonl is missing: one JSON object a line")
    model, tokenizer, _ = load_run(path, pick_device(cfg.device), fast=cfg.fast)
    check_loops(model, cfg, path, ("requests",))
    if cfg.max_len and model.context_limit:
        raise UserError(f"max_len={cfg.max_len} means nothing to a model with RoPE: leave it out")
    print(serve(model, tokenizer, cfg), file=sys.stderr)


if __name__ == "__main__":
    run_cli(main)
