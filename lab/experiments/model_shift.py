"""
LRT's backbone with a shift by one token in place of the memory: controls without recurrence.

shift=layer     m_{t-1} is what the same layer reads of the previous token: (2) to (5) of
                model_lrt.py with x_{t-1} for m_{t-1}
shift=output    x_t <- x_t + lambda x_{t-1} after the last layer, one scalar for the model
values=false    none, and no value embeddings: what these alone give
They train and evaluate; there is no cache (sample_tokens=0).
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import model_lrt
from common.options import UserError
from model_gpt import choice


@dataclass
class Config(model_lrt.Config):
    shift: str = choice("none", "layer", "output")
    values: bool = True

    def __post_init__(self):
        super().__post_init__()
        self.memory, self.source = self.shift == "layer", 0
        super().__post_init__()


def before(x):
    """x (B, T, C) of the previous token; 0 of the first."""
    return F.pad(x[:, :-1], (0, 0, 1, 0))


class Block(model_lrt.Block):

    def forward(self, x, layer, context):
        context.previous = before(x)
        context.kv_rec = context.rec(context.previous)
        return super().forward(x, layer, context)


class Model(model_lrt.Model):
    parameter_kinds = {**model_lrt.Model.parameter_kinds, "mix": "alpha"}

    def __init__(self, cfg):
        super().__init__(cfg)
        self.mix = nn.Parameter(torch.zeros(())) if cfg.shift == "output" else 0.0
        for block in self.blocks if cfg.shift == "layer" else ():
            block.__class__ = Block     # the same weights as model_lrt's of this seed
        if not cfg.values:
            for table in self.values:
                table.weight.requires_grad_(False).zero_()

    def hidden(self, idx, path=None):
        tokens = self.embed(idx)
        context = model_lrt.Context(self, tokens, torch.zeros_like(tokens.x0[:, :1]), {})
        context.rec = self.rec
        x, _ = model_lrt.run(self, context)
        return model_lrt.norm(x + self.mix * before(x), self.cfg.norm_eps)

    def init_cache(self, *sizes):
        raise UserError("this model has no cache to decode with: it trains (sample_tokens=0) and "
                        "evaluates")
