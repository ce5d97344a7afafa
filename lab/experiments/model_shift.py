"""
Controls without recurrence: LRT's backbone has a shift by one token in the place of the memory.

shift=layer     m_{t-1} is the previous token's input of the same layer: (2) to (5) of
                model_lrt.py have x_{t-1} for m_{t-1}
shift=output    x_t <- x_t + lambda x_{t-1} after the last layer, with one scalar for the model
values=false    the backbone has no value embeddings, which shows what these alone give

shift=none, the default, is the backbone. memory= and source= follow from shift=, and other values
of them have no effect.

The models train and evaluate. They have no cache, so that they write no text.
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import model_lrt
from model_gpt import choice
from no_cache import NoCache


@dataclass
class Config(model_lrt.Config):
    shift: str = choice("none", "layer", "output")
    values: bool = True

    def __post_init__(self):
        self.memory, self.source = self.shift == "layer", 0
        super().__post_init__()


def before(x):
    """Return x (B, T, C) of the previous token, which is 0 for the first token."""
    return F.pad(x[:, :-1], (0, 0, 1, 0))


class Block(model_lrt.Block):

    def forward(self, x, layer, context):
        context.previous = before(x)
        if context.rec:     # shared, but each layer projects its own input
            context.kv_rec = context.rec(context.previous)
        return super().forward(x, layer, context)


class Model(NoCache, model_lrt.Model):
    parameter_kinds = {**model_lrt.Model.parameter_kinds, "mix": "alpha"}

    def __init__(self, cfg):
        super().__init__(cfg)
        self.mix = nn.Parameter(torch.zeros(())) if cfg.shift == "output" else 0.0
        for block in self.blocks if cfg.shift == "layer" else ():
            block.__class__ = Block     # a seed gives the same weights as in model_lrt
        if not cfg.values:
            for table in self.values:
                table.weight.requires_grad_(False).zero_()

    def hidden(self, idx, path=None):
        tokens = self.embed(idx)
        context = model_lrt.Context(self, tokens, torch.zeros_like(tokens.x0[:, :1]), {})
        context.rec = self.rec
        x, _ = model_lrt.run_layers(self, context)
        return model_lrt.norm(x + self.mix * before(x), self.cfg.norm_eps)

    def flops_per_token(self):
        """Return FLOPs as model_lrt does, which counts shared projections once. Here each layer
        computes them."""
        shared = self.rec.parameters() if self.cfg.shift == "layer" and self.rec else ()
        again = (self.cfg.n_layer - 1) * sum(p.numel() for p in shared)
        return super().flops_per_token() + 6.0 * again
