"""
RT with a shift by one token. It shows what a shift gives without recurrence, and what recurrence
gives beside a shift. The model trains and evaluates. It has no cache, so that it writes no text.

smear=keys          a token's key is a weighted mean of its own key and the previous token's,
                    k_i <- s k_i + (1 - s) k_{i-1}, where s = sigmoid(a), one a for each KV head
smear=embeddings    x_i <- x_i + a x_{i-1} below the first layer, one a for each channel

One layer can copy with such keys (Olsson et al. 2022, "In-context Learning and Induction Heads").
smear=keys needs recurrent=false, because it is the control without recurrence.
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import model_rt
from model_gpt import choice
from no_cache import NoCache


@dataclass
class Config(model_rt.Config):
    recurrent: bool = False
    smear: str = choice("keys", "embeddings")

    def __post_init__(self):
        super().__post_init__()
        if self.recurrent and self.smear == "keys":
            raise ValueError("smear=keys needs recurrent=false")


class Block(model_rt.Block):

    def __init__(self, cfg):
        super().__init__(cfg)
        self.a = nn.Parameter(torch.zeros(cfg.kv_heads))

    def temporary(self, x, rope):
        q, k, v = super().temporary(x, rope)                    # k, v (B, G, T, D)
        s = torch.sigmoid(self.a).to(k.dtype)[:, None, None]
        return q, s * k + (1 - s) * F.pad(k[:, :, :-1], (0, 0, 1, 0)), v


class Embedding(nn.Embedding):

    def __init__(self, vocab_size, n_embd):
        super().__init__(vocab_size, n_embd)
        self.a = nn.Parameter(torch.linspace(0, 1, n_embd))     # from own token alone to both alike

    def forward(self, idx):
        x = super().forward(idx)                                # (B, T, C)
        return x + self.a * F.pad(x[:, :-1], (0, 0, 1, 0))


class Model(NoCache, model_rt.Model):

    def __init__(self, cfg):
        super().__init__(cfg)
        if cfg.smear == "keys":
            self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        else:
            self.wte = Embedding(cfg.vocab_size, cfg.n_embd)
        self.init_weights()
