"""model_gpt.py computes what independent code computes, which is attention from its definition and transformers'
Llama."""
import json
import math
import os
from unittest.mock import Mock

import pytest
import torch

from common import huggingface
from common.options import UserError
import model_gpt
from conftest import move, tiny
from decoding import KVCache
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


def test_a_fork_of_base_config_alone_runs():
    """BaseConfig's constants are the defaults of model_gpt's options, but for mlp."""
    base, ours = (model_gpt.Model(config(n_layer=1, mlp="gelu") if config is model_gpt.Config else config(n_layer=1))
                  for config in (model_gpt.BaseConfig, model_gpt.Config))
    base.load_state_dict(ours.state_dict())
    idx = torch.arange(9)[None]
    assert torch.equal(base(idx)[0], ours(idx)[0]) and not hasattr(base.blocks[0].mlp, "w_gate")


def test_fast_builds_no_mask(monkeypatch):
    """There is no mask in a forward, in a prefill, and in a decoding step of rows of equal length. (Only the fused
    kernels need none.)"""
    watched = Mock(wraps=model_gpt.F.scaled_dot_product_attention)
    monkeypatch.setattr(model_gpt.F, "scaled_dot_product_attention", watched)
    model, x = tiny("gpt", n_layer=1), torch.randint(0, 61, (2, 9))
    cache = model.init_cache(2, 12)
    model(x), model(x, cache=cache), model(x[:, :1], cache=cache)
    assert [call.args[3] for call in watched.call_args_list] == [None, None, None]


def test_two_ragged_rows_stand_as_in_the_docstring_of_decoding():
    """Letters are numbers: a = 1, ..., f = 6, u = 7, v = 8, w = 9, x = 10. Padding is -1, and an empty slot is 0."""
    cache = KVCache(model_gpt.Config(n_head=1, n_embd=2), 2, 8, "cpu", torch.float32, n_layer=1)

    def call(new, n_valid):
        slots = cache.place(len(new[0]), torch.tensor(n_valid))
        kv = torch.tensor(new)[:, None, :, None].repeat(1, 1, 1, 2)
        k, v = cache.write(0, kv, kv, slots)
        cache.advance(slots)
        return slots, [x[:, 0, :, 0].tolist() for x in (k, v)]

    call([[1, 2, 3, 4], [5, 6, -1, -1]], [4, 2])
    assert cache.lengths.tolist() == [4, 2]
    slots, kv = call([[7, 8, 9], [10, -1, -1]], [3, 1])
    assert (slots.pos.tolist(), slots.at.tolist()) == ([[4, 5, 6], [2, 3, 4]], [[4, 5, 6], [2, 8, 8]])
    assert slots.end == 7
    assert kv == 2 * [[[1, 2, 3, 4, 7, 8, 9], [5, 6, 10, 0, 0, 0, 0]]] and cache.lengths.tolist() == [7, 3]


def test_rms_norm_squares_in_float32_under_autocast():
    x, norm = torch.randn(3, 64), model_gpt.RMSNorm(64, 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        y, low = norm(x), norm(x.bfloat16())
    assert torch.allclose(y, x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt(), atol=1e-6)
    assert torch.equal(low, norm(x.bfloat16().float()).bfloat16())


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
    "as saved": ({}, {}, None, None),
    "float16": ({}, dict(dtype="float16"), cast(torch.float16), None),
    "tied, in shards": (dict(num_key_value_heads=6, shard="40KB", **TIED), {}, None, None),
    "before 2025": ({}, dict(rope_parameters=None, rope_theta=1234.0, rope_scaling=None, head_dim=None), None, None),
    "scaling wins": ({}, dict(rope_scaling=YARN), None, "'yarn'"),
    "of each layer type": ({}, dict(rope_parameters={"full_attention": YARN}), None, "'full_attention'"),
    "tied, another head": ({}, TIED, None, None),
    "not tied, no head": ({}, {}, lambda w: w.pop(HEAD), "lm_head.weight is missing"),
    "not finite": ({}, {}, lambda w: w[HEAD].fill_(math.nan), "finite"),
    "mistral's window": (dict(kind="Mistral", sliding_window=7), {}, None, None),
    "mistral without": (dict(kind="Mistral", sliding_window=None), {}, None, None),
    "qwen3": (dict(kind="Qwen3", head_dim=16), {}, None, None),
    "gemma, as released": (dict(kind="Gemma", **TIED), dict(hidden_act="gelu", tie_word_embeddings="gone"), None, None),
    "biases": (dict(attention_bias=True), {}, None, "no place for the weight .*k_proj.bias"),
    "small biases": (dict(mlp_bias=True), {}, lambda w: [w[n].mul_(1e-4) for n in w if n.endswith("bias")], "down_proj.bias"),
    "gelu by another name": (dict(kind="Gemma"), dict(hidden_act="gelu_new"), None, None),
    "exact gelu": (dict(kind="Gemma"), dict(hidden_act="gelu_python"), None, "hidden_act=gelu_python is not supported"),
    "swish": ({}, dict(hidden_act="swish"), None, None),
    "attention to later tokens": ({}, dict(is_causal=False), None, "is_causal=False"),
    "other weights": ({}, dict(transformers_weights="b"), None, "neither a safetensors"),
    "code of its own": ({}, dict(model_type="own", auto_map={"AutoConfig": "own.Config"}), None, "execute"),
    "another activation": ({}, dict(hidden_act="gelu"), None, "hidden_act"),
    "windows in a Llama": ({}, dict(layer_types=["sliding_attention"] * 3), None, "layer_types"),
    "gpt_neox": ({}, dict(model_type="gpt_neox"), None, "gpt_neox"),
    "another width": ({}, dict(intermediate_size=64), None, "_proj.weight is .*, config.json says"),
    "fewer layers": ({}, dict(num_hidden_layers=2), None, "layers.2"),
    "weights cut off": ({}, {}, "model.safetensors", "header"),
    "fields cut off": ({}, {}, "config.json", "JSON"),
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


def test_the_check_of_an_import_allows_for_rounding_only(tmp_path):
    """float32 moves the logits of a deep model with large weights by more than 1e-5. Each of its queries by a thousandth
    is no rounding."""
    theirs, gpt = saved_llama(tmp_path, num_hidden_layers=24), model_gpt
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(0, 0.5) if p.ndim > 1 else p.fill_(1)
    ours = gpt.Model(gpt.Config(**huggingface.gpt_fields(theirs))).eval()
    ours.load_state_dict({name: theirs.state_dict()[huggingface.llama_name(name)] for name in ours.state_dict()})
    kept, x = ours.wte.weight.clone(), torch.randint(97, (1, 64))
    huggingface.check_same_logits(ours, theirs)
    with torch.no_grad():
        assert (ours(x)[0] - theirs(x).logits).abs().max() > 1e-5 * theirs(x).logits.abs().max()
        assert torch.equal(ours.wte.weight, kept)
        for p in ours.parameters():
            p.mul_(0.1 if p.ndim > 1 else 1)
        theirs.load_state_dict({huggingface.llama_name(name): w for name, w in ours.state_dict().items()})
        huggingface.check_same_logits(ours, theirs)
        ours.blocks[0].attn.wq.weight.mul_(1.001)
    with pytest.raises(ValueError, match="model_gpt does not compute"):
        huggingface.check_same_logits(ours, theirs)
