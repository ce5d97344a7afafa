"""
A page that shows how deep each token goes, and OpenAI's completions, for trained models that loop
over depth (relaxed, mor).

    python -m lab.page out/mor_tiny port=8000           http://127.0.0.1:8000
    python -m lab.page out/mor_tiny out/relaxed_exit exit=confidence:0.5    two runs on one page;
                                                        exit=, fill= are for those without a router
    curl 127.0.0.1:8000/v1/completions -H "Content-Type: application/json" \\
        -d '{"prompt": "def ", "max_tokens": 50, "stream": true}'
    python -m lab.page help                             every key with its meaning

A choice has `depths` too: the loop after which each of its tokens exited, from 1.
"""
import asyncio
import codecs
import contextlib
import itertools
import json
import os
import queue
import re
import secrets
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

import serve
from common.checkpoint import load_run
from common.keys import HERE, UserError, asks_help, help_text, run_cli, split_paths, typed_config
from common.process import pick_device
from common.sampling import check_prompts
try:
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
    from pydantic import BaseModel, Field, model_validator
    from starlette.exceptions import HTTPException
except ImportError as e:
    print(f"error: {e.name} is missing: pip install -r tests/requirements.txt", file=sys.stderr)
    sys.exit(2)

MAX_BODY, MAX_CHOICES = 1 << 20, 128        # of a request: bytes, and prompts times n
LOCAL = re.compile(r"(localhost|127[0-9.]+|\[?::1\]?)(:\d+)?")  # names of this machine alone
runs = {}       # {name: Run}


# ---- decoding: a thread for each run ----

@dataclass(eq=False)
class Choice(serve.Request):
    """One text to write."""
    asked: "Completion" = None      # what it is a choice of
    index: int = 0                  # in the answer
    run: "Run" = None
    queue: asyncio.Queue = None     # of the answer: (choice, [token], [depth], reason at the end)
    cancelled: bool = False         # the client has gone
    reason: str = None              # why the text has ended
    logprobs: list = field(default_factory=list)    # (token, logprob, {token: logprob})

    def add(self, token, exit_after):
        """A token of the answer. Returns whether it is the last."""
        if self.asked.stream:           # others are told of their end alone
            self.tell([token], [exit_after])
        return super().add(token, exit_after) or self.cancelled

    def end(self):
        full = len(self.tokens) == self.max_new_tokens
        self.reason = self.reason or ("length" if full else "stop")
        self.tell([], [])

    def tell(self, tokens, depths):
        """Put what is new into the queue, which belongs to another thread."""
        event = self, tokens, depths, self.reason
        self.run.event_loop.call_soon_threadsafe(self.queue.put_nowait, event)


class Run(serve.Engine):
    """A trained model, and the thread that decodes its choices."""

    def __init__(self, path, cfg, several):
        model, self.tokenizer, _ = load_run(path, pick_device(cfg.device), fast=cfg.fast)
        if several and serve.adapter_of(model).routed:
            cfg = replace(cfg, exit="", fill="exact")
        super().__init__(model, cfg.slots, None, cfg.batching, cfg.exit, cfg.fill,
                         eot=self.tokenizer.eot, vocab_size=self.tokenizer.vocab_size)
        self.inbox, self.waiting = queue.SimpleQueue(), deque()
        threading.Thread(target=self.work, daemon=True).start()

    async def write(self, choices, request):
        """Yields what is told of the choices until all have ended or the client has gone."""
        left, self.event_loop = len(choices), asyncio.get_running_loop()
        try:
            for choice in choices:
                self.inbox.put(choice)
            while left and not await request.is_disconnected():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        event = await choices[0].queue.get()
                    left -= event[-1] is not None
                    yield event
        finally:
            for choice in choices:
                choice.cancelled = True

    def work(self):
        """In the thread: step while there is something to decode."""
        while True:
            while not self.inbox.empty() or not (self.waiting or self.busy()):
                self.waiting.append(self.inbox.get())
            try:
                self.admit(self.waiting)
                self.step()
            except Exception:       # ends what is in work; what waits goes on
                traceback.print_exc()
                for slot in self.busy():
                    slot.request.reason = "error"
                    self.end(slot)

    def prefill(self, slot):
        """Begin with a new choice: none outgrows its slot."""
        choice, ids, top = slot.request, slot.request.prompt, slot.request.asked.logprobs
        if choice.asked.echo and top is not None:
            logits = self.model(torch.tensor([ids], device=self.device))[0][0]
            rows = logits.log_softmax(-1)[:, :self.vocab_size]
            choice.logprobs = [(ids[0], None, None)]        # the first token is not predicted
            choice.logprobs += [alternatives(*x, top) for x in zip(rows, ids[1:])]
        if choice.cancelled or not choice.max_new_tokens:
            self.end(slot)
        else:
            super().prefill(slot)

    def end(self, slot):
        slot.request.end()
        slot.request = None

    def pick(self, slots, logits):
        tokens = super().pick(slots, logits)
        for slot, row, token in zip(slots, logits, tokens):
            if (top := slot.request.asked.logprobs) is not None:
                slot.request.logprobs.append(alternatives(row.log_softmax(-1), token, top))
        return tokens


