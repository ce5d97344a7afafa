"""
Text from a trained model, for every model: one decoding loop over forward and cache.

    python sample.py out/gpt_tiny                                  stream 500 tokens
    python sample.py out/gpt_tiny prompt="def main(" temperature=0.7 top_p=0.95
    python sample.py out/gpt_tiny prompt=FILE:notes.txt            the prompt is a file's text
    python sample.py out/gpt_tiny prompt=LINES:prompts.txt         every line is a prompt, all in one batch
    python sample.py out/gpt_tiny num_samples=8 seed=7             eight samples in one batch
    python sample.py out/recall prompt="3 9 1"                     the token ids of a synthetic task (tasks.py)
    python sample.py out/lrt_tiny prompt=FILE:notes.txt prefill=compare    two ways to take in a prompt, and one text
    python sample.py out/relaxed_tiny exit=confidence:0.9 show_depth=true   tokens may leave after any loop; which did
    python sample.py out/mor_tiny prompt=FILE:notes.txt depths=depths.png   how many recursions each token takes
    python sample.py out/relaxed_tiny requests=FILE.jsonl batching=depth   serve many requests; answers as JSON lines
    python sample.py help                                          every key with its meaning

The checkpoint names its own model and tokenizer. Text goes to stdout, everything else to stderr.

A line of a requests file is a JSON object: {"prompt": "def ", "max_new_tokens": 50, "arrival": 1.5, "id": "a"}, of
which only the prompt must be there; arrival is in seconds after the start. Its answer, written when it is ready, has
the id (or the line's number), text, tokens, exits (the loop after which each token left) and latency in seconds since
its arrival. A line that is no such object is answered by one with "error", and harms no other.
"""
import codecs
import json
import math
import sys
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from tqdm import tqdm

from limits import check_text_fits
from prepare import UserError, asks_help, help_text, read_bytes, run_cli, split_args, typed_config
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
    seed: int = 1337                 # of the sampling (with exit and show_depth each row has random numbers of its own)
    device: str = "auto"             # auto (cuda, mps or cpu, in this order) | cpu | mps | cuda | cuda:N
    fast: bool = True                # the model's fast path; false: its naive one, same text
    prefill: str = ""                # of lrt: exact | interleaved | compare: exact, and how far interleaved is off
    exit: str = ""                   # of relaxed: static:LOOP | confidence:P | margin:P | oracle (empty: no early exit)
    fill: str = ""                   # of relaxed: deeper keys of tokens that left early: exact | propagate
    show_depth: bool = False         # of relaxed, mor: colour each token by the loop after which it left
    depths: str = ""                 # of mor: a picture to draw of the recursions that each token of the prompt takes
    requests: str = ""               # of relaxed, mor: a file of requests to serve, one JSON object a line
    batching: str = "depth"          # of requests: static | sequence | depth, see Engine
    slots: int = 16                  # of requests: how many are in work at a time
    max_len: int = 0                 # of requests: most tokens of one, where positions have no end (0: 8 block_size)

    def __post_init__(self):
        for name, low, high in (("max_new_tokens", 1, None), ("temperature", 0, None), ("top_k", 0, None),
                                ("top_p", 0, 1), ("num_samples", 1, None), ("seed", 0, None), ("slots", 1, 4096),
                                ("max_len", 0, 1 << 30)):
            value = getattr(self, name)
            if value < low or (high is not None and value > high):
                raise ValueError(f"{name}={value} must be at least {low}" + (f" and at most {high}" if high else ""))
        for name, allowed in (("prefill", ("exact", "interleaved", "compare")), ("fill", ("exact", "propagate")),
                              ("batching", ("static", "sequence", "depth"))):
            if getattr(self, name) not in allowed and (name == "batching" or getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} must be one of: {', '.join(allowed)}")
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


# ---------------------------------------------------------------------------------------------------------
# models that loop over depth: early exit, and many requests at a time

EXITS = "static:LOOP, confidence:P, margin:P, oracle"


