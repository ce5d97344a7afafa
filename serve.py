"""
Serving: many requests at a time, for models that loop over depth (relaxed, mor).

    python serve.py out/relaxed_exit requests=FILE.jsonl exit=confidence:0.9
    python serve.py out/mor_tiny requests=FILE.jsonl batching=depth slots=32
    python serve.py out/mor_tiny prompt="def read(self, "   one text, coloured by depth
    python serve.py help                                    every key with its meaning

A line of FILE is a JSON object, of which only the prompt is needed:

    {"prompt": "def ", "max_new_tokens": 50, "arrival": 1.5, "id": "a"}

arrival is in seconds after the start. The answer is a JSON line with the id (or the line's
number), text, tokens, exits (the loop after which each token exited) and latency (seconds
since arrival); for any other line, one with "error".

With share=cycle all loops use the same blocks, so one call may run tokens of several loops. A
token takes loop 1, then may exit or take loop 2. Two slots decode requests A, B and C (A2: loop 2
of a token of A; .: the slot waits):

    static      A1 A2 A1 .  A1 A2 .     a batch starts when all of the one before have ended
                B1 .  B1 B2 .  .  C1
    sequence    A1 A2 A1 .  A1 A2 .     a slot whose request has ended takes the next at once
                B1 .  B1 B2 C1 .  C1
    depth       A1 A2 A1 A1 A2          a slot whose token exits starts its next token at once
                B1 B1 B2 C1 C1          (Bae et al. 2024, 2410.20672, Section 2.4)

Up to rounding, each answer is what its request would get alone.

A token that exits early has no keys and values in the deeper loops, which later tokens need.
The paper leaves them to future work (it simulates the batching, with exits that an oracle
chooses). Here the token's state is kept until a later token goes there. Then fill=exact runs the
state through that loop with the later token; fill=propagate projects keys and values from it.

A model offers n_loop, cfg.share, embed, loop, finish, logits; relaxed also projection and
propagate; mor also takes: its router decides which tokens go on, so it has no exit or fill.

Shapes: N packed tokens (of several requests, one behind the other), R rows, T tokens of the
longest row, S keys, H query heads, G key/value heads, D head size, C width, V vocabulary.
"""
import codecs
import functools
import json
import math
import sys
import time
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from common.checkpoint import load_run
from common.keys import UserError, asks_help, help_text, read_bytes, run_cli, typed_config
from common.process import pick_device
from common.sampling import (Sampling, check_prompts, loop_fractions, next_tokens, read_arguments,
                             text_decoder)
from model_gpt import apply_rope, attention_fast, attention_naive, compute_dtype, rope_tables


# ---- keys and values of packed tokens ----

class SlotCache:
    """Keys and values of every (slot, level) pair, a sequence each. Level 0 is what stands
    before the loops, level b loop b, the last what stands behind. kv[level, layer] grows with
    its longest sequence, so a level that few tokens reach is small. count[level, slot]: the
    number of tokens of a sequence."""

    def __init__(self, slots, levels, max_len, n_kv_head, head_dim, device, dtype):
        self.slots, self.max_len, self.device, self.dtype = slots, max_len, device, dtype
        self.shape = n_kv_head, head_dim
        self.kv = {}    # (level, layer): (slots, 2, G, room, D)
        self.count = np.zeros((levels, slots), np.int64)    # bookkeeping is on the CPU

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

    def reset(self, slot):
        """Empty a slot for a new sequence. It is zeroed: a NaN poisons sums, even under a mask."""
        for kv in self.kv.values():
            kv[slot] = 0
        self.count[:, slot] = 0

    def copy(self, slot, at, source, targets):
        """Copy the keys and values at positions `at` of a slot to deeper levels."""
        for level, layer in [key for key in self.kv if key[0] == source]:
            for target in targets:
                kv = self.kv[source, layer][slot, :, :, at]
                self.buffer(target, layer, max(at) + 1)[slot, :, :, at] = kv


