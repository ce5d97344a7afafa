"""
LRT with a value embedding inside of the gate. In (4) of model_lrt.py g_loc scales Wv u, and then
the value embedding is added. Here g_loc scales both:
    v = g_loc (Wv u + g_ve VE_l[idx]) + g_rec v_rec,    g_ve = 2 sigmoid(Wve u[:32])
This is one reading of the paper, which does not say where value embeddings enter. The authors'
code adds g_ve VE_l[idx] after (4), outside of the gate, as model_lrt.py does.
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
        context.ve = [*context.ve[:layer], scaled, *context.ve[layer + 1:]]     # a new list
        return super().forward(u, layer, context)


class Model(model_lrt.Model):

    def __init__(self, cfg):
        super().__init__(cfg)
        for block in self.blocks:       # a seed gives the same weights as in model_lrt
            block.attn.__class__ = Attention
