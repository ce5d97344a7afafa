"""Real clients use lab/page.py. Each gets what it would get alone, bad and vanished clients do no harm, and a stop
string ends a text."""
import contextlib
import itertools
import json
import runpy
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import runs
import serve
import train
from common.options import UserError
from conftest import move

_, uvicorn, httpx, openai = map(pytest.importorskip, ("fastapi", "uvicorn", "httpx", "openai"))
from lab import page


@pytest.fixture(scope="module")
def folders(data_dir, tmp_path_factory):
    """Return the folders of a MoR and of a relaxed model, whose weights are large enough to differ between tokens."""
    out = tmp_path_factory.mktemp("out")
    for model in ("mor", "relaxed"):
        trainer = runs.run(model, out, data_dir, f"run={model}", "max_steps=3", "block_size=64", "dropout=0")
        move(trainer.model, 0.3)
        train.save(trainer, "ckpt.pt")
    return out


def test_options_reach_the_engine(folders, monkeypatch):
    monkeypatch.setattr(uvicorn.Server, "run", lambda self: None)
    monkeypatch.setattr(page, "runs", {})
    options = "port=0 device=cpu slots=3 exit=static:1 fill=propagate batching=sequence dtype=bfloat16 fast=false"
    page.main([f"{folders}/relaxed", *options.split()])
    run = page.runs["relaxed"]
    assert (len(run.slots), run.propagate, run.batching, run.model.cfg.fast) == (3, True, "sequence", False)
    assert run.rule and run.model.wte.weight.dtype == torch.bfloat16


@pytest.fixture(scope="module")
def url(folders):
    """Return the address of a server of both runs, which runs in a thread. exit= holds for relaxed, with all its
    loops."""
    servers, run = [], uvicorn.Server.run
    argv = f"{folders}/mor {folders}/relaxed port=0 slots=4 device=cpu exit=static:2".split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.Server, "run", lambda self: (servers.append(self), run(self)))
        thread = threading.Thread(target=page.main, args=[argv])
        thread.start()
        while not (servers and servers[0].started):
            assert thread.is_alive()
            time.sleep(0.01)
    assert list(page.runs) == ["mor", "relaxed", "relaxed-without-exits"]
    assert [bool(run.rule) for run in page.runs.values()] == [False, True, False]
    assert page.runs["relaxed"].model is page.runs["relaxed-without-exits"].model
    yield f"http://127.0.0.1:{servers[0].servers[0].sockets[0].getsockname()[1]}"
    servers[0].should_exit = True
    thread.join()
    page.runs.clear()


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def create(client, prompt, model="mor", temperature=0, **options):
    return client.completions.create(model=model, prompt=prompt, temperature=temperature, **options)


def complete(client, prompt, **options):
    return create(client, prompt, **options).choices


def ask(url, body):
    kind = "json" if isinstance(body, (dict, list)) else "content"
    return httpx.post(f"{url}/v1/completions", timeout=60, **{kind: body})


# ---- answers ----

@pytest.mark.parametrize("model", ["mor", "relaxed"])
def test_answers_are_those_of_sampling_alone(client, model):
    ours, tokenizer = page.runs[model].model, page.runs[model].tokenizer
    choice, = complete(client, "abc de", max_tokens=20, model=model)
    ids = tokenizer.encode("abc de")
    for _ in range(20):
        ids.append(int(ours(torch.tensor([ids]))[0][0, -1].argmax()))
    assert "abc de" + choice.text == tokenizer.decode(ids) and choice.finish_reason == "length"
    assert len(choice.depths) == 20 and {*choice.depths} <= {*range(1, ours.loops_to_run + 1)}


def test_end_of_text(client, monkeypatch):
    """The token that stands for it is the likeliest one after "abc de"."""
    run = page.runs["mor"]
    best = run.model(torch.tensor([list(b"abc de")]))[0][0, -1].argmax()
    monkeypatch.setattr(run, "eot", int(best))
    choice, = complete(client, "abc de", max_tokens=5)
    assert (choice.text, choice.finish_reason, choice.depths) == ("", "stop", [])


