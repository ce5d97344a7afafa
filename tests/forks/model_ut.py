"""A Universal Transformer (1807.03819). The same blocks run in loops, and each loop begins by
adding an embedding of its number."""
from dataclasses import dataclass

import torch.nn as nn

import model_gpt


@dataclass
class Config(model_gpt.Config):
    n_loop: int = 2     # n_layer counts unrolled layers; n_layer / n_loop are stored

    def __post_init__(self):
        super().__post_init__()
        if self.n_loop < 1 or self.n_layer % self.n_loop:
            raise ValueError(f"n_layer={self.n_layer} is not divisible by n_loop={self.n_loop}")


class Model(model_gpt.Model):
    runs_blocks_once = False    # for FSDP

    def __init__(self, cfg):
        super().__init__(cfg)
        self.blocks = self.blocks[:cfg.n_layer // cfg.n_loop]
        self.loop = nn.Embedding(cfg.n_loop, cfg.n_embd)
        nn.init.normal_(self.loop.weight, std=0.02)

    def hidden(self, idx, context=None):
        x = self.drop(self.wte(idx))
        context = context or self.context_type(self.cfg, x)
        for layer in range(self.cfg.n_layer):       # each has its own keys and values
            loop, k = divmod(layer, len(self.blocks))
            if k == 0:
                x = x + self.loop.weight[loop]
            x = self.blocks[k](x, layer, context)
        return self.norm(x)

    def block_weights(self):
        return self.cfg.n_loop * super().block_weights()
