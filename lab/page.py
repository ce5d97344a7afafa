"""
This server shows on a page how deep each token goes, and answers requests of OpenAI's completions
API. It is for trained models that loop over depth (relaxed, mor).

    python -m lab.page out/mor_tiny port=8000           http://127.0.0.1:8000
    python -m lab.page out/mor_tiny out/relaxed_exit exit=confidence:0.5
                            two runs on one page. exit= and fill= are for relaxed alone. With
                            exit= a relaxed run is there a second time, without exits, so that one
                            can compare.
    curl 127.0.0.1:8000/v1/completions -d '{"prompt": "def ", "max_tokens": 50, "stream": true}'
    python -m lab.page help                             every option with its meaning

Clients of OpenAI's completions work here, such as openai's package and curl. The class Completion
lists what they may ask for. Any other option is refused, unless its value asks for nothing: 0,
false, "", [], {} or null (so logprobs=0 gives none). Beside OpenAI's fields a choice has `depths`,
which are the loops, counted from 1, after which its tokens were predicted.
"""
import asyncio
import itertools
import json
import re
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import serve
from common.checkpoint import load_run
from common.device import pick_device
from common.options import HERE, UserError, naming, run_cli, split_args, typed_config
from sample import check_prompts
try:
    import uvicorn
    from fastapi import FastAPI, HTTPException, Request, responses
    from pydantic import BaseModel, Field, TypeAdapter, ValidationError
    from starlette.requests import ClientDisconnect
except ImportError as e:
    print(f"error: {e.name} is missing: pip install -r tests/requirements.txt", file=sys.stderr)
    sys.exit(2)

LOCAL = re.compile(r"\[?(localhost|127[0-9.]+|[0:]*:0*1)\]?(:\d+)?", re.I)     # this machine alone
runs = {}       # {name: PageEngine}


# ---- decoding ----

class PageEngine(serve.Engine):
    """A trained model that decodes in turns. All clients whose choices are not finished wait for
    the end of a turn, and the first of them begins the next one. A choice is a serve.Request, and
    its id is the HTTP request of its client."""

    def __init__(self, model, tokenizer, cfg, exit="", fill="exact"):
        super().__init__(model, cfg.slots, None, cfg.batching, exit, fill, eot=tokenizer.eot,
                         vocab_size=tokenizer.vocab_size)
        self.tokenizer, self.waiting, self.turn = tokenizer, deque(), None

    async def take_turn(self):
        """Take a few steps for all choices. Before that, a choice that has ended, or whose client
        has gone, loses its slot or its place in the queue."""
        choices = [slot.request for slot in self.busy()] + list(self.waiting)
        gone = {client: await client.is_disconnected() for client in {c.id for c in choices}}
        for choice in choices:
            if gone[choice.id]:
                choice.reason = choice.reason or "cancelled"
        for slot in self.busy():
            slot.request = None if slot.request.reason else slot.request
        self.waiting = deque(choice for choice in self.waiting if not choice.reason)
        self.admit(self.waiting)
        # A turn has four steps, because each change of threads takes time.
        await asyncio.to_thread(lambda: [self.step() for _ in range(4)])

    async def write(self, choices, asked):
        """Yield a server-sent event for each part of each choice, and then one for the usage, if
        that is asked for. The last event says [DONE]. If no stream is asked for, the last thing
        that is yielded is the whole answer instead."""
        stops = tuple(filter(None, [asked.stop] if isinstance(asked.stop, str) else asked.stop))
        streams = [parts_of(c, self.tokenizer.stream(c.tokens), stops) for c in choices]
        texts = [{"text": "", "index": index, "depths": [], "logprobs": None, "finish_reason": None}
                 for index in range(len(choices))]
        answer = {"id": f"cmpl-{time.time_ns()}", "object": "text_completion",
                  "created": int(time.time()), "model": asked.model, "choices": texts}
        self.waiting.extend(choices)
        while not all(text["finish_reason"] for text in texts):
            if self.turn is None or self.turn.done():
                self.turn = asyncio.ensure_future(self.take_turn())
            await asyncio.shield(self.turn)     # the turn is not cancelled if this client goes
            for choice, text, stream in zip(choices, texts, streams):
                # The new parts are those of new tokens, and the end if there is a reason.
                new = len(choice.exits) - len(text["depths"]) + bool(choice.reason)
                for more, depths, reason in itertools.islice(stream, new):
                    text |= {"text": text["text"] + more, "depths": text["depths"] + depths,
                             "finish_reason": reason}
                    part = {**answer, "choices": [{**text, "text": more, "depths": depths}]}
                    yield f"data: {json.dumps(part)}\n\n"
        read = sum(len(choice.prompt) for choice in choices[::asked.n])
        new = sum(len(text["depths"]) for text in texts)
        answer["usage"] = dict(prompt_tokens=read, completion_tokens=new, total_tokens=read + new)
        if asked.stream_options.include_usage:
            yield f"data: {json.dumps({**answer, 'choices': []})}\n\n"
        yield "data: [DONE]\n\n" if asked.stream else answer