def alternatives(logprobs, token, top):
    """(token, its logprob, {token: logprob} of the likeliest and of itself)."""
    best, ids = logprobs.topk(min(top, len(logprobs)))
    best = dict(zip(ids.tolist(), best.tolist()))
    best.setdefault(token, float(logprobs[token]))
    return token, best[token], best


# ---- HTTP ----

def refused(request, e):
    """An error in OpenAI's shape."""
    if isinstance(e, RequestValidationError):
        first = e.errors()[0]
        where = ".".join(map(str, first["loc"][1:]))
        e = UserError(f"{where or 'body'}: {first['msg']}")
    status = getattr(e, "status_code", 400 if isinstance(e, UserError) else 500)
    message = str(getattr(e, "detail", e))[:300].encode(errors="replace").decode()
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": error}, status, getattr(e, "headers", None))


ERRORS = HTTPException, RequestValidationError, UserError, Exception
app = FastAPI(openapi_url=None, exception_handlers=dict.fromkeys(ERRORS, refused))


class Completion(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """What a client may ask for."""
    prompt: str | list[int] | list[str] | list[list[int]] = ""
    model: str = ""                 # a run's name (default: the first run's)
    max_tokens: int = Field(16, ge=0, le=1 << 20)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int = Field(default_factory=lambda: secrets.randbits(62), ge=0, lt=1 << 63)
    logprobs: int = Field(None, ge=0, le=20)    # with so many alternatives (None: no logprobs)
    echo: bool = False
    stream: bool = False

    @model_validator(mode="before")
    @classmethod
    def without_null(cls, given):
        """null and false are defaults, and all that OpenAI's keys may hold that are not here."""
        if not isinstance(given, dict):
            raise ValueError("it must be a JSON object")
        return {key: value for key, value in given.items()
                if value is not None and value is not False}

    def choices(self, run):
        """What to write, n texts for each prompt; UserError where that cannot be."""
        several = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if not several or isinstance(several[0], int):
            several = [several]
        prompts = [run.tokenizer.encode(p) if isinstance(p, str) else p for p in several]
        check_prompts(prompts, run.vocab_size)
        longest = max(map(len, prompts))
        if len(prompts) * self.n > MAX_CHOICES:
            raise UserError(f"{len(prompts)} prompts times n={self.n}: more than {MAX_CHOICES}")
        if longest + self.max_tokens > run.max_len:
            raise UserError(f"a prompt of {longest} tokens and max_tokens={self.max_tokens}: more "
                            f"than the {run.max_len} tokens of this model's context")
        if self.stream and (self.echo or self.logprobs is not None):
            raise UserError("stream=true does not go with echo or logprobs")
        sampling, queue = (self.temperature, 0, self.top_p, 1.0), asyncio.Queue()
        return [Choice(prompts[i // self.n], self.max_tokens, None, sampling,
                       serve.generator(self.seed, i, run.device), asked=self, index=i, run=run,
                       queue=queue) for i in range(len(prompts) * self.n)]


@app.post("/v1/completions")
async def complete(asked: Completion, request: Request):
    name = asked.model or next(iter(runs))
    run = find(name)
    choices = asked.choices(run)
    answer = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion",
              "created": int(time.time()), "model": name}

    async def events():
        """Server-sent events: one for each token, one for each choice's end, [DONE]."""
        decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in choices]
        async for choice, tokens, depths, reason in run.write(choices, request):
            new = run.tokenizer.decode_bytes(tokens)
            text = decoders[choice.index].decode(new, final=reason is not None)
            part = {"text": text, "index": choice.index, "depths": depths, "logprobs": None,
                    "finish_reason": reason}
            yield f"data: {json.dumps({**answer, 'choices': [part]})}\n\n"
        yield "data: [DONE]\n\n"
    if asked.stream:
        return StreamingResponse(events(), media_type="text/event-stream")
    async for *_, reason in run.write(choices, request):
        if reason == "error":
            raise HTTPException(500, "decoding failed; the server's log has the reason")
    read = sum(len(choice.prompt) for choice in choices[::asked.n])
    new = sum(len(choice.tokens) for choice in choices)
    return {**answer, "choices": [result(choice, run.tokenizer) for choice in choices],
            "usage": {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}}


