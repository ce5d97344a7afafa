"""Decoding: the sampling loop gives what forward alone gives, a token is chosen as by hand, and the command line
works."""
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common import checkpoint
from common.tokenizer import load_tokenizer
import runs
import sample
from conftest import MODELS, relative, tiny


def greedy(model, row, n, eot=None):
    """Return the n likeliest tokens after row. Each comes from one forward over the last context_limit tokens. A model
    may keep fewer tokens of a full context."""
    limit, new = model.context_limit or len(row) + n, []
    context = list(row)[-limit:]
    with torch.no_grad():
        while len(new) < n and (not new or new[-1] != eot):
            new.append(model(torch.tensor([context]))[0][0, -1].argmax().item())
            context.append(new[-1])
            if len(context) > limit:
                context = context[-getattr(model, "context_kept", limit):]
    return [t for t in new if t != eot]


def decode(model, prompts, n, **options):
    steps = sample.stream(model, prompts, n, **{"temperature": 0, **options})
    return [[token for token in row if token is not None] for row in zip(*steps)]


def test_a_ragged_batch_is_read_as_in_the_docstring_of_stream(monkeypatch):
    """idx and n_valid of each forward are looked at: of prefill, of a step of all rows, and of a step after a row has
    ended."""
    model, prompts, read = tiny("gpt", tie_embeddings=False), [[5, 6, 7], [8]], []
    (a, c, d), (b, eot) = (greedy(model, prompt, n) for prompt, n in zip(prompts, (3, 2)))

    def read_and_decode(idx, cache, n_valid=None):
        read.append((idx.tolist(), None if n_valid is None else n_valid.tolist()))
        return type(model).decode(model, idx, cache, n_valid)
    monkeypatch.setattr(model, "decode", read_and_decode)
    assert [*sample.stream(model, prompts, 3, temperature=0, eot=eot)] == [[a, b], [c, None], [d, None]]
    assert read == [([[5, 6, 7], [8, 0, 0]], [3, 1]), ([[a], [b]], None), ([[c], [eot]], [1, 0])]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_made_of_one_token_a_row(name):
    """Logits of all tokens of a long prompt may not fit in memory."""
    model, seen = tiny(name), []
    model.head.register_forward_hook(lambda module, args, logits: seen.append(args[0].numel() // args[0].size(-1)))
    decode(model, [[5, 6, 7], [8]], 3)
    assert seen == [2, 2, 2]


@pytest.mark.parametrize("name", MODELS)
@given(data=st.data())
def test_random_batches_decode_as_if_alone(name, data):
    """Prompts have any lengths, past block_size too, and end-of-text ends a row wherever it comes."""
    model = tiny(name, block_size=12, fast=data.draw(st.booleans()))
    prompts = data.draw(st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=20), min_size=1, max_size=3))
    eot = data.draw(st.sampled_from([None] + greedy(model, prompts[0], 5)))
    n = data.draw(st.integers(1, 16))
    assert decode(model, prompts, n, eot=eot) == [greedy(model, p, n, eot) for p in prompts]