def test_random_numbers(client):
    """All choices differ if there is no seed. If there is one, each prompt and choice has its own random numbers, every
    time the same."""
    ask = lambda **options: complete(client, ["ab"] * 4, max_tokens=12, temperature=1, n=2, **options)
    texts = lambda **options: [choice.text for choice in ask(**options)]
    once, five = texts(), texts(seed=5)
    assert len({*once}) == len({*five}) == 8 and not {*once} & {*texts()}
    assert five == texts(seed=5) != texts(seed=6) != texts(seed=-6)


def test_stream_and_several_choices(client):
    """A stream has the texts and the depths of the whole answer, and its usage if asked for."""
    whole = create(client, ["ab", "cd"], max_tokens=30)
    *chunks, last = create(client, ["ab", "cd"], max_tokens=30, stream=True, stream_options={"include_usage": True})
    for choice in whole.choices:
        parts = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
        assert "".join(part.text for part in parts) == choice.text and len(parts) == 31
        assert sum((part.depths for part in parts), []) == choice.depths
        assert [part.finish_reason for part in parts] == [None] * 30 + ["length"]
    assert last.choices == [] and last.usage == whole.usage and whole.usage.total_tokens == 64
    assert not any(chunk.usage for chunk in chunks)
    part, = create(client, "a", max_tokens=0, stream=True)
    assert (part.choices[0].text, part.choices[0].finish_reason) == ("", "length")
    several = create(client, [[97, 98], [99, 100]], n=3)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3, 4, 5]
    assert several.usage.prompt_tokens == 4


# ---- stop strings ----

def test_a_stop_string_ends_the_text():
    """Text that was sent is not taken back. Text that can begin no stop string is sent at once."""
    cases = [(), ("a",), ("ab",), ("aab", "bb"), ("b", "abab"), ("aa", "bba")]
    for stops, *pieces in itertools.product(cases, *[["", "a", "b", "ba"]] * 5):
        text = "".join(pieces)
        end = min([text.find(stop) for stop in stops if stop in text], default=len(text))
        choice = serve.Request([], 8, exits=[1] * 4, reason="length")
        told, depths, reasons = zip(*page.parts_of(choice, iter(pieces), stops))
        assert "".join(told) == text[:end] and not any(reasons[:-1])
        assert choice.reason == reasons[-1] == ("stop" if end < len(text) else "length")
        for n in range(1, len(told)):
            held = "".join(pieces[:n])[len("".join(told[:n])):]
            assert not held or any(stop.startswith(held) for stop in stops)


def test_stop_strings_through_a_client(client):
    """The tokens are bytes. The last list has stop strings that begin and do not go on."""
    text = complete(client, "abc de", max_tokens=40)[0].text
    end = next(n for n in range(8, 30) if text.index(text[n:n + 3]) == n)
    stop = text[end:end + 3]
    for stops in stop, [stop], ["", "\N{SNOWMAN}", stop[:2] + "\N{SNOWMAN}", stop, text[-4:]]:
        whole, chunks = (create(client, "abc de", max_tokens=40, stop=stops, stream=stream) for stream in (False, True))
        parts = [chunk.choices[0] for chunk in chunks]
        assert whole.choices[0].text == "".join(part.text for part in parts) == text[:end]
        assert whole.choices[0].finish_reason == parts[-1].finish_reason == "stop"
        assert whole.usage.completion_tokens == sum(len(part.depths) for part in parts) < 40


# ---- requests ----