def parts_of(choice, pieces, stops):
    """Yield the parts of a choice, (text, depths, finish_reason) of each token and of the end.

    pieces is the tokenizer's stream of the tokens. A part may be asked for when its token is there,
    and the last one when the choice has a reason to end. The text ends before the first of the stop
    strings that it contains. Then choice.reason is set, so that the next turn frees the slot. Text
    that may be the beginning of a stop string is held back."""
    held = ""
    for piece, depth in itertools.zip_longest(pieces, choice.exits):    # the end has no depth
        held += piece
        # where a stop string begins, or may begin as long as further tokens may follow
        starts = (n for n in range(len(held)) if held.startswith(stops, n)
                  or depth and any(stop.startswith(held[n:]) for stop in stops))
        text = held[:next(starts, None)]        # all of it if nothing may be a stop string
        held = held[len(text):]
        if not depth or held.startswith(stops):
            break
        yield text, [depth], None
    choice.reason = "stop" if held else choice.reason
    yield text, [depth] if depth else [], choice.reason


# ---- the interface: OpenAI's completions ----

def refused(request, e):
    """Return an error in OpenAI's shape."""
    if isinstance(e, ValidationError):
        e = UserError(": ".join(map(str, (*e.errors()[0]["loc"], e.errors()[0]["msg"]))))
    status = getattr(e, "status_code", 400 if isinstance(e, UserError) else 500)
    error = {"message": str(getattr(e, "detail", e))[:300], "param": None, "code": status,
             "type": "invalid_request_error" if status < 500 else "server_error"}
    return responses.JSONResponse({"error": error}, status, getattr(e, "headers", None))


app = FastAPI(openapi_url=None, max_body_size=1 << 20, exception_handlers=dict.fromkeys(
    (404, 405, 413, ValidationError, UserError, ClientDisconnect, Exception), refused))
app.add_route("/", lambda request: responses.FileResponse(HERE / "lab" / "page.html"))


class StreamOptions(BaseModel, extra="forbid", strict=True):
    include_usage: bool | None = None