def exit_rule(text, n_loop):
    """What exit= names: a function of one loop's logits (R, V) and that loop (R,), from 0, which tells the rows whose
    token leaves there, (R,) bool; None where every token takes all loops. confidence: the likeliest token has more than
    that probability; margin: more than the second one by that (Schuster et al. 2022). oracle, for measuring: the
    earliest loop whose likeliest token is the last loop's. It needs the last loop, so nothing leaves early; the Engine
    counts.
    """
    kind, _, value = text.partition(":")
    if text in ("", "oracle"):
        return None
    try:
        bound = int(value) if kind == "static" else float(value)
    except ValueError:
        bound = math.nan
    if kind == "static" and 1 <= bound <= n_loop:
        return lambda logits, depth: depth >= bound - 1
    if kind == "confidence" and 0 <= bound <= 1:
        return lambda logits, depth: (logits.softmax(-1).amax(-1) > bound).cpu()
    if kind == "margin" and 0 <= bound <= 1:
        top = lambda logits: logits.softmax(-1).topk(2).values
        return lambda logits, depth: (top(logits).diff(dim=-1)[:, 0] < -bound).cpu()
    raise UserError(f"exit={text}: {EXITS} are allowed, LOOP from 1 to {n_loop}, P from 0 to 1")


@dataclass
class Request:
    """A text to continue, and what has become of it."""
    prompt: list                     # token ids
    max_new_tokens: int
    arrival: float = 0.0             # seconds after the start
    id: object = None
    tokens: list = field(default_factory=list)     # the answer, without end-of-text
    exits: list = field(default_factory=list)      # for each of them, the loop after which it left, from 1
    latency: float = 0.0             # seconds from arrival to the last token


