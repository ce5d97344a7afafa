"""The KV cache, for decoding."""
from dataclasses import dataclass

import torch


class KVCache:
    """Keys (after RoPE) and values of all tokens, with a window too: k[layer], v[layer] of
    (B, G, max_len + 1, D). Slot p of a row holds its token at position p, so the causal mask
    also hides what a shorter row has not filled; slot max_len takes padding, and is never read.
    A call chooses slots (place), each layer writes there and reads all (write), and the end
    counts the tokens (advance). Under no_grad.

    lengths (B,): tokens of each row; longest: their maximum, on the host. ragged: lengths may
    differ (a call had n_valid, or some rows were reset)."""

    def __init__(self, cfg, batch_size, max_len, device, dtype, n_layer=None):
        shape = batch_size, cfg.n_kv_head, max_len + 1, cfg.head_dim
        n_layer = cfg.n_layer if n_layer is None else n_layer
        with torch.inference_mode(False):  # else only inference mode could write
            self.k = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(n_layer)]
            self.v = [torch.zeros_like(k) for k in self.k]
            self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.max_len, self.longest, self.ragged = max_len, 0, False

    def buffers(self):
        return [x[:, :, :self.max_len] for x in self.k + self.v]    # without padding's slot

    def nbytes(self):
        return sum(x.nbytes for x in self.buffers())

    def reset(self, rows=None):
        """Empty rows (indices; None: all). Zeroed, as a masked weight of 0 times NaN is NaN."""
        rows = slice(None) if rows is None else rows
        for buffer in self.buffers():
            buffer[rows] = 0
        self.lengths[rows] = 0
        self.longest = int(self.lengths.max())
        self.ragged = self.longest > 0

    def place(self, T, n_valid=None):
        """Slots for T new tokens a row, n_valid (B,) of them real (None: all). Changes nothing."""
        n_new = torch.full_like(self.lengths, T)
        if n_valid is not None:
            n_new = n_valid.to(self.lengths).clamp(0, T)
        if self.longest + T > self.max_len:  # without padding it may fit
            needed = int((self.lengths + n_new).max())
            if needed > self.max_len:
                raise ValueError(f"the cache is full: {needed} tokens, max_len={self.max_len}")
        end = min(self.longest + T, self.max_len)
        offset = torch.arange(T, device=self.lengths.device)
        if n_valid is None and not self.ragged:
            return Slots((self.longest + offset)[None], end, n_new)
        pos = self.lengths[:, None] + offset        # (B, T)
        at = torch.where(offset < n_new[:, None], pos, self.max_len)
        # clamped: padding, too, has a key in its window, so a caller's sums meet no NaN
        return Slots(pos.clamp(max=end - 1), end, n_new, at)

    def write(self, layer, k, v, slots):
        """Write k, v (B, G, T, D) of the new tokens; return all so far, (B, G, S, D)."""
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
        self.ragged = slots.at is not None
        self.longest = int(self.lengths.max()) if self.ragged else slots.end


@dataclass
class Slots:
    """Where the T new tokens of a call stand in a KVCache."""
    pos: torch.Tensor            # (1, T) or (B, T): their positions
    end: int                     # S: slots 0 .. S - 1 are read, some may be empty
    n_new: torch.Tensor          # (B,): how many of each row are real
    at: torch.Tensor = None      # (B, T): their slots, padding's max_len (None: those of pos)
