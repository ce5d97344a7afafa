"""
Text from a trained model, for every model: one decoding loop over forward and cache.

    python sample.py out/gpt_tiny                           stream 500 tokens
    python sample.py out/gpt_tiny prompt="def main(" temperature=0.7 top_p=0.95
    python sample.py out/gpt_tiny prompt=FILE:notes.txt     the prompt is a file's text
    python sample.py out/gpt_tiny prompt=LINES:prompts.txt  a prompt a line, all in one batch
    python sample.py out/gpt_tiny num_samples=8 seed=7      eight samples in one batch
    python sample.py out/recall prompt="3 9 1"              token ids of a task (tasks.py)
    python sample.py out/lrt_tiny prompt=FILE:notes.txt prefill=compare
    python sample.py out/relaxed_tiny exit=confidence:0.9 show_depth=true
    python sample.py out/mor_tiny prompt=FILE:notes.txt depths=depths.png
    python sample.py help                                   every key with its meaning

The checkpoint names its own model and tokenizer. Text goes to stdout, everything else to stderr.
"""
import codecs
import sys
import time
from dataclasses import dataclass

import torch

from common.checkpoint import load_run
from common.keys import UserError, asks_help, help_text, read_text, run_cli
from lab.plot import pyplot, save_picture
from common.process import check_text_fits, pick_device
from common.sampling import Sampling, check_prompts, loop_fractions, next_tokens, read_arguments
from serve import Request, check_loops, engine_for


@dataclass
class SampleConfig(Sampling):
    prompt: str = "\n"      # text, literally; FILE:PATH a file's text; LINES:PATH a prompt a line
    num_samples: int = 1    # samples of each prompt, all in one batch
    prefill: str = ""       # lrt: exact | interleaved | compare: exact, and its distance
    show_depth: bool = False    # relaxed, mor: colour each token by the loop after which it exited
    depths: str = ""        # mor: a picture to draw of the recursions of each token of the prompt

    def __post_init__(self):
        super().__post_init__()
        self.between(num_samples=(1, None))
        self.one_of("prefill", "", "exact", "interleaved", "compare")


def prefill(model, cache, rows):
    """Feed every row's last tokens, as many as the cache may hold, to an emptied cache in one
    forward. Returns the logits after each row's last token (B, V) and how many tokens each row
    holds."""
    cache.reset()
    rows = [row[-cache.max_len:] for row in rows]
    lengths = [len(row) for row in rows]
    device = next(model.parameters()).device
    padded = [row + [0] * (max(lengths) - len(row)) for row in rows]
    idx = torch.tensor(padded, device=device)                           # (B, T)
    n = torch.tensor(lengths, device=device)
    logits, _, _ = model(idx, cache=cache, n_valid=n if min(lengths) < max(lengths) else None)
    return logits[torch.arange(len(rows), device=device), n - 1], lengths


