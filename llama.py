"""
Llama-family weights in and out: Hugging Face folders (SmolLM, TinyLlama, Llama 2, 3) <-> model_gpt.

Both sides store matrices as (out, in) and pair the halves of a head under RoPE alike, so a weight
only changes its name.
"""
import json
from pathlib import Path

from model_gpt import Config, Model


def from_pretrained(path, **overrides):
    """A model_gpt from a Llama-family folder (config.json and safetensors, one file or sharded) or
    from a hub name, downloaded. overrides replace Config fields (block_size, dropout, fast). Raises
    ValueError, naming the feature, where the weights need what model_gpt has not."""
    folder = pretrained_folder(path)
    model = Model(Config(**{**llama_config(folder), **overrides}))
    model.load_state_dict(llama_weights(folder, model))
    return model


def to_pretrained(model, path):
    """Write config.json and model.safetensors as transformers' LlamaForCausalLM reads them. Raises
    ValueError where the model has what Llama has not."""
    from safetensors.torch import save_file
    c = model.cfg
    if c.pos != "rope" or c.mlp != "swiglu" or c.qk_norm or c.window:
        raise ValueError("only pos=rope, mlp=swiglu, qk_norm=false, window=0 can be written as "
                         "a Llama")
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=c.vocab_size,
        hidden_size=c.n_embd, intermediate_size=c.n_mlp, num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head, head_dim=c.head_dim,
        max_position_embeddings=c.block_size, rms_norm_eps=c.norm_eps, rope_theta=c.rope_theta,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}, hidden_act="silu",
        attention_bias=False, mlp_bias=False, bos_token_id=None, eos_token_id=None,
        tie_word_embeddings=c.tie_embeddings,
        torch_dtype=str(model.wte.weight.dtype).removeprefix("torch."))
    weights = {llama_name(n): p.detach().contiguous() for n, p in model.named_parameters()}
    Path(path).mkdir(parents=True, exist_ok=True)
    (Path(path) / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights, Path(path) / "model.safetensors", metadata={"format": "pt"})


NAMES = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm",
         "attn.wq": "self_attn.q_proj", "attn.wk": "self_attn.k_proj",
         "attn.wv": "self_attn.v_proj", "attn.wo": "self_attn.o_proj",
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
    """The Config fields that config.json of a Llama-family folder asks for. What model_gpt cannot
    compute (biases, scaled RoPE, another activation, a head size of its own) is refused by name."""
    hf = read_json(folder / "config.json")
    if hf.get("model_type") not in ("llama", "mistral"):
        raise ValueError(f"model_type {hf.get('model_type')} is not supported: llama or mistral is")
    try:
        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(f"rope scaling '{kind}' is not supported: only unscaled RoPE is")
        # Llama ignores the field
        window = hf.get("sliding_window", 4096) if hf["model_type"] == "mistral" else 0
        fields = dict(
            block_size=int(hf["max_position_embeddings"]), vocab_size=int(hf["vocab_size"]),
            n_layer=int(hf["num_hidden_layers"]), n_head=int(hf["num_attention_heads"]),
            n_kv_head=int(hf.get("num_key_value_heads") or hf["num_attention_heads"]),
            n_embd=int(hf["hidden_size"]), n_mlp=int(hf["intermediate_size"]),
            norm_eps=float(hf["rms_norm_eps"]), window=int(window or 0),
            rope_theta=float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0),
            tie_embeddings=bool(hf.get("tie_word_embeddings", False)))
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{folder / 'config.json'} lacks a field or has a wrong one: {e}") from e
    head_dim = fields["n_embd"] // fields["n_head"]
    for name, wanted in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu"),
                         ("head_dim", head_dim)):
        value = hf.get(name, wanted)
        if value != wanted and not (name == "head_dim" and value is None):
            raise ValueError(f"{name}={value} is not supported: only {wanted} is")
    return fields


def llama_weights(folder, model):
    """The model's state dict from the folder's safetensors files (one, or those that the index
    names). Raises ValueError naming a weight that is missing, left over or of another shape."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    index = folder / "model.safetensors.index.json"
    names = read_json(index).get("weight_map") if index.exists() else {"": "model.safetensors"}
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
            found.pop(source, None)             # some files store the tied head again, some do not
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
