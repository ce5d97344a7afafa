"""Our models have the same numbers as the authors' code: all schedules of RT, naive and fast code of the others, and of
LRT Algorithm 1 and the exact chain. (tests/golden/README.md says what the files hold.)"""
import json

import numpy as np
import pytest
import torch
import torch.nn as nn

import model_gpt
import model_lrt
import model_mor
import model_rat
import model_relaxed
import model_rt
from conftest import ROOT, relative

BLOCK = {"W_q": "attn.wq.weight", "W_k": "attn.wk.weight", "W_v": "attn.wv.weight", "W_o": "attn.wo.weight",
         "W_gate": "mlp.w_gate.weight", "W_up": "mlp.w_up.weight", "W_down": "mlp.w_down.weight",
         "norm1": "norm1.weight", "norm2": "norm2.weight"}


def golden(name):
    """Return the arrays of a file as float64 tensors (token ids stay int64), and its configuration."""
    with np.load(ROOT / "tests" / "golden" / f"{name}.npz") as f:
        arrays = {key: torch.from_numpy(f[key]) for key in f.files if key != "config"}
        config = json.loads(str(f["config"]))
    return {k: x.double() if x.is_floating_point() else x for k, x in arrays.items()}, config


def load(model, arrays, names=None, rows={}):
    """Set the parameters of names, {an array: its parameter}. If names is None, the arrays have the parameters' names.
    rows says where an array is only a part of its parameter."""
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in (names or dict(zip(arrays, arrays))).items():
            part = own[parameter][rows.get(name, ...)]
            part.copy_(arrays[name].view_as(part))
    return model.double()


def check_gradients(model, arrays, names, tolerance, rows={}):
    """Compare the gradients. The file must have every d_NAME."""
    assert {k[2:] for k in arrays if k.startswith("d_")} == names.keys()
    own = dict(model.named_parameters())
    for name, parameter in names.items():
        grad = own[parameter].grad[rows.get(name, ...)]
        assert relative(grad, arrays["d_" + name].view_as(grad)) < tolerance, name


def check_layers(model, arrays, names, y, values, gradients, rows={}):
    """Compare the layers alone, without the final norm. The B T rows of x are the embeddings of tokens 0 .. B T - 1,
    and y is the file's name of the result. Returns the tokens (B, T)."""
    names, arrays["d_x"] = {**names, "x": "wte.weight"}, arrays["dx"]
    load(model, arrays, names, rows).train()
    model.norm = nn.Identity()
    idx = torch.arange(model.cfg.vocab_size).view(2, -1)
    h = model.hidden(idx)
    assert relative(h, arrays[y]) < values
    (h * arrays["r"]).sum().backward()
    check_gradients(model, arrays, names, gradients, rows)
    return idx


@pytest.mark.parametrize("schedule", ["naive", "tiled", "wavefront"])
@pytest.mark.parametrize("name, layers, values, gradients", [("rt_block_rms_qkfull", 1, 3e-6, 1e-5),
                                                             ("rt_stack", 3, 5e-6, 2e-5)])
def test_rt(name, layers, values, gradients, schedule):
    arrays, config = golden(name)
    in_block = {"W_q": "wq", "W_k": "wk", "W_v": "wv", "W_o": "wo", "W_1": "w_up", "W_2": "w_down", "norm1": "norm1",
                "norm2": "norm2", **({"q_norm": "q_norm", "k_norm": "k_norm"} if layers == 1 else {})}
    names = {(f"L{l}_" if layers > 1 else "") + k: f"blocks.{l}.{own}.weight" for l in range(layers)
             for k, own in in_block.items()}
    cfg = model_rt.Config(block_size=13, vocab_size=26, n_layer=layers, n_head=4, n_embd=32, n_mlp=128, chunk=4,
                          qk_norm=config["qk_norm"], schedule=schedule)
    check_layers(model_rt.Model(cfg), arrays, names, "y", values, gradients)


