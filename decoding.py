"""
Decoding with a KV cache, for all models: where the keys and values of earlier tokens are kept.

A model that has read T tokens needs their keys and values again for token T + 1, and nothing else
of them. A call with a cache therefore runs the new tokens alone. It writes their keys and values
into slots of the cache and attends to all that stand there. Rows of a batch may hold different
numbers of tokens (they are ragged), and a call may bring each row a different number of new ones.
Two rows of a cache with max_len = 8, before a call with T = 3 new tokens a row, of which the
second row has one real token and two of padding (n_valid = 3, 1):

    slot       0  1  2  3  4  5  6  7 | 8        lengths  pos       at        lengths after it
    row 0      a  b  c  d  .  .  .  . |          4        4  5  6   4  5  6   7
    row 1      e  f  .  .  .  .  .  . |          2        2  3  4   2  8  8   3

Slot p of a row holds the token at position p, so that the causal mask, which compares positions,
also hides what a shorter row has not filled. Slot max_len takes the padding and is never read. end,
here 7, is the number of slots that the call reads.

A call goes through four steps:
    slots = cache.place(T, n_valid)         which slots the new tokens take; nothing changes yet
    cache.write(layer, k, v, slots)         each layer writes its keys and values, and gets all
    cache.advance(slots)                    the new tokens count, once all layers have written
and reset(rows) empties rows. They all run under no_grad.

A static call (cache.static = True) is a ragged call that reads all max_len slots. It reads no number
on the host, and all its shapes are the same from call to call, so that it can be recorded as a CUDA
graph (graphs.py).

Shapes: B rows, T new tokens, S keys (the slots that are read), G key/value heads, D head size.
"""
from dataclasses import dataclass

import torch


@dataclass
class Slots:
    """Where the T new tokens of a call stand in a KVCache."""
    pos: torch.Tensor            # (1, T) or (B, T): their positions
    end: int                     # S: slots 0 .. S - 1 are read, some may be empty
    n_new: torch.Tensor          # (B,): how many of each row are real
    at: torch.Tensor = None      # (B, T): their slots, padding's max_len (None: those of pos)


