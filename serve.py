"""
Serving: many requests at a time, for models that loop over depth (relaxed, mor).

    python serve.py out/relaxed_exit requests=FILE.jsonl exit=confidence:0.9
    python serve.py out/mor_tiny requests=FILE.jsonl batching=sequence slots=32
    python serve.py out/mor_tiny prompt="def read(self, "   the text, in colours
    python serve.py help                                    every option with its meaning

A server with a web page uses the same engine (lab/page.py).

A line of FILE is {"prompt": "def ", "max_new_tokens": 50, "id": "a"}, in which only the prompt is
needed. The answer is a JSON line with the id (or the line's number), the text, its tokens, exits
(for each token, the loop after which it was predicted) and seconds (since the start). An answer
ends where the context is full, where sample.py would go on. prompt= prints each token in the colour
of the loop after which it was predicted: 1 blue, 2 green, 3 red.

Batching. A token takes loop 1. Then it takes loop 2, or it exits, which means that the next token
is predicted from it. (model_mor.py calls a loop a recursion. There a token of a prompt may leave
the loops early, too, but nothing is predicted until all tokens of the prompt have left them.) In
the pictures, two slots decode the requests A and B, and C comes next. A column is a step, and A2 is
loop 2 of a token of A. (The word sequence stands for a request's tokens. share=sequence of
model_mor.py is something else.)

    sequence    A1 A2 A1 .  A1 A2       a step is one loop of all: slots whose tokens have exited
                B1 .  B1 B2 C1 C2       wait (.) for the others
    depth       A1 A2 A1 A1 A2          nobody waits: a step takes tokens in different loops
                B1 B1 B2 C1 C2

Batching over depth is possible because all loops use the same stored blocks. In relaxed each row
adds the deltas of its own loop. In mor all loops use the same blocks only with share=cycle and
share=middle_cycle. Other values of share, and kv=share, are refused. Bae et al. (2024, 2410.20672,
Section 2.4) call this continuous depth-wise batching, and they simulate it with exits that an
oracle chooses. Up to rounding, each answer is what its request would get alone.

Words.

    request     a prompt to continue, and its answer
    slot        the place where one request is decoded (decoding.py calls an entry a slot)
    lane        the keys and values of a slot's tokens in one loop
    entry       the keys and values of one token in a lane; entry p belongs to position p

Exits. A slot first feeds its prompt to the model (prefill), then one token of the answer at a time.
In mor a router decides how many recursions a token takes, and in each recursion a token attends to
the earlier tokens that took the same one. In relaxed the tokens of a prompt take all loops, and a
rule (exit=) chooses after which loop a token of the answer exits. But later tokens that go deeper
need the keys and values of an exited token there. So an exited token stays unfinished. When a later
token of its slot takes a deeper loop, the exited token takes it at the same time. If fill=exact, it
does so as if it had not exited. If fill=propagate, its state is frozen, and the loop only makes
keys and values from this state.

Letters are those of model_gpt.py. A call has B rows of T tokens, where T = 1 or B = 1. Loops count
from 1, and the layers of a loop from 0.
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
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.checkpoint import load_run
from common.device import pick_device
from common.options import (UserError, check_known, choice, read_text, run_cli, split_args,
                            typed_config)
from decoding import next_tokens
from model_gpt import apply_rope, compute_dtype, rope_tables, upcast
from sample import (Decoding, Sampling, check_finite, check_prompts, read_prompts)


# ---- the engine: who goes next ----

# Objects of these classes are compared by identity (eq=False), because == of tensors is a tensor.

@dataclass(eq=False)
class Request:
    """A prompt to continue, and its answer so far. The engine takes only requests whose
    max_new_tokens is at least 1 and whose prompt and answer together fit into its max_len."""
    prompt: list                    # token ids
    max_new_tokens: int
    id: object = None
    sampling: tuple = (0.0, 0, 1.0)                 # temperature, top_k, top_p
    generator: torch.Generator = None               # its own random numbers for sampling
    tokens: list = field(default_factory=list)      # the answer, without end-of-text
    exits: list = field(default_factory=list)       # the loop after which each was predicted
    reason: str = None              # stop (end-of-text), length, or a reason of lab.page


@dataclass(eq=False)
class Token:
    """A token that a slot feeds to the model."""
    slot: "Slot"
    pos: int
    h: torch.Tensor                 # its state (C,)
    loops: int = 0                  # how many loops it has taken
    exited: bool = False            # whether the next token has been predicted from it
    h1: torch.Tensor = None         # mor: its state before loop 1


@dataclass(eq=False)
class Slot:
    """The place where one request is decoded.

    Along `unfinished` the number of loops taken never rises, so that the tokens at its end have
    taken the fewest loops. A step runs these and all before them that have taken as many. So all
    tokens that a slot runs in a step are in the same loop. The tokens in front of these stay, and
    each has taken at least one loop more. So the number still does not rise after the step. In mor,
    tokens of a prompt leave `unfinished` as the router decides, and the last of `fed` may leave
    first."""
    number: int
    request: Request = None
    fed: list = None                # the newest tokens: a prompt, or one token of the answer
    unfinished: list = field(default_factory=list)  # tokens that take another loop, by position

    def feed(self, x, start):
        """Add tokens with embeddings x (T, C) at the positions start, start + 1, .. They take loop
        1 next."""
        self.fed = [Token(self, pos, h) for pos, h in enumerate(x, start)]
        self.unfinished += self.fed

    def loops_taken(self):
        """Return how many loops the last unfinished tokens have taken. The slot runs the next
        one."""
        return self.unfinished[-1].loops

    def take(self):
        """Remove from `unfinished` the tokens that run the slot's next loop, and return them."""
        n, taken = self.loops_taken(), []
        while self.unfinished and self.loops_taken() == n:
            taken.append(self.unfinished.pop())
        return taken[::-1]


