"""
Text from a trained model, for every model: one decoding loop over forward and cache.

    python sample.py out/gpt_tiny                                  stream 500 tokens
    python sample.py out/gpt_tiny prompt="def main(" temperature=0.7 top_p=0.95
    python sample.py out/gpt_tiny prompt=FILE:notes.txt            the prompt is a file's text
    python sample.py out/gpt_tiny prompt=LINES:prompts.txt         every line is a prompt, all in one batch
    python sample.py out/gpt_tiny num_samples=8 seed=7             eight samples in one batch
    python sample.py out/recall prompt="3 9 1"                     the token ids of a synthetic task (tasks.py)
    python sample.py out/lrt_tiny prompt=FILE:notes.txt prefill=compare    two ways to take in a prompt, and one text
    python sample.py help                                          every key with its meaning

The checkpoint names its own model and tokenizer. Text goes to stdout, everything else to stderr.
"""
import codecs
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from prepare import UserError, asks_help, help_text, run_cli, split_args, typed_config
from tasks import COMPRESSION


@dataclass
class SampleConfig:
    prompt: str = "\n"              # text to continue, literally; FILE:PATH a file's text; LINES:PATH one prompt a line
    max_new_tokens: int = 500        # tokens to write after the prompt
    temperature: float = 0.8         # 0 takes the likeliest token; 1 samples the model's own distribution
    top_k: int = 0                   # sample among the k likeliest tokens (0: all)
    top_p: float = 1.0               # sample among the likeliest tokens that together have this probability
    repetition_penalty: float = 1.0  # above 1 makes tokens that stand in the row already less likely
    num_samples: int = 1             # samples of each prompt, all in one batch
    stop: bool = True                # end a sample at the end-of-text token
    seed: int = 1337                 # of the sampling
    device: str = "auto"             # auto (cuda, mps or cpu, in this order) | cpu | mps | cuda | cuda:N
    fast: bool = True                # the model's fast path; false: its naive one, same text
    prefill: str = ""                # of lrt: exact | interleaved | compare: exact, and how far interleaved is off

    def __post_init__(self):
        for name, low, high in (("max_new_tokens", 1, None), ("temperature", 0, None), ("top_k", 0, None),
                                ("top_p", 0, 1), ("num_samples", 1, None), ("seed", 0, None)):
            value = getattr(self, name)
            if value < low or (high is not None and value > high):
                raise ValueError(f"{name}={value} must be at least {low}" + (f" and at most {high}" if high else ""))
        if self.prefill not in ("", "exact", "interleaved", "compare"):
            raise ValueError(f"prefill={self.prefill} must be one of: exact, interleaved, compare")
        if self.seed >= 2 ** 63:
            raise ValueError(f"seed={self.seed} must be less than 2^63")
        if not 0.01 <= self.repetition_penalty <= 100:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must lie between 0.01 and 100 (1: none)")


def next_tokens(logits, seen, temperature, top_k, top_p, repetition_penalty, generator):
    """One token a row from logits (B, V): (B,) int64. seen (B, V) marks the tokens of each row so far.
    Order: penalty (Keskar et al. 2019: positive logits divided, negative multiplied), temperature, top_k,
    top_p (Holtzman et al. 2020: the smallest set of likeliest tokens that reaches top_p)."""
    if repetition_penalty != 1:
        less = torch.where(logits > 0, logits / repetition_penalty, logits * repetition_penalty)
        logits = torch.where(seen, less, logits)
    if temperature == 0 or top_k == 1:
        return logits.argmax(-1)
    logits = logits / max(temperature, 1e-6)
    if 0 < top_k < logits.size(-1):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        p = ordered.softmax(-1)
        ordered = ordered.masked_fill(p.cumsum(-1) - p >= max(top_p, 1e-9), -torch.inf)     # the first always stays
        logits = torch.empty_like(logits).scatter_(-1, order, ordered)
    return logits.softmax(-1).multinomial(1, generator=generator).squeeze(-1)


