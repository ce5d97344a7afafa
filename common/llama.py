"""
Llama-family weights: Hugging Face folders (SmolLM, TinyLlama, Llama 2, 3, Mistral, Qwen3,
Gemma 1) <-> model_gpt. Models whose loops unroll to a model_gpt are written too.

Both sides store matrices as (out, in), and RoPE rotates the same pairs.
A weight only changes its name. But Gemma's norms multiply by 1 + w: they are stored as w.
"""
import json
import math
import os
from dataclasses import fields
from pathlib import Path

import torch

from common.keys import model_module, read_json
from common.tokenizer import hub_folder


def from_pretrained(path, **overrides):
    """A model_gpt from a Llama-family folder (config.json and safetensors) or a hub name.
    overrides replace Config fields (block_size, dropout, fast). ValueError or UserError names
    what the weights need and model_gpt has not."""
    gpt = model_module("gpt")
    folder = hub_folder(path, ["config.json", "model*.safetensors", "*.index.json"])
    fields, found = llama_config(folder), stored_weights(folder)
    fields["tie_embeddings"] = fields["tie_embeddings"] and tied(found)
    if fields["scale_embeddings"]:      # Gemma
        found |= {name: 1 + w.double() for name, w in found.items() if "norm" in name}
    model = gpt.Model(gpt.Config(**{**fields, **overrides}))
    model.load_state_dict(llama_weights(folder, found, model))
    return model


def to_pretrained(model, path, eos=None):
    """Write config.json and model.safetensors as transformers reads them. model: what `unrolled`
    takes. eos: the token at which generation stops. ValueError if no family has what it has."""
    model = unrolled(model)
    c, family = model.cfg, family_of(model.cfg)
    config = {theirs: getattr(c, ours) for theirs, ours in FIELDS.items()}
    config |= dict(
        architectures=[f"{family}ForCausalLM"], model_type=family.lower(),
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        hidden_act=ACTS[c.mlp], attention_bias=False, mlp_bias=False,
        bos_token_id=None, eos_token_id=eos, sliding_window=c.window or None,
        torch_dtype=str(model.wte.weight.dtype).removeprefix("torch."))
    weights = {llama_name(name): p.detach().contiguous()
               for name, p in model.named_parameters()}
    if family == "Gemma":
        weights |= {name: w - 1 for name, w in weights.items() if "norm" in name}
    Path(path).mkdir(parents=True, exist_ok=True)
    save_weights(weights, Path(path) / "model.safetensors")
    (Path(path) / "config.json").write_text(json.dumps(config, indent=2) + "\n")


# of config.json and of model_gpt's Config
FIELDS = {"vocab_size": "vocab_size", "hidden_size": "n_embd",
          "intermediate_size": "n_mlp", "num_hidden_layers": "n_layer",
          "num_attention_heads": "n_head", "num_key_value_heads": "n_kv_head",
          "head_dim": "head_dim", "max_position_embeddings": "block_size",
          "rms_norm_eps": "norm_eps", "rope_theta": "rope_theta",
          "tie_word_embeddings": "tie_embeddings"}
ACTS = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh"}


def family_of(c):
    """The family that computes the same as model_gpt with Config c; ValueError if none does."""
    has = {"Qwen3": c.qk_norm, "Mistral": c.window > 0,
           "Gemma": c.mlp == "geglu" or c.scale_embeddings}
    families = [name for name, own in has.items() if own] or ["Llama"]
    gemma = c.mlp == "geglu" and c.scale_embeddings
    if c.pos != "rope" or c.mlp == "gelu" or len(families) > 1 or has["Gemma"] != gemma:
        raise ValueError("only pos=rope with mlp=swiglu and one of qk_norm and window, or with "
                         "mlp=geglu and scale_embeddings, can be written as a Llama folder")
    return families[0]