class Engine:
    """The engine decodes requests in `slots` slots. A prompt and its answer together have up to
    max_len tokens (None: the model's limit or, without one, 8 times block_size). eot is the id of
    end-of-text (None: no answer ends with it). vocab_size is the tokenizer's (None: the model's). A
    model's vocabulary may be padded by further ids, which stand for nothing and are never chosen.

    This is the life of the tokens 0 to 3 in relaxed, with three loops and a prompt of two tokens.
    The column `unfinished` has the slot's list before each step. In it 2:1 is the token at position
    2, which has taken 1 loop so far:

        step  loop  unfinished   what happens
        1     1     0:0 1:0      the prompt takes loop 1
        2     2     0:1 1:1      it takes loop 2
        3     3     0:2 1:2      the prompt is done; 1 predicts token 2, which is fed
        4     1     2:0          2 exits: it predicts token 3, which is fed, and stays unfinished
        5     1     2:1 3:0      3 takes loop 1 alone; it does not exit, as it is not sure
        6     2     2:1 3:1      both take loop 2, where 3 attends to the keys of 2
        7     3     2:2 3:2      both take loop 3 and are done; 3 predicts token 4"""
    # A slot that runs more than MANY tokens in a step has a call of its own (see run_layers). The
    # value was measured: with MANY = 1, serving takes 14 % longer if prompts have 4 to 16 tokens.
    # Without a limit it takes 14 % longer if prompts have 40 to 120 tokens.
    MANY = 16

    def __init__(self, model, slots, max_len=None, batching="depth", exit="", fill="exact",
                 eot=None, vocab_size=None):
        self.model, self.adapter, self.n_loop = model, adapter_of(model), model.loops_to_run
        if not 1 <= slots <= 4096:
            raise UserError(f"slots={slots} must be at least 1 and at most 4096")
        if (exit or fill != "exact") and self.adapter.routed:
            raise UserError("exit and fill are for relaxed, and this model is a mor")
        self.batching, self.eot, self.vocab_size = batching, eot, vocab_size
        self.rule, self.propagate = exit_rule(exit, self.n_loop), fill == "propagate"
        self.slots = [Slot(n) for n in range(slots)]
        self.max_len = max_len or model.context_limit or 8 * model.cfg.block_size
        self.device = model.wte.weight.device
        self.make_cache(model.cfg, compute_dtype(model.wte.weight))

    def make_cache(self, cfg, dtype):
        """Make the lanes: keys and values of (lanes, 2, G, max_len, D) for each layer of a loop.

        Loop number i of slot number s has the lane s + (i - 1) * len(slots). taken (lanes,
        max_len) says at which positions a lane has keys. mor's first and last layer, with numbers
        -2 and -1, have the lanes of loop 1 alone, because all tokens take both.

        A lane has gaps. It has an entry for every position, also for a token that does not take its
        loop, and `taken` hides this entry. model_mor.py has no gaps, because it keeps the tokens of
        a later recursion one after the other. With configs/mor_tiny.yaml, its cache begins with
        6,136 bytes a token, as in the table mor_pareto of lab/results/tables.md. Lanes would take
        8,192. Here a call has rows in different loops, and the loops of a slot have different
        numbers of tokens. Because of the gaps, the position alone says in every lane where a row
        writes and which keys come before it. Without gaps, each lane would need a length and the
        positions of its tokens."""
        zeros, n = partial(torch.zeros, device=self.device, dtype=dtype), len(self.slots)
        shape = 2, cfg.kv_heads, self.max_len, cfg.head_size
        self.kv = [zeros(n * self.n_loop, *shape) for _ in range(cfg.n_stored)]
        self.kv += [zeros(n, *shape) for _ in range(getattr(cfg, "n_outside", 0))]
        self.taken = zeros(n * self.n_loop, self.max_len, dtype=torch.bool)
        pos = torch.arange(self.max_len, device=self.device)
        self.rope = cfg.pos == "rope" and rope_tables(pos, cfg.head_size, cfg.rope_theta, dtype)

    def run(self, requests):
        """Yield each of the requests (a list of Request) when its answer is complete."""
        queue = deque(requests)
        while queue or self.busy():
            self.admit(queue)
            yield from self.step()

    def busy(self):
        return [slot for slot in self.slots if slot.request is not None]

    @torch.inference_mode()
    def admit(self, queue):
        """Give free slots to the requests that wait in a queue, and feed their prompts. First the
        lanes of a slot are set to zero, because a NaN would get into sums even where a mask hides
        it."""
        for slot in self.slots:
            if slot.request is None and queue:
                slot.request = queue.popleft()
                for lanes in (self.taken, *self.kv):
                    lanes[slot.number::len(self.slots)] = 0
                slot.unfinished.clear()
                slot.feed(self.embed(slot.request.prompt), 0)

    def embed(self, ids):
        return self.model.wte(torch.tensor(ids, dtype=torch.long, device=self.device))

    # This leaves out cuDNN's attention, because cuDNN plans anew for each shape, which takes longer
    # than a step, and here many calls have a new shape.
    @sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    @torch.inference_mode()
    def step(self):
        """Run one loop of all slots. In sequence batching, run only those whose last unfinished
        tokens have taken the most loops. Return the requests that end."""
        # 1. Choose the slots that run. In sequence batching a slot that is back at loop 1 waits for
        # the others. lab.page also makes steps without a busy slot, for which max has a default.
        slots, adapter = self.busy(), self.adapter
        if self.batching == "sequence":
            most = max((slot.loops_taken() for slot in slots), default=0)
            slots = [slot for slot in slots if slot.loops_taken() == most]
        tokens = [token for slot in slots for token in slot.take()]

        # 2. Their tokens take a loop. Frozen ones write their keys first, because others attend to
        # these.
        self.run_layers(adapter.before_loops, [token for token in tokens if token.loops == 0])
        self.run_layers(adapter.write_keys, filter(self.frozen, tokens))
        self.run_layers(adapter.run_loop, itertools.filterfalse(self.frozen, tokens))
        for token in tokens:
            token.loops += 1

        # 3. Choose the tokens that take another loop. In mor the router chooses them. In relaxed
        # all tokens do, also those that have exited.
        for token in adapter.go_on([token for token in tokens if token.loops < self.n_loop]):
            token.slot.unfinished.append(token)

        # 4. A slot is done if it has no unfinished token. In mor some tokens of a prompt may have
        # left the loops in earlier steps. Here all tokens of the prompt run together again, because
        # each of them needs keys in the last layer.
        fed = [token for slot in slots if not slot.unfinished for token in slot.fed]
        self.run_layers(adapter.after_loops, fed, loop=1)

        # 5. Predict the next token of a slot that is done, or whose newest token exits.
        return self.predict(slots)

    def frozen(self, token):
        """Return whether a token's state stays as it is, because the token has exited and
        fill=propagate is set."""
        return self.propagate and token.exited

    def run_layers(self, layers, tokens, loop=None):
        """Replace the states of tokens by those after `layers`, which is a method of the adapter or
        None. SlotContext explains loop.

        Slots share one call, in which each token is a row (T = 1) and has a copy of its slot's
        keys. A slot with more than MANY tokens has a call of its own, in which it is one row
        (B = 1). Such a slot runs a long prompt, or a token together with many that have exited."""
        if layers is None:
            return
        # The tokens of a slot stand together.
        groups = [list(group) for _, group in itertools.groupby(tokens, lambda token: token.slot)]
        few = [token for group in groups if len(group) <= self.MANY for token in group]
        many = [(len(group), group) for group in groups if len(group) > self.MANY]
        for T, call in [*many, (1, few)]:
            if call:
                x = torch.stack([token.h for token in call]).unflatten(0, (-1, T))  # (B, T, C)
                x = layers(x, SlotContext(self, call, T, loop))
                for token, h in zip(call, x.flatten(0, 1)):
                    token.h = h

    def predict(self, slots):
        """Add a token to the answers of the slots that are done, and of those whose newest token
        exits by the rule. The rule does not apply to a slot whose answer has no token yet, because
        it is still in its prompt, which takes all loops. Return the requests that end."""
        asked = [slot for slot in slots
                 if not slot.unfinished or (self.rule and slot.request.tokens)]
        if not asked:
            return []
        h = self.model.norm(torch.stack([slot.fed[-1].h for slot in asked]))        # (B, C)
        logits = upcast(self.model.head(h))[:, :self.vocab_size]
        if self.rule:
            likeliest = logits.softmax(-1).amax(-1).tolist()
            # a bool for each slot
            exits = [self.rule(slot.fed[-1].loops, p) for slot, p in zip(asked, likeliest)]
            asked, logits = list(itertools.compress(asked, exits)), logits[exits]
        ids = self.pick(asked, logits)
        requests = [slot.request for slot in asked]     # before a request that ends leaves its slot
        for slot, id, x in zip(asked, ids, self.embed(ids).split(1)):
            self.answer(slot, id, x)
        return [request for request in requests if request.reason]

    def answer(self, slot, id, x):
        """Add the token id to a slot's answer and feed its embedding x (1, C), or end the answer.

        id was predicted from the slot's newest token, which has thereby exited. If this was before
        the last loop, the newest token stays unfinished, so that it takes each deeper loop together
        with the first later token that goes there."""
        request, last = slot.request, slot.fed[-1]
        last.exited = True
        if id == self.eot:
            return self.end(slot, "stop")
        request.tokens.append(id)
        request.exits.append(last.loops)
        if len(request.tokens) == request.max_new_tokens:
            return self.end(slot, "length")
        slot.feed(x, last.pos + 1)

    def pick(self, slots, logits):
        """Return a token for each slot. The likeliest tokens are found for all slots at once. A
        token is sampled only where the request asks for it."""
        check_finite(logits)
        ids = logits.argmax(-1).tolist()
        for n, r in enumerate(slot.request for slot in slots):
            if r.sampling != Request.sampling:      # the default is the likeliest token
                ids[n] = int(next_tokens(logits[n:n + 1], *r.sampling, r.generator))
        return ids

    def end(self, slot, reason):
        slot.request.reason = reason
        slot.request = None


