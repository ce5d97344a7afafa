"""lab/page.py through real clients: completions as each request would get alone; bad and vanished clients."""
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch

import runs
import train
from common.keys import UserError
from conftest import ROOT
from test_serve import move

for package in ("fastapi", "uvicorn"):
    pytest.importorskip(package)
httpx, openai = pytest.importorskip("httpx"), pytest.importorskip("openai")
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
    """Of a server of both, in a thread."""
    cfg = page.PageConfig(port=0, slots=4, device="cpu", exit="static:2")       # of relaxed; all its loops
    server = page.make_server([folders / "mor", folders / "relaxed"], cfg)
    assert page.runs["relaxed"].rule and not page.runs["mor"].rule
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
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
    echoed, = complete(client, "abc de", max_tokens=0, model=model, logprobs=1, echo=True)
    assert echoed.text == "abc de" and echoed.logprobs.token_logprobs[0] is None
    assert echoed.logprobs.token_logprobs[1:] == pytest.approx(expected[:5], abs=1e-4)


@pytest.fixture
def end_likeliest():
    """After "abc de" the MoR's likeliest token is end-of-text: it has the weights of what was the likeliest."""
    model, tokenizer = page.runs["mor"].model, page.runs["mor"].tokenizer
    with torch.inference_mode():
        pair = [int(model(torch.tensor([tokenizer.encode("abc de")]))[0][0, -1].argmax()), tokenizer.eot]
        model.head.weight[pair] = model.head.weight[pair[::-1]]
        yield
        model.head.weight[pair] = model.head.weight[pair[::-1]]


def test_end_of_text_has_its_log_probability(client, end_likeliest):
    choice, = complete(client, "abc de", max_tokens=1, echo=True, logprobs=1)
    found = choice.logprobs
    assert (choice.text, choice.finish_reason, choice.depths) == ("abc de", "stop", [])
    assert found.tokens == [*"abc de", ""] and found.text_offset == [0, 1, 2, 3, 4, 5, 6]
    assert found.top_logprobs[-1] == {"": found.token_logprobs[-1]} and len(found.token_logprobs) == 7


def test_lm_eval_scores_as_eval_does(url, end_likeliest):
    pytest.importorskip("lm_eval")
    pytest.importorskip("tenacity", reason="lm_eval's clients need it")
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from test_eval import harness_model
    run = page.runs["mor"]
    ours = harness_model(run.model, run.tokenizer, 4)
    api = LocalCompletionsAPI(base_url=f"{url}/v1/completions", model="mor", tokenizer_backend=None, batch_size=4)
    api.tokenizer, api.tokenized_requests = run.tokenizer, True
    rng, greedy = random.Random(0), list(b"abc d")
    with torch.inference_mode():
        for _ in range(4):
            greedy.append(int(run.model(torch.tensor([greedy]))[0][0, -1, :256].argmax()))
    asked = [(greedy[:5], greedy[5:]), (greedy[:5], greedy[5:6]), (list(b"abc d"), list(b"e")), ([120, 195], [169, 7])]
    asked += [([rng.randrange(256) for _ in range(5)], [rng.randrange(256)]) for _ in range(4)]
    theirs = api._loglikelihood_tokens([(("", ""), *pair) for pair in asked])
    want = ours.scores(asked)
    assert [greedy for _, greedy in theirs] == [greedy for _, greedy in want] and want[1][1] and not want[-1][1]
    assert [score for score, _ in theirs] == pytest.approx([score for score, _ in want], abs=1e-4)


def test_random_numbers(client):
    """Without a seed all differ; with one each prompt and choice has its own, the same every time."""
    texts = lambda **keys: [c.text for c in complete(client, ["ab"] * 4, max_tokens=12, temperature=1, n=2, **keys)]
    once = texts()
    assert len({*once}) == 8 and not {*once} & {*texts()}
    assert len({*texts(seed=5)}) == 8 and texts(seed=5) == texts(seed=5) != texts(seed=6)


