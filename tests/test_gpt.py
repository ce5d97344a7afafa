"""model_gpt.py computes what transformers' Llama computes. Attention and rotary positions from their definitions, which
the tests of other models use, also stand here."""
import json
import math
import os

import pytest
import torch

from common import huggingface
from common.options import UserError
from conftest import move
from kernel_cases import dense_attend


def rotate(x, pos, theta):
    """Return x (T, H, D) with rotary positions by complex numbers. The pair (i, i + D/2) of position t turns by t
    theta^(-2i/D)."""
    half = x.size(-1) // 2
    freq = torch.tensor([theta ** (-2 * i / x.size(-1)) for i in range(half)], dtype=torch.float64)
    turn = torch.exp(1j * pos[:, None].double() * freq)[:, None]
    z = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turn
    return torch.cat([z.real, z.imag], -1)


def dense_heads(q, k, v, *positions, **more):
    """Return (T, heads, D), the attention of q (T, heads, D) to k and v (S, key heads, D). The whole score matrix is
    written out."""
    out, _ = dense_attend(*(x.transpose(0, 1)[None] for x in (q, k, v)), *positions, **more)
    return out[0].transpose(0, 1)


# Hugging Face weights ---------------------------------------------------------------------------------------

def saved_llama(path, kind="Llama", shard="5GB", **sizes):
    """Return a tiny random Llama (or Mistral) whose norms are random too. transformers writes it to path."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**{**dict(
        vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6, head_dim=8,
        num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1234.0}), **sizes})
    model = move(getattr(transformers, f"{kind}ForCausalLM")(config).eval(), 0.2)
    model.save_pretrained(path, max_shard_size=shard)
    assert (len(list(path.glob("*.safetensors"))) > 1) == (shard == "40KB")
    return model


def stored(folder, change):
    """Change the stored weights, a dict, in place."""
    from safetensors.torch import load_file, save_file
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file({n: w.clone() for n, w in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def cast(dtype):
    return lambda weights: weights.update({n: w.to(dtype) for n, w in weights.items()})


HEAD = "lm_head.weight"
TIED = dict(tie_word_embeddings=True)
YARN = {"rope_type": "yarn", "rope_theta": 1234.0, "factor": 4.0}
# A variation is (what transformers saves, how config.json is changed, how the weights are changed or which file is cut
# off, the reason if we refuse).
VARIATIONS = {
    "float16": ({}, dict(dtype="float16"), cast(torch.float16), None),
    "tied, in shards": (dict(num_key_value_heads=6, shard="40KB", **TIED), {}, None, None),
    "before 2025": ({}, dict(rope_parameters=None, rope_theta=1234.0, rope_scaling=None, head_dim=None), None, None),
    "scaling wins": ({}, dict(rope_scaling=YARN), None, "'yarn'"),
    "of each layer type": ({}, dict(rope_parameters={"full_attention": YARN}), None, "'full_attention'"),
    "tied, another head": ({}, TIED, None, None),
    "not tied, no head": ({}, {}, lambda w: w.pop(HEAD), "lm_head.weight is missing"),
    "not finite": ({}, {}, lambda w: w[HEAD].fill_(math.nan), "finite"),
    "mistral's window": (dict(kind="Mistral", sliding_window=7), {}, None, None),
    "qwen3": (dict(kind="Qwen3", head_dim=16), {}, None, None),
    "gemma, as released": (dict(kind="Gemma", **TIED), dict(hidden_act="gelu", tie_word_embeddings="gone"), None, None),
    "biases": (dict(attention_bias=True), {}, None, "no place for the weight .*k_proj.bias"),
    "attention to later tokens": ({}, dict(is_causal=False), None, "is_causal=False"),
    "code of its own": ({}, dict(model_type="own", auto_map={"AutoConfig": "own.Config"}), None, "execute"),
    "another activation": ({}, dict(hidden_act="gelu"), None, "hidden_act"),
    "windows in a Llama": ({}, dict(layer_types=["sliding_attention"] * 3), None, "layer_types"),
    "gpt_neox": ({}, dict(model_type="gpt_neox"), None, "gpt_neox"),
    "another width": ({}, dict(intermediate_size=64), None, "_proj.weight is .*, config.json says"),
    "fewer layers": ({}, dict(num_hidden_layers=2), None, "layers.2"),
    "weights cut off": ({}, {}, "model.safetensors", "header"),
}


@pytest.mark.parametrize("sizes, changes, weights, refused", VARIATIONS.values(), ids=VARIATIONS)
def test_folders_are_read_as_transformers_reads_them(tmp_path, sizes, changes, weights, refused):
    """changes holds fields of config.json, and "gone" takes one out."""
    saved_llama(tmp_path, **sizes)
    config = {**json.loads((tmp_path / "config.json").read_text()), **changes}
    config = {name: value for name, value in config.items() if value != "gone"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if isinstance(weights, str):
        os.truncate(tmp_path / weights, 100)
    elif weights:
        stored(tmp_path, weights)
    if refused:
        with pytest.raises(ValueError, match=refused):
            huggingface.from_pretrained(tmp_path)
        return
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours, x = huggingface.from_pretrained(tmp_path).eval(), torch.randint(0, 97, (2, 30))
    want = theirs.eval()(x).logits
    assert (ours(x)[0] - want).abs().max() < 1e-5 * want.abs().max()
    tied = theirs.lm_head.weight is theirs.model.embed_tokens.weight
    assert tied == (ours.head.weight is ours.wte.weight)


def test_a_hub_name_is_downloaded(tmp_path, monkeypatch):
    import huggingface_hub
    saved_llama(tmp_path, kind="Mistral", sliding_window=7)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **k: {"owner/name": str(tmp_path)}[name])
    cfg = huggingface.from_pretrained("owner/name").cfg
    assert (cfg.rope_theta, cfg.kv_heads, cfg.window, cfg.block_size) == (1234.0, 2, 7, 64)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="merge the adapter"):
        huggingface.from_pretrained(tmp_path)
    with pytest.raises(UserError, match="owner/other is not a folder here and could not be downloaded"):
        huggingface.from_pretrained("owner/other")


def test_the_check_of_an_import_allows_for_rounding(tmp_path):
    """float32 moves the logits of a deep model with large weights by more than 1e-5."""
    theirs, x = saved_llama(tmp_path, num_hidden_layers=24), torch.randint(97, (1, 64))
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(0, 0.5) if p.ndim > 1 else p.fill_(1)
        theirs.save_pretrained(tmp_path)
        ours, want = huggingface.from_pretrained(tmp_path).eval()(x)[0], theirs(x).logits
    assert (ours - want).abs().max() > 1e-5 * want.abs().max()