class Engine:
    """Decodes many requests in `slots` rows of one cache, for models that offer n_loop, enter, loop, logits, and leave
    (a rule decides where a token leaves, exit) or finish (a router does, and the cache knows).

    static: a batch starts when the one before has ended. sequence: a row whose request has ended takes the next at once
    (continuous sequence-wise batching); all rows go through the loops in step, those left early wait for the rest.
    depth: every row goes its own way: a step is one loop for all rows, each at its own depth, and a row whose token
    leaves starts its next token in the next step (continuous depth-wise batching, Bae et al. 2024, Section 2.4).

    What a request is answered depends on none of this: it is what it would get alone (when sampling: with the random
    numbers of its place in the queue). Under a rule prompts are taken in by all loops, so that their keys are complete;
    a router decides about each of their tokens. A row whose text outgrows max_len goes on as stream does, from its last
    max_len tokens.
    """

    def __init__(self, model, slots, max_len, batching="depth", exit="", eot=None, vocab_size=None, temperature=0.0,
                 top_k=0, top_p=1.0, repetition_penalty=1.0, seed=1337, clock=time.perf_counter, sleep=time.sleep,
                 on_token=None):
        if batching == "depth" and not model.cfg.share.endswith("cycle"):
            raise UserError(f"batching=depth needs loops over the same blocks, so share=cycle, not {model.cfg.share}")
        self.model, self.batching, self.max_len, self.eot, self.vocab_size = model, batching, max_len, eot, vocab_size
        self.routed = hasattr(model, "finish")
        if not exit and not self.routed and model.cfg.exit_loop:    # the model itself lets every token leave there
            exit = f"static:{model.cfg.exit_loop}"
        self.oracle, self.rule = exit == "oracle", exit_rule(exit, model.n_loop)
        self.sampling, self.seed = (temperature, top_k, top_p, repetition_penalty), seed
        self.clock, self.sleep, self.on_token = clock, sleep, on_token
        self.device = next(model.parameters()).device
        self.cache = model.init_cache(slots, max_len)
        self.requests, self.done, self.admitted = [None] * slots, [], 0
        self.texts, self.generators = [None] * slots, [None] * slots
        self.depth = [0] * slots                                # the loop that a row's tokens go through next, from 0
        self.n = [1] * slots                                    # how many these are: a whole text, then one by one
        self.whole = [False] * slots                            # whether they are a text: it goes through all loops
        self.h = [None] * slots                                 # (n, C) of each row: their states between loops
        self.early = [None] * slots                             # of a text: (depth, logits) where its last token left
        self.guesses = [[] for _ in range(slots)]               # oracle: the likeliest token after each loop

    @torch.inference_mode()
    def run(self, requests):
        """Yields each of the requests (a list of Request) when it is answered."""
        queue, start = deque(sorted(requests, key=lambda r: r.arrival)), self.clock()
        while queue or any(self.requests):
            now = self.clock() - start
            if not any(self.requests) and queue[0].arrival > now:
                self.sleep(queue[0].arrival - now)
                continue
            self.admit(queue, now)
            self.step()
            now, done, self.done = self.clock() - start, self.done, []
            for request in done:
                request.latency = now - request.arrival
                yield request

    def admit(self, queue, now):
        """Give free rows to the requests that have arrived, and take in their prompts."""
        if self.batching == "static" and any(self.requests):
            return
        for row in [row for row, request in enumerate(self.requests) if request is None]:
            if queue and queue[0].arrival <= now:
                self.requests[row] = request = queue.popleft()
                self.generators[row] = self.generator(self.admitted)
                self.admitted += 1
                self.take_in(row, list(request.prompt))

    def take_in(self, row, text):
        """Let the row start with a text, of which it keeps as much as fits."""
        self.cache.reset([row])
        self.texts[row], self.depth[row] = text, 0
        self.n[row], self.whole[row] = min(len(text), self.max_len), True

    def generator(self, n):
        """The random numbers of the n-th request: its own, so that its neighbours do not change it."""
        word = np.random.SeedSequence([self.seed, n]).generate_state(1, np.uint64)[0]
        return torch.Generator(self.device).manual_seed(int(word >> np.uint64(1)))

    def step(self):
        """One step of the rows in work: one loop (depth), or one token (static, sequence)."""
        rows = [row for row, request in enumerate(self.requests) if request is not None]
        for row in rows:
            if len(self.texts[row]) > self.max_len and not self.depth[row] and not self.whole[row]:
                self.take_in(row, self.texts[row])
        while rows:
            rows = self.advance(rows)
            if self.batching == "depth":
                return

    def advance(self, rows):
        """One loop further for the tokens of rows. Returns the rows whose tokens go on to another."""
        rows = sorted(rows, key=lambda row: (self.whole[row], self.depth[row]))     # like ones side by side: quicker
        self.begin([row for row in rows if self.depth[row] == 0])
        counts, depth = [self.n[row] for row in rows], torch.tensor([self.depth[row] for row in rows])
        h, n, which = torch.cat([self.h[row] for row in rows]), torch.tensor(counts), torch.tensor(rows)    # h (N, C)
        h = self.model.loop(h, depth, self.cache, which, n)
        left = self.routed_away(h, which, n) if self.routed else self.ruled_away(h, depth, which, n)
        for row, states in zip(rows, h.split(counts)):
            self.h[row] = states
        on = [row for row, gone in zip(rows, left.tolist()) if not gone]
        for row in on:
            self.depth[row] += 1
        return on

    def begin(self, rows):
        """Embed the tokens that rows take in next."""
        if not rows:
            return
        counts = [self.n[row] for row in rows]
        idx = [token for row, n in zip(rows, counts) for token in self.texts[row][-n:]]
        h = self.model.enter(torch.tensor(idx, device=self.device), self.cache, *map(torch.tensor, (rows, counts)))
        for row, states in zip(rows, h.split(counts)):
            self.h[row] = states

    def newest(self, h, n):
        """Of states h (N, ..) of n (R,) tokens a row, those of each row's last one (R, ..)."""
        return h if len(h) == len(n) else h[(n.cumsum(0) - 1).to(self.device)]

    def routed_away(self, h, rows, n):
        """Which of the rows, with states h (N, ..) of n (R,) tokens each, have none that the router sends through
        another loop, (R,) bool; those are predicted from."""
        left = ~self.cache.goes_on(rows, n)
        if left.any():
            if not left.all():
                h, rows, n = h[left.repeat_interleave(n).to(self.device)], rows[left], n[left]
            h = self.newest(self.model.finish(h, self.cache, rows, n), n)
            exits = self.cache.exits(rows) - 1
            self.emit(rows.tolist(), exits.tolist(), self.model.logits(h)[:, :self.vocab_size])
        return left

    def ruled_away(self, h, depth, rows, n):
        """The same where a rule decides about each row's newest token, and tells the model who leaves early."""
        newest = self.newest(h, n)
        left = self.decide(newest, depth, rows)
        early = left & (depth < self.model.n_loop - 1)
        if early.any():
            self.model.leave(newest[early.to(self.device)], depth[early], self.cache, rows[early])
        return left

    def decide(self, h, depth, rows):
        """Which of the rows' newest tokens, with states h (R, C) after loop depth (R,), leave, (R,) bool; those are
        predicted from. The last token of a text leaves with the others of it, after the last loop, but what it is
        predicted from is the loop after which it would have left alone."""
        last = depth == self.model.n_loop - 1
        asked = last if self.rule is None and not self.oracle else torch.ones_like(last)
        if not asked.any():
            return last
        logits = self.model.logits(h[asked.to(self.device)])[:, :self.vocab_size]        # (rows asked, V)
        left = last if self.rule is None else last | self.rule(logits, depth)
        for row, guess in zip(rows.tolist(), logits.argmax(-1).tolist() if self.oracle else ()):
            self.guesses[row].append(guess)
        whole = torch.tensor([self.whole[row] for row in rows.tolist()])
        for n in (left & whole).nonzero()[:, 0].tolist() if self.rule is not None else ():
            self.early[rows[n]] = self.early[rows[n]] or (int(depth[n]), logits[n].clone())
        left = left & (last | ~whole)
        if left.any():
            self.emit(rows[left].tolist(), depth[left].tolist(), logits[left[asked].to(self.device)])
        return left

    def emit(self, rows, depths, logits):
        """Give each row its next token from logits (rows, V), and end what is answered."""
        for n, row in enumerate(rows):
            if self.early[row] is not None:
                (depths[n], logits[n]), self.early[row] = self.early[row], None
        for row, depth, token in zip(rows, depths, self.pick(rows, logits)):
            request, self.depth[row], self.n[row], self.whole[row] = self.requests[row], 0, 1, False
            if self.oracle:
                depth, self.guesses[row] = self.guesses[row].index(self.guesses[row][-1]), []
            if token != self.eot:
                request.tokens.append(token)
                request.exits.append(depth + 1)
                self.texts[row].append(token)
                if self.on_token is not None:
                    self.on_token(request)
            if token == self.eot or len(request.tokens) == request.max_new_tokens:
                self.requests[row] = None
                self.done.append(request)

    def pick(self, rows, logits):
        """A token a row, a list: the likeliest, or one sampled with the request's own random numbers."""
        temperature, top_k, top_p, penalty = self.sampling
        if temperature == 0 and penalty == 1:
            return logits.argmax(-1).tolist()
        tokens = []
        for n, row in enumerate(rows):
            seen = torch.zeros_like(logits[:1], dtype=torch.bool)
            if penalty != 1:
                seen[0, self.texts[row]] = True
            tokens.append(int(next_tokens(logits[n:n + 1], seen, temperature, top_k, top_p, penalty,
                                          self.generators[row])))
        return tokens


