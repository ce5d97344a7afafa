"""
Decoding with a KV cache, for all models: where the keys and values of earlier tokens are kept.

To go on with a sequence, a Transformer needs nothing of the earlier tokens but their keys and
values. A call with a cache therefore runs the new tokens alone. Each layer writes their keys and
values into slots of the cache and attends to all that are there. In KVCache, slot p of a row holds
the token at position p. LRT, RAT and MoR have subclasses of it in their files. LRT's also holds a
memory. RAT's also holds states, and its slots are not positions. MoR's has a further cache for
each recursion after the first, if each recursion has keys of its own (kv=recursion).

In the simplest case there is one row. One call brings the four tokens of a prompt, a to d, and the
next call one more, e. (A call with several tokens a row, such as the first one, is a prefill.)
These are the slots after each call (a dot is empty), the positions pos of the new tokens, and the
number of tokens in the row, lengths:

             slot  0  1  2  3  4  5  6  7
     first call    a  b  c  d  .  .  .  .       pos  0  1  2  3      lengths  4
    second call    a  b  c  d  e  .  .  .       pos  4               lengths  5

Rows of a batch may hold different numbers of tokens, and a call may bring each row a different
number of new ones. Such a call is ragged. Its T new tokens a row are padded on the right, and
n_valid says how many of them are real. This is an example with max_len = 8 and T = 3. Row 0 holds
four tokens and gets u, v, w. Row 1 holds two tokens and gets x and two of padding (-). So n_valid
is 3, 1.

             slot  0  1  2  3  4  5  6  7 | 8    lengths
    row 0  before  a  b  c  d  .  .  .  . | .       4       pos  4  5  6      at  4  5  6
            after  a  b  c  d  u  v  w  . | .       7
    row 1  before  e  f  .  .  .  .  .  . | .       2       pos  2  3  4      at  2  8  8
            after  e  f  x  .  .  .  .  . | -       3

pos has the positions of the new tokens, and at has their slots. The slot of a real token is its
position. The slot of all padding is max_len, which is never read. The call reads the slots before
`end`. end is T plus the length of the longest row, and at most max_len. Here end is 4 + 3 = 7.
Row 1 has nothing in slots 3 .. 6. The causal mask hides these from x, because it compares positions
and x is at 2. The padding attends to some of them, and its results mean nothing.

A call goes through three steps, under no_grad:
    slots = cache.place(T, n_valid)         chooses pos, at and end; nothing changes yet
    cache.write(layer, k, v, slots)         writes a layer's new keys and values, and returns those
                                            of slots 0 .. end - 1
    cache.advance(slots)                    counts the new tokens, once all layers have written
Usually the context of the call does the first two (Cached, below), and the model's decode the last.
LRT, RAT, MoR's later recursions and RT's prefill take these steps in their own way. If a call fails
after it has begun to write, its cache must be reset (reset(rows) empties rows). By then RAT's
states and MoR's later caches may include some tokens of the call. In RT and LRT, lengths may
already count some of them, because these models may run the call token by token.

A static call (cache.static = True) is a ragged call with end = max_len. During it the host reads no
value from the device, and all shapes are the same from call to call. So it can be recorded as a
CUDA graph (graphs.py).

Letters: B rows, T new tokens a row, S slots that are read (end), G key/value heads, D head size.
"""
from dataclasses import dataclass

import torch


@dataclass
class Slots:
    """The slots of a KVCache that the T new tokens of a call take. A model may run some of the rows
    alone (model_mor.py does). pos, at and rows are then those of these rows, and n_new still has
    all rows."""
    pos: torch.Tensor            # (1, T) or (B, T): their positions
    end: int                     # S: slots 0 .. S - 1 are read, and some of them may be empty
    n_new: torch.Tensor          # (B,): how many of each row's new tokens are real
    at: torch.Tensor = None      # (B, T): their slots (None: their positions, the same in all rows)
    rows: torch.Tensor = None    # (B, 1): the numbers 0 .. B - 1 (None where at is None)


