"""A Transformer with moving averages for attention: h_t = g h_{t-1} + (1 - g) v_t, out = W_o (silu(z_t) * h_t), where
g = sigmoid(b) is learned, one for each channel. A cache holds one state for each layer and row."""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import kernels
import model_gpt
from model_gpt import upcast


@dataclass
class Config(model_gpt.BaseConfig):
    n_mlp: int = 0
    mlp: str = model_gpt.choice("swiglu", "gelu")
    pos: str = model_gpt.choice("none")     # the recurrence knows the order
    tie_embeddings: bool = True

    def __post_init__(self):
        super().__post_init__()
        self.n_mlp = self.n_mlp or model_gpt.mlp_width(self)


class EMA(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.fast, C = cfg.fast, cfg.n_embd
        self.wz, self.wv, self.wo = (nn.Linear(C, C, bias=False) for _ in range(3))
        self.gate = nn.Parameter(torch.linspace(0, 4, C))

    def forward(self, x, layer, context):
        v, g = upcast(self.wv(x)), upcast(self.gate.sigmoid())      # (B, T, C), (C,)
        g = context.gates(g.expand_as(v))
        average = kernels.scan if self.fast else naive_average
        h = average(g, v, v.size(1), context.start(layer, v))
        context.keep(layer, h)
        return self.wo((F.silu(self.wz(x)) * h).to(x.dtype))


def naive_average(g, v, chunk, h):
    states = []
    for t in range(v.size(1)):
        h = g[:, t] * h + (1 - g[:, t]) * v[:, t]
        states.append(h)
    return torch.stack(states, 1)


class Context:
    def __init__(self, cfg, x, cache=None, n_valid=None):
        self.cache, self.padding = cache, None
        if cache is not None:
            self.slots = cache.place(x.size(1), n_valid)
            self.padding = torch.arange(x.size(1), device=x.device) >= self.slots.n_new[:, None]    # (B, T)

    def gates(self, g):
        """A gate of 1 keeps the state over padding."""
        return g if self.padding is None else g.masked_fill(self.padding[..., None], 1)

    def start(self, layer, v):
        return torch.zeros_like(v[:, 0]) if self.cache is None else self.cache.state[layer].clone()

    def keep(self, layer, h):
        if self.cache is not None:
            self.cache.state[layer].copy_(h[:, -1])


class Cache(model_gpt.KVCache):
    """The averages, state[layer] (B, C), in float32 or better."""

    def __init__(self, cfg, batch_size, max_len, device, dtype):
        super().__init__(cfg, batch_size, max_len, device, dtype, n_layer=0)
        with torch.inference_mode(False):
            self.state = [upcast(torch.zeros(batch_size, cfg.n_embd, device=device, dtype=dtype))
                          for _ in range(cfg.n_layer)]

    def buffers(self):
        return self.state


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
