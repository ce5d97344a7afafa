"""
LRT with a value embedding inside of the gate: g_loc scales it too,
    v = g_loc (v_loc + g_ve e) + g_rec v_rec
This is one reading of the paper, which does not say where value embeddings enter. The authors'
code and model_lrt.py add g_ve e after (4), outside of the gate.
"""
from dataclasses import dataclass

import torch

import model_lrt


@dataclass
class Config(model_lrt.Config):

    def __post_init__(self):
        super().__post_init__()
        if not self.into_kv:
            raise ValueError("model=inside needs memory=true and an inject with kv")


class Attention(model_lrt.Attention):

    def forward(self, u, layer, context):
        g_loc = 2 * torch.sigmoid(self.w_gate(u)).chunk(2, -1)[0]       # (B, n, G)
        scaled = g_loc[..., None] * context.ve[layer]
        context.ve = [*context.ve[:layer], scaled, *context.ve[layer + 1:]]     # for this pass
        return super().forward(u, layer, context)


class Model(model_lrt.Model):

    def __init__(self, cfg):
        super().__init__(cfg)
        for block in self.blocks:       # a seed gives the same weights as in model_lrt
            block.attn.__class__ = Attention
