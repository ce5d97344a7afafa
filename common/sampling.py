"""
How the next token is chosen: the keys that sample.py and serve.py share, and the choice itself.
"""
from dataclasses import dataclass

import torch

from common.keys import Keys, UserError


@dataclass
class Decoding(Keys):
    """The keys of every command that decodes."""
    device: str = "auto"            # auto (cuda, mps or cpu, in this order) | cpu | mps | cuda:N
    fast: bool = True               # the model's fast path; false: its naive one, the same text


@dataclass
class Sampling(Decoding):
    """The keys that sample.py and serve.py share."""
    max_new_tokens: int = 500       # tokens to write after a prompt
    temperature: float = 0.8        # 0: the likeliest token; 1: the model's distribution
    top_k: int = 0                  # sample among the k likeliest tokens (0: all)
    top_p: float = 1.0              # sample among the likeliest with this probability together
    stop: bool = True               # end at the end-of-text token
    seed: int = 1337                # of the sampling

    def __post_init__(self):
        self.between(max_new_tokens=(1, 1 << 20), temperature=(0, None), top_k=(0, None),
                     top_p=(0, 1), seed=(0, 2 ** 63 - 1))


def check_finite(logits):
    if not logits.isfinite().all():
        raise UserError("the model's logits are not finite: its weights, or its sizes, are broken")


def next_tokens(logits, temperature, top_k, top_p, generator):
    """One token a row from logits (B, V): (B,) int64. Order: temperature, top_k, top_p (Holtzman
    et al. 2020: the smallest set of likeliest tokens that reaches top_p)."""
    check_finite(logits)
    if temperature == 0 or top_k == 1:
        return logits.argmax(-1)
    logits = logits / max(temperature, 1e-6)
    if 0 < top_k < logits.size(-1):
        kth = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        p = ordered.softmax(-1)
        enough = p.cumsum(-1) - p >= max(top_p, 1e-9)   # the first always stays
        ordered = ordered.masked_fill(enough, -torch.inf)
        logits = torch.empty_like(logits).scatter_(-1, order, ordered)
    return logits.softmax(-1).multinomial(1, generator=generator).squeeze(-1)


def check_prompts(prompts, vocab_size):
    """UserError for a prompt without tokens, or with a token beyond the vocabulary."""
    for prompt in prompts:
        if not prompt:
            raise UserError("the prompt is empty: give at least one character")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise UserError(f"the prompt has a token outside the vocabulary of {vocab_size}")


def loop_fractions(loops, n_loop):
    """How many of loops, one for each token, are 1, 2, .. n_loop: 1: 60%, 2: 40%."""
    return ", ".join(f"{b}: {loops.count(b) / max(1, len(loops)):.0%}"
                     for b in range(1, n_loop + 1))