@pytest.mark.parametrize("fast", [True, False])
def test_rat(fast):
    """Training has the authors' numbers. So has decoding, after a prompt that ends with a chunk and after one that ends
    inside."""
    arrays, _ = golden("rat_layer_L4")
    rows = dict(W_z=slice(32), W_g=slice(32, 64), W_v=slice(64, 96), W_q=slice(96, 112), W_k=slice(112, 128))
    names = {**dict.fromkeys(rows, "blocks.0.attn.w_in.weight"), "W_o": "blocks.0.attn.wo.weight",
             "b_g": "blocks.0.attn.gate_bias", "norm": "blocks.0.norm1.weight"}
    model = model_rat.Model(model_rat.Config(block_size=16, vocab_size=32, n_layer=1, n_head=4, n_embd=32, chunk=4,
                                             norm_eps=1e-6, fast=fast))
    nn.init.zeros_(model.blocks[0].mlp.w_down.weight)           # the file has no MLP
    idx = check_layers(model, arrays, names, "out", 3e-6, 1e-5, rows)
    for prompt in (4, 6):
        cache = model.eval().init_cache(2, 16)
        with torch.no_grad():
            pieces = idx.split([prompt] + [1] * (16 - prompt), 1)
            out = torch.cat([model.decode(piece, cache) for piece in pieces], 1)
        assert relative(out, arrays[f"step_P{prompt}"]) < 3e-6


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("router", ["expert", "token"])
def test_mor(router, fast):
    """The logits show which tokens a recursion chose, because another choice moves them far."""
    arrays, _ = golden(f"mor_{router}_R3")
    blocks = {"first": "first.0", "shared0": "blocks.0", "shared1": "blocks.1", "last": "last.0"}
    names = {f"{k}_{name}": f"{own}.{parameter}" for k, own in blocks.items() for name, parameter in BLOCK.items()}
    names |= {"embed": "wte.weight", "norm_f": "norm.weight"}
    model = model_mor.Model(model_mor.Config(
        block_size=16, vocab_size=64, n_layer=8, n_loop=3, n_head=4, n_kv_head=2, n_embd=32, n_mlp=64, norm_eps=1e-6,
        router=router, fast=fast))
    routers = [n for n, _ in model.named_parameters() if n.startswith("router")]
    names |= dict(zip(["router"] if router == "token" else ["router1", "router2", "router3"], routers, strict=True))
    load(model, arrays, names).train()
    targets = torch.cat([arrays["ids"][:, 1:], torch.full_like(arrays["ids"][:, :1], -1)], 1)
    logits, loss, aux = model(arrays["ids"], targets)
    ours, theirs = ("aux", "aux_bce") if router == "expert" else ("balance", "balancing_loss")
    for a, b in ((logits, "logits"), (loss, "total_loss"), (aux["ce"], "lm_loss"), (aux[ours], theirs)):
        assert relative(a, arrays[b]) < 5e-6
    loss.backward()
    check_gradients(model, arrays, names, 2e-5)


IN_LRT = {"W_q": "attn.wq", "W_k": "attn.wk", "W_v": "attn.wv", "W_o": "attn.wo", "W_ve": "attn.w_value",
          "W_g": "attn.w_gate", "W_k_rec": "attn.rec.wk", "W_v_rec": "attn.rec.wv", "W_1": "mlp.w_up", "W_2": "mlp.w_down"}


