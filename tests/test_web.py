"""serve.py with port=: OpenAI's completions, as each request would get alone; bad and vanished clients."""
import http.client
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch

import runs
import train
import serve
from lab import page
from test_serve import move
from common.tokenizer import ByteTokenizer


@pytest.fixture(scope="module")
def server(data_dir, tmp_path_factory):
    """A MoR and a relaxed model with weights large enough to differ between tokens, behind one server."""
    out = tmp_path_factory.mktemp("out")
    for model in ("mor", "relaxed"):
        trainer = runs.run(model, out, data_dir, f"run={model}", "max_steps=3", "block_size=64", "dropout=0")
        move(trainer.model, 0.3)
        train.save(trainer, "ckpt.pt")
    cfg = serve.ServeConfig(port=0, slots=4, device="cpu", exit="static:2")     # of relaxed; all its loops
    server = page.open_server([out / "mor", out / "relaxed"], cfg)
    assert server.workers["relaxed"].rule and not server.workers["mor"].rule
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def send(server, body, method="POST", path="/v1/completions", kind="application/json"):
    """The connection on which a request was sent."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    data = json.dumps(body) if isinstance(body, (dict, list)) else body
    connection.request(method, path, data, {"Content-Type": kind})
    return connection


def ask(server, *request, **keys):
    """(status, JSON value or text) of a request."""
    with closing(send(server, *request, **keys)) as connection:
        answer = connection.getresponse()
        text = answer.read().decode()
    return answer.status, json.loads(text) if answer.headers.get_content_type() == "application/json" else text


def vanish(server, seconds, **body):
    """A client that goes away without reading."""
    with closing(send(server, body)):
        time.sleep(seconds)


def wait_until_idle(worker):
    end = time.time() + 20
    while (worker.busy() or worker.waiting) and time.time() < end:
        time.sleep(0.01)
    assert not worker.busy() and not worker.waiting


def complete(server, prompt, **keys):
    status, answer = ask(server, {"prompt": prompt, "temperature": 0, **keys})
    assert status == 200, answer
    return answer["choices"]


@pytest.mark.parametrize("model", ["mor", "relaxed"])
def test_answers_are_those_of_sampling_alone(server, model):
    ours, tokenizer = server.workers[model].model, server.workers[model].tokenizer
    choice, = complete(server, "abc de", max_tokens=20, model=model, logprobs=2)
    ids = tokenizer.encode("abc de")
    with torch.no_grad():
        for _ in range(20):
            ids.append(int(ours(torch.tensor([ids]))[0][0, -1].argmax()))
        logprobs = ours(torch.tensor([ids]))[0][0].log_softmax(-1)
    assert "abc de" + choice["text"] == tokenizer.decode(ids)
    expected = [float(logprobs[i, ids[i + 1]]) for i in range(25)]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected[5:], abs=1e-4)
    assert all(1 <= len(top) <= 2 for top in choice["logprobs"]["top_logprobs"])
    assert {*choice["depths"]} <= {*range(1, ours.n_loop + 1)} and choice["finish_reason"] == "length"
    echoed, = complete(server, "abc de", max_tokens=0, model=model, logprobs=1, echo=True)
    assert echoed["text"] == "abc de" and echoed["logprobs"]["token_logprobs"][0] is None
    assert echoed["logprobs"]["token_logprobs"][1:] == pytest.approx(expected[:5], abs=1e-4)


def test_parts_of_a_character_in_logprobs():
    """Both bytes of é alone are the same replacement character; the text has one character for them."""
    words = page.in_openais_words(ByteTokenizer(), list("aéb".encode()), [None] + [(-1.0, {0xC3: -0.1, 0xA9: -2.0})] * 3)
    assert words["text_offset"] == [0, 1, 1, 2] and words["top_logprobs"][1] == {"\ufffd": -0.1}


def test_stream_stop_and_several_choices(server):
    whole, = complete(server, "ab", max_tokens=30)
    status, text = ask(server, {"prompt": "ab", "temperature": 0, "max_tokens": 30, "stream": True,
                                "stream_options": {"include_usage": True}})
    *events, done, rest = text.split("\n\n")
    events = [json.loads(event.removeprefix("data: ")) for event in events]
    assert status == 200 and (done, rest) == ("data: [DONE]", "") and events[-1]["usage"]["completion_tokens"] == 30
    chunks = [event["choices"][0] for event in events[:-1]]
    assert "".join(c["text"] for c in chunks) == whole["text"]
    assert sum((c["depths"] for c in chunks), []) == whole["depths"]
    assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == ["length"]
    stop = whole["text"][7:10]
    cut, = complete(server, "ab", max_tokens=30, stop=[stop, "never"])
    assert cut["text"] == whole["text"][:whole["text"].index(stop)] and cut["finish_reason"] == "stop"
    assert "[DONE]" in ask(server, {"prompt": "a", "max_tokens": 0, "stream": True})[1]
    keys = dict(max_tokens=12, temperature=1.0, n=3, seed=5)
    many = complete(server, ["ab", [99, 100]], **keys)
    assert [c["index"] for c in many] == [0, 1, 2, 3, 4, 5] and len({c["text"] for c in many}) > 3
    assert [c["text"] for c in complete(server, "ab", **keys)] == [c["text"] for c in many[:3]]


BAD = [(b"[" * 100_000, "not JSON"), (b"\xff", "not JSON"), ([], "JSON object"), ({"prompt": ""}, "empty"),
       ({"prompt": [[]]}, "list of token ids"), ({"prompt": [500]}, "vocabulary"), ({"prompt": "\ud800"}, "Unicode"),
       ({"prompt": "a", "max_tokens": 1000}, "64 tokens"), ({"prompt": "a", "n": "n"}, "n='n'"),
       ({"prompt": "a", "stop": [""]}, "stop"), ({"prompt": "a", "tools": []}, "'tools' is not supported")]


def test_the_page_and_the_list_of_models(server):
    assert "<textarea" in ask(server, None, "GET", "/")[1]
    assert {m["id"] for m in ask(server, None, "GET", "/v1/models")[1]["data"]} == {"mor", "relaxed"}


def test_bad_requests_are_told(server, monkeypatch):
    for body, word in BAD:
        status, answer = ask(server, body)
        assert status == 400 and word in answer["error"]["message"] and "\n" not in answer["error"]["message"]
    assert ask(server, None, "GET", "/etc/passwd")[0] == ask(server, {}, path="/v1/chat")[0] == 404
    assert ask(server, {"prompt": "a"}, kind="text/plain")[0] == 415
    monkeypatch.setattr(web, "MAX_WAITING", 2)
    assert ask(server, {"prompt": "a", "n": 3})[0] == 429
    monkeypatch.setattr(web, "MAX_BODY", 20)
    assert ask(server, {"prompt": "a" * 20})[0] == 413


def test_200_clients_some_of_which_vanish(server):
    """Each gets what it would get alone, beside bad requests and vanished clients; all slots are free after."""
    rng = random.Random(0)
    prompts = ["".join(rng.choices("abcdefgh ", k=rng.randint(1, 12))) for _ in range(12)]
    alone = {p: complete(server, p, max_tokens=12)[0]["text"] for p in prompts}

    def client(n):
        if n % 10 == 3:
            return vanish(server, 0.05, prompt="a", max_tokens=50, stream=n % 20 == 3)
        if n % 10 == 7:
            assert ask(server, rng.choice(BAD)[0])[0] == 400
        prompt, more = prompts[n % 12], dict(echo=True, logprobs=1) if n % 5 == 0 else {}
        choice, = complete(server, prompt, max_tokens=12, **more)
        assert choice["text"] == prompt * bool(more) + alone[prompt]
    with ThreadPoolExecutor(200) as pool:
        list(pool.map(client, range(200)))
    wait_until_idle(server.workers["mor"])


@pytest.mark.parametrize("stream", [True, False])
def test_a_vanished_client_frees_its_slot(server, stream, monkeypatch):
    worker, asked = server.workers["mor"], []
    step, submit = worker.step, worker.submit
    monkeypatch.setattr(worker, "step", lambda: (time.sleep(0.05), step()))     # slower, but never silent for long
    monkeypatch.setattr(worker, "submit", lambda choices: (asked.extend(choices), submit(choices)))
    vanish(server, 0.3, prompt="ab", max_tokens=60, temperature=0, stream=stream)       # it meets no end-of-text
    wait_until_idle(worker)
    assert len(asked[0].tokens) < 50
