"""
Serving: many requests at a time, for models that loop over depth (relaxed, mor).

    python serve.py out/relaxed_exit requests=FILE.jsonl exit=confidence:0.9
    python serve.py out/mor_tiny requests=FILE.jsonl batching=depth slots=32
    python serve.py out/mor_tiny prompt="def read(self, "   one text, coloured by loops
    python serve.py help                                    every key with its meaning

A line of FILE is a JSON object, of which only the prompt is needed:

    {"prompt": "def ", "max_new_tokens": 50, "arrival": 1.5, "id": "a"}

arrival is in seconds after the start. The answer is a JSON line with the id (or the line's
number), text, tokens, exits (the loop after which each token exited) and latency (seconds
since arrival); for any other line, one with "error".

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
chooses. Here the token's state is kept until a later token goes there. Then fill=exact runs the
state through that loop with the later token; fill=propagate projects keys and values from it.

Shapes: N packed tokens (of several requests, one behind the other), R rows (a slot's part of
them), T tokens of the longest row, S keys, H query heads, G key/value heads, D head size, C
width, V vocabulary. Loops count from 1.
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
import torch.nn as nn
import torch.nn.functional as F

from common.checkpoint import load_run
from common.keys import UserError, asks_help, help_text, read_bytes, run_cli, typed_config
from common.process import pick_device
from common.sampling import Sampling, check_prompts, loop_fractions, next_tokens, read_arguments
from model_gpt import apply_rope, attend, compute_dtype, rope_tables, upcast


# ---- keys and values of packed tokens ----

class SlotCache:
    """Keys and values of every (level, slot), a sequence each. Level b is loop b; level 0 is what
    stands before the loops, the last level what stands behind. kv[level, layer] grows with its
    longest sequence, so a level that few tokens reach is small. count[level, slot]: tokens."""

    def __init__(self, slots, levels, max_len, n_kv_head, head_dim, device, dtype):
        self.slots, self.max_len, self.device, self.dtype = slots, max_len, device, dtype
        self.shape = n_kv_head, head_dim
        self.kv = {}        # (level, layer): (slots, 2, G, room, D)
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


class RaggedBatch:
    """The attention context of packed tokens: n[r] new ones of slot[r], row after row, at
    positions pos (N,). A row attends to the keys of its slot at level reads[r], each token to the
    entries of that sequence up to its own, entry (N,). writes[r]: whether the row's tokens have
    keys of their own there."""

    def __init__(self, cache, slot, n, pos, entry, reads, writes, rope, fast):
        self.cache, self.slot, self.n, self.entry, self.fast = cache, slot, n, entry, fast
        self.row, _ = spread(n)                                         # (N,)
        at = torch.from_numpy(pos).to(cache.device)
        self.rope = rope and [table[at][:, None] for table in rope]     # (N, 1, D / 2) each
        self.reads, self.writes, self.makes_keys = reads, writes, bool(writes.any())

    @functools.cached_property
    def groups(self):
        """One call of attention takes rows that are alike in this: the level that they read,
        whether they have several tokens, and whether they write."""
        kinds, groups = list(zip(self.reads, self.n > 1, self.writes)), []
        for kind in sorted(set(kinds)):
            rows = np.array([kind == other for other in kinds])         # (R,)
            groups.append(RowGroup(self, rows, int(kind[0]), bool(kind[2])))
        return groups

    def rotated(self, x):
        return apply_rope(x, *self.rope) if self.rope else x

    def attend(self, layer, q, k, v):
        """q (N, H, D); k, v (N, G, D), or None where no row has its own -> (N, H, D)."""
        q, out = self.rotated(q), torch.empty_like(q)
        new = k if k is None else torch.stack([self.rotated(k), v], 1)  # (N, 2, G, D)
        for group in self.groups:
            group.attend(layer, q, new, out)
        return out

    def write(self, layer, k, v):
        """Write k, v (N, G, D) of tokens that are all at one level, without attending."""
        new = torch.stack([self.rotated(k), v], 1)                      # (N, 2, G, D)
        slot, entry = (torch.from_numpy(x).to(k.device) for x in (self.slot[self.row], self.entry))
        kv = self.cache.buffer(int(self.reads[0]), layer, int(self.entry.max()) + 1)
        kv[slot, :, :, entry] = new.to(kv.dtype)


class RowGroup:
    """Rows of a RaggedBatch, rows (R,) bool, that attend to the same level, with one token each
    or with several: queries padded to (R, T) attend to (R, S) keys."""

    def __init__(self, batch, rows, level, writes):
        cache, slot, n = batch.cache, batch.slot[rows], batch.n[rows]
        self.cache, self.level, self.writes, self.fast = cache, level, writes, batch.fast
        tokens = np.flatnonzero(rows[batch.row])            # (N',): the packed tokens of the rows
        entry, (row, step), T = batch.entry[tokens], spread(n), int(n.max())
        self.S = int(entry.max()) + 1
        # most slots, one token each: reading all slots in place is cheaper than gathering
        # these; the other slots' results are dropped
        self.in_place = T == 1 and 2 * len(n) > cache.slots
        self.shape = (cache.slots if self.in_place else len(n)), T
        place = (slot[row] if self.in_place else row), step     # of each token in (R, T)
        last = np.full(self.shape, self.S)                  # padding attends to anything
        last[place] = entry
        hidden = np.arange(self.S) > last[..., None]        # (R, T, S)
        bias = np.where(hidden, np.float32(-np.inf), np.float32(0))
        tensor = lambda x: torch.from_numpy(x).to(cache.device)
        self.tokens, self.entry, self.place = tensor(tokens), tensor(entry), (*map(tensor, place),)
        self.token_slot, self.slot = tensor(slot[row]), tensor(slot)        # (N',), (R,)
        self.bias = tensor(bias)[:, None].to(cache.dtype)   # (R, 1, T, S)

    def attend(self, layer, q, new, out):
        """q (N, H, D), new (N, 2, G, D) -> out (N, H, D), of this group's tokens."""
        kv = self.cache.buffer(self.level, layer, self.S)
        if self.writes:
            kv[self.token_slot, :, :, self.entry] = new[self.tokens].to(kv.dtype)
        kv = kv[:, :, :, :self.S]
        kv = kv if self.in_place else kv.index_select(0, self.slot)     # (R, 2, G, S, D)
        k, v = kv.to(q.dtype).unbind(1)                                 # (R, G, S, D)
        (R, T), H, G, D = self.shape, q.size(1), k.size(1), q.size(2)
        padded = q.new_zeros(R, T, H, D)        # 0 where no token is
        padded[self.place] = q[self.tokens]
        if T == 1:      # the H / G query heads of a key head stand as its queries: quicker
            padded = padded.view(R, G, H // G, D)
            y = attend(padded, k, v, self.bias, self.fast).reshape(R, T, H, D)
        else:
            y = attend(padded.transpose(1, 2), k, v, self.bias, self.fast).transpose(1, 2)
        out[self.tokens] = y[self.place]


# ---- the models: blocks on packed tokens ----

def run_block(block, h, layer, context, call):
    """model_gpt's Block on packed tokens h (N, C). call(part, x): a linear layer or a QK-norm of
    the block, as each token's loop has it. layer: its number in a loop."""
    attn, mlp, n = block.attn, block.mlp, block.norm1(h)
    q = call(attn.q_norm, heads(attn, call(attn.wq, n)))                # (N, H, D)
    k, v = keys_values(block, n, call) if context.makes_keys else (None, None)
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

    def layers(self, loop):
        """(stored block, use) of each layer of a loop."""
        K = self.cfg.n_stored
        pairs = [self.cfg.block_and_use(layer) for layer in range((loop - 1) * K, loop * K)]
        return [(self.model.blocks[k], u) for k, u in pairs]

    def loop(self, h, loop, context):
        """h after loop (N,): each token's own (share=sequence: the same one)."""
        first = int(loop[0])
        alike = bool((loop == first).all())
        own = None if alike else F.one_hot(loop - 1, self.cfg.n_loop).to(h)[..., None]
        for layer, (block, u) in enumerate(self.layers(first)):
            call = functools.partial(as_use, u=u) if alike else functools.partial(each_as, own=own)
            h = run_block(block, h, layer, context, call)
        return h

    def logits(self, h, context):
        return upcast(self.model.head(self.model.norm(h)))

    def propagate(self, h, loop, context):
        """Give a loop keys and values of tokens that exited before it, projected from the states h
        they exited with."""
        for layer, (block, u) in enumerate(self.layers(loop)):
            call = functools.partial(as_use, u=u)
            context.write(layer, *keys_values(block, block.norm1(h), call))


def as_use(part, x, u):
    """A part of a relaxed block as use u."""
    return x if isinstance(part, nn.Identity) else part(x, u)


def each_as(part, x, own):
    """A part of a relaxed block, each token of x (N, ...) as its own use: own (N, n_loop, 1) has a
    1 there. One product applies the A of all uses; the mask keeps each token's own."""
    if isinstance(part, nn.Identity):
        return x
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

    def logits(self, state, context):
        h, h1 = state.chunk(2, -1)
        if self.cfg.router == "token":
            _, p, depth = self.model.choose_depth(h1)
            h = self.model.exit(h1, h, p, depth)
        h = self.run(self.model.last, h, context)
        return upcast(self.model.head(self.model.norm(h)))


LOOPS = {"model_relaxed": RelaxedLoops, "model_mor": MoRLoops}


def loops_of(model):
    """The adapter of a model; None for a model without loops."""
    adapter = LOOPS.get(type(model).__module__)
    return adapter and adapter(model)


# ---- when a token may exit ----

def exit_rule(text, n_loop):
    """What exit= names: a function of logits (R, V) after loop (R,) that tells which tokens exit
    there, (R,) bool; None where every token takes all loops.

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
    top = lambda logits, k: logits.softmax(-1).topk(k).values           # (R, k)
    if kind == "static" and 1 <= bound <= n_loop:
        return lambda logits, loop: loop >= bound
    if kind == "confidence" and 0 <= bound <= 1:
        return lambda logits, loop: top(logits, 1)[:, 0] > bound
    if kind == "margin" and 0 <= bound <= 1:
        return lambda logits, loop: -top(logits, 2).diff()[:, 0] > bound
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
    exits: list = field(default_factory=list)       # the loop after which each exited
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
    loop: int = 1                    # the loop that they take next
    states: torch.Tensor = None      # (len(at), .) between loops
    going: np.ndarray = None         # which of the new tokens take the next loop, indices
    deferred: dict = field(default_factory=dict)    # {loop: [(position, state)]}: see defer
    exit: int = 0                    # the loop after which the last of them exits, once known
    rows: dict = field(default_factory=dict)        # {loop: its logits (V,) there}

    def begin(self, ids, at, prompt):
        """New tokens at positions `at`, the last of ids."""
        self.ids, self.at, self.prompt = ids, at, prompt
        self.loop, self.exit, self.rows = 1, 0, {}


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
        self.loops, self.n_loop, self.device = loops_of(model), model.n_loop, w.device
        self.eot, self.vocab_size, self.on_token = eot, vocab_size, on_token
        self.fill = fill or getattr(cfg, "fill", "exact")
        self.oracle, self.rule = exit == "oracle", exit_rule(exit, self.n_loop)
        self.sampling, self.seed, self.clock, self.sleep = sampling, seed, clock, sleep
        self.cache = SlotCache(slots, self.n_loop + 2, max_len, cfg.n_kv_head, cfg.head_dim,
                               w.device, compute_dtype(w))
        self.rope = None
        if cfg.pos == "rope":           # of all positions, (max_len, D / 2) each
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
        slot.deferred = {}
        slot.begin(ids, range(min(len(ids), self.max_len)), prompt=True)

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
        fresh = [slot for slot in slots if slot.loop == 1]
        if fresh:
            self.embed(fresh)
        self.loop(slots)
        out = set(self.exit_by_router(slots) if self.loops.routed else self.exit_by_rule(slots))
        stay = [slot for slot in slots if slot not in out]
        for slot in stay:
            slot.loop += 1
        return stay

    # the model's calls

    def context(self, slots, level, at):
        """The attention context of tokens at positions at[r] of the slots, at level[r]. mor:
        kv=recursion: a token attends to those that took the same loop. share: to all, by their
        keys of loop 1. share_update: to all, by their keys of this loop, where those that did not
        take it have keys of loop 1."""
        kv, end = getattr(self.model.cfg, "kv", ""), self.n_loop + 1
        number, n = (np.array(list(x)) for x in ((s.number for s in slots), map(len, at)))
        level = np.array(level)
        pos = np.concatenate([np.array(x) for x in at])
        entry = pos if kv.startswith("share") else self.cache.reserve(level, number, n)
        reads = level if kv != "share" else np.where(level % end, 1, level)
        return RaggedBatch(self.cache, number, n, pos, entry, reads, reads == level, self.rope,
                           self.model.cfg.fast)

    def embed(self, slots):
        """Embed the new tokens; all take the first loop."""
        at = [slot.at for slot in slots]
        idx = [token for slot in slots for token in slot.ids[-len(slot.at):]]
        context = self.context(slots, [0] * len(slots), at) if self.loops.routed else None
        h = self.loops.embed(torch.tensor(idx, device=self.device), context)
        for slot, states in zip(slots, h.split([*map(len, at)])):
            slot.states, slot.going = states, np.arange(len(states))

    def loop(self, slots):
        """One loop for the slots' tokens. Keys that it lacks are seen to first: fill=propagate
        projects them; fill=exact runs the deferred tokens before the others."""
        deferred = [slot.deferred.pop(slot.loop, []) for slot in slots]
        if self.fill == "propagate":
            self.propagate(slots, deferred)
            deferred = [[]] * len(slots)
        states, at = [], []
        for slot, old in zip(slots, deferred):
            all_go = len(slot.going) == len(slot.at)
            states += [*(h for _, h in old), slot.states if all_go else slot.states[slot.going]]
            at.append([*(position for position, _ in old), *(slot.at[n] for n in slot.going)])
        n, level = [*map(len, at)], [slot.loop for slot in slots]
        loop = torch.tensor(level).repeat_interleave(torch.tensor(n))   # (N,)
        h = self.loops.loop(torch.cat(states), loop, self.context(slots, level, at))
        for slot, old, positions, new in zip(slots, deferred, at, h.split(n)):
            done, new = new[:len(old)], new[len(old):]
            self.defer(slot, [(position, h[None]) for position, h in zip(positions, done)])
            all_go = len(new) == len(slot.at)
            slot.states = new if all_go else slot.states.index_copy(0, self.index(slot.going), new)

    def logits(self, states, context=None):
        return self.loops.logits(states, context)[:, :self.vocab_size]

    def index(self, x):
        return torch.from_numpy(x).to(self.device)

    # a rule decides: relaxed

    def exit_by_rule(self, slots):
        """The slots whose newest tokens take no further loop. A token does not where it exits;
        a prompt takes the others too, but is predicted from where its last token exits, and so
        does every token for the oracle."""
        end = self.n_loop
        if self.rule is None and not self.oracle:       # the others need no head
            slots = [slot for slot in slots if slot.loop == end]
        if not slots:
            return []
        logits = self.logits(torch.cat([slot.states[-1:] for slot in slots]))   # (R, V)
        loop = torch.tensor([slot.loop for slot in slots])
        exits = loop == end if self.rule is None else self.rule(logits, loop).cpu() | (loop == end)
        for slot, row, exit in zip(slots, logits, exits.tolist()):
            slot.rows[slot.loop] = row
            if exit and not slot.exit:
                slot.exit = slot.loop
        out = [slot for slot in slots if slot.exit and (slot.loop == end or not slot.prompt)]
        for slot in out:
            self.defer(slot, [(slot.at[-1], slot.states[-1:])])
        self.emit(out, [slot.rows[slot.exit] for slot in out])
        return out

    def defer(self, slot, states):
        """Keep (position, state) pairs for the next loop, until a later token goes there."""
        if slot.loop < self.n_loop:
            slot.deferred.setdefault(slot.loop + 1, []).extend(states)

    def propagate(self, slots, deferred):
        """Project keys and values from the deferred states, [(position, state)] of each slot."""
        pairs = [(slot, old) for slot, old in zip(slots, deferred) if old]
        for loop in {slot.loop for slot, _ in pairs}:
            some = [(slot, old) for slot, old in pairs if slot.loop == loop]
            at = [[position for position, _ in old] for _, old in some]
            context = self.context([slot for slot, _ in some], [loop] * len(some), at)
            h = torch.cat([state for _, old in some for _, state in old])
            self.loops.propagate(h, loop, context)
            for slot, old in some:
                self.defer(slot, old)

    # a router decides: mor

    def exit_by_router(self, slots):
        """The slots of which no token takes another loop. They run the last layer, and the newest
        token of each is predicted from."""
        self.route(slots)
        out = [slot for slot in slots if not len(slot.going)]
        if out:
            at = [slot.at for slot in out]
            context = self.context(out, [self.n_loop + 1] * len(out), at)
            newest = np.cumsum([*map(len, at)]) - 1         # (R,)
            logits = self.logits(torch.cat([slot.states for slot in out]), context)
            self.emit(out, logits[self.index(newest)])
        return out

    def route(self, slots):
        """Keep in `going` the tokens that the router sends through the next loop."""
        n = torch.tensor([len(slot.going) for slot in slots])
        loop = torch.tensor([slot.loop + 1 for slot in slots]).repeat_interleave(n)     # (N,)
        states = torch.cat([slot.states[slot.going] for slot in slots])
        takes = self.loops.takes(states, loop.clamp(max=self.n_loop)).cpu() & (loop <= self.n_loop)
        for slot, mask in zip(slots, takes.split(n.tolist())):
            exits, slot.going = slot.going[~mask.numpy()], slot.going[mask.numpy()]
            if len(slot.at) - 1 in exits:
                slot.exit = slot.loop
            if self.model.cfg.kv == "share_update" and len(exits):
                at, deeper = slot.at.start + exits, range(slot.loop + 1, self.n_loop + 1)
                self.cache.copy(slot.number, at.tolist(), 1, deeper)

    # the answers

    def emit(self, slots, rows):
        """Give each slot its next token, predicted from its row (V,), and end what is answered."""
        for slot, token in zip(slots, self.pick(slots, torch.stack([*rows])) if slots else []):
            request, exit = slot.request, self.oracle_exit(slot) if self.oracle else slot.exit
            if token != self.eot:
                request.tokens.append(token)
                request.exits.append(exit)
                slot.ids.append(token)
                if self.on_token is not None:
                    self.on_token(request)
            slot.begin(slot.ids, range(slot.at.stop, slot.at.stop + 1), prompt=False)
            if token == self.eot or len(request.tokens) == request.max_new_tokens:
                slot.request = None
                self.done.append(request)

    def oracle_exit(self, slot):
        """The first loop whose likeliest token is the last's."""
        guesses = [int(row.argmax()) for row in slot.rows.values()]
        return 1 + guesses.index(guesses[-1])

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
    loops = loops_of(model)
    if loops is None:
        raise UserError(f"serve.py is for models that loop over depth (relaxed, mor), {path} does "
                        f"not")
    if (exit or fill) and loops.routed:
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
    request, new = Request(tokenizer.encode(cfg.prompt), cfg.max_new_tokens), []
    texts = tokenizer.stream(iter(new.pop, None))   # of the tokens that show puts into new
    check_prompts([request.prompt], model.cfg.vocab_size)

    def show(request):
        new.append(request.tokens[-1])
        print(coloured(next(texts), request.exits[-1], model.n_loop), end="", flush=True)
    print(tokenizer.decode(request.prompt), end="", flush=True)
    list(engine_for(model, tokenizer, cfg, [request], on_token=show).run([request]))
    new.append(None)
    print(next(texts))
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