@torch.no_grad()
def stream(model, prompts, max_new_tokens, temperature=0.8, top_k=0, top_p=1.0,
           repetition_penalty=1.0, eot=None, seed=1337, vocab_size=None):
    """Continue prompts, lists of token ids which may differ in length, as one batch.

    Yields one list a step: each row's new token, or None for a row that has met eot. Where a row
    has filled the model's context (context_limit), its last tokens are prefilled again for every
    further one: each token is predicted from exactly the last context_limit tokens. A model whose
    prefill is slow keeps fewer (context_kept), and the cache goes on from these until it is full.
    Sampling has a generator of its own, so it changes no other random number. vocab_size is the
    tokenizer's, if the model's is padded beyond it: ids that stand for nothing are never chosen.
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
        ids = next_tokens(logits[:, :vocab_size], seen[:, :vocab_size], temperature, top_k, top_p,
                          repetition_penalty, generator)
        seen[torch.arange(len(rows), device=device), ids] = True
        new = [i if on and i != eot else None for i, on in zip(ids.tolist(), live)]
        live = [i is not None for i in new]
        yield new
        if not any(live) or n == max_new_tokens - 1:
            return
        for row, i in zip(rows, new):
            row.extend([i] * (i is not None))
        if any(on and h >= cache.max_len for on, h in zip(live, held)):
            again = [kept if h >= cache.max_len else h + on for h, on in zip(held, live)]
            logits, held = prefill(model, cache, [row[-size:] for row, size in zip(rows, again)])
        else:
            n_valid = None if all(live) else torch.tensor(live, device=device).long()
            logits = model(ids[:, None], cache=cache, n_valid=n_valid)[0][:, -1]
            held = [h + on for h, on in zip(held, live)]


def choose_prefill(model, how, path):
    """Set how the model prefills; UserError if it knows one way only."""
    if not hasattr(model.cfg, "prefill") or not model.cfg.memory:
        raise UserError(f"prefill={how} is for a model that prefills in more than one way (lrt "
                        f"with memory), {path} is not")
    model.cfg.prefill = "exact" if how == "compare" else how


@torch.no_grad()
def compare_prefills(model, prompts):
    """A line that tells seconds of both prefills, the second time each, and how far the
    distributions of the next token are apart. prompts: the tokens of each."""
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
    kl = (a.exp() * (a - b)).sum(-1).mean()
    return (f"prefill: exact {seconds['exact']:.3f} s, interleaved {seconds['interleaved']:.3f} s; "
            f"next token: KL {kl:.2g} nats, the likeliest is the same in {same} of {len(a)} rows")


def sample_text(model, tokenizer, prompt, max_new_tokens, **options):
    """prompt and its continuation as one string. The model is put into eval mode."""
    model.eval()
    ids = tokenizer.encode(prompt)
    steps = stream(model, [ids], max_new_tokens, eot=tokenizer.eot,
                   vocab_size=tokenizer.vocab_size, **options)
    new = [step[0] for step in steps]
    return tokenizer.decode(ids + [i for i in new if i is not None])


# -------------------------------------------------------------------------------------------------
# models that loop over depth: early exit, colours and pictures of depth

COLOURS = (34, 36, 32, 33, 35, 31)      # of the terminal: blue, cyan, green, yellow, magenta, red


def coloured(text, loop, n_loop):
    """text in the colour of a token that exited after loop `loop`, from 1, of n_loop."""
    colour = COLOURS[(loop - 1) * (len(COLOURS) - 1) // max(1, n_loop - 1)]
    return f"\033[{colour}m{text}\033[0m" if text else ""


def write_exits(model, tokenizer, prompts, cfg):
    """Continue prompts with early exit and print them: one as it comes, several when all are done.
    Returns how many tokens came, and after which loops they exited, in words."""
    requests = [Request(list(prompt), cfg.max_new_tokens) for prompt in prompts]
    alone = len(requests) == 1
    for r in requests:
        r.decoder, r.text = codecs.getincrementaldecoder("utf-8")(errors="replace"), ""

    def add(r, text, end=""):
        r.text += text
        if alone:
            print(text, end=end, flush=True)

    def on_token(r):
        new = r.decoder.decode(tokenizer.decode_bytes(r.tokens[-1:]))
        add(r, coloured(new, r.exits[-1], model.n_loop) if cfg.show_depth else new)
    for r in requests:
        add(r, tokenizer.decode(r.prompt))
    engine = engine_for(model, tokenizer, cfg, requests, len(requests), batching="sequence",
                        on_token=on_token)
    for r in engine.run(requests):
        add(r, r.decoder.decode(b"", final=True), end="\n")
    for r in requests if not alone else []:
        print(r.text, "-" * 80, sep="\n", flush=True)
    loops = [loop for r in requests for loop in r.exits]
    words = f"; exited after loop {loop_fractions(loops, model.n_loop)}"
    if cfg.show_depth:
        legend = [coloured(str(b), b, model.n_loop) for b in range(1, model.n_loop + 1)]
        words += " " + " ".join(legend)
    return len(loops), words


def draw_depths(model, tokenizer, prompt, file, width=100):
    """Print a prompt, token ids, each token in the colour of the recursions that it takes, and
    draw the same into a picture. Returns how many take how many, in words."""
    prompt = prompt[:model.context_limit]
    idx = torch.tensor([prompt], device=next(model.parameters()).device)
    loops = model.recursions(idx)[0].tolist()
    texts = list(tokenizer.stream(prompt))      # and one more, of a character that was cut
    print("".join(coloured(text, loop, model.n_loop) for text, loop in zip(texts, loops)))
    pieces, column, row = [], 0, 0                                      # as draw_text takes them
    for loop in range(1, model.n_loop + 1):                             # the legend
        pieces.append((-2, 16 * loop - 16, f"{loop} recursion{'s' * (loop > 1)}", loop))
    for text, loop in zip(texts, loops):
        for piece in text.replace("\t", "    ").splitlines(keepends=True):
            line = piece.rstrip("\n")
            if column and column + len(line) > width:
                column, row = 0, row + 1
            pieces.append((row, column, line, loop))
            column, row = (column + len(line), row) if line == piece else (0, row + 1)
    draw_text(pieces, model.n_loop, file, width)
    return f"{file}: {len(loops)} tokens, recursions {loop_fractions(loops, model.n_loop)}"


def draw_text(pieces, n_loop, file, width):
    """A picture of pieces of text, (row, column, text, recursions), on grounds that are darker the
    more they take."""
    plt = pyplot()
    rows, shade = 1 + max(row for row, *_ in pieces), plt.get_cmap("YlOrRd")
    fig, ax = plt.subplots(figsize=(width * 0.08, (rows + 2) * 0.18))
    ax.set_position((0, 0, 1, 1))
    for row, column, text, loop in pieces:
        color = shade(0.6 * loop / n_loop)
        ax.add_patch(plt.Rectangle((column, -row), len(text), 1, lw=0, color=color))
        for n, letter in enumerate(text):                               # whatever its width
            ax.text(column + n + 0.5, 0.5 - row, letter, family="monospace", fontsize=8,
                    ha="center", va="center", parse_math=False)
    ax.set(xlim=(0, width), ylim=(1 - rows, 3))
    ax.axis("off")
    save_picture(fig, "depths", file, dpi=110)
    plt.close(fig)


def read_prompts(text):
    """The prompts that a prompt= argument names."""
    kind, _, path = text.partition(":")
    if kind not in ("FILE", "LINES"):
        return [text]
    content = read_text(path, f"prompt file {path}")
    lines = [line.rstrip("\r") for line in content.split("\n") if line.strip()]
    prompts = [content] if kind == "FILE" else lines
    if not prompts or not prompts[0]:
        raise UserError(f"prompt file {path} is empty")
    return prompts


def write_stream(steps, tokenizer):
    """Print the tokens of a single row as they come; bytes of an unfinished character wait.
    Returns how many."""
    decoder, count = codecs.getincrementaldecoder("utf-8")(errors="replace"), 0
    for (token,) in steps:
        if token is not None:
            count += 1
            print(decoder.decode(tokenizer.decode_bytes([token])), end="", flush=True)
    print(decoder.decode(b"", final=True))
    return count


def write_batch(steps, tokenizer, prompts):
    """Print the rows of a batch when all are done. Returns how many tokens came."""
    rows = [[] for _ in prompts]
    for new in steps:
        for row, token in zip(rows, new):
            row.extend([token] * (token is not None))
    for ids, row in zip(prompts, rows):
        print(tokenizer.decode(ids + row), "-" * 80, sep="\n", flush=True)
    return sum(map(len, rows))


def main(argv):
    if asks_help(argv):
        return print(help_text(SampleConfig))
    (path,), cfg = read_arguments(argv, SampleConfig)
    device = pick_device(cfg.device)
    texts = read_prompts(cfg.prompt)
    model, tokenizer, ckpt = load_run(path, device, fast=cfg.fast)
    check_loops(model, cfg, path, "exit", "fill", "show_depth", "depths")
    if cfg.depths and not hasattr(model, "recursions"):
        raise UserError(f"depths={cfg.depths} is for a model with a router (mor), {path} is not")
    prompts = list(map(tokenizer.encode, texts))
    check_prompts(model, prompts)
    longest, rows = max(map(len, prompts)), cfg.num_samples * len(prompts)
    check_text_fits(model, rows, longest + cfg.max_new_tokens, device,
                    f"num_samples={cfg.num_samples}, max_new_tokens={cfg.max_new_tokens}")
    prompts = [ids for ids in prompts for _ in range(cfg.num_samples)]
    if cfg.depths:
        return print(draw_depths(model, tokenizer, prompts[0], cfg.depths), file=sys.stderr)
    if cfg.prefill:
        choose_prefill(model, cfg.prefill, path)
    if cfg.prefill == "compare":
        print(compare_prefills(model, prompts[::cfg.num_samples]), file=sys.stderr)
    limit = model.context_limit
    if limit and longest > limit:
        print(f"the prompt has {longest} tokens: cropped to its last {limit} (block_size)",
              file=sys.stderr)
    start, exits = time.perf_counter(), ""
    if cfg.exit or cfg.show_depth:
        count, exits = write_exits(model, tokenizer, prompts, cfg)
    else:
        count = write(model, tokenizer, prompts, cfg)
    seconds = time.perf_counter() - start
    print(f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s ({ckpt['model']}, "
          f"step {ckpt['step']}, {device}{exits})", file=sys.stderr)


def write(model, tokenizer, prompts, cfg):
    """Continue prompts as one batch and print them. Returns how many tokens came."""
    eot = tokenizer.eot if cfg.stop else None
    steps = stream(model, prompts, cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.top_p,
                   cfg.repetition_penalty, eot, cfg.seed, tokenizer.vocab_size)
    if len(prompts) > 1:
        return write_batch(steps, tokenizer, prompts)
    print(tokenizer.decode(prompts[0]), end="", flush=True)
    return write_stream(steps, tokenizer)


if __name__ == "__main__":
    run_cli(main)