def result(choice, tokenizer):
    """A choice of the answer. Its logprobs are in OpenAI's form, a list for each field."""
    text = tokenizer.decode(choice.prompt) * choice.asked.echo
    found = {"text": text + "".join(tokenizer.stream(choice.tokens)), "index": choice.index,
             "finish_reason": choice.reason, "depths": choice.exits, "logprobs": None}
    if not choice.logprobs:
        return found
    tokens, values, tops = zip(*choice.logprobs)        # end-of-text too, where it was chosen
    word = lambda token: as_text(tokenizer.decode_bytes([token]))
    *sizes, _ = map(len, tokenizer.stream(tokens))
    # the likeliest comes last: it holds where several are the same text
    tops = [top and {word(token): top[token] for token in reversed(top)} for top in tops]
    return {**found, "logprobs": {"tokens": list(map(word, tokens)), "token_logprobs": values,
                                  "text_offset": [0, *itertools.accumulate(sizes)][:-1],
                                  "top_logprobs": tops}}


def as_text(piece):
    """A token's text: end-of-text is "", a part of a character bytes:\\xc3, as OpenAI's are."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def find(name):
    if name not in runs:
        raise HTTPException(404, f"model {name:.60} is not here: {', '.join(runs)}")
    return runs[name]


@app.get("/v1/models/{name}")
async def model(name: str):
    return {"id": name, "object": "model", "created": 0, "owned_by": "nanorecur",
            "n_loop": find(name).n_loop}


@app.get("/v1/models")
async def models():
    return {"object": "list", "data": [await model(name) for name in runs]}


@app.api_route("/", methods=["GET", "HEAD"])
async def page():
    return FileResponse(HERE / "lab" / "page.html")


def guarded(local):
    """app, without large bodies. local: and for nobody who calls this machine by a foreign name,
    as a page of another site could."""
    async def answer(scope, receive, send):
        headers, inner = Request(scope).headers, app
        size = headers.get("content-length", "0" if scope["method"] != "POST" else MAX_BODY + 1)
        if local and not LOCAL.fullmatch(headers.get("host", "")):
            inner = refused(None, HTTPException(403, "the Host header names another machine"))
        elif int(size) > MAX_BODY:
            message = f"Content-Length must be given, at most {MAX_BODY}"
            inner = refused(None, HTTPException(413, message))
        await inner(scope, receive, send)
    return answer


# ---- the command line ----

@dataclass
class PageConfig(serve.EngineKeys):
    port: int = 8000                # 0: a free one
    host: str = "127.0.0.1"         # the address to listen on; 0.0.0.0: from everywhere

    def __post_init__(self):
        self.between(port=(0, 65535))
        if not self.host:
            raise ValueError("host= is empty: 127.0.0.1 is this machine alone, 0.0.0.0 all")


def make_server(paths, cfg):
    for path in paths:
        name = Path(path).resolve().name if Path(path).is_dir() else Path(path).stem
        if name in runs:
            raise UserError(f"two runs are named {name}")
        runs[name] = Run(path, cfg, len(paths) > 1)
    # at its end the server waits for a second, then cuts the streams that go on
    return uvicorn.Server(uvicorn.Config(
        guarded(LOCAL.fullmatch(cfg.host)), cfg.host, cfg.port, ws="none", lifespan="off",
        access_log=False, limit_concurrency=1000, timeout_graceful_shutdown=1))


def main(argv):
    if asks_help(argv):
        return print(help_text(PageConfig))
    paths, keys = split_paths(argv)
    cfg = typed_config(PageConfig, keys)
    if not paths:
        raise UserError("give one run or more: python -m lab.page out/NAME ... [key=value ...]")
    try:
        make_server(paths, cfg).run()
    except SystemExit:      # uvicorn has said why it cannot listen there
        sys.exit(2)
    except KeyboardInterrupt:
        os._exit(130)       # the runs' threads may be inside torch, which nothing interrupts


if __name__ == "__main__":
    run_cli(main)