def test_logprobs_of_what_is_sampled(client):
    """It stands among the alternatives, which 0 leaves out; a part of a character as bytes."""
    for n in (0, 1, 5):
        found = complete(client, "é", max_tokens=30, temperature=2, logprobs=n, echo=True, seed=1)[0].logprobs
        assert found.tokens[:2] == ["bytes:\\xc3", "bytes:\\xa9"] and found.text_offset[:3] == [0, 0, 1]
        assert all(top[token] == value for token, value, top in
                   zip(found.tokens[1:], found.token_logprobs[1:], found.top_logprobs[1:]))
        assert {len(top) for top in found.top_logprobs[1:]} == ({1} if n == 0 else {n, n + 1})


def test_stream_and_several_choices(client):
    whole, = complete(client, "ab", max_tokens=30)
    chunks = [part.choices[0] for part in client.completions.create(
        model="mor", prompt="ab", temperature=0, max_tokens=30, stream=True, logprobs=False)]
    assert "".join(c.text for c in chunks) == whole.text and len(chunks) > 20
    assert sum((c.depths for c in chunks), []) == whole.depths
    assert [c.finish_reason for c in chunks if c.finish_reason] == ["length"]
    assert len(list(client.completions.create(model="mor", prompt="a", max_tokens=0, stream=True))) == 1
    answer = client.completions.create(model="mor", prompt=[[97, 98], [99, 100]], n=3)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3, 4, 5]
    assert answer.usage.prompt_tokens == 4 and answer.usage.completion_tokens == sum(len(c.depths) for c in answer.choices)


def test_models(client, url):
    assert {m.id for m in client.models.list()} == {"mor", "relaxed"} and client.models.retrieve("mor").n_loop == 2
    assert "<textarea" in httpx.get(f"{url}/?x=1").text and httpx.get(f"{url}/v1/models?x=1").status_code == 200
    with pytest.raises(openai.NotFoundError, match="model never is not here: mor, relaxed"):
        client.models.retrieve("never")


BAD = [(b"[" * 100_000, "parsing the body"), (b"\xff", "parsing the body"), (b"{", "JSON"), ([], "JSON object"),
       ({"prompt": ""}, "empty"), ({"prompt": [[]]}, "empty"), ({"prompt": [500]}, "vocabulary of 257"),
       (b'{"prompt": "\\ud800"}', "not valid Unicode"), ({"prompt": "a", "max_tokens": 1000}, "64 tokens"),
       ({"n": "n"}, "n: Input"), ({"n": True}, "n: Input"), ({"prompt": ["a"] * 64, "n": 3}, "more than 128"),
       ({"prompt": "a", "stop": "b"}, "stop: Extra inputs"), ({"prompt": "a", "tools": [1]}, "tools: Extra inputs"),
       ({"prompt": "a", "echo": True, "stream": True}, "does not go with"), (b'{"temperature": NaN}', "finite"),
       (b'{"\\ud800": 1}', "unicode")]
JSON = {"Content-Type": "application/json"}


def ask(url, body):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{url}/v1/completions", content=content, headers=JSON, timeout=60)


def test_bad_requests_are_told(url):
    """In OpenAI's shape, and short."""
    def refused(answer, status, word):
        error = answer.json()["error"]
        assert answer.status_code == error["code"] == status and word in error["message"], answer.text
        assert len(answer.text) < 500 and error["type"] == "invalid_request_error"
    for body, word in BAD:
        refused(ask(url, body), 400, word)
    neutral = {"seed": None, "stop": None, "suffix": None}
    assert ask(url, {"prompt": "a", "max_tokens": 1, **neutral}).status_code == 200
    refused(ask(url, {"prompt": "a" * 20_000_000}), 413, "at most 1048576")
    refused(httpx.post(f"{url}/v1/completions", content=iter([b"{}"])), 413, "Content-Length")
    refused(httpx.post(f"{url}/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"}),
            400, "JSON object")
    refused(httpx.get(f"{url}/etc/passwd"), 404, "Not Found")
    refused(httpx.request("BREW", f"{url}/v1/models"), 405, "Method Not Allowed")
    for path in ("/", "/v1/models", "/v1/completions", "/never"):
        for host in ("evil.example", "localhost.evil.example", "127.evil.example:80", ""):
            refused(httpx.post(f"{url}{path}", headers={"Host": host}), 403, "Host header")
    assert httpx.get(f"{url}/v1/models", headers={"Host": "localhost:9000"}).status_code == 200
    assert httpx.head(url).status_code == 200 and httpx.head(f"{url}/v1/models").status_code == 405


