"""model_gpt.py against independent computations: attention from its definition, transformers' Llama, its errors."""
import json
import math

import pytest
import torch

import llama
import model_gpt
from conftest import relative, tiny
from model_gpt import Config, Model


def rotate(x, pos, theta):
    """Rotary by complex numbers: pair (i, i + D/2) of position t turns by t theta^(-2i/D). x (T, H, D)."""
    half = x.size(-1) // 2
    freq = torch.tensor([theta ** (-2 * i / x.size(-1)) for i in range(half)], dtype=torch.float64)
    turn = torch.exp(1j * pos[:, None].double() * freq)[:, None]
    z = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turn
    return torch.cat([z.real, z.imag], -1)


def attention_by_hand(model, x):
    """One block's attention for x (T, C), position by position and head by head, from the definition."""
    cfg, a = model.cfg, model.blocks[0].attn
    T, D, share = x.size(0), cfg.head_dim, cfg.n_head // cfg.n_kv_head
    q, k, v = a.wq(x).view(T, -1, D), a.wk(x).view(T, -1, D), a.wv(x).view(T, -1, D)
    if cfg.qk_norm:
        q, k = (y / (y.square().mean(-1, keepdim=True) + cfg.norm_eps).sqrt() * n.weight
                for y, n in ((q, a.q_norm), (k, a.k_norm)))
    if cfg.pos == "rope":
        q, k = (rotate(y, torch.arange(T), cfg.rope_theta) for y in (q, k))
    out = torch.zeros(T, cfg.n_head, D, dtype=x.dtype)
    for i in range(T):
        first = max(0, i - cfg.window + 1) if cfg.window else 0
        for h in range(cfg.n_head):
            slope = 2 ** (-8 * (h + 1) / cfg.n_head) if cfg.pos == "alibi" else 0
            scores = torch.stack([q[i, h] @ k[j, h // share] / math.sqrt(D) - slope * (i - j)
                                  for j in range(first, i + 1)])
            out[i, h] = scores.softmax(0) @ v[first:i + 1, h // share]
    return a.wo(out.view(T, -1))


@pytest.mark.parametrize("sizes", [dict(), dict(n_kv_head=2, rope_theta=500.0), dict(pos="alibi"), dict(pos="none"),
                                   dict(window=3), dict(pos="alibi", window=4, n_kv_head=1), dict(qk_norm=True)])
@pytest.mark.parametrize("fast", [True, False])
def test_attention_is_its_definition(sizes, fast):
    model = tiny("gpt", n_layer=1, fast=fast, **sizes)
    captured = []
    model.blocks[0].attn.register_forward_hook(lambda m, args, out: captured.append((args[0], out)))
    model(torch.randint(0, 61, (1, 11)))
    normed, got = captured[0]
    with torch.no_grad():
        assert relative(got[0], attention_by_hand(model, normed[0])) < 1e-12


def test_fast_takes_the_fused_kernel_and_naive_does_not(monkeypatch):
    calls = []
    fused = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(model_gpt.F, "scaled_dot_product_attention",
                        lambda *a, **k: calls.append((a[3], k["is_causal"])) or fused(*a, **k))
    x = torch.randint(0, 61, (2, 9))
    tiny("gpt", fast=False)(x)
    assert calls == []
    model = tiny("gpt")
    model(x)
    assert calls == [(None, True)] * 2, "plain causal attention needs no mask"
    calls.clear()
    with torch.no_grad():
        cache = model.init_cache(2, 12)
        model(x, cache=cache)
        model(x[:, :1], cache=cache)
    assert calls == [(None, True)] * 2 + [(None, False)] * 2, "nor does a decoding step of rows of equal length"


def test_sizes_and_parameter_count():
    cfg = Config(vocab_size=100, n_layer=3, n_head=4, n_kv_head=2, n_embd=64, n_mlp=96, qk_norm=True)
    model = Model(cfg)
    block = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 2 * 64 + 2 * 16
    assert sum(p.numel() for p in model.parameters()) == 100 * 64 + 3 * block + 64
    assert model.init_cache(5, 10).nbytes() == 2 * 3 * 5 * 10 * 2 * 16 * 4  # k, v x layers x rows x len x heads x D x 4
    untied = Model(Config(vocab_size=100, n_layer=1, n_embd=64, mlp="gelu", tie_embeddings=False))
    assert sum(p.numel() for p in untied.parameters()) == 2 * 100 * 64 + 4 * 64 * 64 + 8 * 64 * 64 + 3 * 64
    assert Config(n_embd=768, n_head=12).n_mlp == 2048 and Config(mlp="gelu", n_embd=64).n_mlp == 256


def test_flops_by_hand():
    model = Model(Config(block_size=4, vocab_size=10, n_layer=1, n_head=2, n_embd=8, n_mlp=16))
    assert model.flops_per_token() == 6 * (4 * 64 + 3 * 8 * 16 + 80) + 12 * 8 * 2.5
    windowed = Model(Config(block_size=4, vocab_size=10, n_layer=1, n_head=2, n_embd=8, n_mlp=16, window=2))
    assert model.flops_per_token() - windowed.flops_per_token() == 12 * 8 * (2.5 - 7 / 4)


@pytest.mark.parametrize("bad, named", [
    (dict(n_embd=30), "n_embd=30 is not divisible by n_head=4"), (dict(n_kv_head=3), "n_kv_head=3"),
    (dict(n_embd=12), "even head size"), (dict(mlp="relu"), "mlp=relu"), (dict(pos="sin"), "pos=sin"),
    (dict(n_layer=0), "n_layer=0"), (dict(vocab_size=-1), "vocab_size=-1"), (dict(dropout=1.0), "dropout=1.0"),
    (dict(window=-1), "window"), (dict(block_size=0), "block_size=0")])
def test_impossible_sizes_are_named(bad, named):
    with pytest.raises(ValueError, match=named):
        Config(**{**dict(n_embd=64), **bad})


def test_dropout_acts_in_training_only():
    model, x = tiny("gpt", dropout=0.5), torch.randint(0, 61, (1, 9))
    assert torch.equal(model(x)[0], model(x)[0])
    model.train()
    assert not torch.equal(model(x)[0], model(x)[0])


# Hugging Face weights ---------------------------------------------------------------------------------------

def saved_llama(path, kind="Llama", shard="5GB", **sizes):
    """A tiny random Llama (or Mistral) written by transformers, norms randomised."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**{**dict(
        vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6, head_dim=8,
        num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1234.0}), **sizes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    model.save_pretrained(path, max_shard_size=shard)
    return model


def logits_of(model, x):
    with torch.no_grad():
        out = model.eval()(x)
    return out[0] if isinstance(out, tuple) else out.logits


def assert_same_logits(ours, theirs):
    x = torch.randint(0, ours.cfg.vocab_size, (2, 30))
    want = logits_of(theirs, x)
    assert (logits_of(ours, x) - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize("sizes, changes", [
    (dict(), dict()), (dict(tie_word_embeddings=True, num_key_value_heads=6, shard="40KB"), dict()),
    (dict(), dict(rope_parameters=None, rope_theta=1234.0, rope_scaling=None, head_dim=None)),      # before 2025
    (dict(), dict(sliding_window=8, use_sliding_window=False)),                                     # Llama ignores it
    (dict(kind="Mistral", sliding_window=7), dict())])
def test_loads_what_transformers_saved(tmp_path, sizes, changes):
    theirs = saved_llama(tmp_path, **sizes)
    edit(tmp_path, **changes)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == ("shard" in sizes)
    ours = llama.from_pretrained(tmp_path, block_size=32, dropout=0.1)
    assert_same_logits(ours, theirs)
    assert ours.cfg.rope_theta == 1234.0 and ours.cfg.n_kv_head == theirs.config.num_key_value_heads
    assert ours.cfg.block_size == 32 and ours.cfg.dropout == 0.1 and ours.cfg.window == 7 * ("kind" in sizes)
    assert (ours.head.weight is ours.wte.weight) == theirs.config.tie_word_embeddings


@pytest.mark.parametrize("sizes", [dict(), dict(tie_embeddings=True, n_kv_head=2, rope_theta=500.0)])
def test_transformers_loads_what_we_saved(tmp_path, sizes):
    transformers = pytest.importorskip("transformers")
    ours = tiny("gpt", **{**dict(tie_embeddings=False), **sizes}).float()
    llama.to_pretrained(ours, tmp_path / "new")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert_same_logits(ours, theirs)
    assert theirs.config.eos_token_id is None, "transformers would stop at a token that ends nothing here"
    again = llama.from_pretrained(tmp_path / "new")
    assert again.cfg == ours.cfg and all(map(torch.equal, again.parameters(), ours.parameters()))


def test_older_weights_load_the_same(tmp_path):
    """bfloat16, with the tied head stored once more and rotary tables beside it."""
    from safetensors.torch import load_file, save_file
    saved_llama(tmp_path, tie_word_embeddings=True)
    weights = {n: w.bfloat16() for n, w in load_file(tmp_path / "model.safetensors").items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(weights, tmp_path / "model.safetensors")
    ours = llama.from_pretrained(tmp_path)
    assert ours.head.weight is ours.wte.weight
    assert torch.equal(ours.wte.weight, weights["model.embed_tokens.weight"].float())


def test_a_hub_name_is_downloaded(tmp_path, monkeypatch):
    import huggingface_hub
    saved_llama(tmp_path)
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **k: asked.append(name) or str(tmp_path))
    assert llama.from_pretrained("owner/name").cfg.n_layer == 3 and asked == ["owner/name"]

    def offline(name, **k):
        raise OSError("no network")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match="owner/name is not a folder here and could not be downloaded"):
        llama.from_pretrained("owner/name")


def edit(folder, **changes):
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "missing"}))


@pytest.mark.parametrize("changes, named", [
    (dict(rope_scaling={"rope_type": "llama3", "factor": 8.0}, rope_parameters=None), "llama3"),
    (dict(rope_parameters={"rope_type": "yarn"}), "yarn"), (dict(rope_parameters="x"), "config.json"),
    (dict(attention_bias=True), "attention_bias"), (dict(mlp_bias=True), "mlp_bias"),
    (dict(hidden_act="gelu"), "hidden_act"), (dict(head_dim=16), "head_dim"), (dict(model_type="bert"), "bert"),
    (dict(vocab_size=None), "config.json"), (dict(hidden_size="missing"), "hidden_size"),
    (dict(intermediate_size=64), "gate_proj"), (dict(num_hidden_layers=2), "layers.2"),
    (dict(num_hidden_layers=4), "layers.3")])
def test_what_we_cannot_compute_is_refused_by_name(tmp_path, changes, named):
    saved_llama(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=named):
        llama.from_pretrained(tmp_path)


def test_damaged_folders_are_refused(tmp_path):
    saved_llama(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:len(data) // 2])
    with pytest.raises(ValueError, match="damaged"):
        llama.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="JSON"):
        llama.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="neither a folder nor a hub name"):
        llama.from_pretrained(tmp_path / "missing")
    with pytest.raises(ValueError, match="as a Llama"):
        llama.to_pretrained(tiny("gpt", pos="alibi"), tmp_path / "x")
