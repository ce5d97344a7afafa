"""
A page that shows how deep each token goes, and OpenAI's completions, for trained models that loop
over depth (relaxed, mor).

    python -m lab.page out/mor_tiny port=8000           http://127.0.0.1:8000
    python -m lab.page out/mor_tiny out/relaxed_exit exit=confidence:0.5
                            two runs on one page; exit=, fill= are for those without a router
    curl 127.0.0.1:8000/v1/completions -d '{"prompt": "def ", "max_tokens": 50, "stream": true}'
    python -m lab.page help                             every key with its meaning

Beside OpenAI's fields a choice has `depths`: the loop after which each token exited, from 1.
"""
import asyncio
import itertools
import json
import os
import re
import secrets
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import serve
from common.checkpoint import load_run
from common.keys import HERE, UserError, run_cli, split_args, typed_config
from common.process import pick_device
from sample import check_prompts
try:
    import uvicorn
    from fastapi import FastAPI
    from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
    from pydantic import BaseModel, Field, TypeAdapter, ValidationError
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
except ImportError as e:
    print(f"error: {e.name} is missing: pip install -r tests/requirements.txt", file=sys.stderr)
    sys.exit(2)

LOCAL = re.compile(r"(localhost|127[0-9.]+|\[?::1\]?)(:\d+)?")  # names of this machine alone
MAX_BODY, MAX_CHOICES = 1 << 20, 128        # of a request: bytes, and prompts times n
runs = {}       # {name: Run}


class Run(serve.Engine):
    """A trained model, and the thread that decodes: in turns of a few steps for all, which the
    requests that wait for their choices begin."""

    def __init__(self, path, cfg, several):
        device = pick_device(cfg.device)
        model, self.tokenizer, _ = load_run(path, device, cfg.dtype, fast=cfg.fast)
        if several and serve.adapter_of(model).routed:
            cfg = replace(cfg, exit="", fill="exact")
        super().__init__(model, cfg.slots, None, cfg.batching, cfg.exit, cfg.fill,
                         eot=self.tokenizer.eot, vocab_size=self.tokenizer.vocab_size)
        self.waiting, self.thread, self.turn = deque(), ThreadPoolExecutor(1), None

    def advance(self):
        """In the thread. An error ends the choices in work; those that wait go on."""
        try:
            for _ in range(4):      # steps a turn: to change hands takes time, too
                self.admit(self.waiting)
                for slot in self.busy():
                    if slot.request.reason or not slot.request.max_new_tokens:
                        self.end(slot, slot.request.reason or "length")
                self.step()
        except Exception as e:
            for slot in self.busy():
                self.end(slot, RuntimeError(str(e)))    # the server's fault

    async def write(self, choices, answer, request):
        """Yields server-sent events: one for each token of a choice (a serve.Request, its id is
        its index), one for its end, then those of the next. Stops when the client has gone."""
        try:
            self.waiting.extend(choices)
            for choice in choices:
                texts, told = self.tokenizer.stream(choice.tokens), 0
                while told <= len(choice.exits):
                    while not choice.reason and told == len(choice.exits):
                        if await request.is_disconnected():
                            return
                        if self.turn is None or self.turn.done():
                            self.turn = asyncio.wrap_future(self.thread.submit(self.advance))
                        await asyncio.shield(self.turn)
                    if isinstance(choice.reason, Exception):
                        raise choice.reason
                    depths = choice.exits[told:told + 1]
                    part = {"text": next(texts), "index": choice.id, "depths": depths,
                            "logprobs": None, "finish_reason": None if depths else choice.reason}
                    yield f"data: {json.dumps({**answer, 'choices': [part]})}\n\n"
                    told += 1
            yield "data: [DONE]\n\n"
        finally:
            for choice in choices:
                choice.reason = choice.reason or "cancelled"

    @torch.inference_mode()
    def result(self, choice, asked):
        """A choice of an answer. Logprobs are of all loops, and of end-of-text if it came."""
        prompt, texts = self.tokenizer.decode(choice.prompt), self.tokenizer.stream(choice.tokens)
        found = {"text": prompt * asked.echo + "".join(texts), "index": choice.id,
                 "depths": choice.exits, "finish_reason": choice.reason, "logprobs": None}
        if asked.logprobs is None:
            return found
        ids = choice.prompt + choice.tokens + [self.eot] * (choice.reason == "stop")
        rows = self.model(torch.tensor([ids[:-1] or ids], device=self.device))[0][0]
        rows = rows.log_softmax(-1)[:, :self.vocab_size]
        word = lambda token: self.tokenizer.decode_bytes([token]).decode(errors="backslashreplace")
        values, tops = [None], [None]       # nothing predicts the first token
        for row, token in zip(rows, ids[1:]):
            best = row.topk(min(asked.logprobs, len(row))).indices.tolist()
            values.append(float(row[token]))
            tops.append({word(other): float(row[other]) for other in [token, *reversed(best)]})
        start = 0 if asked.echo else len(choice.prompt)
        ids, values, tops = (x[start:] for x in (ids, values, tops))
        sizes = map(len, self.tokenizer.stream(ids))
        return {**found, "logprobs": {
            "tokens": list(map(word, ids)), "token_logprobs": values, "top_logprobs": tops,
            "text_offset": list(itertools.accumulate(sizes, initial=0))[:-2]}}


