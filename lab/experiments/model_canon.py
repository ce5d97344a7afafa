"""
A control without recurrence: LRT's backbone with Canon layers (Allen-Zhu 2025, "Physics of Language
Models: Part 4.1", 2512.17351). A Canon layer adds to each token a weighted sum of itself and the
three tokens before it, with four weights w_0 ... w_3 (C,) of each channel:

    u_t <- u_t + w_0 u_t + w_1 u_{t-1} + w_2 u_{t-2} + w_3 u_{t-3}

canon=A     before the attention, on u = RMSNorm(x)
canon=AC    also before the MLP, on its RMSNorm(x)

The paper also has Canon layers on queries, keys and values (B) and inside of the MLP (D). The model
trains and evaluates. It has no cache, so that it writes no text.
"""
from dataclasses import dataclass

import torch.nn as nn
import torch.nn.functional as F

import model_lrt
from model_gpt import choice
from no_cache import NoCache

TAPS = 4


@dataclass
class Config(model_lrt.Config):
    memory: bool = False
    canon: str = choice("AC", "A")

    def __post_init__(self):
        super().__post_init__()
        if self.memory:
            raise ValueError("model=canon needs memory=false")


class Canon(nn.Module):
    """A Canon layer. Its weights start as those of any torch.nn.Conv1d, as in the authors' code."""

    def __init__(self, n_embd):
        super().__init__()
        self.conv = nn.Conv1d(n_embd, n_embd, TAPS, groups=n_embd, bias=False)

    def forward(self, u):
        """(B, T, C) -> (B, T, C)"""
        return u + self.conv(F.pad(u.mT, (TAPS - 1, 0))).mT


class Attention(model_lrt.Attention):
    def forward(self, u, layer, context):
        return super().forward(self.canon(u), layer, context)


class MLP(model_lrt.SquaredMLP):
    def forward(self, u):
        return super().forward(self.canon(u))


class Model(NoCache, model_lrt.Model):
    # AdamW, at the rate that the head has at width 768
    parameter_kinds = {**model_lrt.Model.parameter_kinds, "conv": "gate"}

    def __init__(self, cfg):
        super().__init__(cfg)
        for block in self.blocks:       # all other weights are those of model_lrt with this seed
            block.attn.__class__, block.attn.canon = Attention, Canon(cfg.n_embd)
            if cfg.canon == "AC":
                block.mlp.__class__, block.mlp.canon = MLP, Canon(cfg.n_embd)
