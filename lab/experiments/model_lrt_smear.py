"""
LRT with smeared embeddings, x0_t <- x0_t + a x0_{t-1} with one a for each channel. It shows what
LRT's memory gains beside a shift by one token. memory=false is the backbone with the shift.

The model trains and evaluates. It has no cache, so that it writes no text.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

import model_lrt
from no_cache import NoCache

Config = model_lrt.Config


class Model(NoCache, model_lrt.Model):
    parameter_kinds = {**model_lrt.Model.parameter_kinds, "smear": "gate"}

    def __init__(self, cfg):
        super().__init__(cfg)
        self.smear = nn.Parameter(torch.linspace(0, 1, cfg.n_embd))     # as in model_smear.py

    def embed(self, idx, pos=None):
        tokens = super().embed(idx, pos)
        before = F.pad(tokens.x0[:, :-1], (0, 0, 1, 0))                 # (B, T, C)
        return tokens._replace(x0=tokens.x0 + self.smear * before)

    def hidden(self, idx, path=None):
        """See model_lrt. The exact chain goes without a cache, because a call with a cache has no
        embedding of the token before."""
        path = path or (self.cfg.train_path_used if self.training else "exact")
        if path == "exact" and self.cfg.has_chain:
            x = model_lrt.chain(self, self.embed(idx), 1)
            return model_lrt.norm(x, self.cfg.norm_eps)
        return super().hidden(idx, path)