def test_models_and_curl(client, url):
    """The page's sentences for a model depend on router and exits. curl sends a form's Content-Type, and query strings
    are ignored."""
    told = {m.id: (m.router, m.exits) for m in client.models.list()}
    assert told == {"mor": ("expert", False), "relaxed": ("", True), "relaxed-without-exits": ("", False)}
    assert client.models.retrieve("mor").n_loop == 2
    assert "<textarea" in httpx.get(f"{url}/?x=1").text and httpx.head(url).status_code == 200
    with pytest.raises(openai.NotFoundError, match="model never is not here: mor, relaxed"):
        client.models.retrieve("never")
    body = '{"prompt": "ab", "max_tokens": 2, "temperature": 0, "seed": null, "stop": null}'
    found = subprocess.check_output(["curl", "-s", f"{url}/v1/completions?x=1", "-d", body])
    assert json.loads(found)["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}


NEUTRAL = dict(best_of=1, echo=False, frequency_penalty=0, presence_penalty=0.0, logit_bias={}, logprobs=None, stop=[],
               suffix="", tools=[], n=None, model="", user="me", stream_options={"include_usage": None})
BAD = [(b"[" * 100_000, "recursion limit"), (b"\xff", "Invalid JSON"), (b"{", "Invalid JSON"), ([], "an object"),
       ({"prompt": ""}, "empty"), ({"prompt": [[]]}, "empty"), ({"prompt": []}, "empty"),
       ({"prompt": [500]}, "vocabulary of 257"), (b'{"prompt": "\\ud800"}', "Invalid JSON"),
       (b'{"temperature": NaN}', "finite"), ({"prompt": "a", "max_tokens": 1000}, "context 64 tokens"),
       ({"n": "n"}, "n: Input"), ({"n": True}, "n: Input"), ({"prompt": ["a"] * 64, "n": 3}, "at most 128"),
       *(({"prompt": "a", name: value}, f"{name}: ") for name, value in dict(
           echo=True, stream_options={"include": True}, logprobs=1, best_of=2, frequency_penalty=1, stop=1, tools=[1]).items())]


def test_options_that_ask_for_nothing(url):
    """The body comes in chunks."""
    body = json.dumps({"prompt": "ab", "max_tokens": 1, **NEUTRAL}).encode()
    assert ask(url, iter([body[:9], body[9:]])).json()["usage"]["total_tokens"] == 3


def test_bad_requests_are_told(url):
    """The answers are short, and in OpenAI's shape."""
    answers = [(ask(url, body), 400, word) for body, word in BAD]
    answers += [(ask(url, iter([b"a" * 600_000] * 2)), 413, "Too Large"),
                (httpx.get(f"{url}/etc/passwd"), 404, "Not Found"),
                (httpx.request("BREW", f"{url}/v1/models"), 405, "Method Not Allowed")]
    answers += [(httpx.post(f"{url}{path}", headers={key: name + host}), 403, "Host or Origin")
                for key, name in (("Host", ""), ("Origin", "http://"))
                for host in ("evil.example", "localhost.evil.example", "127.evil.example:80", "")
                for path in ("/", "/v1/models", "/v1/completions", "/never")]
    for answer, status, word in answers:
        error = answer.json()["error"]
        assert answer.status_code == error["code"] == status and word in error["message"], error
        assert len(answer.text) < 500 and error["type"] == "invalid_request_error"
    assert ask(url, {"prompt": "a" * 2_000_000}).status_code == 413
    assert httpx.head(f"{url}/v1/models").status_code == 405


@pytest.mark.parametrize("host", ["LOCALHOST", "127.1", "0.0.0.0"])
def test_a_loopback_address_is_guarded(host, folders, url, monkeypatch):
    """The server's own name is not foreign, because clients send it in their headers."""
    local, served = host != "0.0.0.0", []
    monkeypatch.setattr(page, "runs", {})
    monkeypatch.setattr(uvicorn.Server, "run", lambda self: served.append(self.config.app))
    page.main([str(folders / "mor"), f"host={host}", "port=0", "device=cpu"])
    assert served == [page.guarded if local else page.app]
    assert [bool(page.LOCAL.fullmatch(name)) for name in ("[::1]:80", "0:0:0:0:0:0:0:1", "::")] == [True, True, False]
    answer = httpx.get(f"{url}/v1/models", headers={"Host": host, "Origin": f"http://{host}"})
    assert answer.status_code == (200 if local else 403)


# ---- clients beside each other ----

def vanish(url, seconds, **body):
    """Be a client that goes away before its answer, or in its middle."""
    with contextlib.suppress(httpx.ReadTimeout):
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=seconds):
            time.sleep(seconds)


