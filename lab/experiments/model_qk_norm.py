"""
RAT with QK-norm, model_gpt's: RMSNorm with a weight on each head's query and key, before RoPE.

norm=keys       of k, before the recurrence
norm=states     of k~, after it: what queries attend to
The forward is RAT.forward and rat_fast of model_rat.py in one, with the norms. It trains and
evaluates; there is no cache (sample_tokens=0).
"""
from dataclasses import dataclass

import torch

import kernels
import model_rat
from common.options import UserError
from model_gpt import RMSNorm, apply_rope, choice, upcast


@dataclass
class Config(model_rat.Config):
    norm: str = choice("keys", "states")


class RAT(model_rat.RAT):

    def forward(self, u, layer, context):
        cfg, L, D = self.cfg, self.cfg.chunk, self.cfg.head_size
        z, g, v, q, k = self.w_in(u).split(self.widths, -1)
        q, k = (x.unflatten(-1, (-1, D)) for x in (q, k))       # (B, T, G, D)
        q = self.q_norm(q)
        if cfg.norm == "keys":
            k = self.k_norm(k)
        copies = cfg.n_head // cfg.qk_groups
        q, k = (torch.cat([x] * copies, 2).flatten(2) for x in (q, k))
        a = torch.sigmoid(upcast(g) + self.gate_bias)
        k_state, v_state = (kernels.scan(a, upcast(x), L) for x in (k, v))
        q, k_state, v_state = (model_rat.in_heads(x, cfg) for x in (q, k_state, v_state))
        if cfg.norm == "states":
            k_state = self.k_norm(k_state)
        final_k, final_v, cos, sin = (
            x[:, :, L - 1::L] for x in (k_state, v_state, *context.rope["rat"]))
        y = model_rat.read_states(q, k_state, v_state, apply_rope(final_k, cos, sin), final_v,
                                  context)
        return self.wo(torch.sigmoid(z) * y.transpose(1, 2).flatten(2).to(z.dtype))


class Model(model_rat.Model):

    def __init__(self, cfg):
        super().__init__(cfg)
        for block in self.blocks:
            if isinstance(block.mix, model_rat.RAT):
                block.mix.__class__ = RAT   # the same weights as model_rat's of this seed
                block.mix.q_norm = RMSNorm(cfg.head_size, cfg.norm_eps)
                block.mix.k_norm = RMSNorm(cfg.head_size, cfg.norm_eps)

    def init_cache(self, *sizes):
        raise UserError("this model has no cache to decode with: it trains (sample_tokens=0) and "
                        "evaluates")
