"""A Universal Transformer (1807.03819): the same blocks run in loops, each after an embedding of its number."""
from dataclasses import dataclass

import torch.nn as nn

import model_gpt


@dataclass
class Config(model_gpt.Config):
    n_loop: int = 2     # loops; n_layer counts unrolled layers, n_layer / n_loop are stored

    def __post_init__(self):
        super().__post_init__()
        if self.n_loop < 1 or self.n_layer % self.n_loop:
            raise ValueError(f"n_layer={self.n_layer} is not divisible by n_loop={self.n_loop}")


class Model(model_gpt.Model):
    runs_blocks_once = False

    def __init__(self, cfg):
        stored = cfg.n_layer // cfg.n_loop
        model_gpt.LanguageModel.__init__(self, cfg, [model_gpt.Block(cfg) for _ in range(stored)])
        self.loop = nn.Embedding(cfg.n_loop, cfg.n_embd)
        model_gpt.init_weights(self, cfg.n_layer)

    def hidden(self, idx, cache=None, n_valid=None):
        x = self.drop(self.wte(idx))
        context = self.context_type(self.cfg, x, cache, n_valid)
        for layer in range(self.cfg.n_layer):       # the cache has a place for each
            loop, k = divmod(layer, len(self.blocks))
            x = x + self.loop.weight[loop] if k == 0 else x
            x = self.blocks[k](x, layer, context)
        if cache is not None:
            cache.advance(context.slots)
        return self.norm(x)

    def block_weights(self):
        return self.cfg.n_loop * super().block_weights()