def prefill(model, cache, rows):
    """Feed every row's last tokens, as many as the cache may hold, to an emptied cache in one forward.
    Returns the logits after each row's last token (B, V) and how many tokens each row holds."""
    cache.reset()
    rows = [row[-cache.max_len:] for row in rows]
    lengths = [len(row) for row in rows]
    device = next(model.parameters()).device
    idx = torch.tensor([row + [0] * (max(lengths) - len(row)) for row in rows], device=device)      # (B, T)
    n = torch.tensor(lengths, device=device)
    logits, _, _ = model(idx, cache=cache, n_valid=n if min(lengths) < max(lengths) else None)
    return logits[torch.arange(len(rows), device=device), n - 1], lengths


@torch.no_grad()
def stream(model, prompts, max_new_tokens, temperature=0.8, top_k=0, top_p=1.0, repetition_penalty=1.0,
           eot=None, seed=1337, vocab_size=None):
    """Continue prompts, a list of lists of token ids which may differ in length, as one batch.

    Yields one list a step: each row's new token, or None for a row that has met eot. Where a row has filled
    the model's context (context_limit), its last tokens are prefilled again for every further one: each
    token is then predicted from exactly the last context_limit tokens. A model whose prefill is slow keeps fewer
    (context_kept), and the cache goes on from these until it is full again.
    Sampling has a generator of its own, so it changes no other random number. vocab_size is the tokenizer's,
    where the model's is padded beyond it: ids that stand for nothing are never chosen.
    """
    check_prompts(model, prompts)
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    rows, live = [list(p) for p in prompts], [True] * len(prompts)
    need = max(map(len, rows)) + max_new_tokens
    cache = model.init_cache(len(rows), min(need, model.context_limit or need))
    kept = min(getattr(model, "context_kept", cache.max_len), cache.max_len)
    logits, held = prefill(model, cache, rows)
    seen = torch.zeros_like(logits, dtype=torch.bool)
    for b, row in enumerate(rows):
        seen[b, row] = True
    for n in range(max_new_tokens):
        ids = next_tokens(logits[:, :vocab_size], seen[:, :vocab_size], temperature, top_k, top_p, repetition_penalty,
                          generator)
        seen[torch.arange(len(rows), device=device), ids] = True
        new = [i if on and i != eot else None for i, on in zip(ids.tolist(), live)]
        live = [i is not None for i in new]
        yield new
        if not any(live) or n == max_new_tokens - 1:
            return
        for row, i in zip(rows, new):
            row.extend([i] * (i is not None))
        if any(on and h >= cache.max_len for on, h in zip(live, held)):
            logits, held = prefill(model, cache, [row[-(kept if h >= cache.max_len else h + on):]
                                                  for row, h, on in zip(rows, held, live)])
        else:
            n_valid = None if all(live) else torch.tensor(live, device=device).long()
            logits = model(ids[:, None], cache=cache, n_valid=n_valid)[0][:, -1]
            held = [h + on for h, on in zip(held, live)]


def check_prompts(model, prompts):
    """UserError for a prompt without tokens, or with a token that the model does not have."""
    for prompt in prompts:
        if not prompt:
            raise UserError("the prompt is empty: give at least one character")
        if not 0 <= min(prompt) <= max(prompt) < model.cfg.vocab_size:
            raise UserError(f"the prompt has a token outside the model's vocabulary of {model.cfg.vocab_size}")


def choose_prefill(model, how, path):
    """Set how the model takes in a prompt; UserError where it knows one way only."""
    if not hasattr(model.cfg, "prefill") or not model.cfg.memory:
        raise UserError(f"prefill={how} is for a model that takes in prompts in more than one way (lrt with memory), "
                        f"{path} is not")
    model.cfg.prefill = "exact" if how == "compare" else how


@torch.no_grad()
def compare_prefills(model, prompts):
    """A line that tells seconds of both prefills, the second time each, and how far the distributions of the next token
    are apart. prompts: the tokens of each, every prompt once."""
    kept, seconds, found = model.cfg.prefill, {}, {}
    size = min(model.context_limit, max(map(len, prompts)))
    for how in ("exact", "interleaved"):
        model.cfg.prefill = how
        cache = model.init_cache(len(prompts), size)
        for _ in range(2):
            start = time.perf_counter()
            found[how] = prefill(model, cache, prompts)[0].cpu().double().log_softmax(-1)
            seconds[how] = time.perf_counter() - start
    model.cfg.prefill = kept
    a, b = found.values()
    same = int((a.argmax(-1) == b.argmax(-1)).sum())
    return (f"prefill: exact {seconds['exact']:.3f} s, interleaved {seconds['interleaved']:.3f} s; next token: KL "
            f"{(a.exp() * (a - b)).sum(-1).mean():.2g} nats, the likeliest is the same in {same} of {len(a)} rows")


