"""
serve.py with port=: an HTTP server with OpenAI's /v1/completions, and a page that shows depth.

    python serve.py out/mor_tiny port=8000                     http://127.0.0.1:8000
    python serve.py out/mor_tiny out/relaxed_exit port=8000 exit=confidence:0.5     two models on
                                    one page; exit= and fill= are for those without a router
    curl 127.0.0.1:8000/v1/completions -H "Content-Type: application/json" \\
        -d '{"prompt": "def ", "max_tokens": 50, "stream": true}'

Keys of a completion: model (a run's name; by default the first run), prompt (text, token ids, or a
list of either), max_tokens, temperature, top_p, n, stop, seed, logprobs, echo, stream. A choice has
`depths` too: the loop after which each of its tokens exited, from 1. /v1/models lists the runs.

How to sample is a matter of each completion, so temperature and the like mean nothing beside port=.
Each run has one thread, which decodes all its requests with the Engine of serve.py. Each connection
has a thread that waits for its tokens. A client that goes away frees its slots.
"""
import codecs
import itertools
import json
import os
import queue
import selectors
import socket
import sys
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

from common.checkpoint import load_run
from common.keys import HERE, UserError, first_line
from common.process import check_text_fits, pick_device
from common.sampling import check_prompts
from serve import Engine, Request, check_loops

MAX_BODY = 1 << 20          # bytes of a request
MAX_CHOICES = 128           # prompts times n, of a request
MAX_WAITING = 1024          # requests of all clients that wait for a slot
IDLE = 30                   # seconds that a read from a client, or a write, may take


# ---- decoding: a thread for each run ----

