"""A Transformer with moving averages for attention: h_t = g h_{t-1} + (1 - g) v_t, out = W_o (silu(z_t) * h_t), where
g = sigmoid(b) is learned, one a channel. A cache holds one state a layer and row."""
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
        if context.cached:
            state.copy_(h[:, -1])
        return self.wo((F.silu(self.wz(x)) * h).to(x.dtype))


class Context:
    """padding (B, T, 1) or (T, 1); states of each layer, which a cache keeps."""

    def __init__(self, cfg, x, cache=None, n_valid=None):
        (B, T, C), self.cached = x.shape, cache is not None
        self.states, n_new = upcast(x.new_zeros(cfg.n_layer, B, C)), T
        if self.cached:
            self.slots, self.states = cache.place(T, n_valid), cache.states
            n_new = self.slots.n_new[:, None, None]
        self.padding = torch.arange(T, device=x.device)[:, None] >= n_new


class Cache(KVCache):
    def __init__(self, cfg, batch_size, max_len, device, dtype):
        super().__init__(cfg, batch_size, max_len, device, dtype, n_layer=0)
        with torch.inference_mode(False):
            self.states = [upcast(torch.zeros(batch_size, cfg.n_embd, device=device, dtype=dtype))
                           for _ in range(cfg.n_layer)]

    def buffers(self):
        return self.states


class Model(model_gpt.Model):
    context_type = Context

    def __init__(self, cfg):
        blocks = [model_gpt.Block(cfg, attention=EMA) for _ in range(cfg.n_layer)]
        model_gpt.LanguageModel.__init__(self, cfg, blocks)
        model_gpt.init_weights(self, cfg.n_layer)

    def init_cache(self, batch_size, max_len):
        return Cache(self.cfg, *self.cache_sizes(batch_size, max_len))

    def mixer_flops(self):
        return 0.0
