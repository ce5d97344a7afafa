"""
A control for MoR's routers: MoR with expert choice whose scores are random numbers and no functions
of a token's state. As many tokens take each recursion as in MoR, but no choice is learned.

Recursion r has scores that are uniform from -q to 1 - q, where q = 1 / (R - r + 2). In training top
k chooses random tokens by them. In evaluation a token takes the recursion iff its score is at least
0. So k_r / k_{r-1} = 1 - q of the tokens that compete are chosen there, too. As in MoR, the scores
are also factors in (2.1). In evaluation they depend on nothing but the place of the token in its
batch, so that a result can be repeated. router_arch= has no effect. The model trains and evaluates.
It has no cache, so that it writes no text.
"""
from dataclasses import dataclass

import torch
import torch.nn as nn

import model_mor
from no_cache import NoCache


@dataclass
class Config(model_mor.Config):

    def __post_init__(self):
        super().__post_init__()
        if self.router != "expert" or self.causal != "aux_loss":
            raise ValueError("model=random_router needs router=expert and causal=aux_loss")


class RandomRouter(nn.Module):

    def __init__(self, r, n_loop):
        super().__init__()
        self.r, self.q = r, 1 / (n_loop - r + 2)

    def forward(self, h):
        """(B, T, C) -> (B, T, 1)"""
        fixed = None if self.training else torch.Generator(h.device).manual_seed(self.r)
        noise = torch.rand(*h.shape[:2], 1, device=h.device, dtype=h.dtype, generator=fixed)
        return noise - self.q


class Model(NoCache, model_mor.Model):

    def __init__(self, cfg):
        super().__init__(cfg)       # all other weights are those of model_mor with this seed
        R = cfg.n_loop
        self.routers = nn.ModuleList(RandomRouter(r, R) for r in range(1, R + 1))