def read_requests(path, tokenizer, model, max_new_tokens, longest=None):
    """The requests in a file, of at most `longest` tokens each, and of the lines that hold none the answers that tell
    why: (list of Request, list of dict). UserError where there is no such file, or nothing in it."""
    try:
        lines = read_bytes(path).split(b"\n")
    except OSError as e:
        raise UserError(f"requests={path} cannot be read: {e.strerror}") from e
    requests, errors = [], []
    for n, line in enumerate(lines, 1):
        if not line.strip():
            continue
        given = None
        try:
            given = json.loads(line.decode())
            requests.append(parse_request(given, n, tokenizer, model, max_new_tokens, longest))
        except (UserError, ValueError, OverflowError, RecursionError) as e:
            name = given.get("id", n) if isinstance(given, dict) else n
            name = name if is_id(name) else n
            what = str(e) if isinstance(e, UserError) else "not a line of JSON in UTF-8"
            errors.append({"id": name, "line": n, "error": " ".join(what.split())})
    if not requests and not errors:
        raise UserError(f"requests={path} is empty: one JSON object a line")
    return requests, errors


def is_id(value):
    """Whether a JSON value can name a request: a text, a number that JSON can write, or null."""
    return value is None or isinstance(value, (str, int)) or isinstance(value, float) and math.isfinite(value)