def test_seeds():
    model, state = tiny("gpt"), torch.get_rng_state()
    one, again, other = (decode(model, [[1, 2]] * 3, 20, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state), "sampling draws from a generator of its own"
    assert one == again != other and one[0] != one[1]


def frequencies(p, **options):
    """Return how often each token is drawn when the model's probabilities are p."""
    logits, options = torch.tensor(p).log().expand(20000, -1), dict(temperature=1.0, top_k=0, top_p=1.0) | options
    ids = sample.next_tokens(logits, **options, generator=torch.Generator().manual_seed(0))
    return (torch.bincount(ids, minlength=len(p)) / 20000).tolist()


def near(weights):
    return pytest.approx([w / sum(weights) for w in weights], abs=0.015)


def test_choice_of_a_token_by_hand():
    p = [0.1, 0.5, 0.15, 0.25]
    assert frequencies(p) == near(p) and frequencies(p, temperature=0.5) == near([x * x for x in p])
    assert frequencies(p, top_k=2) == near([0, 0.5, 0, 0.25])
    assert frequencies(p, top_p=0.74) == near([0, 0.5, 0, 0.25])
    assert frequencies(p, top_p=0.76) == near([0, 0.5, 0.15, 0.25])
    for options in (dict(top_p=0.0), dict(top_k=3, top_p=0.5), dict(temperature=0)):
        assert frequencies(p, **options) == [0, 1, 0, 0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data_dir):
    out = tmp_path_factory.mktemp("trained")
    runs.run("gpt", out, data_dir, "max_steps=30", "learning_rate=1e-2", "block_size=32")
    return str(out / "r")


def call(capsys, *argv):
    capsys.readouterr()
    sample.main(list(argv))
    return capsys.readouterr()


def test_streams_a_sample(trained, capsys):
    out, err = call(capsys, trained, "prompt=ab", "max_new_tokens=20", "seed=3")
    assert out.startswith("ab") and len(out) > 10 and "20 tokens in" in err and "tokens/s" in err
    assert call(capsys, trained, "prompt=ab", "max_new_tokens=20", "seed=3").out == out
    for text in ("${oc.env:HOME}", "1e3", "a=b", "é\n"):
        assert call(capsys, trained, f"prompt={text}", "max_new_tokens=1").out.startswith(text)


@pytest.mark.parametrize("name", MODELS)
def test_weights_and_cache_have_the_dtype(name, tmp_path, data_dir, monkeypatch, capsys):
    """A CPU takes float32 by itself, with the same text. bfloat16 rounds, and the text may be another."""
    folder, loaded = runs.run(name, tmp_path, data_dir, "max_steps=1").folder, []
    monkeypatch.setattr(sample, "load_run", lambda *args, **keys: loaded.append(checkpoint.load_run(*args, **keys))
                        or loaded[-1])
    argv = str(folder), "device=cpu", "prompt=abcdefgh", "max_new_tokens=30", "temperature=0"
    assert call(capsys, *argv).out == call(capsys, *argv, "dtype=float32").out
    assert "30 tokens in" in call(capsys, *argv, "dtype=bfloat16", "stop=false").err
    auto, wide, narrow = (model for model, *_ in loaded)
    for model, dtype in (auto, torch.float32), (wide, torch.float32), (narrow, torch.bfloat16):
        cache = model.init_cache(1, 10)
        assert {x.dtype for x in [*model.parameters(), *getattr(cache, "k", []), *getattr(cache, "v", [])]} == {dtype}
    idx = torch.tensor([list(b"abcdefgh")])
    exact, rounded = (model(idx, cache=model.init_cache(1, 10))[0] for model in (wide, narrow))
    assert rounded.dtype == torch.float32 and 0 < relative(rounded, exact) < 0.15


def test_options_reach_the_decoding(trained, monkeypatch, capsys):
    given = []
    monkeypatch.setattr(sample, "stream", lambda model, prompts, n, *how, **more: given.extend(
        (model.cfg.fast, len(prompts), n, *how, more)) or iter([[65] * len(prompts)]))
    call(capsys, trained, "prompt=ab", "num_samples=2", "max_new_tokens=7", "temperature=0.5", "top_k=3", "top_p=0.25", "seed=4",
         "fast=false")
    assert given == [False, 2, 7, 0.5, 3, 0.25, {"eot": 256, "seed": 4, "vocab_size": 257}]
    del given[:]
    call(capsys, trained, "prompt=ab", "stop=false")
    assert given[0] is True and given[-1]["eot"] is None


def test_samples_in_a_batch(trained, capsys, tmp_path):
    (tmp_path / "lines.txt").write_text("first\n\nthe second line\n")
    out, err = call(capsys, trained, f"prompt=LINES:{tmp_path / 'lines.txt'}", "max_new_tokens=5", "num_samples=2")
    assert out.startswith("first") and out.count("-" * 80) == 4 and "20 tokens" in err
    assert re.findall("first|the second line", out) == ["first"] * 2 + ["the second line"] * 2
    out, _ = call(capsys, trained, f"prompt=FILE:{tmp_path / 'lines.txt'}", "max_new_tokens=1")
    assert out.startswith("first\n\nthe second line\n")


def test_the_sample_after_training():
    """It has no dropout, and it ends at the end-of-text token."""
    model, tokenizer = tiny("gpt", vocab_size=257, dropout=0.5), load_tokenizer({"kind": "byte"})
    one, other = (sample.sample_text(model.train(), tokenizer, "ab", 20, temperature=0) for _ in range(2))
    assert one == other and not model.training
    tokenizer.eot, = greedy(model, list(b"ab"), 1)
    assert sample.sample_text(model, tokenizer, "ab", 20, temperature=0) == "ab"


def test_a_long_prompt_is_cropped_and_said(trained, capsys):
    out, err = call(capsys, trained, f"prompt={'abc ' * 20}", "max_new_tokens=4", "temperature=0")
    assert "80 tokens: prompts are cropped to their last 32 (block_size)" in err
    short = call(capsys, trained, f"prompt={('abc ' * 20)[-32:]}", "max_new_tokens=4", "temperature=0")
    assert short.out[32:] == out[80:] and "cropped" not in short.err


def test_padding_of_the_vocabulary_is_never_sampled(tmp_path, data_dir, capsys):
    """A model that is hardly trained and has more ids than its tokenizer would choose an id that does not decode."""
    runs.run("gpt", tmp_path, data_dir, "vocab_size=5000", "max_steps=1")
    for options in ([], ["temperature=0"]):
        assert "40 tokens" in call(capsys, str(tmp_path / "r"), "max_new_tokens=40", "stop=false", *options).err


def test_a_character_in_pieces_is_printed_whole(capsys):
    tokenizer = load_tokenizer({"kind": "byte"})
    ids = list("aé€\U0001f600".encode()) + [0xC3]      # the last character never ends
    assert sample.write_stream(([i] for i in ids), tokenizer, [[]]) == 11
    assert capsys.readouterr().out == "aé€\U0001f600�\n"
