"""
This program continues prompts with a trained model. Its loop, `stream`, serves all models, because
each model has a cache and a forward pass that uses it, and says how long its context may be
(RAT's may have any length).

    python sample.py out/gpt_tiny                           500 tokens, printed as they come
    python sample.py out/gpt_tiny prompt="def main(" temperature=0.7 top_p=0.95
    python sample.py out/gpt_tiny prompt=FILE:notes.txt     the prompt is a file's text
    python sample.py out/gpt_tiny prompt=LINES:prompts.txt  a prompt a line, all in one batch
    python sample.py out/gpt_tiny num_samples=8 seed=7      eight samples in one batch
    python sample.py out/recall prompt="3 9 1"              token ids of a task (common/tasks.py)
    python sample.py help                                   every option with its meaning

The checkpoint names its own model and tokenizer. Text goes to stdout, and all else to stderr.
"""
import sys
import time
from dataclasses import dataclass

import torch

import graphs
from common.checkpoint import load_run
from common.device import pick_device
from common.options import (Options, UserError, choice, home, read_text, run_cli, split_args,
                            typed_config)
from decoding import next_tokens


@dataclass
class Decoding(Options):
    """The options of every command that decodes."""
    device: str = "auto"            # auto (cuda, mps or cpu, in this order) | cpu | mps | cuda:N
    dtype: str = choice("auto", "float32", "bfloat16")  # of weights and cache; auto: as train.py
    fast: bool = True               # false: naive code where decoding has it, no CUDA graph


@dataclass
class Sampling(Decoding):
    """The options that sample.py and serve.py share."""
    max_new_tokens: int = 500       # tokens to write after a prompt
    temperature: float = 0.8        # 0: the likeliest token; 1: the model's distribution
    top_k: int = 0                  # sample among the k likeliest tokens (0: all)
    top_p: float = 1.0              # sample among the fewest tokens that together have this much
    stop: bool = True               # end at the end-of-text token
    seed: int = 1337                # of the random numbers of sampling

    def __post_init__(self):
        self.between(max_new_tokens=(1, 1 << 20), temperature=(0, None), top_k=(0, None),
                     top_p=(0, 1), seed=(0, 2 ** 63 - 1))


@dataclass
class SampleConfig(Sampling):
    prompt: str = ""        # a text, FILE:PATH or LINES:PATH (default: the run's sample_prompt)
    num_samples: int = 1    # samples of each prompt, all in one batch
    prefill: str = choice("", "exact", "interleaved")   # lrt: how prompts are read ("": the run's)

    def __post_init__(self):
        super().__post_init__()
        self.between(num_samples=(1, 1 << 16))


# ---- checks, which serve.py, lab/page.py and lab/eval.py use, too ----

NOT_FINITE = "the model's logits are not finite: its weights, or its sizes, are broken"


def check_finite(logits):
    """Raise a UserError for logits that are not finite."""
    if not logits.isfinite().all():
        raise UserError(NOT_FINITE)


def check_prompts(prompts, vocab_size):
    """Raise a UserError for a prompt that has no token, or has one beyond the vocabulary."""
    for prompt in prompts:
        if not prompt:
            raise UserError("the prompt is empty: give at least one character")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise UserError(f"the prompt has a token outside the vocabulary of {vocab_size}")


# ---- decoding ----

# The loop in `stream` is for prompts that start together. generate in model_gpt.py is a shorter
# loop for rows of equal length, and serve.py has a loop for requests that come and go. All three
# choose a token by decoding.next_tokens.

def prefill(model, cache, rows):
    """Empty the cache and feed it the rows in one call of the model. A row that is longer than the
    cache is cropped to its last tokens. Return the logits after each row's last token, (B, V)."""
    cache.reset()
    rows = [row[-cache.max_len:] for row in rows]
    lengths = [len(row) for row in rows]
    device = next(model.parameters()).device
    padded = [row + [0] * (max(lengths) - len(row)) for row in rows]
    idx = torch.tensor(padded, device=device)                           # (B, T)
    n = torch.tensor(lengths, device=device)
    h = model.decode(idx, cache, n if min(lengths) < max(lengths) else None)    # (B, T, C)
    # The head runs on the last tokens alone, because logits of all tokens may not fit in memory.
    logits = model.head(h[torch.arange(len(rows), device=device), n - 1])       # (B, V)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@torch.inference_mode()