def parse_request(given, n, tokenizer, model, max_new_tokens, longest=None):
    """The Request of one line's JSON value; UserError where it is none."""
    kinds = {"prompt": str, "max_new_tokens": int, "arrival": (int, float), "id": object}
    if not isinstance(given, dict):
        raise UserError("a request is a JSON object")
    for key, value in given.items():
        if key not in kinds:
            raise UserError(f"unknown key {key!r:.60}: the keys are {', '.join(kinds)}")
        if not isinstance(value, kinds[key]) or isinstance(value, bool) or key == "id" and not is_id(value):
            raise UserError(f"{key} has a wrong type: {value!r:.60}")
    if not given.get("prompt"):
        raise UserError("the prompt is empty: give at least one character")
    count, arrival = given.get("max_new_tokens", max_new_tokens), given.get("arrival", 0.0)
    if not 1 <= count <= 1 << 20:
        raise UserError(f"max_new_tokens={count} must be at least 1 and at most {1 << 20}")
    if not 0 <= arrival < 1e9:
        raise UserError(f"arrival={arrival!r:.60} must be seconds, 0 or more")
    prompt = tokenizer.encode(given["prompt"])
    check_prompts(model, [prompt])
    if longest is not None and len(prompt) + count > longest:       # one long request would make every row as long
        raise UserError(f"max_new_tokens={count} after a prompt of {len(prompt)} is more than max_len={longest}")
    return Request(prompt, count, float(arrival), given.get("id", n))


def engine_for(model, tokenizer, cfg, requests, slots, **options):
    """An Engine as large as the requests need."""
    need = max(len(r.prompt) + r.max_new_tokens for r in requests)
    check_text_fits(model, min(slots, len(requests)), need, next(model.parameters()).device,
                    f"slots={slots} and requests of {need} tokens")
    return Engine(model, min(slots, len(requests)), min(need, model.context_limit or need), exit=cfg.exit,
                  eot=tokenizer.eot if cfg.stop else None, vocab_size=tokenizer.vocab_size, temperature=cfg.temperature,
                  top_k=cfg.top_k, top_p=cfg.top_p, repetition_penalty=cfg.repetition_penalty, seed=cfg.seed, **options)


def serve(model, tokenizer, cfg):
    """Answer the requests of a file, a JSON line each. Returns a summary."""
    longest = None if model.context_limit else cfg.max_len or 8 * model.cfg.block_size
    requests, errors = read_requests(cfg.requests, tokenizer, model, cfg.max_new_tokens, longest)
    for error in errors:
        print(json.dumps(error), flush=True)
    if not requests:
        return f"no request in {cfg.requests}, {len(errors)} errors"
    engine, start = engine_for(model, tokenizer, cfg, requests, cfg.slots, batching=cfg.batching), time.perf_counter()
    with tqdm(total=len(requests), unit="request", desc=cfg.batching) as bar:
        for r in engine.run(requests):
            print(json.dumps({"id": r.id, "text": tokenizer.decode(r.tokens), "tokens": r.tokens, "exits": r.exits,
                              "latency": round(r.latency, 4)}), flush=True)
            bar.update()
    seconds = time.perf_counter() - start
    latencies = sorted(r.latency for r in requests)
    count = sum(len(r.tokens) for r in requests)
    return (f"{len(requests)} requests, {len(errors)} errors, {count} tokens in {seconds:.2f} s: "
            f"{count / seconds:.1f} tokens/s; latency {latencies[len(latencies) // 2]:.2f} s (median), "
            f"{latencies[int(0.95 * len(latencies))]:.2f} s (95 %); {exit_shares(requests, model.n_loop)}; "
            f"cache {engine.cache.nbytes():,} bytes")