class KVCache:
    """This cache holds the keys, after RoPE, and the values of all tokens, also of those that a
    sliding window hides: k[layer] and v[layer] are (B, G, max_len + 1, D). n_layer is how many
    layers have keys (None: cfg.n_layer).

    lengths (B,) counts the tokens of each row, on the device. longest is their maximum, on the
    host. After static calls it may be larger, because each static call adds its T (1 in decoding),
    even if all tokens of the longest row are padding. ragged says that lengths may differ, because
    a call had n_valid, some rows were reset, or a static call failed. (In MoR's later recursions
    ragged is always true after a static call.)"""
    static = False

    def __init__(self, cfg, batch_size, max_len, device, dtype, n_layer=None):
        shape = batch_size, cfg.kv_heads, max_len + 1, cfg.head_size
        n_layer = cfg.n_layer if n_layer is None else n_layer
        with torch.inference_mode(False):  # otherwise only inference mode could write
            self.k = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(n_layer)]
            self.v = [torch.zeros_like(k) for k in self.k]
            self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
            self.rows = torch.arange(batch_size, device=device)[:, None]
        self.max_len, self.dtype, self.longest, self.ragged = max_len, dtype, 0, False

    def buffers(self):
        """Return all keys and values, without the slot of padding. A subclass adds its states.
        reset makes them 0, and nbytes counts them."""
        return [x[:, :, :self.max_len] for x in self.k + self.v]

    def nbytes(self):
        return sum(x.nbytes for x in self.buffers())

    def reset(self, rows=None):
        """Empty the rows of these indices (None: all rows). Their slots become zero, because a NaN
        that stayed there would spread: attention multiplies what a mask hides by 0, and 0 times NaN
        is NaN."""
        rows = slice(None) if rows is None else rows
        for buffer in self.buffers():
            buffer[rows] = 0
        self.lengths[rows] = 0
        self.longest = int(self.lengths.max())
        self.ragged = self.longest > 0

    def place(self, T, n_valid=None):
        """Return the Slots of T new tokens a row, of which n_valid (B,) are real (None: all).
        Values below 0 count as 0, and values above T as T. Raise ValueError if the tokens do not
        fit. (Before a static call, its caller calls check_room.) No token is written or counted
        yet."""
        n_new = self.count_new(T, n_valid)
        if not self.static:
            self.check_room(T, n_new)
        end = self.max_len if self.static else min(self.longest + T, self.max_len)
        offset = torch.arange(T, device=self.lengths.device)
        if n_valid is None and not self.ragged and not self.static:
            return Slots((self.longest + offset)[None], end, n_new)
        pos = self.lengths[:, None] + offset        # (B, T)
        at = torch.where(offset < n_new[:, None], pos, self.max_len)
        # The position of padding may lie beyond end - 1, the last slot that is read. It is clamped,
        # so that there is a key in its sliding window. A softmax over no key would be NaN, which
        # could get into a caller's sum.
        return Slots(pos.clamp(max=end - 1), end, n_new, at, self.rows)

    def count_new(self, T, n_valid):
        """Return how many of each row's T new tokens are real, (B,)."""
        if n_valid is None:
            return torch.full_like(self.lengths, T)
        return n_valid.to(self.lengths).clamp(0, T)

    def check_room(self, T, n_new):
        """Raise ValueError if a row's real tokens, n_new (B,) of its T new ones, do not fit. The
        host waits for lengths, which are on the device, only if the longest row has no room for T.
        Even then the real tokens may fit."""
        if self.longest + T > self.max_len:
            needed = int((self.lengths + n_new).max())
            if needed > self.max_len:
                raise ValueError(f"the cache is full: {needed} tokens, max_len={self.max_len}")

    def write(self, layer, k, v, slots):
        """Write k and v (B, G, T, D) of the new tokens. Return those of all slots that the call
        reads, (B, G, S, D) each. A second write of the same call replaces the first one."""
        for buffer, new in ((self.k[layer], k), (self.v[layer], v)):
            if slots.at is None:  # end is longest + T, because place has raised otherwise
                buffer[:, :, slots.end - new.size(2):slots.end] = new
            else:
                new = new.transpose(1, 2).to(buffer.dtype)
                buffer[slots.rows, :, slots.at] = new  # this indexing gives (B, T, G, D)
        return [x[layer][:, :, :slots.end].to(k.dtype) for x in (self.k, self.v)]

    def advance(self, slots):
        """Count the new tokens, after every layer has written them."""
        self.lengths += slots.n_new
        if not self.static:
            self.ragged = slots.at is not None
            self.longest = int(self.lengths.max()) if self.ragged else slots.end

    def begin_static(self):
        """Make calls static from here on. A subclass whose buffers grow gives them their full size
        here, because they must keep it."""
        self.static = True

    def end_static(self, T, ragged):
        """Make calls ordinary again, after one static call of at most T tokens a row. ragged says
        whether the lengths of rows may differ now."""
        self.static, self.ragged = False, ragged
        self.longest = min(self.longest + T, self.max_len)


class Cached:
    """A mix-in. It turns a model's Context into the context of a call with a cache, in which tokens
    have the positions that place chose, and each layer's keys and values go into the cache.

        class CachedContext(Cached, Context): ...

    Context is model_gpt's, or takes the same arguments (cfg, x, pos, k_pos, in_order). The Context
    must read no value of x, because x is uninitialized here. `more` are further arguments of a
    Context."""

    def __init__(self, cfg, cache, T, n_valid=None, **more):
        self.cache, self.slots = cache, cache.place(T, n_valid)
        x = cache.lengths.new_empty(len(cache.lengths), T, dtype=cache.dtype)
        k_pos = torch.arange(self.slots.end, device=x.device)   # slot p is position p
        in_order = self.slots.at is None  # because then all rows hold equally many tokens
        super().__init__(cfg, x, self.slots.pos, k_pos, in_order, **more)

    def extend(self, layer, k, v):
        """Write k and v by KVCache.write, and return what it returns."""
        return self.cache.write(layer, k, v, self.slots)


# ---- the choice of a token ----

def next_tokens(logits, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """Draw one token a row, (B,) int64, from logits (B, V). At temperature 0, or with top_k 1, the
    likeliest token is taken. Otherwise temperature, of at least 1e-6, divides the logits. Then
    top_k keeps the k likeliest tokens and those that tie with the last of them (0: all). Then top_p
    keeps the smallest set of likeliest tokens whose probabilities sum to at least top_p
    (Holtzman et al. 2020)."""
    if temperature == 0 or top_k == 1:
        return logits.argmax(-1)
    logits = logits / max(temperature, 1e-6)
    if 0 < top_k < logits.size(-1):
        kth = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        p = ordered.softmax(-1)
        # A token is left out if the probabilities of those before it sum to top_p or more. The
        # likeliest always stays.
        enough = p.cumsum(-1) - p >= max(top_p, 1e-9)
        ordered = ordered.masked_fill(enough, -torch.inf)
        logits = torch.empty_like(logits).scatter_(-1, order, ordered)
    p = logits.softmax(-1)
    # If e has draws from Exp(1), the argmax of p / e is token i with probability p_i.
    # torch.multinomial draws in this way, too. It is written out here so that nothing is read on
    # the host, as a CUDA graph demands.
    return (p / torch.empty_like(p).exponential_(1, generator=generator)).argmax(-1)
