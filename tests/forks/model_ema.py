"""A Transformer with moving averages in the place of attention:

    z_t = W_z x_t,  v_t = W_v x_t,  h_t = g h_{t-1} + (1 - g) v_t,  out = W_o (silu(z_t) * h_t),  g = sigmoid(gate)

gate is learned, one number for each channel. A cache holds one state for each layer and row."""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import kernels
import model_gpt
from decoding import KVCache
from model_gpt import upcast


@dataclass
class Config(model_gpt.Config):
    pos: str = model_gpt.choice("none")     # the recurrence knows the order


class EMA(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        C = cfg.n_embd
        self.wz = nn.Linear(C, C, bias=False)
        self.wv = nn.Linear(C, C, bias=False)
        self.wo = nn.Linear(C, C, bias=False)
        self.gate = nn.Parameter(torch.linspace(0, 4, C))

    def forward(self, x, layer, context):
        v, state = upcast(self.wv(x)), context.states[layer]        # (B, T, C), (B, C)
        g = upcast(self.gate.sigmoid()).expand_as(v).masked_fill(context.padding, 1)    # 1 keeps the state
        h = kernels.scan(g, v, v.size(1), state.clone())
        if isinstance(context, CachedContext):
            state.copy_(h[:, -1])
        return self.wo((F.silu(self.wz(x)) * h).to(x.dtype))


class Context:
    """states (B, C) of each layer are zero. padding is (B, T, 1), or (1, 1, 1) if there is none."""

    def __init__(self, cfg, x):
        B, T, C = x.shape
        self.states = upcast(x.new_zeros(cfg.n_layer, B, C))
        self.padding = torch.zeros(1, 1, 1, dtype=torch.bool, device=x.device)


class CachedContext:
    """The states are the cache's, which the layers overwrite."""

    def __init__(self, cfg, cache, T, n_valid=None):
        self.slots, self.states = cache.place(T, n_valid), cache.states
        offset = torch.arange(T, device=cache.lengths.device)[:, None]
        self.padding = offset >= self.slots.n_new[:, None, None]


class Cache(KVCache):
    def __init__(self, cfg, batch_size, max_len, device, dtype):
        super().__init__(cfg, batch_size, max_len, device, dtype, n_layer=0)
        with torch.inference_mode(False):
            self.states = [upcast(torch.zeros(batch_size, cfg.n_embd, device=device, dtype=dtype))
                           for _ in range(cfg.n_layer)]

    def buffers(self):
        return self.states


class Model(model_gpt.Model):
    context_type, cached_context_type = Context, CachedContext

    def __init__(self, cfg):
        blocks = [model_gpt.Block(cfg, attention=EMA) for _ in range(cfg.n_layer)]
        model_gpt.LanguageModel.__init__(self, cfg, blocks)
        model_gpt.init_weights(self, cfg.n_layer)

    def init_cache(self, batch_size, max_len):
        return Cache(self.cfg, *self.cache_sizes(batch_size, max_len))

    def mixer_flops(self):
        return 0.0
