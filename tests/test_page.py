"""lab/page.py through real clients: completions as each request would get alone; bad and vanished clients."""
import contextlib
import json
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import runs
import train
from common.keys import UserError
from conftest import ROOT, move

_, uvicorn, httpx, openai = map(pytest.importorskip, ("fastapi", "uvicorn", "httpx", "openai"))
from lab import page


@pytest.fixture(scope="module")
def folders(data_dir, tmp_path_factory):
    """A MoR and a relaxed model with weights large enough to differ between tokens."""
    out = tmp_path_factory.mktemp("out")
    for model in ("mor", "relaxed"):
        trainer = runs.run(model, out, data_dir, f"run={model}", "max_steps=3", "block_size=64", "dropout=0")
        move(trainer.model, 0.3)
        train.save(trainer, "ckpt.pt")
    return out


@pytest.fixture(scope="module")
def url(folders):
    """Of a server of both, in a thread. exit= is for relaxed: all its loops."""
    servers, startup = [], uvicorn.Server.startup
    argv = [str(folders / "mor"), str(folders / "relaxed"), "port=0", "slots=4", "device=cpu", "exit=static:2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.Server, "startup", lambda self, sockets: (servers.append(self), startup(self))[1])
        thread = threading.Thread(target=page.main, args=[argv])
        thread.start()
        while not (servers and servers[0].started):
            assert thread.is_alive()
            time.sleep(0.01)
    assert page.runs["relaxed"].rule and not page.runs["mor"].rule
    yield f"http://127.0.0.1:{servers[0].servers[0].sockets[0].getsockname()[1]}"
    servers[0].should_exit = True
    thread.join()
    page.runs.clear()


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def complete(client, prompt, **keys):
    return client.completions.create(**{"model": "mor", "prompt": prompt, "temperature": 0, **keys}).choices


@pytest.mark.parametrize("model", ["mor", "relaxed"])
def test_answers_are_those_of_sampling_alone(client, model):
    ours, tokenizer = page.runs[model].model, page.runs[model].tokenizer
    choice, = complete(client, "abc de", max_tokens=20, model=model, logprobs=2)
    ids = tokenizer.encode("abc de")
    with torch.no_grad():
        for _ in range(20):
            ids.append(int(ours(torch.tensor([ids]))[0][0, -1].argmax()))
        logprobs = ours(torch.tensor([ids]))[0][0].log_softmax(-1)
    assert "abc de" + choice.text == tokenizer.decode(ids)
    expected = [float(logprobs[i, ids[i + 1]]) for i in range(25)]
    assert choice.logprobs.token_logprobs == pytest.approx(expected[5:], abs=1e-4)
    assert {*choice.depths} <= {*range(1, ours.loops_to_run + 1)} and choice.finish_reason == "length"


def test_likeliest_is_end_of_text(client, url, request):
    """After "abc de", as it has the weights of what was the likeliest. lm_eval scores as lab.eval does."""
    run, greedy = page.runs["mor"], list(b"abc d")
    best = int(run.model(torch.tensor([list(b"abc de")]))[0][0, -1].argmax())
    weight = run.model.head.weight.data
    swap = lambda: weight.copy_(weight.index_copy(0, torch.tensor([best, run.eot]), weight[[run.eot, best]]))
    request.addfinalizer(swap)
    swap()
    choice, = complete(client, "abc de", max_tokens=1, echo=True, logprobs=1)
    found = choice.logprobs
    assert (choice.text, choice.finish_reason, choice.depths) == ("abc de", "stop", [])
    assert found.tokens == [*"abc de", ""] and found.text_offset == [0, 1, 2, 3, 4, 5, 6]
    assert found.top_logprobs[-1] == {"": found.token_logprobs[-1]} and len(found.token_logprobs) == 7

    pytest.importorskip("tenacity", reason="lm_eval's clients need it")
    lm_eval = pytest.importorskip("lm_eval.models.openai_completions")
    from test_eval import harness_model
    api = lm_eval.LocalCompletionsAPI(base_url=f"{url}/v1/completions", model="mor", tokenizer_backend=None)
    api.tokenizer, api.tokenized_requests, api._batch_size = run.tokenizer, True, 4
    with torch.inference_mode():
        for _ in range(4):
            greedy.append(int(run.model(torch.tensor([greedy]))[0][0, -1, :256].argmax()))
    asked = [(greedy[:5], greedy[5:]), (greedy[:5], greedy[5:6]), (list(b"abc d"), list(b"e")), ([120, 195], [169, 7])]
    theirs, is_greedy = zip(*api._loglikelihood_tokens([(("", ""), *pair) for pair in asked]))
    scores, greedy = zip(*harness_model(run.model, run.tokenizer, 4).scores(asked))
    assert theirs == pytest.approx(scores, abs=1e-4) and is_greedy == greedy and greedy[1] and not greedy[-1]


def test_random_numbers(client):
    """Without a seed all differ; with one each prompt and choice has its own, the same every time."""
    texts = lambda **keys: [c.text for c in complete(client, ["ab"] * 4, max_tokens=12, temperature=1, n=2, **keys)]
    once, five = texts(), texts(seed=5)
    assert len({*once}) == len({*five}) == 8 and not {*once} & {*texts()}
    assert five == texts(seed=5) != texts(seed=6)


@pytest.mark.parametrize("n", [0, 1, 5])
def test_logprobs_of_what_is_sampled(client, n):
    """It stands among the alternatives, which 0 leaves out; a part of a character as a number."""
    found = complete(client, "é", max_tokens=30, temperature=2, logprobs=n, echo=True, seed=1)[0].logprobs
    assert found.tokens[:2] == ["\\xc3", "\\xa9"] and found.text_offset[:3] == [0, 0, 1]
    rest = zip(found.tokens[1:], found.token_logprobs[1:], found.top_logprobs[1:])
    assert all(top[token] == value and len(top) in (max(n, 1), n + 1) for token, value, top in rest)


def test_stream_and_several_choices(client):
    """A stream has the texts, one after the other, and the depths of the whole answer."""
    keys = dict(model="mor", prompt=["ab", "cd"], temperature=0, max_tokens=30, logprobs=False)
    whole, chunks = client.completions.create(**keys), list(client.completions.create(**keys, stream=True))
    for choice in whole.choices:
        parts = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
        assert "".join(part.text for part in parts) == choice.text and len(parts) == 31
        assert sum((part.depths for part in parts), []) == choice.depths
        assert [part.finish_reason for part in parts] == [None] * 30 + ["length"]
    assert len(list(client.completions.create(model="mor", prompt="a", max_tokens=0, stream=True))) == 1
    assert [c.index for c in complete(client, [[97, 98], [99, 100]], n=3)] == [0, 1, 2, 3, 4, 5]


def test_models_and_curl(client, url):
    """curl sends a form's Content-Type; query strings are ignored."""
    assert {m.id for m in client.models.list()} == {"mor", "relaxed"} and client.models.retrieve("mor").n_loop == 2
    assert "<textarea" in httpx.get(f"{url}/?x=1").text and httpx.get(f"{url}/v1/models?x=1").status_code == 200
    with pytest.raises(openai.NotFoundError, match="model never is not here: mor, relaxed"):
        client.models.retrieve("never")
    body = '{"prompt": "ab", "max_tokens": 2, "temperature": 0, "seed": null, "stop": null, "echo": false}'
    found = subprocess.run(["curl", "-s", f"{url}/v1/completions?x=1", "-d", body], stdout=subprocess.PIPE)
    assert json.loads(found.stdout)["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}


BAD = [(b"[" * 100_000, "recursion limit"), (b"\xff", "Invalid JSON"), (b"{", "Invalid JSON"), ([], "an object"),
       ({"prompt": ""}, "empty"), ({"prompt": [[]]}, "empty"), ({"prompt": [500]}, "vocabulary of 257"),
       (b'{"prompt": "\\ud800"}', "Invalid JSON"), ({"prompt": "a", "max_tokens": 1000}, "context 64 tokens"),
       ({"n": "n"}, "n: Input"), ({"n": True}, "n: Input"), ({"prompt": ["a"] * 64, "n": 3}, "at most 128"),
       ({"prompt": "a", "stop": "b"}, "stop: Extra inputs"), ({"prompt": "a", "tools": [1]}, "tools: Extra inputs"),
       ({"prompt": "a", "echo": True, "stream": True}, "does not go with"), (b'{"temperature": NaN}', "finite")]


def ask(url, body):
    return httpx.post(f"{url}/v1/completions", timeout=60, **{"content" if isinstance(body, bytes) else "json": body})


def test_bad_requests_are_told(url):
    """In OpenAI's shape, and short."""
    answers = [(ask(url, body), 400, word) for body, word in BAD]
    answers += [(ask(url, {"prompt": "a" * 20_000_000}), 413, "at most 1048576"),
                (httpx.post(f"{url}/v1/completions", content=iter([b"{}"])), 413, "Content-Length"),
                (httpx.get(f"{url}/etc/passwd"), 404, "Not Found"),
                (httpx.request("BREW", f"{url}/v1/models"), 405, "Method Not Allowed")]
    answers += [(httpx.post(f"{url}{path}", headers={"Host": host}), 403, "Host or")
                for host in ("evil.example", "localhost.evil.example", "127.evil.example:80", "")
                for path in ("/", "/v1/models", "/v1/completions", "/never")]
    answers += [(httpx.post(f"{url}/v1/completions", headers={"Origin": f"http://{host}"}), 403, "Origin header")
                for host in ("evil.example", "localhost.evil.example")]
    for answer, status, word in answers:
        error = answer.json()["error"]
        assert answer.status_code == error["code"] == status and word in error["message"], answer.text
        assert len(answer.text) < 500 and error["type"] == "invalid_request_error"
    assert httpx.get(f"{url}/v1/models", headers={"Host": "localhost:9000", "Origin": url}).status_code == 200
    assert httpx.head(url).status_code == 200 and httpx.head(f"{url}/v1/models").status_code == 405


def test_a_failure_is_told_and_does_no_harm(url, client, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(page.runs["mor"], "step", lambda: 1 / 0)
        answer = ask(url, {"prompt": "ab"})
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
            ask(url, {"prompt": "ab", "stream": True})
    assert complete(client, "ab", max_tokens=3)


def vanish(url, seconds, **body):
    """A client that goes away before its answer, or in its middle."""
    with contextlib.suppress(httpx.ReadTimeout):
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=seconds):
            time.sleep(seconds)


def test_200_clients_some_of_which_vanish(url, client):
    """Each gets what it would get alone, beside bad requests, vanished clients and idle connections."""
    rng = random.Random(0)
    prompts = ["".join(rng.choices("abcdefgh ", k=rng.randint(1, 12))) for _ in range(12)]
    alone = {p: complete(client, p, max_tokens=8)[0].text for p in prompts}

    def one(n):
        if n % 10 == 3:
            return vanish(url, 0.05, prompt="a", max_tokens=50, stream=n % 20 == 3)
        if n % 10 == 7:
            assert ask(url, rng.choice(BAD)[0]).status_code == 400
        prompt, more = prompts[n % 12], dict(echo=True, logprobs=1) if n % 5 == 0 else {}
        choice, = complete(client, prompt, max_tokens=8, **more)
        assert choice.text == prompt * bool(more) + alone[prompt]
    idle = [socket.create_connection(url.removeprefix("http://").split(":")) for _ in range(120)]
    with ThreadPoolExecutor(200) as pool:
        assert len(list(pool.map(one, range(200)))) == 200 and len(idle) == 120


@pytest.mark.parametrize("stream", [True, False])
def test_a_vanished_client_frees_its_slot(url, client, stream, monkeypatch):
    """Four texts that would take the four slots for 3 seconds."""
    step = page.runs["mor"].step
    monkeypatch.setattr(page.runs["mor"], "step", lambda: (time.sleep(0.05), step()))
    vanish(url, 0.3, prompt="ab", max_tokens=60, temperature=0, stream=stream, n=4)
    assert complete(client.with_options(timeout=1.5), "ab", max_tokens=1)


def test_a_stream_that_is_cut_is_an_error(folders):
    """By SIGTERM. The server has the name of the folder that it started in, and an IPv6 address."""
    slow = ("import sys, time, lab.page as page; step = page.Run.step\n"
            "page.Run.step = lambda self: (time.sleep(0.2), step(self))\npage.main(sys.argv[1:])")
    server = subprocess.Popen([sys.executable, "-c", slow, ".", "port=0", "host=::1", "device=cpu"], text=True,
                              cwd=folders / "mor", stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})
    url = next(found[0] for line in server.stderr if (found := re.findall(r"http://[^ ]+", line)))
    asked = {"prompt": "ab", "max_tokens": 60, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", timeout=60, json=asked) as answer:
        assert answer.headers["transfer-encoding"] == "chunked"
        lines = answer.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["model"] == "mor"
        server.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
            assert "data: [DONE]" not in list(lines)
    assert server.wait(20) == -signal.SIGTERM


@pytest.mark.parametrize("argv, message", [([], "give one run folder or checkpoint"), (["{mor}", "host="], "host= is empty"),
                                           (["{mor}", "{mor}"], "two runs are named mor"),
                                           (["{mor}", "dtype=float16"], "dtype=float16 must be one of")], ids=str)
def test_what_is_refused(argv, message, folders, monkeypatch):
    monkeypatch.setattr(page, "runs", {})
    with pytest.raises(UserError, match=message):
        page.main([word.format(mor=folders / "mor") for word in argv])


def test_a_run_in_bfloat16(folders):
    run = page.Run(folders / "mor", page.PageConfig(device="cpu", dtype="bfloat16"), several=False)
    assert {x.dtype for x in [*run.kv, *run.model.parameters()]} == {torch.bfloat16}


def test_a_missing_package_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(page.__file__)
    assert capsys.readouterr().err == "error: fastapi is missing: pip install -r tests/requirements.txt\n"