def exit_shares(requests, n_loop):
    """How many of the tokens left after each loop, in words."""
    return f"left after loop {loop_shares([loop for r in requests for loop in r.exits], n_loop)}"


def loop_shares(loops, n_loop):
    """How many of loops, one for each token, are 1, 2, .. n_loop: 1: 60%, 2: 40%."""
    return ", ".join(f"{b}: {loops.count(b) / max(1, len(loops)):.0%}" for b in range(1, n_loop + 1))


COLOURS = (34, 36, 32, 33, 35, 31)      # of the terminal: blue, cyan, green, yellow, magenta, red


def coloured(text, loop, n_loop):
    """text in the colour of a token that left after loop `loop`, from 1, of n_loop."""
    colour = COLOURS[(loop - 1) * (len(COLOURS) - 1) // max(1, n_loop - 1)]
    return f"\033[{colour}m{text}\033[0m" if text else ""


def write_exits(model, tokenizer, prompts, cfg):
    """Continue prompts with early exit and print them: one as it comes, several when all are done. Returns how many
    tokens came, and where they left, in words."""
    requests, alone = [Request(list(prompt), cfg.max_new_tokens) for prompt in prompts], len(prompts) == 1
    decoders = {id(r): codecs.getincrementaldecoder("utf-8")(errors="replace") for r in requests}
    texts = {id(r): "" for r in requests}

    def show(text, end=""):
        if alone:
            print(text, end=end, flush=True)
        return text

    def take(r):
        new = decoders[id(r)].decode(tokenizer.decode_bytes(r.tokens[-1:]))
        texts[id(r)] += show(coloured(new, r.exits[-1], model.n_loop) if cfg.show_depth else new)

    show(tokenizer.decode(prompts[0]))
    engine = engine_for(model, tokenizer, cfg, requests, len(requests), batching="sequence", on_token=take)
    for r in engine.run(requests):
        texts[id(r)] += show(decoders[id(r)].decode(b"", final=True), end="\n")
    for r in [] if alone else requests:
        print(tokenizer.decode(r.prompt) + texts[id(r)], "-" * 80, sep="\n", flush=True)
    colours = " ".join(coloured(str(b), b, model.n_loop) for b in range(1, model.n_loop + 1)) if cfg.show_depth else ""
    return sum(len(r.tokens) for r in requests), "; " + " ".join([exit_shares(requests, model.n_loop), colours]).strip()


def draw_depths(model, tokenizer, prompt, file, width=100):
    """Print a prompt, token ids, each token in the colour of the recursions that it takes, and draw the same into a
    picture. Returns how many take how many, in words."""
    prompt = prompt[:model.context_limit]
    loops = model.recursions(torch.tensor([prompt], device=next(model.parameters()).device))[0].tolist()
    texts = [tokenizer.decode([token]) for token in prompt]
    print("".join(coloured(text, loop, model.n_loop) for text, loop in zip(texts, loops)))
    pieces, column, row = [], 0, 0                                      # (row, column, text, recursions)
    for text, loop in zip(texts, loops):
        for piece in text.replace("\t", "    ").splitlines(keepends=True):
            if column and column + len(piece.rstrip("\n")) > width:
                column, row = 0, row + 1
            pieces.append((row, column, piece.rstrip("\n"), loop))
            column, row = (0, row + 1) if piece.endswith("\n") else (column + len(piece), row)
    legend = [(-2, 16 * loop - 16, f"{loop} recursion{'s' * (loop > 1)}", loop) for loop in range(1, model.n_loop + 1)]
    draw_text(legend + pieces, model.n_loop, file, width)
    return f"{file}: {len(loops)} tokens, recursions {loop_shares(loops, model.n_loop)}"


def draw_text(pieces, n_loop, file, width):
    """A picture of pieces of text, (row, column, text, recursions), on grounds that are darker the more they take."""
    from train import save_picture
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    rows, shade = 1 + max(row for row, *_ in pieces), plt.get_cmap("YlOrRd")
    fig, ax = plt.subplots(figsize=(width * 0.08, (rows + 2) * 0.18))
    ax.set_position((0, 0, 1, 1))
    for row, column, text, loop in pieces:
        ax.add_patch(plt.Rectangle((column, -row), len(text), 1, lw=0, color=shade(0.6 * loop / n_loop)))
        for n, letter in enumerate(text):                               # fonts differ in width: each in its place
            ax.text(column + n + 0.5, 0.5 - row, letter, family="monospace", fontsize=8, ha="center", va="center",
                    parse_math=False)
    ax.set(xlim=(0, width), ylim=(1 - rows, 3))
    ax.axis("off")
    save_picture(fig, "depths", file, dpi=110)
    plt.close(fig)


def check_loops(model, cfg, path):
    """Set how the model fills in what early exit leaves out; UserError where keys for models that loop over depth are
    given for another."""
    given = [key for key in ("exit", "fill", "show_depth", "requests", "depths") if getattr(cfg, key)]
    if given and not hasattr(model, "loop"):
        raise UserError(f"{given[0]}={getattr(cfg, given[0])} is for a model that loops over depth (relaxed, mor), "
                        f"{path} is not")
    for key in [key for key in ("exit", "fill") if getattr(cfg, key) and hasattr(model, "finish")]:
        raise UserError(f"{key}={getattr(cfg, key)} is for relaxed: of {path}, a mor, the router decides who leaves")
    if cfg.depths and not hasattr(model, "recursions"):
        raise UserError(f"depths={cfg.depths} is for a model with a router (mor), {path} is not")
    unused = {"show_depth": cfg.show_depth, "depths": cfg.depths, "prefill": cfg.prefill,
              "num_samples": cfg.num_samples != 1, "prompt": cfg.prompt != SampleConfig.prompt,
              "max_len": cfg.max_len and model.context_limit}
    for key in [key for key, given in unused.items() if given and cfg.requests]:
        raise UserError(f"{key}={getattr(cfg, key)!s:.60} means nothing to requests=FILE of this model: leave it out")
    if cfg.exit:
        exit_rule(cfg.exit, model.n_loop)
    if cfg.fill:
        model.cfg.fill = cfg.fill


def read_prompts(text):
    """The prompts that a prompt= argument names."""
    kind, _, path = text.partition(":")
    if kind not in ("FILE", "LINES"):
        return [text]
    try:
        content = read_bytes(path).decode("utf-8")
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
    check_loops(model, cfg, path)
    if cfg.requests:
        return print(serve(model, tokenizer, cfg), file=sys.stderr)
    prompts = list(map(tokenizer.encode, texts))
    check_prompts(model, prompts)
    longest = max(map(len, prompts))
    check_text_fits(model, cfg.num_samples * len(prompts), longest + cfg.max_new_tokens, device,
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
        print(f"the prompt has {longest} tokens: cropped to its last {limit} (block_size)", file=sys.stderr)
    start = time.perf_counter()
    count, exits = write_exits(model, tokenizer, prompts, cfg) if cfg.exit or cfg.show_depth else (
        write(model, tokenizer, prompts, cfg), "")
    seconds = time.perf_counter() - start
    print(f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s ({ckpt['model']}, step {ckpt['step']}, "
          f"{device}{exits})", file=sys.stderr)


def write(model, tokenizer, prompts, cfg):
    """Continue prompts as one batch and print them. Returns how many tokens came."""
    steps = stream(model, prompts, cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.top_p,
                   cfg.repetition_penalty, tokenizer.eot if cfg.stop else None, cfg.seed, tokenizer.vocab_size)
    if len(prompts) > 1:
        return write_batch(steps, tokenizer, prompts)
    print(tokenizer.decode(prompts[0]), end="", flush=True)
    return write_stream(steps, tokenizer)


if __name__ == "__main__":
    run_cli(main)