def exit_rule(exit, n_loop):
    """Return the rule that exit= names, or None if it is empty. rule(loop, p) says whether a token
    exits after a loop, where p is the probability of its likeliest next token. With static:LOOP it
    exits after loop LOOP. With confidence:P it exits after the first loop in which p is above P, or
    after the last loop. This confidence is softmax_max in the public code of CALM (Schuster et al.
    2022)."""
    kind, _, bound = exit.partition(":")
    with contextlib.suppress(ValueError):       # a bound that is no number is refused below
        bound = float(bound)
        if kind == "static" and bound in range(1, n_loop + 1):
            return lambda loop, p: loop >= bound
        if kind == "confidence" and 0 <= bound <= 1:
            return lambda loop, p: p > bound or loop == n_loop
    if exit:
        raise UserError(f"exit={exit}: static:1 to static:{n_loop}, confidence:P (0 to 1) allowed")


class SlotContext:
    """This is the context of a call of B rows of T tokens. It stands in the place of model_gpt's
    Context.

    All tokens of a row belong to one slot and are in the same loop. The number of this loop is the
    argument `loop`. If that is None, it is one more than the number of loops that the tokens have
    taken. A token attends to itself and to the earlier tokens of its slot that took this loop. The
    bias is only a mask, because relaxed and mor have neither ALiBi nor a window."""

    def __init__(self, engine, tokens, T, loop=None):
        self.tokens, self.kv = tokens, engine.kv
        tensor = partial(torch.tensor, device=engine.device)
        self.loop = tensor([loop or token.loops + 1 for token in tokens[::T]])   # (B,)
        self.lane = tensor([token.slot.number for token in tokens[::T]])        # (B,)
        self.lane += (self.loop - 1) * len(engine.slots)
        self.pos = tensor([token.pos for token in tokens]).view(-1, T)          # (B, T)
        self.S = max(token.pos for token in tokens) + 1
        engine.taken[self.lane[:, None], self.pos] = True
        visible = torch.arange(self.S, device=engine.device) <= self.pos[..., None]
        visible = visible & engine.taken[self.lane, None, :self.S]              # (B, T, S)
        self.bias = torch.where(visible, 0.0, -math.inf)[:, None]               # (B, 1, T, S)
        self.kept = torch.ones_like(self.pos, dtype=torch.bool)     # for model_mor: all tokens
        self.rope = engine.rope and [x[self.pos][:, None] for x in engine.rope]

    def extend(self, layer, k, v):
        """Write k and v (B, G, T, D) of the tokens. Return the first S entries of each row's lane,
        (B, G, S, D) each. The bias hides those that a token may not read."""
        self.write(layer, k, v)
        kv = self.kv[layer][:, :, :, :self.S].index_select(0, self.lane)
        return kv.to(k.dtype).unbind(1)

    def write(self, layer, k, v):
        """Write k and v (B, G, T, D) to the entries of the tokens' positions."""
        kv, new = self.kv[layer], torch.stack([k, v], 1).permute(0, 3, 1, 2, 4)
        kv[self.lane[:, None], :, :, self.pos] = new.to(kv.dtype)           # (B, T, 2, G, D)


