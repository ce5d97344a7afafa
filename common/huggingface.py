"""
Hugging Face folders: Llama-family weights (SmolLM, TinyLlama, Llama 2, 3, Mistral, Qwen3, Gemma 1)
<-> model_gpt, and tokenizers. Models whose loops unroll to a model_gpt are written too.

Both sides store matrices as (out, in), and RoPE rotates the same pairs. A weight only changes its
name. But Gemma's norms multiply by 1 + w, and its files store w. No token is put in front of a
text, not even Gemma's <bos>, with which it was trained. Without <bos> its predictions are worse.
"""
import json
import logging
import os
from dataclasses import fields
from pathlib import Path

import torch

from common.options import (UserError, first_line, model_module, need, note, put_back, read_json,
                         read_text, replace_file)
from common.tokenizer import (HUB_NAME, HFTokenizer, byte_signs, check_back, no_panic,
                              words_of_bytes)


# ---- weights ----

def from_pretrained(path):
    """Return a model_gpt with the weights that transformers reads from a folder of the Llama
    family (config.json and safetensors), or from such a model of the hub by its name. A ValueError
    or a UserError names what model_gpt does not compute."""
    folder = hub_folder(path, ["config.json", "model*.safetensors", "*.index.json"])
    theirs = load_llama(folder)
    gpt = model_module("gpt")
    model = gpt.Model(gpt.Config(**gpt_fields(theirs)))
    weights = theirs.state_dict()
    if model.cfg.scale_embeddings:      # Gemma
        weights |= {name: 1 + w.double() for name, w in weights.items() if "norm" in name}
    if unread := weights.keys() - {llama_name(name) for name in model.state_dict()}:
        raise ValueError(f"model_gpt has no place for the weight {min(unread)}")
    model.load_state_dict({name: weights[llama_name(name)] for name in model.state_dict()})
    check_same_logits(model, theirs)
    return model


def to_pretrained(model, path, eos=None):
    """Write config.json and model.safetensors as transformers reads them. A model can be written if
    it is a gpt, a relaxed, or a mor with router=none and without kv=share. Generation stops at the
    token eos. Raise UserError if no family has what the model has."""
    model = unrolled(model)
    c = model.cfg
    own = c.qk_norm, c.window > 0, c.mlp, c.scale_embeddings
    family = next((family for family, has in FAMILIES.items() if has == own), None)
    if family is None or c.pos != "rope":
        raise UserError("only pos=rope with mlp=swiglu and at most one of qk_norm and window, or "
                        "with mlp=geglu and scale_embeddings, can be written as a Llama folder")
    if family == "llama" and c.n_embd % c.n_head:   # transformers could not read it
        raise UserError(f"n_embd={c.n_embd} n_head={c.n_head}: without qk_norm and window, only an "
                        "n_embd that n_head divides can be written as a Llama folder")
    sizes = {"n_mlp": "mlp_width", "n_kv_head": "kv_heads", "head_dim": "head_size"}
    config = {theirs: getattr(c, sizes.get(ours, ours)) for theirs, ours in FIELDS.items()}
    config |= dict(
        architectures=[f"{family.capitalize()}ForCausalLM"], model_type=family,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        hidden_act=ACTS[c.mlp][0], attention_bias=False, mlp_bias=False,
        bos_token_id=None, eos_token_id=eos, sliding_window=c.window or None,
        torch_dtype=str(model.wte.weight.dtype).removeprefix("torch."),
        transformers_version="5.0.0")       # the first that reads rope_parameters
    weights = {llama_name(name): p.detach().contiguous()
               for name, p in model.named_parameters()}
    if family == "gemma":
        weights |= {name: w - 1 for name, w in weights.items() if "norm" in name}
    Path(path).mkdir(parents=True, exist_ok=True)
    content = need("safetensors.torch").save(weights, metadata={"format": "pt"})
    replace_file(Path(path) / "model.safetensors", content)
    (Path(path) / "config.json").write_text(json.dumps(config, indent=2) + "\n")


