"""model_gpt.py against independent computations: attention from its definition, transformers' Llama."""
import json
import math
import os
from unittest.mock import Mock

import pytest
import torch

from common import llama
from common.keys import UserError
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
    watched = Mock(wraps=model_gpt.F.scaled_dot_product_attention)
    monkeypatch.setattr(model_gpt.F, "scaled_dot_product_attention", watched)
    model, x = tiny("gpt", n_layer=1), torch.randint(0, 61, (2, 9))
    cache = model.init_cache(2, 12)
    model(x), model(x, cache=cache), model(x[:, :1], cache=cache)
    assert [call.args[3] for call in watched.call_args_list] == [None, None, None]


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
    assert (len(list(path.glob("*.safetensors"))) > 1) == (shard == "40KB")
    return model


def edit(folder, **changes):
    """Change fields of config.json; "gone" takes one out."""
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    config = {name: value for name, value in config.items() if value != "gone"}
    (folder / "config.json").write_text(json.dumps(config))


def stored(folder, change):
    """Change the stored weights, a dict, in place."""
    from safetensors.torch import load_file, save_file
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file({n: w.clone() for n, w in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def cast(dtype):
    return lambda weights: weights.update({n: w.to(dtype) for n, w in weights.items()})


EMBED, HEAD, ROTARY = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"
TIED = dict(tie_word_embeddings=True)
YARN = {"rope_type": "yarn", "rope_theta": 1234.0, "factor": 4.0}
OTHERS = dict(is_causal=False, vocab_size=None, tie_word_embeddings="false",
              num_hidden_layers=2.5, head_dim=15, hidden_act="gelu", layer_types=["sliding_attention"] * 3)
# (what transformers saves, how config.json is changed, how the weights are, the reason if we refuse)
VARIATIONS = {
    "as saved": ({}, {}, None, None),
    "tied, in shards": (dict(num_key_value_heads=6, shard="40KB", **TIED), {}, None, None),
    "before 2025": ({}, dict(rope_parameters=None, rope_theta=1234.0, rope_scaling=None, head_dim=None), None, None),
    "a window that Llama ignores": ({}, dict(sliding_window=8, use_sliding_window=False), None, None),
    "scaling wins": ({}, dict(rope_scaling=YARN), None, "'yarn'"),
    "linear, old name": ({}, dict(rope_scaling={"type": "linear", "factor": 2.0}), None, "'linear'"),
    "unscaled wins": ({}, dict(rope_parameters=YARN, rope_scaling={"type": "default"}, rope_theta=77.0), None, None),
    "empty scaling": ({}, dict(rope_scaling={}, rope_theta=77.0), None, None),
    "no theta": ({}, dict(rope_parameters=None), None, None),
    "theta of two places": ({}, dict(rope_theta=77.0), None, None),
    "partial rotation": ({}, dict(partial_rotary_factor=0.5), None, None),
    "of each layer type": ({}, dict(rope_parameters={"full_attention": YARN}), None, "'full_attention'"),
    "tied, another head": ({}, TIED, None, None),
    "tied, the same head": ({}, TIED, lambda w: w.update({HEAD: w[EMBED]}), None),
    "tied, head alone": ({}, TIED, lambda w: w.pop(EMBED), None),
    "tied, rotary tables": (TIED, {}, lambda w: w.update({ROTARY: torch.ones(4)}), None),
    "not tied, no head": ({}, {}, lambda w: w.pop(HEAD), "lm_head.weight is missing"),
    "float16": ({}, dict(dtype="float16"), cast(torch.float16), None),
    "not finite": ({}, {}, lambda w: w[HEAD].fill_(math.nan), "finite"),
    "mistral's window": (dict(kind="Mistral", sliding_window=7), {}, None, None),
    "mistral without": (dict(kind="Mistral", sliding_window=None), {}, None, None),
    "mistral, window 0": (dict(kind="Mistral"), dict(sliding_window=0), None, "size of tensor"),
    "mistral's default heads": (dict(kind="Mistral", num_attention_heads=8, num_key_value_heads=8, head_dim=6),
                                dict(num_key_value_heads="gone"), None, None),
    "qwen3": (dict(kind="Qwen3", head_dim=16), {}, None, None),
    "qwen3's default head size": (dict(kind="Qwen3", head_dim=128), dict(head_dim="gone"), None, None),
    "gemma": (dict(kind="Gemma", head_dim=16), {}, None, None),
    "gemma, as released": (dict(kind="Gemma", **TIED), dict(hidden_act="gelu", tie_word_embeddings="gone"), None, None),
    "gemma's default head size": (dict(kind="Gemma", head_dim=256, num_attention_heads=1, num_key_value_heads=1),
                                  dict(head_dim="gone"), cast(torch.bfloat16), None),
    "gemma with silu": (dict(kind="Gemma"), dict(hidden_act="silu"), None, "hidden_act"),
    "gemma, one direction": (dict(kind="Gemma"), dict(use_bidirectional_attention=False), None, None),
    "head size": (dict(head_dim=16), {}, None, None),
    "biases": (dict(attention_bias=True), {}, None, "attention_bias=True"),
    "other weights": ({}, dict(transformers_weights="b"), None, "neither a safetensors"),
    "code of its own": ({}, dict(model_type="own", auto_map={"AutoConfig": "own.Config"}), None, "execute"),
    "missing biases": ({}, dict(mlp_bias=True), None, "down_proj.bias is missing"),
    **{name: ({}, {name: value}, None, name) for name, value in OTHERS.items()},
    "gpt_neox": ({}, dict(model_type="gpt_neox"), None, "gpt_neox"),
    "theta as text": ({}, dict(rope_theta="1e4", rope_parameters=None), None, "'str'"),
    "another width": ({}, dict(intermediate_size=64), None, "_proj.weight is .*, config.json says"),
    "fewer layers": ({}, dict(num_hidden_layers=2), None, "layers.2"),
}


@pytest.mark.parametrize("sizes, changes, weights, refused", VARIATIONS.values(), ids=VARIATIONS)
def test_folders_are_read_as_transformers_reads_them(tmp_path, sizes, changes, weights, refused):
    saved_llama(tmp_path, **sizes)
    edit(tmp_path, **changes)
    if weights:
        stored(tmp_path, weights)
    if refused:
        with pytest.raises((ValueError, RuntimeError), match=refused):
            llama.from_pretrained(tmp_path)
    else:
        assert_same_logits(tmp_path)


def assert_same_logits(folder):
    theirs = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours, x = llama.from_pretrained(folder).eval(), torch.randint(0, 97, (2, 30))
    with torch.no_grad():
        want = theirs.eval()(x).logits
        assert (ours(x)[0] - want).abs().max() < 1e-5 * want.abs().max()
    tied = theirs.lm_head.weight is theirs.model.embed_tokens.weight
    assert tied == (ours.head.weight is ours.wte.weight)


def test_a_hub_name_is_downloaded(tmp_path, monkeypatch):
    """The model has the keys of config.json."""
    import huggingface_hub
    saved_llama(tmp_path, kind="Mistral", sliding_window=7)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **k: {"owner/name": str(tmp_path)}[name])
    cfg = llama.from_pretrained("owner/name").cfg
    assert (cfg.rope_theta, cfg.n_kv_head, cfg.window, cfg.block_size) == (1234.0, 2, 7, 64)
    with pytest.raises(UserError, match="owner/other is not a folder here and could not be downloaded"):
        llama.from_pretrained("owner/other")


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_damaged_folders_are_refused(tmp_path, file):
    saved_llama(tmp_path)
    os.truncate(tmp_path / file, 100)
    with pytest.raises(ValueError, match="header|JSON"):
        llama.from_pretrained(tmp_path)
