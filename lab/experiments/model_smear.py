"""
RT without recurrence, but with smeared keys: a layer's key is a mean of its own and of the
previous token's, k_i <- s k_i + (1 - s) k_{i-1}, s = sigmoid(a), one a head (Olsson et al. 2022,
"In-context Learning and Induction Heads": with such keys one layer can copy). A control: what a
shift by one token gives without recurrence. It trains and evaluates; there is no cache
(sample_tokens=0).
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import model_rt
from common.keys import UserError


@dataclass
class Config(model_rt.Config):
    recurrent: bool = False


class Block(model_rt.Block):

    def __init__(self, cfg):
        super().__init__(cfg)
        self.a = nn.Parameter(torch.zeros(cfg.n_kv_head))

    def temporary(self, x, rope):
        q, k, v = super().temporary(x, rope)                    # k, v (B, G, T, D)
        s = torch.sigmoid(self.a)[:, None, None]
        return q, s * k + (1 - s) * F.pad(k[:, :, :-1], (0, 0, 1, 0)), v


class Model(model_rt.Model):

    def __init__(self, cfg):
        super().__init__(cfg)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.init_weights()

    def init_cache(self, *sizes):
        raise UserError("this model has no cache to decode with: it trains (sample_tokens=0) and "
                        "evaluates")