def save_weights(weights, path, **fields):
    """A safetensors file, whole or not at all, with fields in its metadata; else OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    temporary = Path(f"{path}.tmp")
    try:
        save_file(weights, temporary, metadata={"format": "pt", **fields})
        os.replace(temporary, path)
    except SafetensorError as e:
        raise OSError(str(e)) from e
    finally:
        temporary.unlink(missing_ok=True)


@torch.no_grad()
def unrolled(model):
    """The model_gpt that computes the same: of a relaxed model up to exit_loop, with each use's
    W' + B A in a layer of its own; of a MoR without router. ValueError for other models."""
    c, gpt = model.cfg, model_module("gpt")
    if type(model) is gpt.Model:
        return model
    if hasattr(c, "block_and_use"):
        uses = [c.block_and_use(layer) for layer in range(model.loops_to_run * c.n_stored)]
        layers = [(model.blocks[k], use) for k, use in uses]
    elif getattr(c, "router", "") == "none" and c.kv != "share":
        recursions = sum(model.layers_of[:model.loops_to_run], [])
        layers = [(block, None) for block in (*model.first, *recursions, *model.last)]
    else:
        raise ValueError(f"{type(model).__module__} computes what no Llama does: gpt, relaxed, and "
                         "mor with router=none can be written as one, if kv is not share")
    same = {f.name: getattr(c, f.name) for f in fields(gpt.Config) if hasattr(c, f.name)}
    plain = gpt.Model(gpt.Config(**{**same, "n_layer": len(layers)})).to(model.wte.weight)
    for name, p in plain.named_parameters():
        p.copy_(weight_of_use(layers, name) if name.startswith("blocks.")
                else model.get_parameter(name))
    return plain


def weight_of_use(layers, name):
    """blocks.LAYER.NAME of the unrolled model. layers: (block, use) of each."""
    _, layer, name = name.split(".", 2)
    block, use = layers[int(layer)]
    part = block.get_submodule(name.removesuffix(".weight"))
    if getattr(part, "rank", 0):    # a linear layer with deltas
        return torch.addmm(part.weight, part.b[use].t(), part.a[use])
    return part.weights[use] if hasattr(part, "weights") else part.weight


NAMES = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm",
         "attn.wq": "self_attn.q_proj", "attn.wk": "self_attn.k_proj",
         "attn.wv": "self_attn.v_proj", "attn.wo": "self_attn.o_proj",
         "attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm",
         "mlp.w_gate": "mlp.gate_proj", "mlp.w_up": "mlp.up_proj", "mlp.w_down": "mlp.down_proj"}