def lrt(name, **keys):
    """Return (arrays, model, names, rows) of a file. The second half of each head's rows of W_q, W_k and W_k_rec is
    negated, because nanochat's rotary positions turn the other way (see tests/golden/README.md)."""
    arrays, config = golden(name)
    turn = torch.cat([torch.ones(16), -torch.ones(16)]).double()[:, None]
    arrays |= {k: (w.view(-1, 32, 64) * turn).view_as(w) for k, w in arrays.items() if k.endswith(("_q", "_k", "_k_rec"))}
    cfg = model_lrt.Config(block_size=arrays["idx"].size(1), vocab_size=96, n_layer=4, n_head=2, n_embd=64,
                           norm_eps=config["norm_eps"], **keys)
    names = {"wte": "wte.weight", "lm_head": "head.weight", "alpha": "alpha", "beta": "beta", "gamma": "gamma"}
    names |= {f"L{l}_ve": f"values.{l}.weight" for l in range(4)}
    names |= {f"L{l}_{k}": f"blocks.{l}.{own}.weight" for l in range(4) for k, own in IN_LRT.items()}
    names = {k: own for k, own in names.items() if k in arrays}
    rows = {k: (..., slice(32)) if k.endswith("W_g") else slice(96) for k in names         # no padded vocabulary, and
            if k.endswith(("wte", "lm_head", "_ve", "W_g")) and not k.endswith("W_ve")}    # gates of 32 channels
    model = load(model_lrt.Model(cfg), arrays, names, rows)
    assert {*names.values()} == dict(model.named_parameters()).keys()
    return arrays, model, names, rows


@pytest.mark.parametrize("fast", [True, False])
def test_lrt_backbone(fast):
    arrays, model, *_ = lrt("lrt_backbone_gqa", n_kv_head=1, memory=False, swa=33, fast=fast)
    for training in (True, False):
        logits, loss, _ = model.train(training)(arrays["idx"], arrays["targets"])
        assert (logits - arrays["logits"]).abs().max() < 5e-5 and abs(loss - arrays["loss"]) < 1e-5


@pytest.mark.parametrize("fast", [True, False])
def test_lrt(fast):
    """Algorithm 1 has the two losses and all gradients of the authors' code. So has the exact chain its loss and
    logits, with a cache and without."""
    arrays, model, names, rows = lrt("lrt_official_mha", swa=25, source=4, source_norm=True, projections="layerwise", fast=fast)
    idx, targets = arrays["idx"], arrays["targets"]
    logits, loss, aux = model.train()(idx, targets)
    for a, b in ((logits, "logits_refined"), (loss, "loss"), (aux["ce"], "loss_merged"), (aux["ce_first"], "loss_first")):
        assert relative(a, arrays[b]) < 3e-6, b
    loss.backward()
    check_gradients(model, arrays, names, 1e-5, rows)
    with torch.no_grad():
        cache = model.eval().init_cache(2, 48)
        chains = [model(idx, targets)[0], torch.cat([model(x, cache=cache)[0] for x in idx.split([20, 1, 27], 1)], 1)]
    logits, loss, _ = model(idx, targets)       # with gradients the chain uses no cache
    assert all(relative(x, arrays["logits_seq"]) < 3e-6 for x in (logits, *chains))
    assert relative(loss, arrays["loss_seq"]) < 3e-6


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("init", ["average", "stepwise", "lower"])
def test_relaxed_deltas(init, fast):
    """The stored matrices and the products of the deltas are the authors', for one matrix of the block. Norms have
    weight 1."""
    arrays, _ = golden("relaxed_svd")
    sizes = dict(block_size=8, vocab_size=5, n_layer=6, n_head=2, n_embd=16, n_mlp=24)
    source = load(model_gpt.Model(model_gpt.Config(**sizes)),
                  {f"blocks.{l}.mlp.w_up.weight": arrays["W"][l] for l in range(6)})
    model = model_relaxed.Model(model_relaxed.Config(**sizes, n_loop=2, rank=4, init=init, fast=fast)).double()
    model_relaxed.convert(model, source.state_dict())
    for l in range(6):
        matrix = model.blocks[l % 3].mlp.w_up
        assert (matrix.weight - arrays[f"{init}_stored"][l % 3]).abs().max() < 1e-6
        assert (matrix.b[l // 3].t() @ matrix.a[l // 3] - arrays[f"{init}_BA"][l]).abs().max() < 2e-5
        y = matrix(arrays["x"][None], l // 3)[0]
        assert (y - arrays[f"{init}_y"][l]).abs().max() < 2e-5
