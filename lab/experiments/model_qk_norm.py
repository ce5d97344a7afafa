"""
RAT with the QK-norm of model_gpt.py. It is an RMSNorm with a weight, which is applied to each
head's query and key before RoPE. norm= says which key is normed:

norm=keys       k, before the recurrence
norm=states     k~, after the recurrence: the key that queries attend to

Only rat layers have these norms. RAT.forward below is RAT.forward and rat_fast of model_rat.py in
one, with the norms. There is no naive code, so that fast=false changes nothing in rat layers. The
model trains and evaluates. It has no cache, so that it writes no text.
"""
from dataclasses import dataclass

import torch

import kernels
import model_rat
from model_gpt import RMSNorm, apply_rope, choice, upcast
from no_cache import NoCache


@dataclass
class Config(model_rat.Config):
    norm: str = choice("keys", "states")


class RAT(model_rat.RAT):

    def forward(self, u, layer, context):
        cfg, K, D = self.cfg, self.cfg.chunk, self.cfg.head_size
        z, r, v, q, k = self.w_in(u).split(self.widths, -1)
        q, k = (x.unflatten(-1, (-1, D)) for x in (q, k))       # (B, T, G, D)
        q = self.q_norm(q)
        if cfg.norm == "keys":
            k = self.k_norm(k)
        copies = cfg.n_head // cfg.qk_groups
        q, k = (torch.cat([x] * copies, 2).flatten(2) for x in (q, k))
        g = torch.sigmoid(upcast(r) + self.gate_bias)
        k_state, v_state = (kernels.scan(g, upcast(x), K) for x in (k, v))
        q, k_state, v_state = (model_rat.in_heads(x, cfg) for x in (q, k_state, v_state))
        if cfg.norm == "states":
            k_state = self.k_norm(k_state)
        final_k, final_v, cos, sin = (
            x[:, :, K - 1::K] for x in (k_state, v_state, *context.rope["rat"]))
        y = model_rat.read_states(q, k_state, v_state, apply_rope(final_k, cos, sin), final_v,
                                  context)
        return self.wo(torch.sigmoid(z) * y.transpose(1, 2).flatten(2).to(z.dtype))


class Model(NoCache, model_rat.Model):

    def __init__(self, cfg):
        super().__init__(cfg)
        for block in self.blocks:
            if isinstance(block.attn, model_rat.RAT):
                block.attn.__class__ = RAT   # a seed gives the same weights as in model_rat
                block.attn.q_norm = RMSNorm(cfg.head_size, cfg.norm_eps)
                block.attn.k_norm = RMSNorm(cfg.head_size, cfg.norm_eps)