def test_clients_some_of_which_vanish(url, client):
    """Each gets what it would get alone, beside bad requests and vanished clients."""
    text = lambda n: complete(client, "abcd"[:n % 4 + 1], max_tokens=8)[0].text
    alone = [text(n) for n in range(4)]
    with ThreadPoolExecutor(20) as pool:
        texts, bad = pool.map(text, range(12)), pool.map(lambda case: ask(url, case[0]), BAD[:4])
        for n in range(4):
            pool.submit(vanish, url, 0.05, prompt="a", max_tokens=50, stream=n % 2 == 0)
        assert list(texts) == alone * 3 and len({*alone}) == 4
        assert {answer.status_code for answer in bad} == {400}


@pytest.mark.parametrize("stream", [True, False])
def test_a_vanished_client_frees_its_slot(url, client, stream, monkeypatch):
    """The four texts of the client would take the four slots for 3 seconds. A request that waits is never admitted if
    its client vanishes."""
    run, admitted = page.runs["mor"], []
    step, embed = run.step, run.embed
    monkeypatch.setattr(run, "step", lambda: (time.sleep(0.05), step()))
    monkeypatch.setattr(run, "embed", lambda ids: (admitted.append(bytes(ids)), embed(ids))[1])
    with ThreadPoolExecutor(2) as pool:
        options = dict(max_tokens=60, temperature=0, stream=stream)
        long = pool.submit(vanish, url, 1, prompt="ab", n=4, **options)
        while len(run.busy()) < 4:
            time.sleep(0.01)
        pool.submit(vanish, url, 0.3, prompt="gone", **options).result()
        assert not long.done()
    assert complete(client.with_options(timeout=1.5), "cd", max_tokens=1)
    assert admitted.count(b"ab") == 4 and b"cd" in admitted and b"gone" not in admitted


def test_a_failure_is_told_and_does_no_harm(url, client, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(page.runs["mor"], "step", lambda: 1 / 0)
        assert ask(url, {"prompt": "ab"}).json()["error"].items() >= {"code": 500, "type": "server_error"}.items()
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
            ask(url, {"prompt": "ab", "stream": True})
    assert complete(client, "ab", max_tokens=3)


# ---- the program ----

@pytest.mark.parametrize("argv, message", [
    ("{0}/mor {0}/mor", "two runs are named mor"), ("{0}/mor host=", "host= is empty"),
    ("{1} {0}/relaxed exit=static:1", "two runs are named relaxed-without-exits"),
    ("{0}/mor exit=static:1", "exit= and fill= are for relaxed"), ("{0}/mor fill=propagate", "none of these runs"), ("{0}/mor host=my..host", "no name of a host"),
    ("{0}/mor {3} exit=static:1", "none of these runs is one"),
    ("{0}/mor port={2}", r"in use.*: 'host=127.0.0.1 port=\d+'")])
def test_what_is_refused(argv, message, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "runs", {})
    monkeypatch.setattr(uvicorn.Server, "run", lambda self: None)       # without a refusal the test ends, too
    twin, other = tmp_path / "relaxed-without-exits", tmp_path / "other"
    twin.symlink_to(folders / "relaxed")
    other.symlink_to(folders / "mor")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises((UserError, OSError), match=message):
        page.main(argv.format(folders, twin, taken.getsockname()[1], other).split())


def test_a_missing_package_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(page.__file__)
    assert capsys.readouterr().err == "error: fastapi is missing: pip install -r tests/requirements.txt\n"