# ---- the models: what the engine asks of them ----
# `routed` is true where the model itself decides when a token leaves the loops, so that exit= and
# fill= are refused. In mor its router decides, and with router=none all tokens take all loops.
# go_on(tokens) returns the tokens that take another loop. before_loops, run_loop, write_keys and
# after_loops take states x (B, T, C) and their SlotContext, whose rows may be in different loops,
# and return the next states. before_loops, write_keys or after_loops is None where a model has no
# use for it.

class RelaxedAdapter:
    routed, before_loops, after_loops = False, None, None

    def __init__(self, model):
        self.model, self.cfg = model, model.cfg

    def run_loop(self, x, context):
        """Run the stored blocks with each row in its loop. The layer that a block is told is its
        number k, because SlotContext chooses the lanes of the loop."""
        u = self.use(x, context)
        for k, block in enumerate(self.model.blocks):
            x = block(x, k, context, u)
        return x

    def write_keys(self, x, context):
        """Write the keys and values that the loop makes from frozen states x. They are computed as
        in model_relaxed's Attention. Return x as it is."""
        u, D = self.use(x, context), self.cfg.head_size
        for layer, block in enumerate(self.model.blocks):
            n, attn = block.norm1(x), block.attn
            k, v = (w(n, u).unflatten(-1, (-1, D)).transpose(1, 2)          # (B, G, T, D)
                    for w in (attn.wk, attn.wv))
            if self.cfg.qk_norm:
                k = attn.k_norm(k, u)
            k = apply_rope(k, *context.rope) if context.rope else k
            context.write(layer, k, v)
        return x

    def use(self, x, context):
        """Return the use u of the stored blocks, which is the number of loops that a row has taken
        so far. Where all rows are in the same loop, u is an int, so that deltas can be merged.
        Elsewhere it is (B, n_loop), with a 1 in each row at its use."""
        uses = {token.loops for token in context.tokens}
        if len(uses) == 1 or self.cfg.rank == 0:    # at rank 0 all uses are the same
            return uses.pop()
        return F.one_hot(context.loop - 1, self.cfg.n_loop).to(x)

    def go_on(self, tokens):
        """Return all tokens. A token that has exited also goes on, together with a later one."""
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
        """Run the first layer, if there is one, and keep its result, h_1 in model_mor's (2.2)."""
        for block in self.model.first:
            x = block(x, -2, context)
        for token, h in zip(context.tokens, x.flatten(0, 1)):
            token.h1 = h
        return x

    def run_loop(self, x, context):
        """Run the blocks of recursion 1 for all rows, because all recursions have the same blocks.
        The scores are those of each row's own recursion."""
        expert = self.cfg.router == "expert"
        s = self.scores(self.model.routers, x, context.loop) if expert else None
        return self.model.recursion(1, x, context, s)

    def after_loops(self, x, context):
        """Finish token choice by (2.2), and run the last layer, if there is one."""
        if self.cfg.router == "token":
            h1 = torch.stack([token.h1 for token in context.tokens]).view_as(x)
            _, p, depth = self.model.choose_depth(h1, self.model.loops_to_run)
            x = self.model.add_gated(h1, x, p, depth)   # (2.2)
        for block in self.model.last:
            x = block(x, -1, context)
        return x

    def go_on(self, tokens):
        """Return the tokens that take another recursion. Without a router these are all tokens. By
        token choice they are those that have not reached their depth, and by expert choice those
        whose deciding score (`decides` in model_mor.py) is >= 0."""
        model, cfg = self.model, self.cfg
        if cfg.router == "none" or not tokens:
            return tokens
        if cfg.router == "token":
            h1 = torch.stack([token.h1 for token in tokens])
            _, _, depth = model.choose_depth(h1, model.loops_to_run)
            return [token for token, d in zip(tokens, depth.tolist()) if token.loops < d]
        routers = model.aux_routers if cfg.causal == "aux_router" else model.routers
        x = torch.stack([token.h for token in tokens])[:, None]             # (tokens, 1, C)
        next_loop = torch.tensor([token.loops + 1 for token in tokens], device=x.device)
        goes_on = self.scores(routers, x, next_loop)[:, 0] >= 0             # (tokens,)
        return itertools.compress(tokens, goes_on.tolist())

    def scores(self, routers, x, loop):
        """Return scores (B, T) of states x (B, T, C), each by the router of its row's loop (B,)."""
        s = torch.cat([router(x) for router in routers], -1)                # (B, T, n_loop)
        return s.take_along_dim(loop[:, None, None] - 1, -1)[..., 0]


