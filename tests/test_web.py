"""serve.py with port=: OpenAI's completions, as each request would get alone; bad and vanished clients."""
import http.client
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import checkpoint
import runs
import sample
import serve
import web
from conftest import MODELS


@pytest.fixture(scope="module")
def served(data_dir, tmp_path_factory):
    """A MoR and a relaxed model with weights large enough to differ between tokens, behind one server."""
    out, paths = tmp_path_factory.mktemp("out"), []
    for model in ("mor", "relaxed"):
        runs.run(model, out / model, data_dir, "max_steps=3", "block_size=64", "dropout=0")
        file = out / model / "r" / "ckpt.pt"
        state = checkpoint.load_checkpoint(file)
        torch.manual_seed(0)
        for name, w in state["weights"].items():
            if w.dim() == 2:
                w += 0.3 * torch.randn_like(w)
        checkpoint.save_checkpoint(file.with_name(f"{model}.pt"), state)
        paths.append(file.with_name(f"{model}.pt"))
    server = web.open_server(paths, serve.ServeConfig(port=0, slots=4, device="cpu"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server, dict(zip(("mor", "relaxed"), paths))
    server.shutdown()
    server.server_close()


def ask(server, body, method="POST", path="/v1/completions", kind="application/json"):
    """(status, JSON value or text) of a request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    connection.request(method, path, data, {"Content-Type": kind} if data is not None else {})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    is_json = answer.headers.get_content_type() == "application/json"
    return answer.status, json.loads(text) if is_json else text


def complete(server, prompt, **keys):
    status, answer = ask(server, {"prompt": prompt, "temperature": 0, **keys})
    assert status == 200, answer
    return answer["choices"]


@pytest.mark.parametrize("model", ["mor", "relaxed"])
def test_answers_are_those_of_sampling_alone(served, model):
    server, paths = served
    ours, tokenizer, _ = checkpoint.load_run(paths[model])
    choice, = complete(server, "abc de", max_tokens=20, model=model, logprobs=2)
    assert "abc de" + choice["text"] == sample.sample_text(ours, tokenizer, "abc de", 20, temperature=0)
    ids = tokenizer.encode("abc de")
    with torch.no_grad():
        for _ in range(20):
            ids.append(int(ours(torch.tensor([ids]))[0][0, -1, :257].argmax()))
        logprobs = ours(torch.tensor([ids]))[0][0, :, :257].log_softmax(-1)
    expected = [float(logprobs[i - 1, ids[i]]) for i in range(6, 26)]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    assert all(1 <= len(top) <= 2 for top in choice["logprobs"]["top_logprobs"])
    assert {*choice["depths"]} <= {*range(1, ours.n_loop + 1)} and choice["finish_reason"] == "length"
    echoed, = complete(server, "abc de", max_tokens=0, model=model, logprobs=1, echo=True)
    assert echoed["text"] == "abc de" and echoed["logprobs"]["token_logprobs"][0] is None
    expected = [float(logprobs[i, ids[i + 1]]) for i in range(5)]
    assert echoed["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)


def test_stream_stop_and_several_choices(served):
    server, _ = served
    whole, = complete(server, "ab", max_tokens=30)
    status, text = ask(server, {"prompt": "ab", "temperature": 0, "max_tokens": 30, "stream": True,
                                "stream_options": {"include_usage": True}})
    *events, done, rest = text.split("\n\n")
    events = [json.loads(event.removeprefix("data: ")) for event in events]
    assert status == 200 and done == "data: [DONE]" and rest == "" and events[-1]["usage"]["completion_tokens"] == 30
    chunks = [event["choices"][0] for event in events[:-1]]
    assert "".join(c["text"] for c in chunks) == whole["text"] and sum((c["depths"] for c in chunks), []) == whole["depths"]
    assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == ["length"]
    stop = whole["text"][7:10]
    cut, = complete(server, "ab", max_tokens=30, stop=[stop, "never"])
    assert cut["text"] == whole["text"][:whole["text"].index(stop)] and cut["finish_reason"] == "stop"
    keys = dict(max_tokens=12, temperature=1.0, n=3, seed=5)
    many = complete(server, ["ab", [99, 100]], **keys)
    assert [c["index"] for c in many] == [0, 1, 2, 3, 4, 5] and len({c["text"] for c in many}) > 3
    assert [c["text"] for c in complete(server, "ab", **keys)] == [c["text"] for c in many[:3]]


BAD = [(b"{", "not JSON"), ([], "JSON object"), ({"prompt": ""}, "empty"), ({"prompt": [[]]}, "list of token ids"),
       ({"prompt": "a", "max_tokens": 1000}, "64 tokens"), ({"prompt": "a", "max_tokens": "x"}, "max_tokens"),
       ({"prompt": "a", "temperature": -1}, "temperature"), ({"prompt": "a", "n": 1000}, "n=1000"),
       ({"prompt": ["a"] * 100, "n": 2}, "128"), ({"prompt": [500]}, "vocabulary"), ({"prompt": "a", "n": "n"}, "n='n'"), ({"prompt": "a", "stop": [""]}, "stop"),
       ({"prompt": "a", "model": "x"}, "unknown"), ({"prompt": "a", "tools": []}, "'tools' is not supported"),
       ({"prompt": "\ud800"}, "Unicode"), ({"prompt": "a", "stream": True, "echo": True}, "stream"),
       (b"[" * 100_000, "not JSON"), (b"\xff", "not JSON")]


@pytest.mark.parametrize("body, word", BAD, ids=range(len(BAD)))
def test_bad_requests_are_told(served, body, word):
    status, answer = ask(served[0], body)
    assert status == 400 and word in answer["error"]["message"] and "\n" not in answer["error"]["message"]


def test_other_addresses_types_and_sizes(served):
    server, _ = served
    assert ask(server, None, "GET", "/")[0] == 200 and "<textarea" in ask(server, None, "GET", "/")[1]
    assert {m["id"] for m in ask(server, None, "GET", "/v1/models")[1]["data"]} == {"mor", "relaxed"}
    assert ask(server, None, "GET", "/etc/passwd")[0] == ask(server, {}, path="/v1/chat")[0] == 404
    assert ask(server, {"prompt": "a"}, kind="text/plain")[0] == 415
    assert "[DONE]" in ask(server, {"prompt": "a", "max_tokens": 0, "stream": True})[1]
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest("POST", "/v1/completions")        # the size is refused before the body is sent
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(web.MAX_BODY + 1))
    connection.endheaders()
    assert connection.getresponse().status == 413


def test_200_clients_some_of_which_vanish(served):
    """Each gets what it would get alone, malformed requests and vanished clients among them; all slots are free after."""
    server, _ = served
    worker, rng = server.workers["mor"], random.Random(0)
    prompts = ["".join(rng.choices("abcdefgh ", k=rng.randint(1, 12))) for _ in range(12)]
    alone = {p: complete(server, p, max_tokens=12)[0]["text"] for p in prompts}

    def client(n):
        if n % 10 == 3:                     # goes away without reading
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
            connection.request("POST", "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 50, "stream": n % 20 == 3}),
                               {"Content-Type": "application/json"})
            time.sleep(0.05)
            connection.close()
            return True
        if n % 10 == 7:
            return ask(server, rng.choice(BAD)[0])[0] == 400
        prompt = prompts[n % 12]
        return complete(server, prompt, max_tokens=12)[0]["text"] == alone[prompt]
    with ThreadPoolExecutor(200) as pool:
        assert all(pool.map(client, range(200)))
    end = time.time() + 20
    while (worker.busy() or worker.waiting) and time.time() < end:
        time.sleep(0.05)
    assert not worker.busy() and not worker.waiting
    assert complete(server, prompts[0], max_tokens=12)[0]["text"] == alone[prompts[0]]


def test_a_vanished_client_frees_its_slot(served, monkeypatch):
    server, _ = served
    worker = server.workers["mor"]
    step = worker.step
    monkeypatch.setattr(worker, "step", lambda: (time.sleep(0.05), step()))     # slower, but never silent for long
    for stream in (True, False):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        body = {"prompt": "ab", "max_tokens": 60, "temperature": 0, "stream": stream}      # it meets no end-of-text
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        time.sleep(0.3)
        request = worker.busy()[0].request
        connection.close()
        end = time.time() + 20
        while worker.busy() and time.time() < end:
            time.sleep(0.01)
        assert not worker.busy() and len(request.tokens) < 50


def test_too_many_are_refused(served, monkeypatch):
    monkeypatch.setattr(web, "MAX_WAITING", 2)
    status, answer = ask(served[0], {"prompt": "a", "n": 3})
    assert status == 429 and "try again" in answer["error"]["message"]


def test_openais_client(served):
    openai = pytest.importorskip("openai", reason="openai is not installed")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{served[0].server_port}/v1", api_key="none")
    whole = complete(served[0], "ab", max_tokens=9)[0]["text"]
    assert client.completions.create(model="mor", prompt="ab", max_tokens=9, temperature=0).choices[0].text == whole
    parts = client.completions.create(model="mor", prompt="ab", max_tokens=9, temperature=0, stream=True)
    assert "".join(part.choices[0].text for part in parts) == whole


@pytest.mark.parametrize("model", [m for m in MODELS if m not in ("mor", "relaxed")])
def test_models_without_loops_are_refused(model, data_dir, tmp_path):
    runs.run(model, tmp_path, data_dir, "max_steps=1")
    with pytest.raises(serve.UserError, match="loops over depth"):
        web.open_server([tmp_path / "r"], serve.ServeConfig(port=0, device="cpu"))