# Each field of config.json stands beside that of model_gpt's Config.
FIELDS = {"vocab_size": "vocab_size", "hidden_size": "n_embd",
          "intermediate_size": "n_mlp", "num_hidden_layers": "n_layer",
          "num_attention_heads": "n_head", "num_key_value_heads": "n_kv_head",
          "head_dim": "head_dim", "max_position_embeddings": "block_size",
          "rms_norm_eps": "norm_eps", "rope_theta": "rope_theta",
          "tie_word_embeddings": "tie_embeddings"}
# The first name of an activation is written. All of them are read.
ACTS = {"swiglu": ("silu", "swish"),
        "geglu": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate")}
# A family has these values: whether it has qk_norm, whether it has a window, its mlp, and
# scale_embeddings.
FAMILIES = {"llama": (False, False, "swiglu", False),
            "mistral": (False, True, "swiglu", False),
            "qwen3": (True, False, "swiglu", False),
            "gemma": (False, False, "geglu", True)}


@torch.no_grad()
def unrolled(model):
    """Return the model_gpt that computes the same as a model. A relaxed model is unrolled up to
    exit_loop, with each use's W' + B A in a layer of its own, and so is a MoR without router. Raise
    UserError for other models."""
    c, gpt = model.cfg, model_module("gpt")
    if type(model) is gpt.Model:
        return model
    if type(model).__module__ == "model_relaxed":
        layers = [(block, use) for use in range(model.loops_to_run) for block in model.blocks]
    elif type(model).__module__ == "model_mor" and c.router == "none" and c.kv != "share":
        n_inner = c.n_stored * model.loops_to_run
        recursions = [model.blocks[k] for k in c.order[:n_inner]]
        layers = [(block, None) for block in (*model.first, *recursions, *model.last)]
    else:
        raise UserError(f"{type(model).__module__} computes what no Llama does: gpt, relaxed, and "
                        "mor with router=none can be written as one, if kv is not share")
    same = {f.name: getattr(c, f.name) for f in fields(gpt.Config) if hasattr(c, f.name)}
    plain = gpt.Model(gpt.Config(**{**same, "n_layer": len(layers)})).to(model.wte.weight)
    for name, p in plain.named_parameters():
        p.copy_(weight_of_use(layers, name) if name.startswith("blocks.")
                else model.get_parameter(name))
    return plain


def weight_of_use(layers, name):
    """Return the weight blocks.LAYER.NAME of the unrolled model. layers has (block, use) of each
    layer."""
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


def load_llama(folder):
    """Return transformers' model of a folder, in float32. A ValueError tells what is wrong."""
    transformers = need("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if (folder / "adapter_config.json").exists():   # transformers reads it only where peft is
        raise ValueError("adapter_config.json is not supported: merge the adapter into the weights")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if config.model_type not in FAMILIES:
            raise ValueError(f"model_type {config.model_type!r} is none of {', '.join(FAMILIES)}")
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, use_safetensors=True,
            trust_remote_code=False, ignore_mismatched_sizes=True, output_loading_info=True)
    except Exception as e:      # of any type: the library checks fields, files and weights
        raise ValueError(" ".join(str(e).split())) from e
    for kind in "missing", "unexpected":
        if names := found[f"{kind}_keys"]:
            raise ValueError(f"the weight {min(names)} is {kind}")
    for name, has, wanted in found["mismatched_keys"]:
        raise ValueError(f"the weight {name} is {tuple(has)}, config.json says {tuple(wanted)}")
    return model.eval()


def gpt_fields(theirs):
    """Return the Config fields with which model_gpt computes the same."""
    c = theirs.config
    qk_norm, window, mlp, scale_embeddings = FAMILIES[c.model_type]
    rope = c.rope_parameters
    nested = any(isinstance(value, dict) for value in rope.values())    # one for each layer type
    if nested or rope.get("rope_type") != "default":
        raise ValueError(f"RoPE with {rope} is not supported: only unscaled RoPE is")
    windows = "sliding_attention" in (getattr(c, "layer_types", None) or ())
    if windows and not window:
        raise ValueError("layer_types is not supported: only full_attention is")
    if c.hidden_act not in ACTS[mlp]:
        raise ValueError(f"hidden_act={c.hidden_act} is not supported: {', '.join(ACTS[mlp])} are")
    same = {ours: getattr(c, name) for name, ours in FIELDS.items() if ours != "rope_theta"}
    tied = theirs.lm_head.weight is theirs.model.embed_tokens.weight
    return dict(same, rope_theta=float(rope["rope_theta"]), tie_embeddings=tied, mlp=mlp,
                window=window and c.sliding_window or 0, qk_norm=qk_norm,
                scale_embeddings=scale_embeddings)


@torch.no_grad()
def check_same_logits(model, theirs):
    """Raise ValueError where transformers computes something else: another mask, another scale. The
    first 256 positions are compared, so that a window of 256 keys or more is not tested. Both
    compute in float32, whose rounding may move the logits of a deep model by more than 1e-5. How
    much more is measured: the last bit of the embeddings is changed at random."""
    V, T = model.cfg.vocab_size, min(256, model.cfg.block_size)
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(V, (1, T), generator=generator)
    ours, wanted = model.eval()(idx)[0], theirs(idx).logits
    w = model.wte.weight.clone()
    model.wte.weight.mul_(1 + 2**-23 * torch.randint(-1, 2, w.shape, generator=generator))
    rounding = (model(idx)[0] - ours).abs().max()
    model.wte.weight.copy_(w)
    most = torch.maximum(1e-5 * wanted.abs().max(), 4 * rounding)
    if not (ours - wanted).abs().max() <= most:     # NaN too
        unusual = [f"{name}={value}" for name, value in theirs.config.to_diff_dict().items()
                   if name not in {*FIELDS, *UNREAD}]
        raise ValueError("model_gpt does not compute what "
                         f"{', '.join(unusual) or 'this'} asks for, or a weight is not finite")


# These fields of config.json change no logits, or gpt_fields has read them.
UNREAD = {"_name_or_path", "architectures", "dtype", "transformers_version", "rope_parameters",
          "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range",
          "attention_dropout", "pretraining_tp"}


# ---- tokenizers ----

# If a model's files name no end-of-text token, it is the first of these in the vocabulary.
EOS_TOKENS = "<|endoftext|>", "</s>", "<|end_of_text|>"
# Together these characters have every byte of UTF-8, and there are capitals, digits and quotes of
# all kinds. Tokenizers often change those from 0x301 on.
CODES = [*range(0x100), *range(0x100, 0x1000, 64), *range(0x1000, 0x10000, 4096),
         *range(0x10000, 0x110000, 0x40000), 0x100000, 0x301, 0x212b, 0xfb01, 0xff21, 0x338f,
         0x2026, 0x201c, 0x201d, 0x3000, 0x200b, 0x200d, 0x2028, 0xfeff, 0xfffd, 0x2581]
PROBE = "".join(f"a{chr(code)}B {chr(code)} " for code in CODES)
PROBE = f"  {PROBE}{40 * ' '}b, c . D ! I 'm n't ``e'' 12345\n\n\t\t\r\n"


def hf_tokenizer(name) -> HFTokenizer:
    """Return the tokenizer of a model's folder or hub name. Raise UserError if it does not give
    every text back, because bits per byte would count bytes that its tokens do not stand for."""
    try:
        folder = hub_folder(name, ["tokenizer.json", "tokenizer_config.json"])
        config, file = folder / "tokenizer_config.json", folder / "tokenizer.json"
        eos = read_json(config).get("eos_token") if config.exists() else None
        eos = eos["content"] if isinstance(eos, dict) else eos  # older files
        with no_panic():
            tokenizer = read_tokenizer(read_text(file, file), eos)
            added = tokenizer.library.get_added_tokens_decoder().values()
            text = PROBE + "".join(f"  {token.content}  b" for token in added) + "  "
            back = tokenizer.decode(tokenizer.encode(text))
        if text != check_back(text, back):
            note(f"hf:{name} gives some texts back in another form (Unicode's NFC, or a blank for "
                 f"▁): bytes are counted in that form")
        return tokenizer
    except Exception as e:  # of the library, which has no class of its own, or of the files
        kind = "" if isinstance(e, UserError) else f"{type(e).__name__}: "
        raise UserError(f"tokenizer hf:{name} cannot be used: {kind}{first_line(e)}") from None


def read_tokenizer(text, eos=None) -> HFTokenizer:
    """Return the tokenizer of a tokenizer.json. Truncation, padding, dropout and the
    post_processor, which adds special tokens, are left out, because ids must depend on the text
    alone. eos is the end-of-text token, which is found among EOS_TOKENS where it is None."""
    data = {**json.loads(text), "truncation": None, "padding": None, "post_processor": None}
    data["model"].pop("dropout", None)
    library = need("tokenizers").Tokenizer.from_str(json.dumps(data))
    vocab = library.get_vocab()
    eos = eos or next((token for token in EOS_TOKENS if token in vocab), None)
    if eos not in vocab:
        raise ValueError("no end-of-text token: name one of its vocabulary as eos_token in "
                         "tokenizer_config.json")
    library.add_special_tokens([eos])
    return HFTokenizer(library.to_str(), eos)


def hub_folder(name, files) -> Path:
    """Return the folder that is named, or a local copy of the files that the hub has under that
    name."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    # A missing name in a folder of runs, such as out/gtp_tiny, is a typing error and no hub name.
    runs = folder.parent.glob("*/log.jsonl")
    if folder.exists() or any(runs) or not HUB_NAME.fullmatch(str(name)):
        raise UserError(f"{name} is neither a folder nor a hub name (owner/name)")
    hub = need("huggingface_hub")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # without its retries
    need("huggingface_hub.utils").disable_progress_bars()
    try:
        return Path(hub.snapshot_download(str(name), allow_patterns=files))
    except Exception as e:  # of a dozen kinds: no network, no such name, no permission
        raise UserError(f"{name} is not a folder here and could not be downloaded: "
                        f"{type(e).__name__}: {first_line(e)}") from None


def export(model, tokenizer, path):
    """Make a Hugging Face folder of a model and its tokenizer, and put it into its place, which is
    empty or holds an older export. Raise UserError if no Llama computes what the model does, or
    if another file is there, because transformers might read it. A call that fails leaves nothing
    new behind, and the older export in its place."""
    for file in path.iterdir() if path.exists() else ():
        if file.name not in EXPORTED:
            raise UserError(f"{file} is not of an export: remove it, or choose another folder")
    place = path.resolve()
    there = next(parent for parent in place.parents if parent.exists())
    temporary = there / f".{place.name}.tmp"
    put_back(temporary, place)      # of a call that was killed
    try:
        to_pretrained(model, temporary / "new", tokenizer.eot)
        if not save_tokenizer(tokenizer, temporary / "new"):
            note(f"{path} has no tokenizer: a {tokenizer.kind} tokenizer is no BPE of bytes")
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists():
            os.rename(place, temporary / "old")
        os.rename(temporary / "new", place)
    finally:
        put_back(temporary, place)


# The files of an export.
EXPORTED = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def save_tokenizer(tokenizer, folder):
    """Write tokenizer.json and tokenizer_config.json for transformers, where "<|endoftext|>" is
    one token. Return False for the kinds that are no BPE of bytes, which are char and the numbers
    of tasks."""
    if tokenizer.kind not in ("byte", "bpe", "hf"):
        return False
    library = tokenizer.library if tokenizer.kind == "hf" else library_bpe(tokenizer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast",
              "eos_token": library.id_to_token(tokenizer.eot)}
    (Path(folder) / "tokenizer.json").write_bytes(library.to_str(pretty=True).encode())
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    return True


def library_bpe(tokenizer):
    """Return a byte or bpe tokenizer as one of the library `tokenizers`. Any two tokens that make a
    third are merged, as tiktoken does, in the order of the thirds."""
    library, signs = need("tokenizers"), {byte: sign for sign, byte in byte_signs().items()}
    pieces = map(tokenizer.decode_bytes, ([i] for i in range(tokenizer.eot)))
    vocab = {"".join(map(signs.get, piece)): i for i, piece in enumerate(pieces)}
    merges = [(word[:i], word[i:]) for word in vocab for i in range(1, len(word))
              if word[:i] in vocab and word[i:] in vocab]
    found = library.Tokenizer(library.models.BPE(vocab, merges))
    found.pre_tokenizer = words_of_bytes(tokenizer.made_of.get("pattern"))
    found.decoder = library.decoders.ByteLevel()
    found.add_special_tokens([EOS_TOKENS[0]])
    return found