def refused(request, e):
    """An error in OpenAI's shape."""
    if isinstance(e, ValidationError):
        first = e.errors()[0]
        e = UserError(f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}")
    status = getattr(e, "status_code", 400 if isinstance(e, UserError) else 500)
    message = str(getattr(e, "detail", e))[:300].encode(errors="replace").decode()
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None,
                                   "code": status}}, status, getattr(e, "headers", None))


app = FastAPI(openapi_url=None, exception_handlers=dict.fromkeys(
    (HTTPException, ValidationError, UserError, ClientDisconnect, Exception), refused))
app.add_api_route("/", lambda: FileResponse(HERE / "lab" / "page.html"), methods=["GET", "HEAD"])


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

    def choices(self, run):
        """What to write, n texts for each prompt; UserError where that cannot be."""
        several = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if not several or isinstance(several[0], int):
            several = [several]
        prompts = [run.tokenizer.encode(p) if isinstance(p, str) else p for p in several]
        check_prompts(prompts, run.vocab_size)
        count, size = len(prompts) * self.n, max(map(len, prompts)) + self.max_tokens
        if count > MAX_CHOICES or size > run.max_len:
            raise UserError(f"{count} texts of up to {size} tokens: the server takes at most "
                            f"{MAX_CHOICES}, the model's context {run.max_len} tokens")
        if self.stream and (self.echo or self.logprobs is not None):
            raise UserError("stream=true does not go with echo or logprobs")
        how = self.temperature, 0, self.top_p
        return [serve.Request(prompts[i // self.n], self.max_tokens, i, how,
                              serve.generator(self.seed, i, run.device)) for i in range(count)]


@app.post("/v1/completions")
async def complete(request: Request):
    if int(request.headers.get("content-length", MAX_BODY + 1)) > MAX_BODY:
        raise HTTPException(413, f"Content-Length must be given, at most {MAX_BODY}")
    given = TypeAdapter(dict).validate_json(await request.body())
    # null and false are defaults, and all that OpenAI's keys may hold that are not here
    given = {k: v for k, v in given.items() if v is not None and v is not False}
    asked = Completion.model_validate(given)
    name = asked.model or next(iter(runs))
    run = find(name)
    choices = asked.choices(run)
    answer = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion",
              "created": int(time.time()), "model": name}
    events = run.write(choices, answer, request)
    if asked.stream:
        return StreamingResponse(events, media_type="text/event-stream")
    async for _ in events:
        pass
    results = [run.thread.submit(run.result, choice, asked) for choice in choices]
    read = sum(len(choice.prompt) for choice in choices[::asked.n])
    new = sum(len(choice.tokens) for choice in choices)
    return {**answer, "choices": [await asyncio.wrap_future(result) for result in results],
            "usage": {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}}


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


async def guarded(scope, receive, send):
    """app, for nobody who calls this machine by a foreign name, as a page of another site could."""
    headers = Request(scope).headers
    names = headers.get("host", ""), headers.get("origin", "localhost").rpartition("/")[2]
    foreign = HTTPException(403, "the Host or Origin header names another machine")
    answer = app if all(map(LOCAL.fullmatch, names)) else refused(None, foreign)
    await answer(scope, receive, send)


@dataclass
class PageConfig(serve.EngineKeys):
    port: int = 8000                # 0: a free one
    host: str = "127.0.0.1"         # the address to listen on; 0.0.0.0: from everywhere

    def __post_init__(self):
        self.between(port=(0, 65535))
        if not self.host:
            raise ValueError("host= is empty: 127.0.0.1 is this machine alone, 0.0.0.0 all")


def main(argv):
    paths, keys = split_args(argv, least=1, most=None)
    cfg = typed_config(PageConfig, keys)
    for path in paths:
        name = Path(os.path.abspath(path)).name
        if name in runs:
            raise UserError(f"two runs are named {name}")
        runs[name] = Run(path, cfg, len(paths) > 1)
    try:    # at its end the server waits for a second, then cuts the streams that go on
        uvicorn.Server(uvicorn.Config(
            guarded if LOCAL.fullmatch(cfg.host) else app, host=cfg.host, port=cfg.port, ws="none",
            lifespan="off", access_log=False, timeout_graceful_shutdown=1)).run()
    except SystemExit:      # it has said why it cannot listen there
        sys.exit(2)
    except KeyboardInterrupt:
        os._exit(130)       # the runs' threads may be inside torch, which nothing interrupts


if __name__ == "__main__":
    run_cli(main, PageConfig)