class Completion(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """The options of a client's request."""
    prompt: str | list[str] | list[int] | list[list[int]] = ""      # texts, token ids
    model: str = Field(default_factory=lambda: next(iter(runs)))    # a run (default: the first)
    max_tokens: int = Field(16, ge=0, le=1 << 20)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=128)
    best_of: int = Field(1, ge=0, le=1)             # texts are not compared
    seed: int = Field(default_factory=time.time_ns, ge=-1 << 63, lt=1 << 63)
    stop: str | list[str] = Field("", max_length=1000)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str = ""                                  # anything

    def choices(self, run, client):
        """Return the choices to write, n for each prompt. A UserError says why that cannot be. An
        answer of no tokens has a reason to end from the start."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        prompts = [run.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
                   for prompt in ([self.prompt] if one else self.prompt)]
        check_prompts(prompts, run.vocab_size)
        count, size = len(prompts) * self.n, max(map(len, prompts)) + self.max_tokens
        if count > 128 or size > run.max_len:
            raise UserError(f"{count} texts of up to {size} tokens are too many: the server takes "
                            f"at most 128 texts, and the model's context {run.max_len} tokens")
        how = self.temperature, 0, self.top_p
        reason = None if self.max_tokens else "length"
        randoms = [serve.generator(self.seed % (1 << 64), i, run.device) for i in range(count)]
        return [serve.Request(prompts[i // self.n], self.max_tokens, client, how, random,
                              reason=reason) for i, random in enumerate(randoms)]


@app.post("/v1/completions")
async def complete(request: Request):
    given = TypeAdapter(dict).validate_json(await request.body())
    # "", [], {} and null stand for the default. 0 and false do so only for an unknown option.
    asked = Completion.model_validate({name: value for name, value in given.items()
                                       if value or value == 0 and name in Completion.model_fields})
    await model(asked.model)            # raises 404 if there is no such run
    run = runs[asked.model]
    events = run.write(asked.choices(run, request), asked)
    if asked.stream:
        return responses.StreamingResponse(events, media_type="text/event-stream")
    return [event async for event in events][-1]        # the whole answer


@app.get("/v1/models/{name}")
async def model(name: str):
    if name not in runs:
        raise HTTPException(404, f"model {name:.60} is not here: {', '.join(runs)}")
    run = runs[name]
    return dict(id=name, object="model", created=0, owned_by="", n_loop=run.n_loop,
                exits=bool(run.rule), router=getattr(run.model.cfg, "router", ""))


@app.get("/v1/models")
async def models():
    return {"object": "list", "data": [await model(name) for name in runs]}


# ---- the server ----

async def guarded(scope, receive, send):
    """Run app, unless the client calls this machine by a foreign name. Another site could let its
    own name point to this machine (DNS rebinding), and then a browser would let a page of that site
    read the answers."""
    headers = Request(scope).headers
    names = headers.get("host", ""), headers.get("origin", "localhost").rpartition("/")[2]
    foreign = refused(None, HTTPException(403, "the Host or Origin header names another machine"))
    await (app if all(map(LOCAL.fullmatch, names)) else foreign)(scope, receive, send)


@dataclass
class PageConfig(serve.EngineOptions):
    port: int = 8000                # 0: a free one
    host: str = "127.0.0.1"         # the address to listen on; 0.0.0.0: all of the machine's

    def __post_init__(self):
        self.between(port=(0, 65535))
        if not self.host:
            raise ValueError("host= is empty: 127.0.0.1 serves this machine alone, and 0.0.0.0 "
                             "serves all")


def main(argv):
    paths, options = split_args(argv, least=1, most=None)
    cfg = typed_config(PageConfig, options)
    for path in paths:
        name = Path(path).absolute().name       # also of the path "."
        if name in runs:
            raise UserError(f"two runs are named {name}: each needs a name of its own")
        model, tokenizer, _ = load_run(path, pick_device(cfg.device), cfg.dtype, fast=cfg.fast)
        rule = () if serve.adapter_of(model).routed else (cfg.exit, cfg.fill)   # not for a mor
        runs[name] = PageEngine(model, tokenizer, cfg, *rule)
        if runs[name].rule:         # the same weights show what exits change
            twin = f"{name}-without-exits"
            if twin in runs:
                raise UserError(f"two runs are named {twin}: each needs a name of its own")
            runs[twin] = PageEngine(model, tokenizer, cfg)
    if (cfg.exit or cfg.fill != "exact") and all(run.adapter.routed for run in runs.values()):
        raise UserError("exit= and fill= are for relaxed, and none of these runs is one")
    with naming(f"host={cfg.host} port={cfg.port}"):
        try:
            family, *_, (address, *_) = socket.getaddrinfo(cfg.host, cfg.port)[0]
        except UnicodeError:
            raise UserError("this is no name of a host") from None
        # uvicorn would end with a status of its own if it cannot have the address.
        socket.create_server((address, cfg.port), family=family).close()
    uvicorn.Server(uvicorn.Config(
        guarded if LOCAL.fullmatch(address) else app, host=cfg.host, port=cfg.port, ws="none",
        lifespan="off", access_log=False, timeout_graceful_shutdown=1)).run()


if __name__ == "__main__":
    run_cli(main, PageConfig)