def llama_name(name):
    """blocks.3.attn.wq.weight -> model.layers.3.self_attn.q_proj.weight"""
    top = {"wte.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
           "head.weight": "lm_head.weight"}
    if name in top:
        return top[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


# what transformers takes where a config.json lacks a field
DEFAULTS = {"llama": {}, "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
            "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
            "gemma": {"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True,
                      "hidden_act": "gelu_pytorch_tanh"}}
# fields that change what transformers computes, and the one value that model_gpt computes too
ONLY = {"attention_bias": False, "mlp_bias": False, "is_causal": True,
        "use_sliding_window": False, "per_layer_config": None, "fusion_config": None,
        "quantization_config": None, "transformers_weights": None,
        "use_bidirectional_attention": None}


def llama_config(folder):
    """The Config fields that a folder's config.json asks for, as transformers reads it. What
    model_gpt cannot compute is refused by name."""
    hf = read_json(folder / "config.json")
    family = hf.get("model_type")
    if family not in [*DEFAULTS]:
        why = " (Pythia has LayerNorms and biases)" * (family == "gpt_neox")
        raise ValueError(f"model_type {family!r:.60} is not supported{why}: "
                         f"{', '.join(DEFAULTS)} are")
    hf = {**DEFAULTS[family], **hf, "rope_theta": rope_theta(hf)}
    gemma = family == "gemma"
    if gemma and hf["hidden_act"] == "gelu":    # the released folders', which means its tanh form
        hf["hidden_act"] = ACTS["geglu"]
    mlp = "geglu" if gemma else "swiglu"
    refuse_others(folder, hf, {**ONLY, "hidden_act": ACTS[mlp]})
    n_head = field(hf, "num_attention_heads")
    for name, value in {"num_key_value_heads": n_head, "tie_word_embeddings": False,
                        "head_dim": field(hf, "hidden_size") // n_head}.items():
        hf[name] = value if hf.get(name) is None else hf[name]
    # Llama ignores the field
    windowed = family == "mistral" and hf["sliding_window"] is not None
    return {**{ours: field(hf, theirs) for theirs, ours in FIELDS.items()},
            "window": field(hf, "sliding_window") if windowed else 0,
            "qk_norm": family == "qwen3", "mlp": mlp, "scale_embeddings": gemma}


def field(hf, name):
    """A positive number, or true or false, of a config.json."""
    kind = {"rms_norm_eps": float, "rope_theta": float, "tie_word_embeddings": bool}.get(name, int)
    value = hf.get(name)
    right = type(value) is kind or kind is float and type(value) is int
    if not right or kind is not bool and not 0 < value < math.inf:
        raise ValueError(f"config.json lacks {name} or has a wrong one: {value!r:.60}")
    return kind(value)


def refuse_others(folder, hf, only):
    """ValueError where transformers would compute what model_gpt does not."""
    for name, wanted in only.items():
        if (hf.get(name, wanted) or None) != (wanted or None):      # null is as false
            raise ValueError(f"{name}={hf[name]!r:.60} is not supported: only {wanted} is")
    if hf.get("layer_types") and set(hf["layer_types"]) != {"full_attention"}:
        raise ValueError("layer_types is not supported: only full_attention is")
    if (folder / "adapter_config.json").exists():
        raise ValueError("adapter_config.json is not supported: no adapter is")


def rope_theta(hf):
    """RoPE's base. Of two fields with RoPE's parameters transformers takes the older one."""
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError("RoPE of each layer type is not supported: one for all is")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope scaling {kind!r:.60} is not supported: only unscaled RoPE is")
    return {"rope_theta": 10000.0, **hf, **rope}["rope_theta"]


def stored_weights(folder):
    """{name: tensor} of model.safetensors or else of the files that the index names, as
    transformers chooses. ValueError names a file that cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    index, files, found = folder / "model.safetensors.index.json", ["model.safetensors"], {}
    if index.exists() and not (folder / files[0]).exists():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict):
            raise ValueError(f"{index} has no weight_map")
        files = sorted(set(map(str, names.values())))
    for file in map(folder.joinpath, files):
        try:
            if not file.is_file():      # of a pipe there may be no end
                raise OSError
            found.update(load_file(file))
        except (OSError, SafetensorError) as e:
            raise ValueError(f"{file} is missing or damaged") from e
    return {name: w for name, w in found.items() if not name.endswith("rotary_emb.inv_freq")}


def tied(found):
    """Whether the head is the embedding, where a config says so. As in transformers it is not if
    both are stored and differ, and one of them stands for the other."""
    pair = llama_name("wte.weight"), llama_name("head.weight")
    stored = [found[name] for name in pair if name in found]
    if len(stored) == 2 and not torch.equal(*stored):
        return False
    found.update(dict.fromkeys(pair, *stored[:1]))
    return True


def llama_weights(folder, found, model):
    """The model's state dict. ValueError names a weight that is missing, left over, of another
    shape or not of finite numbers."""
    state = {llama_name(name): p for name, p in model.state_dict().items()}
    for name in {**state, **found}:
        w, p = found.get(name), state.get(name)
        if w is None or p is None or w.shape != p.shape:
            has = "missing" if w is None else tuple(w.shape)
            asked = "in this model" if p is None else tuple(p.shape)
            raise ValueError(f"{folder}: {name} is {has}, not {asked}")
        if not w.is_floating_point() or not w.float().isfinite().all():
            raise ValueError(f"{folder}: {name} is not of finite floating-point numbers")
    return {name: found[llama_name(name)] for name in model.state_dict()}