def adapter_of(model):
    """Return the adapter of a model. Raise a UserError for any model but relaxed and mor. A fork of
    these needs an adapter of its own here, because adapters call the blocks in their own way."""
    name, adapters = type(model).__module__, {"model_relaxed": RelaxedAdapter,
                                              "model_mor": MoRAdapter}
    if name not in adapters:
        raise UserError(f"only model_relaxed and model_mor are served, and not a {name} "
                        "(sample.py decodes every model that has a cache)")
    return adapters[name](model)


# ---- requests in, answers out ----

@dataclass
class EngineOptions(Decoding):
    """The options that serve.py and lab.page share."""
    batching: str = choice("depth", "sequence")
    slots: int = 16                 # requests decoded at a time
    exit: str = ""                  # relaxed: static:LOOP | confidence:P ("": after all loops)
    fill: str = choice("exact", "propagate")    # relaxed: deeper keys of a token that has exited


@dataclass
class ServeConfig(Sampling, EngineOptions):
    requests: str = ""              # the file of requests, one JSON object a line
    prompt: str = ""                # or a text to continue, in colours (FILE:PATH, LINES:PATH)


def main(argv):
    (path,), given = split_args(argv, least=1, most=1)
    cfg = typed_config(ServeConfig, given)
    if bool(cfg.requests) == bool(cfg.prompt):
        raise UserError("give requests=FILE.jsonl (one JSON object a line) or prompt=TEXT")
    model, tokenizer, _ = load_run(path, pick_device(cfg.device), cfg.dtype, fast=cfg.fast)
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
    print(f"{len(requests)} request{'s' * (len(requests) > 1)}, {len(exits)} tokens in "
          f"{seconds:.2f} s: {len(exits) / seconds:.1f} tokens/s; exited after loop "
          f"{loop_fractions(exits, engine.n_loop)}", file=sys.stderr)


