"""A Feedback Transformer (2002.09402), which runs token by token. Each token t leaves one memory m_t, a weighted mean of
its embedding and its states after all L layers, and in every layer the later tokens attend to these memories:

    m_t = sum_l softmax(w)_l x_t^l        l = 0 .. L, where x_t^0 is the embedding

All layers share a memory's key and value. In each layer a token also attends to a pair of that layer's own input. The
paper has no such pair, but without one the first token would attend to nothing."""
import torch
import torch.nn as nn

import model_gpt
from decoding import Cached, KVCache


Config = model_gpt.Config


class Context(model_gpt.Context):
    """The context of one token a row. past has the keys and the values of earlier memories, two lists."""
    past = (), ()

    def extend(self, layer, k, v):
        return [torch.cat([*old, new], 2) for old, new in zip(self.past, (k, v))]

    def remember(self, k, v):
        for old, new in zip(self.past, (k, v)):
            old.append(new)


class CachedContext(Cached, Context):
    """Here extend writes a layer's own pair to the token's slot, which is then overwritten."""

    def remember(self, k, v):
        self.extend(0, k, v)


class Model(model_gpt.Model):
    context_type, cached_context_type = Context, CachedContext
    runs_blocks_once = False    # for FSDP, because each token runs them

    def __init__(self, cfg):
        super().__init__(cfg)
        self.memory_norm = model_gpt.RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.memory_kv = nn.Linear(cfg.n_embd, 2 * cfg.kv_heads * cfg.head_size, bias=False)
        self.mix = nn.Parameter(torch.zeros(cfg.n_layer + 1))       # w
        model_gpt.init_weights(self, cfg.n_layer)

    @torch.compiler.disable     # it would unroll the loop
    def hidden(self, idx, context=None):
        x = self.drop(self.wte(idx))                                # (B, T, C)
        if context is not None:
            return self.one_token(x, context)
        pos, past, states = torch.arange(idx.size(1), device=idx.device), ([], []), []
        for i, x_i in enumerate(x.split(1, 1)):
            context = Context(self.cfg, x_i, pos[None, i:i + 1], pos[:i + 1])
            context.past = past
            states.append(self.one_token(x_i, context))
        return torch.cat(states, 1)

    def one_token(self, x, context):
        """Return the normed last state of one token a row, x (B, 1, C), and keep its memory in the context."""
        states = [x]
        for block in self.blocks:
            x = block(x, 0, context)                                # all layers read layer 0 of a cache
            states.append(x)
        memory = (torch.stack(states, -1) * self.mix.softmax(0)).sum(-1)
        k, v = self.memory_kv(self.memory_norm(memory)).chunk(2, -1)
        k, v = (y.unflatten(-1, (-1, self.cfg.head_size)).transpose(1, 2) for y in (k, v))      # (B, G, 1, D)
        context.remember(model_gpt.apply_rope(k, *context.rope) if context.rope else k, v)
        return self.norm(x)

    def decode(self, idx, cache, n_valid=None):
        cache.place(idx.size(1), n_valid)       # an error comes before the first token is written
        states = []
        for i, idx_i in enumerate(idx.split(1, 1)):
            left = None if n_valid is None else n_valid - i         # 0 or less means padding
            states.append(super().decode(idx_i, cache, left))
        return torch.cat(states, 1)

    def init_cache(self, batch_size, max_len):
        return KVCache(self.cfg, *self.cache_sizes(batch_size, max_len), n_layer=1)

    def block_weights(self):
        return super().block_weights() + self.memory_kv.weight.numel()