def test_a_failure_is_told_and_does_no_harm(url, client, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(page.runs["mor"], "step", lambda: 1 / 0)
        answer = ask(url, {"prompt": "ab"})
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
        assert '"finish_reason": "error"' in ask(url, {"prompt": "ab", "stream": True}).text
    assert complete(client, "ab", max_tokens=3)


def vanish(url, seconds, **body):
    """A client that goes away without reading."""
    with closing(http.client.HTTPConnection(url.removeprefix("http://"))) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), JSON)
        time.sleep(seconds)


def test_200_clients_some_of_which_vanish(url, client):
    """Each gets what it would get alone, beside bad requests, vanished clients and idle connections."""
    rng = random.Random(0)
    prompts = ["".join(rng.choices("abcdefgh ", k=rng.randint(1, 12))) for _ in range(12)]
    alone = {p: complete(client, p, max_tokens=12)[0].text for p in prompts}

    def one(n):
        if n % 10 == 3:
            return vanish(url, 0.05, prompt="a", max_tokens=50, stream=n % 20 == 3)
        if n % 10 == 7:
            assert ask(url, rng.choice(BAD)[0]).status_code == 400
        prompt, more = prompts[n % 12], dict(echo=True, logprobs=1) if n % 5 == 0 else {}
        choice, = complete(client, prompt, max_tokens=12, **more)
        assert choice.text == prompt * bool(more) + alone[prompt]
    address = url.removeprefix("http://").split(":")
    idle = [socket.create_connection(address) for _ in range(120)]
    with ThreadPoolExecutor(200) as pool:
        list(pool.map(one, range(200)))
    for connection in idle:
        connection.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_vanished_client_frees_its_slot(url, client, stream, monkeypatch):
    """Four that would take the four slots for 3 seconds."""
    run, asked = page.runs["mor"], []
    step = run.step
    monkeypatch.setattr(run, "step", lambda: (time.sleep(0.05), step()))
    write = run.write
    monkeypatch.setattr(run, "write", lambda choices, request: (asked.extend(choices), write(choices, request))[1])
    vanish(url, 0.3, prompt="ab", max_tokens=60, temperature=0, stream=stream, n=4)
    start = time.time()
    complete(client, "ab", max_tokens=1)
    assert time.time() - start < 1.5 and max(len(choice.tokens) for choice in asked[:4]) < 30


# a process of its own ---------------------------------------------------------------------------------------------

SLOW = """import sys, time, lab.page as page
step = page.Run.step
page.Run.step = lambda self: (time.sleep(0.2), step(self))
page.main(sys.argv[1:])"""


def test_a_stream_that_is_cut_is_an_error(folders):
    """By SIGTERM. The server has the name of the folder that it started in, and an IPv6 address."""
    command = [sys.executable, "-c", SLOW, ".", "port=0", "host=::1", "device=cpu"]
    server = subprocess.Popen(command, cwd=folders / "mor", stderr=subprocess.PIPE, text=True,
                              env={**os.environ, "PYTHONPATH": str(ROOT)})
    url = next(found[0] for line in server.stderr if (found := re.findall(r"http://[^ ]+", line)))
    with httpx.stream("POST", f"{url}/v1/completions", timeout=60,
                      json={"prompt": "ab", "max_tokens": 60, "temperature": 0, "stream": True}) as answer:
        assert answer.headers["transfer-encoding"] == "chunked"
        lines = answer.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["model"] == "mor"
        server.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
            assert "data: [DONE]" not in list(lines)
    assert server.wait(20) == -signal.SIGTERM


@pytest.mark.parametrize("argv, message", [([], "give one run or more"), (["{mor}", "host="], "host= is empty"),
                                           (["{mor}", "{mor}"], "two runs are named mor"),
                                           (["{mor}", "batching=never"], "must be one of: depth, sequence")], ids=str)
def test_what_is_refused(argv, message, folders, monkeypatch):
    monkeypatch.setattr(page, "runs", {})
    with pytest.raises(UserError, match=message):
        page.main([word.format(mor=folders / "mor") for word in argv])


def test_a_missing_package_is_one_line():
    code = "import sys; sys.modules['fastapi'] = None; import lab.page"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: fastapi is missing: pip install -r tests/requirements.txt\n"
