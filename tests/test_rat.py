"""The layer of model_rat computes its equations and their limits, K = 1 and K = T. The tests also look at caches, at precision, and at what
runs."""
import math

import pytest
import torch

import kernels
import model_gpt
import model_rat
from conftest import relative, tiny
from test_gpt import rotate
from test_models import assert_cache_is_forward, assert_same, outputs_and_gradients, tokens

KINDS = {"rat": {}, "token": dict(pos="rope", qk_groups=1), "none": dict(pos="none", qk_groups=4),
         "rnn": dict(mixer="rnn"), "attention": dict(mixer="attention"), "rat-swa": dict(swa=7),
         "attention-swa": dict(mixer="attention", swa=7)}


def rat(kind="rat", **sizes):
    return tiny("rat", **{"chunk": 4, **KINDS[kind], **sizes})


def output(model, u, layer=0):
    """Return what the layer's mixer makes of u (B, T, C)."""
    return model.blocks[layer].attn(u, layer, model_rat.Context(model.cfg, u))


def rat_by_hand(cfg, mixer, u):
    """Return what the layer makes of one sequence u (T, C), token by token and head by head."""
    C, D, G, H, K = cfg.n_embd, cfg.head_size, cfg.qk_groups, cfg.n_head, cfg.chunk
    z, g, v, q, k = (u @ mixer.w_in.weight.T).split([C, C, C, G * D, G * D], -1)
    v, gate = v.unflatten(-1, (H, D)), (g + mixer.gate_bias).sigmoid().unflatten(-1, (H, D))
    q, k = (x.unflatten(-1, (G, D))[:, [h % G for h in range(H)]] for x in (q, k))      # (T, H, D)
    at = {"chunk": lambda t: t // K, "rope": lambda t: t, "none": lambda t: 0}[cfg.pos]
    turned = lambda x, t: rotate(x[None], torch.tensor([at(t)]), 10000.0)[0]
    ys, ends = [], []                           # ends has (rotated key, value) of each chunk
    for t in range(len(u)):
        if t % K == 0:
            sk = sv = torch.zeros_like(v[0])
        sk, sv = (gate[t] * state + (1 - gate[t]) * x[t] for state, x in ((sk, k), (sv, v)))
        keys, values = map(torch.stack, zip(*ends, (turned(sk, t), sv)))
        p = ((turned(q[t], t) * keys).sum(-1) / math.sqrt(D)).softmax(0)                # (ends + 1, H)
        ys.append((p[..., None] * values).sum(0).flatten())
        if (t + 1) % K == 0:
            ends.append((turned(sk, t), sv))
    return (torch.sigmoid(z) * torch.stack(ys)) @ mixer.wo.weight.T


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("kind", ["rat", "token", "none"])
def test_the_layer_is_its_equations(kind, fast):
    for chunk in (1, 4, 23, 50):
        model, u = rat(kind, chunk=chunk, fast=fast), torch.randn(2, 23, 32, dtype=torch.float64)
        assert relative(output(model, u)[1], rat_by_hand(model.cfg, model.blocks[0].attn, u[1])) < 1e-10


@pytest.mark.parametrize("fast", [True, False])
def test_where_gates_are_shut(fast):
    """Outputs and gradients stay finite where gates are exactly 0 or 1 and an output gate is 0."""
    model, u = rat(fast=fast).float(), torch.randn(2, 23, 32)
    mixer = model.blocks[0].attn
    with torch.no_grad():
        mixer.gate_bias[::3], mixer.gate_bias[1::3] = 1000, -1000
        mixer.w_in.weight[:8] = -1000 * torch.sign(u[0, 0])         # z of head 0 at the first token
    y = mixer(u, 0, model_rat.Context(model.cfg, u))
    y.square().sum().backward()
    assert y.isfinite().all() and all(p.grad.isfinite().all() for p in mixer.parameters())


@pytest.mark.parametrize("pos, theirs", [("chunk", "rope"), ("none", "none")])
def test_attention_is_the_plain_transformers(pos, theirs):
    """Logits and gradients are the same where there are no windows. Where there are windows, a layer's output is the
    same. It has RoPE there also with pos=none."""
    sizes = dict(n_kv_head=2, tie_embeddings=False, mlp="swiglu")
    gpt, model, x = tiny("gpt", pos=theirs, **sizes), rat("attention", pos=pos, **sizes), tokens(2, 51)
    model.load_state_dict(gpt.state_dict())
    assert_same(outputs_and_gradients(model, x), outputs_and_gradients(gpt, x), all_reached=True)
    gpt, model = tiny("gpt", window=7, **sizes), rat("attention-swa", pos=pos, **sizes)
    model.load_state_dict(gpt.state_dict())
    u = torch.randn(2, 40, 32, dtype=torch.float64)
    assert relative(output(model, u, 1), gpt.blocks[1].attn(u, 1, model_gpt.Context(gpt.cfg, u))) < 1e-10
    assert rat("rat-swa", n_layer=4).cfg.kinds == ["rat", "swa", "rat", "swa"]


# Each of these kinds keeps something else in its cache.
@pytest.mark.parametrize("kind", ["rat", "token", "rnn", "rat-swa", "attention-swa"])
def test_what_a_gpu_needs_in_decoding(kind, monkeypatch):
    """The positions that attend_by_position gets ascend. No call writes a slot twice."""
    def checked(q, k, v, *pos, attend=kernels.attend_by_position, **more):
        assert all((p.diff(dim=-1) >= 0).all() for p in (*pos, more.get("q_pos", torch.zeros(1))))
        return attend(q, k, v, *pos, **more)

    def fill(self, layer, k, v, at, padding, fill=model_rat.Cache.fill):
        for row in at if padding is None else at.masked_fill(padding, -1):
            assert len(row[row >= 0]) == len(row[row >= 0].unique())
        fill(self, layer, k, v, at, padding)
    monkeypatch.setattr(kernels, "attend_by_position", checked)
    monkeypatch.setattr(model_rat.Cache, "fill", fill)
    model = rat(kind, block_size=16)
    assert_cache_is_forward(model, [18, 18], [3, 1, 1, 1, 8, 4], 1e-10)
    assert_cache_is_forward(model, [37, 9, 4], [3, 1, 1, 7, 8, 1, 16], 1e-10)


def test_states_are_float32_under_bfloat16(monkeypatch):
    """This holds in a bfloat16 model and under autocast."""
    dtypes, scan, read = [], kernels.scan, model_rat.read_states
    spy = lambda f: lambda *a: (dtypes.append(a[1].dtype), f(*a))[1]       # a[1] is x, or k_state
    monkeypatch.setattr(kernels, "scan", spy(scan))
    monkeypatch.setattr(model_rat, "read_states", spy(read))
    for kind in ("rat", "rnn"):
        for whole in (True, False):
            model = rat(kind).bfloat16() if whole else rat(kind).float()
            with torch.autocast("cpu", torch.bfloat16, enabled=not whole):
                cache = model.init_cache(2, 40)
                for part in tokens(2, 30).split([9, 1, 20], 1):
                    model(part, cache=cache)
            for layer in range(2):
                assert (cache.state[layer].dtype, cache.k[layer].dtype) == (torch.float32, torch.bfloat16)
    assert set(dtypes) == {torch.float32} and len(dtypes) >= 24


def test_flops_count_what_is_read():
    swa = (sum(range(1, 8)) + 57 * 7) / 64
    for kind, keys in (("rnn", 0), ("attention", 2 * 32.5), ("rat", 2 * 8.5), ("rat-swa", 8.5 + swa)):
        model = rat(kind, block_size=64)
        weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
        assert model.flops_per_token() == 6 * weights + 12 * 32 * keys, kind


def test_gate_biases_spread_memories_over_a_chunk_or_all_that_recurs():
    torch.manual_seed(0)
    for sizes, longest in (({}, 15), (dict(mixer="rnn"), 511)):
        model = model_rat.Model(model_rat.Config(block_size=512, n_layer=1, n_embd=2048, n_head=32, **sizes))
        u = model.blocks[0].attn.gate_bias.exp() / longest
        assert 1 / longest <= u.min() < 0.08 and 0.99 < u.max() <= 1 and abs(u.mean() - 0.52) < 0.04