class KVCache:
    """The keys (after RoPE) and values of all tokens, with a sliding window too: k[layer] and
    v[layer] are (B, G, max_len + 1, D).

    lengths (B,) counts the tokens of each row, on the device. longest is their maximum, on the
    host; after static calls it may be too large. ragged says whether lengths may differ, because a
    call had n_valid or some rows were reset."""
    static = False

    def __init__(self, cfg, batch_size, max_len, device, dtype, n_layer=None):
        shape = batch_size, cfg.n_kv_head, max_len + 1, cfg.head_dim
        n_layer = cfg.n_layer if n_layer is None else n_layer
        with torch.inference_mode(False):  # else only inference mode could write
            self.k = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(n_layer)]
            self.v = [torch.zeros_like(k) for k in self.k]
            self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.max_len, self.dtype, self.longest, self.ragged = max_len, dtype, 0, False

    def buffers(self):
        """Return all that the cache holds, without padding's slot."""
        return [x[:, :, :self.max_len] for x in self.k + self.v]

    def nbytes(self):
        return sum(x.nbytes for x in self.buffers())

    def reset(self, rows=None):
        """Empty rows (indices; None: all). They are zeroed, because a masked weight of 0 times NaN
        is NaN."""
        rows = slice(None) if rows is None else rows
        for buffer in self.buffers():
            buffer[rows] = 0
        self.lengths[rows] = 0
        self.longest = int(self.lengths.max())
        self.ragged = self.longest > 0

    def place(self, T, n_valid=None):
        """Return the Slots of T new tokens a row, n_valid (B,) of them real (None: all). Raises
        ValueError where they do not fit. Changes nothing."""
        n_new = torch.full_like(self.lengths, T)
        if n_valid is not None:
            n_new = n_valid.to(self.lengths).clamp(0, T)
        if not self.static:
            self.check_room(T, n_new)
        end = self.max_len if self.static else min(self.longest + T, self.max_len)
        offset = torch.arange(T, device=self.lengths.device)
        if n_valid is None and not self.ragged and not self.static:
            return Slots((self.longest + offset)[None], end, n_new)
        pos = self.lengths[:, None] + offset        # (B, T)
        at = torch.where(offset < n_new[:, None], pos, self.max_len)
        # clamped, so that padding too has a key in its window and no sum of a caller meets a NaN
        return Slots(pos.clamp(max=end - 1), end, n_new, at)

    def check_room(self, T, n_new):
        if self.longest + T > self.max_len:  # without padding it may fit
            needed = int((self.lengths + n_new).max())
            if needed > self.max_len:
                raise ValueError(f"the cache is full: {needed} tokens, max_len={self.max_len}")

    def write(self, layer, k, v, slots):
        """Write k, v (B, G, T, D) of the new tokens. Return those of all tokens, (B, G, S, D)."""
        for buffer, new in ((self.k[layer], k), (self.v[layer], v)):
            if slots.at is None:
                buffer[:, :, slots.end - new.size(2):slots.end] = new
            else:
                rows = torch.arange(len(k), device=k.device)[:, None]
                new = new.transpose(1, 2).to(buffer.dtype)
                buffer[rows, :, slots.at] = new      # (B, T, G, D), as torch has it
        return [x[layer][:, :, :slots.end].to(k.dtype) for x in (self.k, self.v)]

    def advance(self, slots):
        """Count the new tokens, once every layer has written them."""
        self.lengths += slots.n_new
        if not self.static:
            self.ragged = slots.at is not None
            self.longest = int(self.lengths.max()) if self.ragged else slots.end

    def begin_static(self):
        """Calls are static from here on. All buffers get the size that they keep."""
        self.static = True

    def end_static(self, T, ragged):
        """They are ordinary again, after one of T tokens a row at most."""
        self.static, self.ragged = False, ragged
        self.longest = min(self.longest + T, self.max_len)


class Cached:
    """What turns a model's Context into that of a call with a cache: the tokens stand where the
    cache places them, and each layer's keys and values go into it.

        class CachedContext(Cached, Context): ...

    Context(cfg, x, pos, k_pos, causal) is model_gpt's or has its arguments; of x it reads the
    shape, dtype and device alone."""

    def __init__(self, cfg, cache, T, n_valid=None, **more):
        self.cache, self.slots = cache, cache.place(T, n_valid)
        x = cache.lengths.new_empty(len(cache.lengths), T, dtype=cache.dtype)
        k_pos = torch.arange(self.slots.end, device=x.device)   # slot p is position p
        super().__init__(cfg, x, self.slots.pos, k_pos, self.slots.at is None, **more)

    def extend(self, layer, k, v):
        """k, v (B, G, T, D) of the new tokens -> those of all tokens so far, (B, G, S, D)."""
        return self.cache.write(layer, k, v, self.slots)


def next_tokens(logits, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """Return one token a row, (B,) int64, from logits (B, V). temperature 0: the likeliest. top_k
    (0: all) keeps the k likeliest tokens, then top_p the smallest set of likeliest ones that
    together have this probability (Holtzman et al. 2020)."""
    if temperature == 0 or top_k == 1:
        return logits.argmax(-1)
    logits = logits / max(temperature, 1e-6)
    if 0 < top_k < logits.size(-1):
        kth = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        p = ordered.softmax(-1)
        enough = p.cumsum(-1) - p >= max(top_p, 1e-9)   # the first always stays
        ordered = ordered.masked_fill(enough, -torch.inf)
        logits = torch.empty_like(logits).scatter_(-1, order, ordered)
    p = logits.softmax(-1)
    # torch.multinomial draws so, too: the largest of p / e with e from Exp(1) is token i with
    # probability p_i; written out it reads nothing on the host
    return (p / torch.empty_like(p).exponential_(1, generator=generator)).argmax(-1)
