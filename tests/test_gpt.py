"""model_gpt.py against independent computations: attention from its definition, transformers' Llama."""
import json
import os

import pytest
import torch

from common import llama
import model_gpt
from conftest import relative, tiny
from kernel_cases import dense_attend


def rotate(x, pos, theta):
    """Rotary by complex numbers: pair (i, i + D/2) of position t turns by t theta^(-2i/D). x (T, H, D)."""
    half = x.size(-1) // 2
    freq = torch.tensor([theta ** (-2 * i / x.size(-1)) for i in range(half)], dtype=torch.float64)
    turn = torch.exp(1j * pos[:, None].double() * freq)[:, None]
    z = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turn
    return torch.cat([z.real, z.imag], -1)


def dense_heads(q, k, v, *positions, **more):
    """Attention of q (T, heads, D) to k and v (S, key heads, D), the whole score matrix written out: (T, heads, D)."""
    out, _ = dense_attend(*(x.transpose(0, 1)[None] for x in (q, k, v)), *positions, **more)
    return out[0].transpose(0, 1)


def attention_by_hand(model, x):
    """One block's attention for x (T, C), from the definition."""
    cfg, a, T = model.cfg, model.blocks[0].attn, len(x)
    q, k, v = (w(x).view(T, -1, cfg.head_dim) for w in (a.wq, a.wk, a.wv))
    if cfg.qk_norm:
        q, k = (y / (y.square().mean(-1, keepdim=True) + cfg.norm_eps).sqrt() * n.weight
                for y, n in ((q, a.q_norm), (k, a.k_norm)))
    if cfg.pos == "rope":
        q, k = (rotate(y, torch.arange(T), cfg.rope_theta) for y in (q, k))
    slopes = 2 ** (-8 * torch.arange(1, cfg.n_head + 1).double() / cfg.n_head) if cfg.pos == "alibi" else None
    return a.wo(dense_heads(q, k, v, slopes=slopes, window=cfg.window or None).flatten(1))


@pytest.mark.parametrize("sizes", [dict(), dict(n_kv_head=2, rope_theta=500.0), dict(pos="alibi"), dict(pos="none"),
                                   dict(window=3), dict(pos="alibi", window=4, n_kv_head=1), dict(qk_norm=True)])
@pytest.mark.parametrize("fast", [True, False])
def test_attention_is_its_definition(sizes, fast):
    model, found = tiny("gpt", n_layer=1, fast=fast, **sizes), []
    model.blocks[0].attn.register_forward_hook(lambda m, args, out: found.extend((args[0][0], out[0])))
    with torch.no_grad():
        model(torch.randint(0, 61, (1, 11)))
        assert relative(found[1], attention_by_hand(model, found[0])) < 1e-12


def test_fast_builds_no_mask(monkeypatch):
    """In a forward, a prefill, and a decoding step of rows of equal length. (Only the fused kernels do without.)"""
    masks, sdpa = [], model_gpt.F.scaled_dot_product_attention

    def watched(q, k, v, mask, *more, **flags):
        masks.append(mask)
        return sdpa(q, k, v, mask, *more, **flags)
    monkeypatch.setattr(model_gpt.F, "scaled_dot_product_attention", watched)
    model, x = tiny("gpt", n_layer=1), torch.randint(0, 61, (2, 9))
    cache = model.init_cache(2, 12)
    model(x), model(x, cache=cache), model(x[:, :1], cache=cache)
    assert masks == [None, None, None]


@pytest.mark.parametrize("window, keys", [(0, 2.5), (2, 7 / 4)])
def test_flops_by_hand(window, keys):
    sizes = dict(block_size=4, vocab_size=10, n_layer=1, n_head=2, n_embd=8, n_mlp=16, window=window)
    model = model_gpt.Model(model_gpt.Config(**sizes))
    assert model.flops_per_token() == 6 * (4 * 64 + 3 * 8 * 16 + 80) + 12 * 8 * keys


def test_rms_norm_squares_in_float32_under_autocast():
    x, norm = torch.randn(3, 64), model_gpt.RMSNorm(64, 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        y = norm(x)
    assert torch.allclose(y, x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt(), atol=1e-6)


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


@pytest.mark.parametrize("sizes, changes", [
    (dict(), dict()), (dict(tie_word_embeddings=True, num_key_value_heads=6, shard="40KB"), dict()),
    (dict(), dict(rope_parameters=None, rope_theta=1234.0, rope_scaling=None, head_dim=None)),      # before 2025
    (dict(), dict(sliding_window=8, use_sliding_window=False)),                                     # Llama ignores it
    (dict(kind="Mistral", sliding_window=7), dict())])
def test_loads_what_transformers_saved(tmp_path, sizes, changes):
    theirs = saved_llama(tmp_path, **sizes)
    edit(tmp_path, **changes)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == ("shard" in sizes)
    ours, x = llama.from_pretrained(tmp_path, block_size=32, dropout=0.1), torch.randint(0, 97, (2, 30))
    with torch.no_grad():
        want = theirs(x).logits
        assert (ours.eval()(x)[0] - want).abs().max() < 1e-5 * want.abs().max()
    assert ours.cfg.rope_theta == 1234.0 and ours.cfg.n_kv_head == theirs.config.num_key_value_heads
    assert ours.cfg.block_size == 32 and ours.cfg.dropout == 0.1 and ours.cfg.window == 7 * ("kind" in sizes)
    assert (ours.head.weight is ours.wte.weight) == theirs.config.tie_word_embeddings


def test_older_weights_load_the_same(tmp_path):
    """bfloat16, with the tied head stored once more and rotary tables beside it."""
    from safetensors.torch import load_file, save_file
    saved_llama(tmp_path, tie_word_embeddings=True)
    weights = {n: w.bfloat16() for n, w in load_file(tmp_path / "model.safetensors").items()}
    weights["lm_head.weight"] = embedding = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(weights, tmp_path / "model.safetensors")
    ours = llama.from_pretrained(tmp_path)
    assert ours.head.weight is ours.wte.weight and torch.equal(ours.wte.weight, embedding.float())


def test_a_hub_name_is_downloaded(tmp_path, monkeypatch):
    import huggingface_hub
    saved_llama(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **k: {"owner/name": str(tmp_path)}[name])
    assert llama.from_pretrained("owner/name").cfg.n_layer == 3
    with pytest.raises(ValueError, match="owner/other is not a folder here and could not be downloaded"):
        llama.from_pretrained("owner/other")


def edit(folder, **changes):
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("changes, named", [
    (dict(rope_scaling={"rope_type": "llama3", "factor": 8.0}, rope_parameters=None), "llama3"),
    (dict(rope_parameters={"rope_type": "yarn"}), "yarn"), (dict(attention_bias=True), "attention_bias"),
    (dict(use_sliding_window=True), "use_sliding_window"), (dict(head_dim=16), "head_dim"), (dict(model_type="bert"), "bert"), (dict(vocab_size=None), "config.json"),
    (dict(intermediate_size=64), "gate_proj"), (dict(num_hidden_layers=2), "layers.2")])
def test_what_we_cannot_compute_is_refused_by_name(tmp_path, changes, named):
    saved_llama(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=named):
        llama.from_pretrained(tmp_path)


@pytest.mark.parametrize("file, named", [("model.safetensors", "damaged"), ("config.json", "JSON")])
def test_damaged_folders_are_refused(tmp_path, file, named):
    saved_llama(tmp_path)
    os.truncate(tmp_path / file, 100)
    with pytest.raises(ValueError, match=named):
        llama.from_pretrained(tmp_path)
