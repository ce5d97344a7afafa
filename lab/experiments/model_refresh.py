"""
LRT with refreshed keys and values (interleaved_kv_refresh of the authors' code, e0d0f6e).

In Algorithm 1 a subset attends to keys and values of positions that no subset has visited yet.
These are of the first pass, which has no memory. Here they are computed again before each subset.
The first pass keeps what it has without a memory: k_loc = g_loc Wk u before its norm and RoPE,
v_loc = g_loc Wv u + 2 sigmoid(Wve u[:32]) VE_l[idx], and its g_rec. The newest memories m are mixed
in as in (4) of model_lrt.py:

    k <- RoPE(RMSNorm(k_loc + g_rec Wk_rec m_{t-1})),  v <- v_loc + g_rec Wv_rec m_{t-1}

So u stays that of the first pass, and a refresh costs projections, but no pass. The exact chain
has nothing to refresh, so that it is that of model_lrt.py.
"""
from dataclasses import dataclass
from unittest import mock

import torch

import model_lrt
from model_gpt import apply_rope
from model_lrt import Context, norm, run_layers, shifted


@dataclass
class Config(model_lrt.Config):

    def __post_init__(self):
        super().__post_init__()
        if not self.into_kv or self.projections == "layerwise":
            raise ValueError("model=refresh needs memory=true, an inject with kv, and "
                             "projections=shared")


class FirstPass(Context):
    """The Context of the first pass, with local {layer: (k_loc, g_rec)}. These are (B, T, G, D) and
    (B, T, G, 1)."""

    def __init__(self, *args):
        super().__init__(*args)
        self.local = {}


class Attention(model_lrt.Attention):

    def forward(self, u, layer, context):
        if isinstance(context, FirstPass):
            g_loc, g_rec = (2 * torch.sigmoid(self.w_gate(u))[..., None]).chunk(2, dim=2)
            context.local[layer] = g_loc * self.wk(u).unflatten(-1, (-1, self.cfg.head_size)), g_rec
        return super().forward(u, layer, context)


def interleaved(model, tokens):
    """Run Algorithm 1 with a refresh before each subset. Return what `interleaved` of model_lrt.py
    returns."""
    N, T, buffer = model.cfg.subsets, tokens.x0.size(1), {}
    zero = torch.zeros_like(tokens.x0[:, :1])
    context = FirstPass(model, tokens, zero, buffer)
    first, m = run_layers(model, context)
    local = {layer: (*context.local[layer], v_loc) for layer, (_, v_loc) in buffer.items()}
    x = first
    for s in range(min(N, T)):
        previous, subset = shifted(m, zero), slice(s, T, N)
        refresh(model, tokens, previous, buffer, local, visited=tokens.pos % N < s)
        context = Context(model, tokens.part(subset), previous[:, subset], buffer, subset)
        new_x, new_m = run_layers(model, context)
        x = torch.slice_scatter(x, new_x, 1, s, T, N)
        m = torch.slice_scatter(m, new_m, 1, s, T, N)
    return x, first, m, buffer


def refresh(model, tokens, previous, buffer, local, visited):
    """Compute the buffer's keys and values anew, from m_{t-1} of all positions, previous (B, T, C),
    but for the positions that are `visited` (B or 1, T)."""
    k_rec, v_rec = model.rec(previous)          # (B, T, G, D)
    visited = visited[:, None, :, None]
    for layer, (k_loc, g_rec, v_loc) in local.items():
        k = apply_rope(norm(k_loc + g_rec * k_rec, model.cfg.norm_eps), *tokens.rope)
        new = k.transpose(1, 2), v_loc + (g_rec * v_rec).transpose(1, 2)        # (B, G, T, D)
        buffer[layer] = [torch.where(visited, a, b) for a, b in zip(buffer[layer], new)]


def refreshing():
    """Return a context manager. Inside it, model_lrt.py calls `interleaved` of this file in the
    place of its own."""
    return mock.patch.object(model_lrt, "interleaved", interleaved)


class Model(model_lrt.Model):

    def __init__(self, cfg):
        super().__init__(cfg)
        for block in self.blocks:       # a seed gives the same weights as in model_lrt
            block.attn.__class__ = Attention

    def forward(self, *args, **kwargs):
        with refreshing():
            return super().forward(*args, **kwargs)

    def hidden(self, *args, **kwargs):
        with refreshing():
            return super().hidden(*args, **kwargs)

    def flops_per_token(self):
        """Return FLOPs as model_lrt does. Each refresh projects the memories of all positions, and
        the first pass computes its keys and gates a second time."""
        if self.cfg.train_path_used != "interleaved":
            return super().flops_per_token()
        memory = sum(p.numel() for p in self.rec.parameters())
        twice = sum(part.weight.numel() for block in self.blocks
                    for part in (block.attn.wk, block.attn.w_gate))
        return super().flops_per_token() + 6.0 * (self.cfg.subsets * memory + twice)
