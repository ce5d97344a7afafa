"""
Llama-family weights: Hugging Face folders (SmolLM, TinyLlama, Llama 2, 3) <-> model_gpt.
Models whose loops unroll to a model_gpt are written too.

Both sides store matrices as (out, in), and RoPE rotates the same pairs.
So a weight only changes its name.
"""
import json
import os
from dataclasses import fields
from pathlib import Path

import torch

from common.keys import model_module


def from_pretrained(path, **overrides):
    """A model_gpt from a Llama-family folder (config.json and safetensors) or a hub name.
    overrides replace Config fields (block_size, dropout, fast). ValueError names what the
    weights need and model_gpt has not."""
    folder, gpt = pretrained_folder(path), model_module("gpt")
    model = gpt.Model(gpt.Config(**{**llama_config(folder), **overrides}))
    model.load_state_dict(llama_weights(folder, model))
    return model


def to_pretrained(model, path, eos=None):
    """Write config.json and model.safetensors as transformers' LlamaForCausalLM reads them, with
    qk_norm its Qwen3ForCausalLM, with window its MistralForCausalLM. model: what `unrolled` takes.
    eos: the token at which generation stops. ValueError if the model has what these have not."""
    model = unrolled(model)
    c = model.cfg
    if c.pos != "rope" or c.mlp != "swiglu" or c.window and c.qk_norm:
        raise ValueError("only pos=rope, mlp=swiglu, and not both window and qk_norm, can be "
                         "written as a Llama, Qwen3 or Mistral")
    family = "Qwen3" if c.qk_norm else "Mistral" if c.window else "Llama"
    config = dict(
        architectures=[f"{family}ForCausalLM"], model_type=family.lower(), vocab_size=c.vocab_size,
        hidden_size=c.n_embd, intermediate_size=c.n_mlp, num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head, head_dim=c.head_dim,
        max_position_embeddings=c.block_size, rms_norm_eps=c.norm_eps, rope_theta=c.rope_theta,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}, hidden_act="silu",
        attention_bias=False, mlp_bias=False, bos_token_id=None, eos_token_id=eos,
        tie_word_embeddings=c.tie_embeddings, sliding_window=c.window or None,
        torch_dtype=str(model.wte.weight.dtype).removeprefix("torch."))
    weights = {llama_name(n): p.detach().contiguous() for n, p in model.named_parameters()}
    Path(path).mkdir(parents=True, exist_ok=True)
    save_weights(weights, Path(path) / "model.safetensors")
    (Path(path) / "config.json").write_text(json.dumps(config, indent=2) + "\n")


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
        uses = [c.block_and_use(layer) for layer in range(model.n_loop * c.n_stored)]
        layers = [(model.blocks[k], use) for k, use in uses]
    elif getattr(c, "router", "") == "none" and c.kv != "share":
        recursions = sum(model.layers_of[:model.n_loop], [])
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


def pretrained_folder(path):
    """The folder itself, or the local copy of a hub name (owner/name), downloaded if need be."""
    if Path(path).is_dir():
        return Path(path)
    if Path(path).exists() or str(path).count("/") != 1 or str(path).startswith((".", "/")):
        raise ValueError(f"{path} is neither a folder nor a hub name (owner/name)")
    from huggingface_hub import snapshot_download
    wanted = ["config.json", "model*.safetensors", "*.index.json"]
    try:
        return Path(snapshot_download(str(path), allow_patterns=wanted))
    except Exception as e:      # of a dozen kinds: no network, no such name, no permission
        raise ValueError(f"{path} is not a folder here and could not be downloaded "
                         f"({type(e).__name__})") from e


def read_json(file):
    """The object in a JSON file, ValueError naming the file where there is none."""
    if not file.is_file():                  # reading a pipe would wait for ever
        raise ValueError(f"{file} is missing or is not a regular file")
    try:
        value = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise ValueError(f"{file} cannot be read or is not JSON") from e
    if not isinstance(value, dict):
        raise ValueError(f"{file} is not a JSON object")
    return value


def llama_config(folder):
    """The Config fields that a folder's config.json asks for. What model_gpt cannot compute
    (biases, scaled RoPE, another activation or head size) is refused by name."""
    hf = read_json(folder / "config.json")
    family = hf.get("model_type")
    if family not in ("llama", "mistral", "qwen3"):
        raise ValueError(f"model_type {family} is not supported: llama, mistral, qwen3 are")
    try:
        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(f"rope scaling '{kind}' is not supported: only unscaled RoPE is")
        # Llama ignores the field
        window = hf.get("sliding_window", 4096) if family == "mistral" else 0
        fields = dict(
            block_size=int(hf["max_position_embeddings"]), vocab_size=int(hf["vocab_size"]),
            n_layer=int(hf["num_hidden_layers"]), n_head=int(hf["num_attention_heads"]),
            n_kv_head=int(hf.get("num_key_value_heads") or hf["num_attention_heads"]),
            n_embd=int(hf["hidden_size"]), n_mlp=int(hf["intermediate_size"]),
            norm_eps=float(hf["rms_norm_eps"]), window=int(window or 0),
            rope_theta=float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0),
            tie_embeddings=bool(hf.get("tie_word_embeddings", False)), qk_norm=family == "qwen3")
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{folder / 'config.json'} lacks a field or has a wrong one: {e}") from e
    head_dim = fields["n_embd"] // fields["n_head"]
    for name, wanted in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu"),
                         ("use_sliding_window", False), ("head_dim", head_dim)):
        value = hf.get(name, wanted)
        if value != wanted and not (name == "head_dim" and value is None):
            raise ValueError(f"{name}={value} is not supported: only {wanted} is")
    return fields


def llama_weights(folder, model):
    """The model's state dict from one safetensors file, or those that the index names.
    ValueError names a weight that is missing, left over or of another shape."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    index = folder / "model.safetensors.index.json"
    names = {"": "model.safetensors"}
    if index.exists():
        names = read_json(index).get("weight_map")
    found = {}
    for file in set(names.values()) if isinstance(names, dict) else [None]:
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise ValueError(f"{index} must name files of its folder, not {file!r}")
        if not (folder / file).is_file():
            raise ValueError(f"{folder / file} is missing or is not a regular file")
        try:
            found.update(load_file(folder / file))
        except (OSError, SafetensorError) as e:
            raise ValueError(f"{folder / file} cannot be read or is damaged") from e
    weights = {}
    for name, p in model.state_dict().items():
        source = llama_name(name)
        if name == "head.weight" and model.cfg.tie_embeddings:
            found.pop(source, None)     # some files store the tied head again
            source = llama_name("wte.weight")
        if source not in found or found[source].shape != p.shape:
            shape = tuple(found[source].shape) if source in found else "missing"
            raise ValueError(f"{folder}: {source} is {shape}, not {tuple(p.shape)}")
        weights[name] = found[source]
    found = {name for name in found if not name.endswith("rotary_emb.inv_freq")}
    extra = found - {llama_name(name) for name in weights}
    if extra:
        raise ValueError(f"{folder}: {min(extra)} has no place in this model")
    return weights