def spread(n):
    """Row and number in the row of each packed token, (N,) both, of n (R,) tokens a row.
    [3, 1, 2] -> [0 0 0 1 2 2], [0 1 2 0 0 1]."""
    row = np.arange(len(n)).repeat(n)
    return row, np.arange(len(row)) - (n.cumsum() - n)[row]


class RowGroup:
    """Rows of a RaggedBatch that attend to the same level, with one token each or with several:
    attention takes them in one call. slot, n (R,). tokens (N',): which packed tokens are theirs.
    entry (N',): where each stands in its sequence; it attends to the entries up to its own.
    writes: whether the tokens have their own keys at this level."""

    def __init__(self, cache, level, slot, n, tokens, entry, writes, fast):
        self.cache, self.level, self.writes = cache, level, writes
        self.attention = attention_fast if fast else attention_naive
        tensor = lambda x: torch.from_numpy(x).to(cache.device)
        row, step = spread(n)
        T, self.S = int(n.max()), int(entry.max()) + 1
        self.tokens, self.entry = tensor(tokens), tensor(entry)    # (N',)
        self.token_slot, self.slot = tensor(slot[row]), tensor(slot)    # (N',), (R,)
        # most slots, one token each: reading all slots in place is cheaper than gathering
        # these; the other slots' results are dropped
        self.in_place = T == 1 and 2 * len(n) > cache.slots
        self.shape = R, T = cache.slots if self.in_place else len(n), T
        cell = slot[row] if self.in_place else row, step    # each token's place in (R, T)
        last = np.full((R, T), self.S)                      # padding attends to anything
        last[cell] = entry
        visible = np.arange(self.S) <= last[..., None]    # (R, T, S)
        bias = np.where(visible, np.float32(0), np.float32(-np.inf))
        self.cell = tensor(cell[0]), tensor(cell[1])
        self.bias = tensor(bias)[:, None].to(cache.dtype)   # (R, 1, T, S)

    def attend(self, layer, q, new, out):
        """q (N, H, D), new (N, 2, G, D) -> out (N, H, D), of this group's tokens."""
        kv = self.cache.buffer(self.level, layer, self.S)
        if self.writes and new is not None:
            kv[self.token_slot, :, :, self.entry] = new[self.tokens].to(kv.dtype)
        kv = kv[:, :, :, :self.S]
        kv = kv if self.in_place else kv.index_select(0, self.slot)    # (R, 2, G, S, D)
        k, v = kv.unbind(1)    # (R, G, S, D)
        (R, T), H, G, D = self.shape, q.size(1), k.size(1), q.size(2)
        padded = q.new_zeros(R, T, H, D)        # 0 where no token is
        padded[self.cell] = q[self.tokens]
        if T == 1:      # the H / G query heads of a key head stand as its queries: quicker
            y = self.attention(padded.view(R, G, H // G, D), k, v, self.bias).view(R, T, H, D)
        else:
            y = self.attention(padded.transpose(1, 2), k, v, self.bias).transpose(1, 2)
        out[self.tokens] = y[self.cell]


class RaggedBatch:
    """The attention context of packed tokens: n[r] new ones of slot[r] at level[r], row after
    row, at positions at (N,) of their sequences. attend means the same as model_gpt.Context's.

    by_position: a token's entry is its position; else entries are counted. reads (R,): the level
    whose keys a row attends to; where it is not the row's own, the row writes none."""

    def __init__(self, cache, level, slot, n, at, rope, fast, by_position=False, reads=None):
        self.cache, self.level, self.slot, self.n, self.fast = cache, level, slot, n, fast
        self.at = torch.from_numpy(at).to(cache.device)    # (N,)
        self.rope = rope and [table[self.at] for table in rope]    # (N, D) each
        self.row, step = spread(n)    # (N,)
        counted = cache.count[level, slot][self.row] + step
        self.entry = at if by_position else counted    # (N,)
        cache.count[level, slot] += n
        self.reads = level if reads is None else reads

    def makes_keys(self, layer):
        """Whether any row has keys of its own at its level."""
        return bool((self.level == self.reads).any())

    @functools.cached_property
    def groups(self):
        """A RowGroup for each distinct (level read, several new tokens?, writes?)."""
        kinds, groups = list(zip(self.reads, self.n > 1, self.level == self.reads)), []
        for read, several, writes in sorted(set(kinds)):
            some = np.array([kind == (read, several, writes) for kind in kinds])    # (R,)
            tokens = np.flatnonzero(some[self.row])    # (N',)
            groups.append(RowGroup(self.cache, int(read), self.slot[some], self.n[some], tokens,
                                   self.entry[tokens], bool(writes), self.fast))
        return groups

    def rotated(self, x):
        return apply_rope(x, *self.rope) if self.rope else x

    def attend(self, layer, q, k, v):
        """q (1, H, N, D), k, v (1, G, N, D), or None where nothing is written -> (1, H, N, D)."""
        q = self.rotated(q)[0].transpose(0, 1)    # (N, H, D)
        out, new = torch.empty_like(q), None
        if k is not None:
            new = torch.stack([self.rotated(k)[0], v[0]]).permute(2, 0, 1, 3)   # (N, 2, G, D)
        for group in self.groups:
            group.attend(layer, q, new, out)
        return out.transpose(0, 1)[None]

    def write(self, k, v):
        """Write k, v (layers, G, N, D) of tokens that are all at one level, without attending."""
        new = torch.stack([self.rotated(k), v], 1).permute(0, 3, 1, 2, 4)   # (layers, N, 2, G, D)
        slot, entry = (torch.from_numpy(x).to(k.device) for x in (self.slot[self.row], self.entry))
        for layer, rows in enumerate(new):
            kv = self.cache.buffer(int(self.level[0]), layer, int(self.entry.max()) + 1)
            kv[slot, :, :, entry] = rows.to(kv.dtype)


# ---- when a token may exit ----

def exit_rule(text, n_loop):
    """What exit= names: a function of logits (R, V) after loop depth (R,), from 0, that tells
    which tokens exit there, (R,) bool; None where every token takes all loops.

    confidence: the likeliest token's probability is above P; margin: it is above the second
    one's by more than P (Schuster et al. 2022). oracle, for measuring: the earliest loop whose
    likeliest token is the last loop's. All loops run for it, and the Engine counts."""
    if text in ("", "oracle"):
        return None
    kind, _, value = text.partition(":")
    try:
        bound = int(value) if kind == "static" else float(value)
    except ValueError:
        bound = math.nan
    top = lambda logits, k: logits.softmax(-1).topk(k).values    # (R, k)
    if kind == "static" and 1 <= bound <= n_loop:
        return lambda logits, depth: depth >= bound - 1
    if kind == "confidence" and 0 <= bound <= 1:
        return lambda logits, depth: top(logits, 1)[:, 0] > bound
    if kind == "margin" and 0 <= bound <= 1:
        return lambda logits, depth: -top(logits, 2).diff()[:, 0] > bound
    raise UserError(f"exit={text}: static:LOOP, confidence:P, margin:P, oracle are allowed, "
                    f"LOOP from 1 to {n_loop}, P from 0 to 1")


# ---- the engine ----

@dataclass(eq=False)
class Request:
    """A prompt to continue, and what has become of it."""
    prompt: list                     # token ids
    max_new_tokens: int
    arrival: float = 0.0             # seconds after the start
    id: object = None
    tokens: list = field(default_factory=list)      # the answer, without end-of-text
    exits: list = field(default_factory=list)       # the loop after which each exited, from 1
    latency: float = 0.0             # seconds from arrival to the last token
    how: tuple = None                # its own sampling (None: the Engine's)


@dataclass(eq=False)
class Slot:
    """Where one request is decoded. Its new tokens are a prompt, then one at a time."""
    number: int
    request: Request = None
    generator: torch.Generator = None   # the request's own random numbers
    ids: list = None                 # token ids: prompt and answer
    at: range = None                 # positions of the new tokens, the last of ids
    prompt: bool = False             # the new tokens are a prompt
    depth: int = 0                   # the loop that they take next, from 0
    h: torch.Tensor = None    # (len(at), C): their states between loops
    going: np.ndarray = None         # which of the new tokens take the next loop, indices
    taken: int = 0                   # loops that the last of them has taken
    deferred: dict = field(default_factory=dict)    # {depth: [(position, state)]}: see defer
    exit: tuple = None    # (depth, logits) where the last token exits, once decided
    guesses: list = field(default_factory=list)     # oracle: the likeliest token after each loop

    def states(self):
        """Of the new tokens that take the next loop."""
        return self.h if len(self.going) == len(self.at) else self.h[self.going]


def generator(seed, n, device):
    """The random numbers of the n-th request, whatever its neighbours are."""
    word = np.random.SeedSequence([seed, n]).generate_state(1, np.uint64)[0]
    return torch.Generator(device).manual_seed(int(word >> np.uint64(1)))


class Engine:
    """Decodes requests in `slots` slots. A router (mor) or a rule (exit=) decides where tokens
    exit.

    What a request is answered depends on no other: when sampling, it has the random numbers of
    its place in the queue. Under a rule prompts take all loops, so that their keys are complete.
    A sequence that outgrows max_len goes on from its last max_len tokens, as in sample.py."""

    def __init__(self, model, slots, max_len, batching="depth", exit="", fill="", eot=None,
                 vocab_size=None, sampling=(0.0, 0, 1.0, 1.0), seed=1337, on_token=None,
                 clock=time.perf_counter, sleep=time.sleep):
        """sampling: temperature, top_k, top_p, repetition_penalty. on_token(request) is called
        after each token."""
        cfg, w = model.cfg, model.wte.weight
        if batching == "depth" and not cfg.share.endswith("cycle"):
            raise UserError(f"batching=depth needs loops over the same blocks, so share=cycle or "
                            f"middle_cycle, not {cfg.share}")
        self.model, self.batching, self.max_len = model, batching, max_len
        self.eot, self.vocab_size, self.on_token = eot, vocab_size, on_token
        self.routed, self.n_loop = hasattr(model, "takes"), model.n_loop
        self.fill = fill or getattr(cfg, "fill", "exact")
        self.oracle, self.rule = exit == "oracle", exit_rule(exit, self.n_loop)
        self.sampling, self.seed = sampling, seed
        self.clock, self.sleep, self.device = clock, sleep, w.device
        if self.fill == "propagate":    # made once: weights stay as they are
            self.projection = functools.cache(model.projection)
        self.cache = SlotCache(slots, self.n_loop + 2, max_len, cfg.n_kv_head, cfg.head_dim,
                               w.device, compute_dtype(w))
        self.rope = None
        if cfg.pos == "rope":           # of all positions, (max_len, D) each
            at = torch.arange(max_len, device=w.device)
            self.rope = rope_tables(at, cfg.head_dim, cfg.rope_theta, w.dtype)
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
                self.begin(slot)

    def begin(self, slot):
        """Begin with the slot's new request."""
        slot.generator = generator(self.seed, self.admitted, self.device)
        self.admitted += 1
        self.prefill(slot, list(slot.request.prompt))

    def prefill(self, slot, ids):
        """The slot's new tokens are ids, of which as many are kept as the cache has room for."""
        self.cache.reset(slot.number)
        slot.ids, slot.at, slot.prompt = ids, range(min(len(ids), self.max_len)), True
        slot.depth, slot.deferred, slot.exit, slot.guesses = 0, {}, None, []

    def step(self):
        """depth: one loop for all requests. static, sequence: one token for each."""
        slots = self.busy()
        for slot in slots:
            if slot.at.stop > self.max_len:     # a full context
                self.prefill(slot, slot.ids)
        while slots:                    # sequence: until the last token has exited
            slots = self.advance(slots)
            if self.batching == "depth":
                return

    def advance(self, slots):
        """One loop for the tokens of the slots. Returns the slots whose tokens take another."""
        fresh = [slot for slot in slots if slot.depth == 0]
        if fresh:
            self.embed(fresh)
        self.loop(slots)
        exited = set(self.exit_by_router(slots) if self.routed else self.exit_by_rule(slots))
        stay = [slot for slot in slots if slot not in exited]
        for slot in stay:
            slot.depth += 1
        return stay

    # the model's calls

    def context(self, slots, level, at, **options):
        """The attention context of the tokens at positions at[r] of the slots, at level[r]."""
        number = np.array([slot.number for slot in slots])
        n = np.array([len(x) for x in at])
        flat = np.array([position for positions in at for position in positions])
        return RaggedBatch(self.cache, np.zeros_like(n) + level, number, n, flat, self.rope,
                           self.model.cfg.fast, **options)

    def embed(self, slots):
        """Embed the new tokens; all take the first loop."""
        at = [slot.at for slot in slots]
        idx = [token for slot in slots for token in slot.ids[-len(slot.at):]]
        context = self.context(slots, 0, at) if self.routed else None
        h = self.model.embed(torch.tensor(idx, device=self.device), context)
        for slot, states in zip(slots, h.split([len(positions) for positions in at])):
            slot.h, slot.going, slot.taken = states, np.arange(len(states)), 0

    def loop(self, slots):
        """One loop for the slots' tokens. Keys that it lacks are seen to first: fill=propagate
        projects them; fill=exact runs the deferred tokens before the others."""
        deferred = [slot.deferred.pop(slot.depth, []) for slot in slots]
        if self.fill == "propagate":
            self.propagate(slots, deferred)
            deferred = [[]] * len(slots)
        states, at = [], []
        for slot, old in zip(slots, deferred):
            states += [*(h for _, h in old), slot.states()]
            at.append([*(position for position, _ in old), *(slot.at[n] for n in slot.going)])
        n = [len(positions) for positions in at]
        depth = torch.tensor([slot.depth for slot in slots]).repeat_interleave(torch.tensor(n))
        h = torch.cat(states)    # (N, C)
        h = self.model.loop(h, depth, self.loop_context(slots, at))
        for slot, old, positions, new in zip(slots, deferred, at, h.split(n)):
            if old:
                self.defer(slot, zip(positions, new[:len(old)].split(1)))
            new = new[len(old):]
            whole = len(new) == len(slot.at)
            slot.h = new if whole else slot.h.index_copy(0, self.index(slot.going), new)
            slot.taken += len(slot.at) - 1 in slot.going    # the last of the new tokens

    def loop_context(self, slots, at):
        """Level b holds the keys of loop b. mor: those of the tokens that took it
        (kv=recursion); or all read the first loop's (share); or those that take a loop have keys
        of their own there, and the others the first loop's (share_update)."""
        level = np.array([slot.depth + 1 for slot in slots])
        kv = getattr(self.model.cfg, "kv", "")
        return self.context(slots, level, at, by_position=kv.startswith("share"),
                            reads=np.ones_like(level) if kv == "share" else None)

    def logits(self, h):
        return self.model.logits(h)[:, :self.vocab_size]

    def index(self, x):
        return torch.from_numpy(x).to(self.device)

    # a rule decides: relaxed

    def exit_by_rule(self, slots):
        """The slots whose newest tokens take no further loop. A token does not where it exits;
        a prompt takes the others too, but is predicted from where its last token exits."""
        end = self.n_loop - 1
        if self.rule is None and not self.oracle:       # the others need no head
            slots = [slot for slot in slots if slot.depth == end]
        if not slots:
            return []
        logits = self.logits(self.model.finish(torch.cat([slot.h[-1:] for slot in slots]), None))
        exits = [slot.depth == end for slot in slots]
        if self.rule is not None:
            early = self.rule(logits, torch.tensor([slot.depth for slot in slots])).tolist()
            exits = [a or b for a, b in zip(exits, early)]
        for n, slot in enumerate(slots):
            if self.oracle:
                slot.guesses.append(int(logits[n].argmax()))
            if exits[n] and slot.exit is None:
                slot.exit = slot.depth, logits[n]
        out = [slot for slot in slots if slot.exit and (slot.depth == end or not slot.prompt)]
        for slot in out:
            self.defer(slot, [(slot.at[-1], slot.h[-1:])])
        if out:
            depths, rows = zip(*(slot.exit for slot in out))
            self.emit(out, depths, torch.stack(rows))
        return out

    def defer(self, slot, states):
        """Keep (position, state) pairs for the next loop, until a later token goes there."""
        if slot.depth < self.n_loop - 1:
            slot.deferred.setdefault(slot.depth + 1, []).extend(states)

    def propagate(self, slots, deferred):
        """Project keys and values from the deferred states, [(position, state)] of each slot."""
        pairs = [(slot, old) for slot, old in zip(slots, deferred) if old]
        for depth in {slot.depth for slot, _ in pairs}:
            some = [(slot, old) for slot, old in pairs if slot.depth == depth]
            at = [[position for position, _ in old] for _, old in some]
            context = self.context([slot for slot, _ in some], depth + 1, at)
            h = torch.cat([state for _, old in some for _, state in old])
            self.model.propagate(h, self.projection(depth), context)
            for slot, old in some:
                self.defer(slot, old)

    # a router decides: mor

    def exit_by_router(self, slots):
        """The slots of which no token takes another loop. They run the last layer, and the newest
        token of each is predicted from."""
        self.route(slots)
        out = [slot for slot in slots if not len(slot.going)]
        if out:
            context = self.context(out, self.n_loop + 1, [slot.at for slot in out])
            h = self.model.finish(torch.cat([slot.h for slot in out]), context)    # (N, C)
            newest = np.cumsum([len(slot.at) for slot in out]) - 1    # (R,)
            self.emit(out, [slot.taken - 1 for slot in out], self.logits(h[self.index(newest)]))
        return out

    def route(self, slots):
        """Keep in `going` the tokens that the router sends through the next loop."""
        n = torch.tensor([len(slot.going) for slot in slots])
        depth = torch.tensor([slot.depth + 1 for slot in slots])
        depth = depth.repeat_interleave(n)    # (N,)
        h = torch.cat([slot.states() for slot in slots])    # (N, C)
        takes = self.model.takes(h, depth.clamp(max=self.n_loop - 1)).cpu() & (depth < self.n_loop)
        for slot, mask in zip(slots, takes.split(n.tolist())):
            exits, slot.going = slot.going[~mask.numpy()], slot.going[mask.numpy()]
            if self.model.cfg.kv == "share_update" and len(exits):
                at, deeper = slot.at.start + exits, range(slot.depth + 2, self.n_loop + 1)
                self.cache.copy(slot.number, at.tolist(), 1, deeper)

    # the answers

    def emit(self, slots, depths, logits):
        """Give each slot its next token, predicted from logits (R, V) after loop depths (R,), and
        end what is answered."""
        for slot, depth, token in zip(slots, depths, self.pick(slots, logits)):
            request = slot.request
            if self.oracle:
                depth = slot.guesses.index(slot.guesses[-1])
            slot.depth, slot.prompt, slot.exit, slot.guesses = 0, False, None, []
            slot.at = range(slot.at.stop, slot.at.stop + 1)
            if token != self.eot:
                request.tokens.append(token)
                request.exits.append(depth + 1)
                slot.ids.append(token)
                if self.on_token is not None:
                    self.on_token(request)
            if token == self.eot or len(request.tokens) == request.max_new_tokens:
                slot.request = None
                self.done.append(request)

    def pick(self, slots, logits):
        """A token for each slot, a list: the likeliest, or a sampled one."""
        tokens = logits.argmax(-1).tolist()
        for n, slot in enumerate(slots):
            how = slot.request.how or self.sampling
            temperature, _, _, penalty = how
            if temperature > 0 or penalty != 1:
                row = logits[n:n + 1]
                seen = torch.zeros_like(row, dtype=torch.bool)
                seen[0, slot.ids] = True
                tokens[n] = int(next_tokens(row, seen, *how, slot.generator))
        return tokens


# ---- requests in, answers out ----

@dataclass
class ServeConfig(Sampling):
    requests: str = ""              # the file of requests, one JSON object a line
    prompt: str = ""                # or one text to continue, in colours
    batching: str = "depth"         # static | sequence | depth
    slots: int = 16                 # requests decoded at a time
    exit: str = ""                  # relaxed: static:LOOP | confidence:P | margin:P | oracle
    fill: str = ""                  # relaxed: deeper keys after an exit: exact | propagate

    def __post_init__(self):
        super().__post_init__()
        self.between(slots=(1, 4096))
        self.one_of("batching", "static", "sequence", "depth")
        self.one_of("fill", "", "exact", "propagate")


@dataclass
class RequestLine:
    """What a line of the file may hold, beside its id."""
    prompt: str = ""
    max_new_tokens: int = 500
    arrival: float = 0.0


def read_requests(path, tokenizer, model, max_new_tokens):
    """The requests in a file, and answers for the lines that hold none: lists of Request and
    of dict. UserError if there is no such file, or it is empty."""
    try:
        lines = read_bytes(path).removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as e:
        raise UserError(f"requests={path} cannot be read: {e.strerror}") from e
    requests, errors = [], []
    for n, line in enumerate(lines, 1):
        if not line.strip():
            continue
        name, error = n, "not a line of JSON in UTF-8"
        try:
            given = {"max_new_tokens": max_new_tokens, **json.loads(line.decode())}
            name = given.pop("id", n)
            if type(name) not in (str, int, type(None)):
                name, error = n, "id must be a text or a whole number"
                raise ValueError
            line = typed_config(RequestLine, {}, given, free_text=("prompt",))
            requests.append(make_request(line, name, tokenizer, model))
        except (UserError, ValueError, TypeError, RecursionError) as e:
            error = str(e) if isinstance(e, UserError) else error
            errors.append({"id": name, "line": n, "error": error})
    if not requests and not errors:
        raise UserError(f"requests={path} is empty: one JSON object a line")
    return requests, errors


def make_request(line, name, tokenizer, model):
    """The Request of a RequestLine; UserError where the model cannot answer it."""
    new, limit = line.max_new_tokens, model.context_limit
    if not 1 <= new <= 1 << 20:
        raise UserError(f"max_new_tokens={new} must be at least 1 and at most {1 << 20}")
    if not 0 <= line.arrival < 1e9:
        raise UserError(f"arrival={line.arrival} must be seconds, 0 or more")
    prompt, longest = tokenizer.encode(line.prompt), 8 * model.cfg.block_size
    check_prompts([prompt], model.cfg.vocab_size)
    if not limit and len(prompt) + new > longest:       # the rows of all slots would be as long
        raise UserError(f"max_new_tokens={new} after a prompt of {len(prompt)} is more than "
                        f"{longest}, 8 times block_size")
    return Request(prompt, new, line.arrival, name)


def check_loops(model, path, exit, fill):
    """UserError if the model at path has no loops, or a router where exit= or fill= is given."""
    if not hasattr(model, "loop"):
        raise UserError(f"serve.py is for models that loop over depth (relaxed, mor), {path} does "
                        f"not")
    if (exit or fill) and hasattr(model, "takes"):
        raise UserError(f"exit and fill are for relaxed: of {path}, a mor, the router decides "
                        f"which tokens exit")


def engine_for(model, tokenizer, cfg, requests, **options):
    """An Engine as large as the requests need."""
    need = max(len(r.prompt) + r.max_new_tokens for r in requests)
    return Engine(model, min(cfg.slots, len(requests)), min(need, model.context_limit or need),
                  cfg.batching, cfg.exit, cfg.fill, eot=tokenizer.eot if cfg.stop else None,
                  vocab_size=tokenizer.vocab_size, sampling=cfg.how(), seed=cfg.seed, **options)


def serve(model, tokenizer, cfg):
    """Answer the requests of a file, a JSON line each. Returns a summary."""
    requests, errors = read_requests(cfg.requests, tokenizer, model, cfg.max_new_tokens)
    for error in errors:
        print(json.dumps(error), flush=True)
    if not requests:
        return f"no request in {cfg.requests}, {len(errors)} errors"
    engine = engine_for(model, tokenizer, cfg, requests)
    start = time.perf_counter()
    for r in engine.run(requests):
        answer = {"id": r.id, "text": "".join(tokenizer.stream(r.tokens)), "tokens": r.tokens,
                  "exits": r.exits, "latency": round(r.latency, 4)}
        print(json.dumps(answer), flush=True)
    seconds = time.perf_counter() - start
    latencies = sorted(r.latency for r in requests)
    exits = [loop for r in requests for loop in r.exits]
    at = lambda q: f"{latencies[int(q * len(latencies))]:.2f} s"
    return (f"{len(requests)} requests, {len(errors)} errors, {len(exits)} tokens in "
            f"{seconds:.2f} s: {len(exits) / seconds:.1f} tokens/s; latency {at(0.5)} (median), "
            f"{at(0.95)} (95 %); exited after loop {loop_fractions(exits, model.n_loop)}")


COLOURS = (34, 36, 32, 33, 35, 31)      # of the terminal: blue, cyan, green, yellow, magenta, red


def coloured(text, loop, n_loop):
    """text in the colour of a token that exited after loop `loop`, from 1, of n_loop."""
    colour = COLOURS[(loop - 1) * (len(COLOURS) - 1) // max(1, n_loop - 1)]
    return f"\033[{colour}m{text}\033[0m" if text else ""


def write_coloured(model, tokenizer, cfg):
    """Continue a prompt; each token has the colour of the loop after which it exited. Returns a
    summary."""
    cfg = replace(cfg, batching="sequence")     # of one request, for every model
    request, decoder = Request(tokenizer.encode(cfg.prompt), cfg.max_new_tokens), text_decoder()
    check_prompts([request.prompt], model.cfg.vocab_size)

    def show(request):
        text = decoder.decode(tokenizer.decode_bytes(request.tokens[-1:]))
        print(coloured(text, request.exits[-1], model.n_loop), end="", flush=True)
    print(tokenizer.decode(request.prompt), end="", flush=True)
    list(engine_for(model, tokenizer, cfg, [request], on_token=show).run([request]))
    print(decoder.decode(b"", final=True))
    legend = [coloured(str(b), b, model.n_loop) for b in range(1, model.n_loop + 1)]
    return (f"{len(request.tokens)} tokens; exited after loop "
            f"{loop_fractions(request.exits, model.n_loop)} {' '.join(legend)}")


def main(argv):
    if asks_help(argv):
        return print(help_text(ServeConfig))
    path, cfg = read_arguments(argv, ServeConfig)
    if bool(cfg.requests) == bool(cfg.prompt):
        raise UserError("give requests=FILE.jsonl (one JSON object a line) or prompt=TEXT")
    model, tokenizer, _ = load_run(path, pick_device(cfg.device), fast=cfg.fast)
    check_loops(model, path, cfg.exit, cfg.fill)
    write = serve if cfg.requests else write_coloured
    print(write(model, tokenizer, cfg), file=sys.stderr)


if __name__ == "__main__":
    run_cli(main)