def loop_fractions(loops, n_loop):
    """Return the fractions of 1, 2, .. n_loop in `loops`, which has a loop for each token, as
    "1: 60%, 2: 40%"."""
    return ", ".join(f"{loop}: {loops.count(loop) / max(1, len(loops)):.0%}"
                     for loop in range(1, n_loop + 1))


def read_requests(model, tokenizer, cfg):
    """Return the requests of the file, or those of prompt=. A UserError names a bad line."""
    if cfg.prompt:
        return [read_request(json.dumps({"prompt": text}), n, model, tokenizer, cfg)
                for n, text in enumerate(read_prompts(cfg.prompt), 1)]
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
    """Return the Request in line n. Its answer ends where the model's context is full. ServeConfig
    checks the prompt and max_new_tokens of a line, because they are also its options."""
    given = {"id": n, "max_new_tokens": cfg.max_new_tokens}
    try:
        given |= {**json.loads(line)}       # for a list, ** raises a TypeError
        json.dumps(given["id"], allow_nan=False)    # the answer repeats it, and NaN is no JSON
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
    """Return the random number generator of the n-th request. Its numbers depend on seed and n
    alone, so that they are the same whatever other requests there are."""
    [word] = np.random.SeedSequence([seed, n]).generate_state(1, np.uint64).tolist()
    return torch.Generator(device).manual_seed(word >> 1)       # a seed has 63 bits


def as_json(r, tokenizer, seconds):
    return json.dumps({"id": r.id, "text": "".join(tokenizer.stream(r.tokens)),
                       "tokens": r.tokens, "exits": r.exits, "seconds": round(seconds, 4)})


def in_colours(r, tokenizer):
    # stream yields one piece more than there are tokens, which is the rest of an unfinished
    # character. It gets loop 1's colour.
    pieces = zip(tokenizer.stream(r.tokens), [*r.exits, 1])
    codes = 34, 32, 31, 35, 36, 33          # blue, green, red, and others
    new = [f"\033[{codes[(loop - 1) % 6]}m{text}\033[0m" for text, loop in pieces]
    return tokenizer.decode(r.prompt) + "".join(new)


if __name__ == "__main__":
    run_cli(main, ServeConfig)