def sample_text(model, tokenizer, prompt, max_new_tokens, **options):
    """prompt and its continuation as one string. The model is put into eval mode."""
    model.eval()
    ids = tokenizer.encode(prompt)
    steps = stream(model, [ids], max_new_tokens, eot=tokenizer.eot, vocab_size=tokenizer.vocab_size, **options)
    new = [step[0] for step in steps]
    return tokenizer.decode(ids + [i for i in new if i is not None])


def read_prompts(text):
    """The prompts that a prompt= argument names."""
    kind, _, path = text.partition(":")
    if kind not in ("FILE", "LINES"):
        return [text]
    try:
        content = Path(path).read_bytes().decode("utf-8")
    except OSError as e:
        raise UserError(f"prompt file {path} cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise UserError(f"prompt file {path} is not UTF-8 text") from e
    prompts = [content] if kind == "FILE" else [line.rstrip("\r") for line in content.split("\n") if line.strip()]
    if not prompts or not prompts[0]:
        raise UserError(f"prompt file {path} is empty")
    return prompts


def read_arguments(argv):
    """(path of the run, SampleConfig) from `PATH key=value ...`."""
    paths = [a for a in argv if "=" not in a]
    if len(paths) != 1:
        raise UserError("give one run folder or checkpoint: python sample.py out/NAME [key=value ...]")
    return paths[0], typed_config(SampleConfig, split_args([a for a in argv if "=" in a]), free_text=("prompt",))


def write_stream(steps, tokenizer):
    """Print the tokens of a single row as they come; bytes of an unfinished character wait. Returns how many."""
    decoder, count = codecs.getincrementaldecoder("utf-8")(errors="replace"), 0
    for (token,) in steps:
        count += 1
        if token is not None:
            print(decoder.decode(tokenizer.decode_bytes([token])), end="", flush=True)
    print(decoder.decode(b"", final=True))
    return count


def write_batch(steps, tokenizer, prompts):
    """Print the rows of a batch one after another, when all are done. Returns how many tokens came."""
    rows = [[] for _ in prompts]
    for new in steps:
        for row, token in zip(rows, new):
            row.extend([token] * (token is not None))
    for ids, row in zip(prompts, rows):
        print(tokenizer.decode(ids + row), "-" * 80, sep="\n", flush=True)
    return sum(map(len, rows))


def main(argv):
    from train import load_run, pick_device     # train.py prints its closing sample through this file
    if asks_help(argv):
        return print(help_text(SampleConfig))
    path, cfg = read_arguments(argv)
    device = pick_device(cfg.device)
    texts = read_prompts(cfg.prompt)
    model, tokenizer, ckpt = load_run(path, device, fast=cfg.fast)
    if ckpt["config"]["dataset"] == COMPRESSION:
        raise UserError(f"{path} was trained on {COMPRESSION}: it gives back what it read, there is nothing to sample")
    prompts = [ids for ids in map(tokenizer.encode, texts) for _ in range(cfg.num_samples)]
    check_prompts(model, prompts)
    if cfg.prefill:
        choose_prefill(model, cfg.prefill, path)
    if cfg.prefill == "compare":
        print(compare_prefills(model, prompts[::cfg.num_samples]), file=sys.stderr)
    limit, longest = model.context_limit, max(map(len, prompts))
    if limit and longest > limit:
        print(f"the prompt has {longest} tokens: cropped to its last {limit} (block_size)", file=sys.stderr)
    start = time.perf_counter()
    steps = stream(model, prompts, cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.top_p,
                   cfg.repetition_penalty, tokenizer.eot if cfg.stop else None, cfg.seed, tokenizer.vocab_size)
    if len(prompts) == 1:
        print(tokenizer.decode(prompts[0]), end="", flush=True)
        count = write_stream(steps, tokenizer)
    else:
        count = write_batch(steps, tokenizer, prompts)
    seconds = time.perf_counter() - start
    print(f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s ({ckpt['model']}, step {ckpt['step']}, "
          f"{device})", file=sys.stderr)


if __name__ == "__main__":
    run_cli(main)