@dataclass(eq=False)
class Choice(Request):
    """One text to write. Its run's thread puts (choice, new text, token or None, its depth) into
    `events`, and (choice, None, None, None) at the end."""
    events: queue.Queue = None      # of all choices of a client's request
    index: int = 0                  # in the response
    seed: int = 0
    stops: list = ()
    top: int = None                 # logprobs, with so many alternatives (None: no logprobs)
    echo: bool = False              # logprobs of the prompt too
    cancelled: bool = False         # the client has gone
    reason: str = "length"          # why it ended
    logprobs: list = field(default_factory=list)    # (logprob, {token id: logprob}) of each token
    decoder: codecs.IncrementalDecoder = field(
        default_factory=partial(codecs.getincrementaldecoder("utf-8"), errors="replace"))
    pending: str = ""               # text that may be the start of a stop string

    def read(self, piece, final=False):
        """The text that is known after the bytes of a new token. At a stop string, the text before
        it; `reason` is "stop" then."""
        text = self.pending + self.decoder.decode(piece, final)
        found = [at for at in (text.find(stop) for stop in self.stops) if at >= 0]
        if found:
            self.reason, self.pending = "stop", ""
            self.decoder.reset()
            return text[:min(found)]
        begins = (n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
        known = len(text) - (0 if final else max(begins, default=0))
        self.pending = text[known:]
        return text[:known]


class Worker(Engine):
    """The Engine of a run in a thread of its own, with the sampling of each request."""

    def __init__(self, path, cfg, alone):
        model, self.tokenizer, _ = load_run(path, pick_device(cfg.device), fast=cfg.fast)
        if hasattr(model, "takes") and not alone:       # exit= and fill= are for the others
            cfg = replace(cfg, exit="", fill="")
        check_loops(model, cfg, path, "batching")
        self.name = Path(path).name if Path(path).is_dir() else Path(path).stem
        # a text may be as long as the model's context; without a limit, as 8 times block_size
        self.longest = model.context_limit or 8 * model.cfg.block_size
        check_text_fits(model, cfg.slots, self.longest, model.wte.weight.device,
                        f"slots={cfg.slots} and requests of {self.longest} tokens")
        super().__init__(model, cfg.slots, self.longest, cfg.batching, cfg.exit, fill=cfg.fill,
                         eot=self.tokenizer.eot if cfg.stop else None,
                         vocab_size=self.tokenizer.vocab_size, on_token=self.token)
        self.waiting, self.condition = deque(), threading.Condition()
        threading.Thread(target=self.work, daemon=True).start()

    def submit(self, choices):
        """Busy where too many wait already."""
        with self.condition:
            self.waiting = deque(choice for choice in self.waiting if not choice.cancelled)
            waiting = len(self.waiting)
            if waiting + len(choices) > MAX_WAITING:
                raise Busy(f"{waiting} requests wait for a slot already: try again later")
            self.waiting.extend(choices)
            self.condition.notify()

    @torch.inference_mode()
    def work(self):
        while True:
            with self.condition:
                while not self.waiting and not self.busy():
                    self.condition.wait()
            try:
                self.fill_slots()
                self.step()
            except Exception as e:              # told to all that are in work; the others go on
                print(f"{self.name}: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
                for slot in self.busy():
                    slot.request.reason = "error"
                    self.done.append(slot.request)
                    slot.request = None
            done, self.done = self.done, []
            for choice in done:
                self.end(choice)

    def fill_slots(self):
        for slot in self.slots:
            while slot.request is None:
                with self.condition:
                    if not self.waiting:
                        return
                    choice = self.waiting.popleft()
                if choice.cancelled:
                    continue
                slot.request = choice
                if choice.echo and choice.top is not None:
                    choice.logprobs = self.prompt_logprobs(choice.prompt, choice.top)
                if not choice.max_new_tokens:                   # at most one a slot and step
                    self.done.append(choice)
                    slot.request = None
                    break
                slot.generator = torch.Generator(self.device).manual_seed(choice.seed)
                self.start(slot, list(choice.prompt))

    def pick(self, slots, logits):
        tokens = super().pick(slots, logits)
        for slot, row, token in zip(slots, logits, tokens):
            if slot.request.top is not None:
                slot.request.logprobs.append(top_logprobs(row, token, slot.request.top))
        return tokens

    def token(self, choice):
        text = choice.read(self.tokenizer.decode_bytes(choice.tokens[-1:]))
        choice.events.put((choice, text, choice.tokens[-1], choice.exits[-1]))
        if choice.cancelled or choice.reason == "stop":
            choice.max_new_tokens = len(choice.tokens)      # so that the Engine ends it here

    def end(self, choice):
        told = len(choice.tokens) + len(choice.prompt) * choice.echo
        del choice.logprobs[told:]                          # of end-of-text
        if choice.reason == "length" and len(choice.tokens) < choice.max_new_tokens:
            choice.reason = "stop"                          # end-of-text
        choice.events.put((choice, choice.read(b"", final=True), None, None))
        choice.events.put((choice, None, None, None))

    def prompt_logprobs(self, ids, top):
        """Of each token of a prompt but the first, as Choice.logprobs."""
        logits = self.model(torch.tensor([ids], device=self.device))[0]
        logits = logits[0, :, :self.vocab_size]
        return [None] + [top_logprobs(row, token, top) for row, token in zip(logits, ids[1:])]


def top_logprobs(logits, token, top):
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(min(top, len(logprobs))) if top else None
    others = dict(zip(best.indices.tolist(), best.values.tolist())) if top else {}
    return float(logprobs[token]), others


# ---- what a client may ask ----

class Busy(UserError):
    """Too many requests: status 429."""


# Keys of a completion: allowed types, and bounds of numbers.
KEYS = {"model": ([str], None), "prompt": ([str, list], None), "max_tokens": ([int], (0, 1 << 20)),
        "temperature": ([int, float], (0, 100)), "top_p": ([int, float], (0, 1)),
        "n": ([int], (1, MAX_CHOICES)), "stop": ([str, list], None),
        "seed": ([int], (0, 2 ** 63 - 1)), "logprobs": ([int, bool], (0, 20)),
        "echo": ([bool], None), "stream": ([bool], None), "stream_options": ([dict], None),
        "user": ([str], None)}
NEUTRAL = {"best_of": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {},
           "suffix": ""}      # keys of OpenAI's that are allowed with these values


def read_completion(given, workers):
    """(Worker, prompts as lists of ids, options) of a request's JSON value; UserError names what
    is wrong."""
    if not isinstance(given, dict):
        raise UserError("the body must be a JSON object")
    given = {k: v for k, v in given.items()
             if v is not None and not (k in NEUTRAL and NEUTRAL[k] == v)}
    for key, value in given.items():
        if key not in KEYS:
            raise UserError(f"{key!r:.60} is not supported: the keys are {', '.join(KEYS)}")
        kinds, bounds = KEYS[key]
        if type(value) not in kinds or bounds and not bounds[0] <= value <= bounds[1]:
            limits = f" from {bounds[0]} to {bounds[1]}" if bounds else ""
            raise UserError(f"{key}={value!r:.60} must be "
                            f"{' or '.join(kind.__name__ for kind in kinds)}{limits}")
    worker = workers.get(given.get("model", next(iter(workers))))
    if worker is None:
        raise UserError(f"model={given['model']:.60} is unknown: {', '.join(workers)}")
    options = {"max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "n": 1, "stop": [],
               "seed": time.time_ns() % 2 ** 62, "logprobs": None, "echo": False, "stream": False,
               **given}
    stops = [options["stop"]] if isinstance(options["stop"], str) else options["stop"]
    if len(stops) > 16 or not all(type(s) is str and 0 < len(s) <= 200 for s in stops):
        raise UserError("stop must be at most 16 strings of 1 to 200 characters")
    options["stop"] = stops
    if options["stream"] and (options["echo"] or options["logprobs"] is not None):
        raise UserError("stream=true does not go with echo or logprobs")
    prompts = read_prompts(options.get("prompt", ""), worker)
    if len(prompts) * options["n"] > MAX_CHOICES:
        raise UserError(f"{len(prompts)} prompts times n={options['n']} are more than {MAX_CHOICES}")
    for ids in prompts:
        if len(ids) + options["max_tokens"] > worker.longest:
            raise UserError(f"a prompt of {len(ids)} tokens and max_tokens={options['max_tokens']} "
                            f"are more than the {worker.longest} tokens of this model's context")
    return worker, prompts, options


def read_prompts(prompt, worker):
    """Lists of token ids of a text, of ids, or of a list of these."""
    ids = lambda x: isinstance(x, list) and x and all(type(i) is int for i in x)
    several = prompt if isinstance(prompt, list) and not ids(prompt) else [prompt]
    found = []
    for one in several:
        if not isinstance(one, str) and not ids(one):
            raise UserError("prompt must be a text, a list of token ids, or a list of these")
        found.append(worker.tokenizer.encode(one) if isinstance(one, str) else one)
    if not found:
        raise UserError("prompt is an empty list")
    check_prompts(worker.model, found)
    if max(map(max, found)) >= worker.tokenizer.vocab_size:     # a model may have more
        raise UserError(f"prompt has a token that the tokenizer's {worker.tokenizer.vocab_size} "
                        "do not include")
    return found


# ---- HTTP ----

class Handler(BaseHTTPRequestHandler):
    protocol_version, timeout = "HTTP/1.1", IDLE

    def do_GET(self):
        if self.path == "/":
            page = (HERE / "lab" / "page.html").read_bytes()
            return self.respond(200, page, "text/html; charset=utf-8")
        if self.path == "/v1/models":
            data = [{"id": name, "object": "model", "owned_by": "nanorecur",
                     "n_loop": worker.n_loop} for name, worker in self.server.workers.items()]
            return self.respond_json(200, {"object": "list", "data": data})
        self.refuse(404, f"{self.path:.60} is not here: /, /v1/models and /v1/completions are")

    def do_POST(self):
        if self.path != "/v1/completions":
            return self.refuse(404, f"{self.path:.60} is not here: /v1/completions is")
        # a page of another origin cannot send this type without being asked first
        if self.headers.get_content_type() != "application/json":
            return self.refuse(415, "Content-Type must be application/json")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > 9 or int(length) > MAX_BODY:
            return self.refuse(413, f"Content-Length must be given, at most {MAX_BODY}")
        try:
            body = self.rfile.read(int(length))
            worker, prompts, options = read_completion(json.loads(body), self.server.workers)
            choices = self.make_choices(prompts, options)
            worker.submit(choices)
        except Busy as e:
            return self.refuse(429, str(e))
        except UserError as e:
            return self.refuse(400, str(e))
        except (ValueError, RecursionError):
            return self.refuse(400, "the body is not JSON in UTF-8")
        try:
            answer = self.stream if options["stream"] else self.answer
            answer(worker, choices, options)
        finally:
            for choice in choices:
                choice.cancelled = True         # without effect where it has ended

    def make_choices(self, prompts, options):
        # temperature, top_k, top_p, repetition_penalty
        how, events = (options["temperature"], 0, options["top_p"], 1.0), queue.Queue()
        top = options["logprobs"]
        same = dict(how=how, events=events, stops=options["stop"], echo=options["echo"],
                    top=None if top in (None, False) else int(top))
        return [Choice(ids, options["max_tokens"], seed=options["seed"] + i,
                       index=p * options["n"] + i, **same)
                for p, ids in enumerate(prompts) for i in range(options["n"])]

    def events(self, choices):
        """What the run's thread tells about the choices, until all have ended. ConnectionError
        when the client has gone."""
        left, looked = len(choices), time.monotonic()
        while left:
            if time.monotonic() - looked > 0.5:
                self.look_for_client()
                looked = time.monotonic()
            try:
                choice, text, token, depth = choices[0].events.get(timeout=0.5)
            except queue.Empty:
                continue
            left -= text is None
            yield choice, text, token, depth

    def look_for_client(self):
        """ConnectionError if the connection is closed at its other end."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            if selector.select(0) and not self.connection.recv(1, socket.MSG_PEEK):
                raise ConnectionAbortedError("the client has gone")

    def answer(self, worker, choices, options):
        """All choices in one JSON object."""
        texts = {choice: "" for choice in choices}
        for choice, text, _, _ in self.events(choices):
            texts[choice] += text or ""
        if any(choice.reason == "error" for choice in choices):
            return self.refuse(500, "decoding failed; the server's log has the reason")
        results = [self.result(worker, choice, text, options) for choice, text in texts.items()]
        self.respond_json(200, {**head(worker), "choices": results,
                                "usage": usage(choices, options)})

    def result(self, worker, choice, text, options):
        ids, logprobs = choice.tokens, choice.logprobs
        if options["echo"]:
            text, ids = worker.tokenizer.decode(choice.prompt) + text, choice.prompt + ids
        if choice.top is not None:
            logprobs = in_openais_words(worker.tokenizer, ids, logprobs)
        return {"text": text, "index": choice.index, "finish_reason": choice.reason,
                "depths": choice.exits, "logprobs": logprobs or None}

    def stream(self, worker, choices, options):
        """Server-sent events: one for each token, one for each choice's end, [DONE]."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection, same = True, head(worker)

        def send(value):
            self.wfile.write(f"data: {value}\n\n".encode())
        for choice, text, token, depth in self.events(choices):
            result = {"text": text or "", "index": choice.index, "logprobs": None,
                      "finish_reason": choice.reason if text is None else None,
                      "depths": [] if depth is None else [depth]}
            send(json.dumps({**same, "choices": [result]}))
        if options.get("stream_options", {}).get("include_usage"):
            send(json.dumps({**same, "choices": [], "usage": usage(choices, options)}))
        send("[DONE]")

    def respond(self, status, body, kind):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def respond_json(self, status, value):
        self.respond(status, json.dumps(value).encode(), "application/json")

    def refuse(self, status, message):
        self.close_connection = True            # what is left of a body is not read
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.respond_json(status, {"error": {"message": " ".join(message.split()), "type": kind,
                                             "code": status}})

    def log_message(self, *args):
        pass


def head(worker):
    return {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion",
            "created": int(time.time()), "model": worker.name}


def usage(choices, options):
    read = sum(len(choice.prompt) for choice in choices) // options["n"]
    written = sum(len(choice.tokens) for choice in choices)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def in_openais_words(tokenizer, ids, logprobs):
    """The fields of a choice's `logprobs`. The first token of a prompt has none. Of tokens that are
    the same text (parts of a character), the likeliest stands in top_logprobs."""
    text, begun = lambda i: tokenizer.decode([i]), codecs.getincrementaldecoder("utf-8")("replace")
    lengths = [len(begun.decode(tokenizer.decode_bytes([i]))) for i in ids]

    def best(top):
        found = {}
        for i, logprob in top.items():          # the likeliest first
            found.setdefault(text(i), logprob)
        return found
    return {"tokens": [text(i) for i in ids],
            "text_offset": [0, *itertools.accumulate(lengths)][:len(ids)],
            "token_logprobs": [pair and pair[0] for pair in logprobs],
            "top_logprobs": [pair and best(pair[1]) for pair in logprobs]}


class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 256

    def handle_error(self, request, address):
        """A client that goes away is no error of the server."""
        error = sys.exception()
        if not isinstance(error, (ConnectionError, TimeoutError)):
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)


def open_server(paths, cfg):
    """A Server of the runs; port 0 takes a free one. UserError if it cannot listen there."""
    if cfg.batching == "static":
        raise UserError("port= serves with batching=depth or sequence, not static")
    workers = {}
    for path in paths:
        worker = Worker(path, cfg, alone=len(paths) == 1)
        if worker.name in workers:
            raise UserError(f"two runs are named {worker.name}")
        workers[worker.name] = worker
    try:
        server = Server((cfg.host, cfg.port), Handler)
    except (OSError, OverflowError, TypeError) as e:
        raise UserError(f"host={cfg.host} port={cfg.port}: {first_line(e)}") from e
    server.workers = workers
    return server


def serve_http(paths, cfg):
    server = open_server(paths, cfg)
    print(f"{', '.join(server.workers)}: http://{cfg.host}:{server.server_port}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        os._exit(130)       # the runs' threads may be inside torch, which nothing interrupts