def stream(model, prompts, max_new_tokens, temperature=0.8, top_k=0, top_p=1.0, eot=None,
           seed=1337, vocab_size=None):
    """Continue prompts, which are lists of token ids of any lengths, as one batch.

    Each step yields a list of each row's new token, which is None for a row that has ended with
    eot. In this example the prompts are [5, 6, 7] and [8]. a, b, c and d are new tokens, and the
    second row ends after b. The model then reads:

        forward     idx              n_valid                                yields
        prefill     5 6 7 | 8 0 0    3, 1: the others are padding           a, b
        a step      a | b            None: each row has a new token         c, None
        a step      c | eot          1, 0: the second row gets padding      d, None

    When a row has filled the model's context (context_limit), its last tokens are prefilled again
    for every further token, so that each further token is predicted from exactly the last
    context_limit tokens. A token then costs a forward pass over all these tokens. A model whose
    prefill is slow (LRT) keeps fewer tokens, context_kept, and then goes on by steps until its
    cache is full again. All rows are prefilled when one of them is full. This changes no other
    row's text, unless prefill=interleaved approximates it (LRT).

    Sampling draws from a generator of its own, so that it leaves torch's global generator as it is.
    vocab_size is the tokenizer's. A model's vocabulary may be padded by further ids, which stand
    for nothing and are never chosen.
    """
    check_prompts(prompts, model.cfg.vocab_size)
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    rows, live = [list(p) for p in prompts], [True] * len(prompts)
    need = max(map(len, rows)) + max_new_tokens
    cache = model.init_cache(len(rows), min(need, model.context_limit or need))
    kept = min(model.context_kept or need, cache.max_len)

    def choose(logits):
        """Return a token a row, (B,), from logits (B, 1, V), or -1 where they are not finite."""
        logits = logits[:, -1, :vocab_size]
        ids = next_tokens(logits, temperature, top_k, top_p, generator)
        return ids.masked_fill(~logits.isfinite().all(-1), -1)
    step = graphs.decoder(model, cache, choose, [generator])    # on a GPU, a step is one CUDA graph
    ids = choose(prefill(model, cache, rows)[:, None])
    held = [min(len(row), cache.max_len) for row in rows]       # tokens of each row in the cache
    for n in range(max_new_tokens):
        new = ids.tolist()                                      # this waits for the device
        if -1 in new:
            raise UserError(NOT_FINITE)
        new = [i if on and i != eot else None for i, on in zip(new, live)]
        live = [i is not None for i in new]
        yield new
        if not any(live) or n == max_new_tokens - 1:
            return
        for row, i in zip(rows, new):
            if i is not None:
                row.append(i)
        if any(on and h >= cache.max_len for on, h in zip(live, held)):
            # A full row keeps its last `kept` tokens. Any other row keeps all its tokens, and its
            # new token if it goes on. `on` is True or False and counts as 1 or 0.
            held = [kept if h >= cache.max_len else h + on for h, on in zip(held, live)]
            logits = prefill(model, cache, [row[-size:] for row, size in zip(rows, held)])
            ids = choose(logits[:, None])
        else:
            held = [h + on for h, on in zip(held, live)]
            n_valid = None if all(live) else torch.tensor(live, device=device).long()
            ids = step(ids[:, None], n_valid)


def sample_text(model, tokenizer, prompt, max_new_tokens, **options):
    """Return the prompt and its continuation as one string. The model is put into eval mode."""
    model.eval()
    ids = tokenizer.encode(prompt)
    steps = stream(model, [ids], max_new_tokens, eot=tokenizer.eot,
                   vocab_size=tokenizer.vocab_size, **options)
    new = [step[0] for step in steps]
    return tokenizer.decode(ids + [i for i in new if i is not None])


# ---- the command line ----

def read_prompts(text):
    """Return the prompts that prompt= names: a text, the text of FILE:PATH, or the lines of
    LINES:PATH that are not blank."""
    kind, colon, path = text.partition(":")
    if kind not in ("FILE", "LINES") or not colon:
        return [text]
    content = read_text(home(path), f"prompt file {path}")
    lines = [line.rstrip("\r") for line in content.split("\n") if line.strip()]
    prompts = [content] if kind == "FILE" else lines
    if not prompts or not prompts[0]:
        raise UserError(f"prompt file {path} is empty")
    return prompts


def write_stream(steps, tokenizer, prompts):
    """Print the prompt with its first new token, and then the other tokens as they come. The bytes
    of an unfinished character wait for the rest of it. Return how many tokens came."""
    prompt = tokenizer.decode(prompts[0])
    tokens = (token for (token,) in steps if token is not None)
    # tokenizer.stream yields one text more than there are tokens, so that count, which starts at 0,
    # ends as the number of tokens.
    for count, text in enumerate(tokenizer.stream(tokens)):
        print(text if count else prompt + text, end="", flush=True)
    print()
    return count


def write_batch(steps, tokenizer, prompts):
    """Print the rows of a batch when all are done. Return how many tokens came."""
    rows = [[] for _ in prompts]
    for new in steps:
        for row, token in zip(rows, new):
            if token is not None:
                row.append(token)
    for ids, row in zip(prompts, rows):
        print(tokenizer.decode(ids + row), "-" * 80, sep="\n", flush=True)
    return sum(map(len, rows))


def main(argv):
    (path,), given = split_args(argv, least=1, most=1)
    cfg = typed_config(SampleConfig, given)
    device = pick_device(cfg.device)
    texts = read_prompts(cfg.prompt) if "prompt" in given else []
    changed = {"prefill": cfg.prefill} if cfg.prefill else {}
    model, tokenizer, ckpt = load_run(path, device, cfg.dtype, fast=cfg.fast, **changed)
    prompts = list(map(tokenizer.encode, texts or [ckpt["config"].get("sample_prompt", "\n")]))
    limit, longest = model.context_limit, max(map(len, prompts))
    if limit and longest > limit:
        print(f"the longest prompt has {longest} tokens: prompts are cropped to their last {limit} "
              "(block_size)", file=sys.stderr)
    start = time.perf_counter()
    prompts = [ids for ids in prompts for _ in range(cfg.num_samples)]
    steps = stream(model, prompts, cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.top_p,
                   eot=tokenizer.eot if cfg.stop else None, seed=cfg.seed,
                   vocab_size=tokenizer.vocab_size)
    write = write_batch if len(prompts) > 1 else write_stream
    count = write(steps, tokenizer, prompts)
    seconds = time.perf_counter() - start
    print(f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s ({ckpt['model']}, "
          f"step {ckpt['step']}, {device})", file=sys.stderr)


if __name__ == "__main__":
    run_cli(main, SampleConfig)
