"""
A control for tasks that need a state: blocks of model_gpt.py with an LSTM (Hochreiter and
Schmidhuber 1997) in the place of attention. It shows what recurrence does without attention.

    h_t, c_t = LSTM(u_t, h_{t-1}, c_{t-1}),    the mixer's output is Wo h_t

u (B, T, C) is the normed input of the layer, and h and c have C / 2 numbers each. So the mixer's
matrices have 3.5 C^2 weights, and those of attention have 4 C^2. Options of attention have no
effect, but with pos=rope, the default, a text is still limited to block_size tokens. The model
trains and evaluates. It has no cache, so that it writes no text.
"""
import torch.nn as nn

import model_gpt
from model_gpt import Config  # noqa: F401
from no_cache import NoCache


class LSTM(nn.Module):

    def __init__(self, cfg):
        super().__init__()
        width = cfg.n_embd // 2
        self.lstm = nn.LSTM(cfg.n_embd, width, batch_first=True)
        self.wo = nn.Linear(width, cfg.n_embd, bias=False)

    def forward(self, u, layer, context):
        """(B, T, C) -> (B, T, C)"""
        return self.wo(self.lstm(u)[0])


class Model(NoCache, model_gpt.LanguageModel):

    def __init__(self, cfg):
        super().__init__(cfg, [model_gpt.Block(cfg, LSTM) for _ in range(cfg.n_layer)])
        model_gpt.init_weights(self, cfg.n_layer)
        for block in self.blocks:
            block.attn.lstm.reset_parameters()      # torch's own initial weights

    def mixer_flops(self):
        return 0.0
