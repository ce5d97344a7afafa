"""model_rt and rt_wavefront: the schedules are one function. The tests also compare RT without recurrence with
model_gpt, and look at precision, memory and CUDA graphs."""
import itertools
import re
from unittest.mock import Mock

import pytest
import torch

import graphs
import model_relaxed
import model_rt
import rt_wavefront
from conftest import tiny
from kernel_cases import INTERPRETED, assert_close, few
from test_models import assert_cache_is_forward, assert_same, outputs_and_gradients, rms, tokens


def rt(schedule, **sizes):
    """Return the tiny float64 RT of conftest with this schedule. Equal sizes give equal weights."""
    return tiny("rt", schedule=schedule, **sizes)


SWITCHES = [dict(pos="none", n_mlp=7, n_kv_head=1), dict(n_kv_head=2, qk_norm="full", pos="rope", tie_embeddings=True)]
CASES = [*((T, dict(n_layer=L), [1, 8, 64]) for T, L in ((1, 3), (2, 3), (63, 3), (100, 1))),
         *((T, switch, [10]) for T in (4, 37) for switch in SWITCHES),
         (37, dict(kv_norm=False, qk_norm="full"), [])]     # the wavefront does not have this one


@pytest.mark.parametrize("T, sizes, chunks", CASES, ids=str)
def test_naive_is_tiled_is_wavefront(T, sizes, chunks):
    sizes, x = {"n_layer": 3, **sizes}, tokens(2, T + 1)
    want = outputs_and_gradients(rt("naive", **sizes), x)
    for schedule, chunk in [("tiled", 1), *(("wavefront", chunk) for chunk in chunks)]:
        assert_same(outputs_and_gradients(rt(schedule, chunk=chunk, **sizes), x), want)


def test_the_schedule_that_was_asked_for_runs(monkeypatch):
    """fast picks a schedule, and schedule= overrides it. A prompt, whole or in pieces, goes through the wavefront too."""
    used = lambda **sizes: model_rt.Config(**sizes).schedule_used
    assert used() == used(fast=False, schedule="wavefront") == "wavefront"
    assert (used(kv_norm=False), used(fast=False)) == ("tiled", "naive")
    for owner, name in (rt_wavefront, "run_layers"), (rt_wavefront, "prefill"), (model_rt, "tiled"):
        monkeypatch.setattr(owner, name, Mock(wraps=getattr(owner, name)))
    model, x = rt("auto"), tokens(2, 20)
    cache = model.init_cache(2, 40)
    model(x), model(x, cache=cache), model(x, cache=cache), rt("tiled")(x)
    assert [f.call_count for f in (rt_wavefront.run_layers, rt_wavefront.prefill, model_rt.tiled)] == [1, 2, 2]


@pytest.mark.parametrize("schedule, pos", itertools.product(["naive", "tiled", "wavefront"], ["alibi", "rope", "none"]))
def test_without_recurrence_it_is_model_gpt(schedule, pos):
    """Logits, loss, every gradient, and the decoding of ragged rows are the same."""
    model, x = rt(schedule, recurrent=False, pos=pos, n_kv_head=2), tokens(2, 51)
    plain = tiny("gpt", pos=pos, n_kv_head=2, mlp="gelu", tie_embeddings=False)
    part = lambda n: re.sub(r"\.(w_\w+)\.", r".mlp.\1.", re.sub(r"\.(w[qkvo])\.", r".attn.\1.", n))
    plain.load_state_dict({part(n): w for n, w in model.state_dict().items()})
    logits, loss, grads = outputs_and_gradients(plain, x)
    want = logits, loss, {n: grads[part(n)] for n, _ in model.named_parameters()}
    assert_same(outputs_and_gradients(model, x), want, all_reached=True)
    assert_cache_is_forward(model, [37, 20], [16, 1, 1, 19], 1e-10)


@pytest.mark.parametrize("pos", ["alibi", "none"])
def test_bfloat16_attention_is_rounded_nowhere_inside(pos):
    """The attention of a chunk is that in float64. Slopes of six heads are no powers of two."""
    cfg, generator = model_rt.Config(n_head=6, n_kv_head=3, n_embd=48, pos=pos, chunk=64), torch.Generator().manual_seed(0)
    q, k, v, out = (torch.randn(3, 2, heads, 64, 8, generator=generator) for heads in (6, 3, 3, 6))     # of three layers
    found = []
    for dtype in torch.float32, torch.float64:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            run = rt_wavefront.Wavefront(cfg, torch.zeros(2, 64, 48, dtype=dtype), 3)
        (low_q, *kv), none = (x.bfloat16().to(run.dtype) for x in (q, k, v)), torch.zeros_like(k)
        outside = out.to(dtype), 3 * out.sum(-1).to(dtype)
        found.append(rt_wavefront.ChunkAttention(run, low_q, *outside, *kv, none, none).a)
    assert found[0].dtype == torch.float32 and rms(found[0] - found[1]) < 2e-6 * rms(found[1])


def test_saved_for_the_backward_are_x_and_y_of_each_layer():
    model, x = rt("wavefront", n_layer=3), torch.randn(2, 70, 32, dtype=torch.float64)
    weights = rt_wavefront.stack_weights(model.cfg, model.blocks)
    saved = rt_wavefront.Layers.apply(model.cfg, x, *weights).grad_fn.saved_tensors
    assert [x.shape for x in saved] == [(4, 72, 2, 32), *(w.shape for w in weights)]    # three chunks of 24 positions


def test_graphs_are_recorded_and_reused(monkeypatch):
    """The second call of a shape records, and later calls replay with new inputs. A plain function stands for its graph
    here."""
    recorded = {}
    for name, fake in (("recordable", lambda x: True), ("Graph", lambda function, inputs: function),
                       ("GRAPHS", recorded), ("SEEN", set())):
        monkeypatch.setattr(graphs, name, fake)
    plain, graphed = (rt("wavefront", cuda_graphs=on).train() for on in (False, True))
    for seed, T in ((1, 20), (2, 20), (3, 33), (4, 20), (5, 33)):
        x = tokens(2, T + 1, seed=seed)
        assert_same(outputs_and_gradients(graphed, x), outputs_and_gradients(plain, x))
    assert len(recorded) == 4


@pytest.mark.parametrize("device, dtype, tolerance", [("cpu", torch.float32, 1e-5)] if INTERPRETED else [
    pytest.param("cuda", torch.float64, 1e-9, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.float32, 1e-3, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", few([("wavefront", dict(recurrent=False)), *itertools.product(
    ("wavefront", "tiled"), (dict(pos="rope", n_kv_head=1, qk_norm="full"), {}))], 2), ids=str)
def test_schedules_agree_on_the_kernels(case, device, dtype, tolerance):
    """On CUDA the plain implementations run in float64. Triton runs in float32 without tf32, and in
    interpreted_kernels.py."""
    schedule, sizes = case
    small, T = (dict(n_embd=16, n_head=2, chunk=4), 10) if INTERPRETED else ({}, 71)
    (want, _, grads), (found, _, more) = (
        outputs_and_gradients(rt(name, **small, **sizes).to(device, kind), tokens(2, T).to(device))
        for name, kind in (("naive", torch.float64 if INTERPRETED else dtype), (schedule, dtype)))
    floor = 1e-3 * max(rms(g) for g in grads.values())
    assert_close([found, *more.values()], [want, *grads.values()], tolerance, " ".join(["logits", *grads]), floor)


@pytest.mark.parametrize("device, low, tolerance", [("cpu", torch.float32, 1e-6), ("cpu", torch.bfloat16, 4e-3)]
                         if INTERPRETED else [pytest.param("cuda", torch.float32, 1e-5, marks=pytest.mark.gpu),
                                              pytest.param("cuda", torch.bfloat16, 1e-2, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", few([(2, 3, 24, 6, 5), (1, 1, 8, 16, 40), (3, 1, 33, 40, 0), (1, 4, 128, 32, 1)], 3), ids=str)
def test_pieces_in_triton_are_the_plain_ones(case, device, low, tolerance):
    """Each piece runs on slices of larger tensors, as a chunk of 41 positions has them. low is the dtype of
    products."""
    rt_triton = pytest.importorskip("rt_triton")
    (G, Q, C, D, i), (A, B, K) = case, (2, 3, 41)
    generator = torch.Generator()
    Z = A * B * G
    draw = lambda *shape, dtype=torch.float32: torch.randn(*shape, generator=generator).to(device, dtype)
    rows, r = draw(A, K, B, C), draw(A, K * B, 1)
    q, out, lse, bias = draw(Z, Q, K, D), draw(Z, Q, K, D), draw(Z, Q, K, 1), draw(G * Q, K, K)
    k, v, p, delta, da = draw(Z, K, D), draw(Z, K, D), draw(Z, K, K * Q), draw(Z, 1, K * Q), draw(Z, K * Q, D)
    later, now = slice((i + 1) * Q, None), slice(i * Q, (i + 1) * Q)
    calls = dict(
        add_and_norm=lambda: (rows[:, i], draw(A, B, C, dtype=low), 1e-5),
        add_norm_backward=lambda: (rows[:, i], draw(A, B, C, dtype=low), rows.flatten(1, 2)[:, :B], r[:, :B]),
        read_pairs=lambda: (q[:, :, i], k[:, :i], v[:, :i], bias[:, i, :i], lse[:, :, i], out[:, :, i]),
        add_pair_grad=lambda: (draw(Z, 1, D), draw(Z, 1, D), draw(Z, K * Q, D)[:, later], v[:, i:i + 1],
                               p[:, i:i + 1, later], da[:, later], delta[..., later]),
        store_da_delta=lambda: (da[:, now], delta[..., now], draw(Z, Q, D, dtype=low), draw(Z, K * Q, D)[:, now]))
    assert calls.keys() == vars(rt_wavefront.PLAIN).keys()
    for name, arguments in calls.items():
        found = []
        for pieces in (rt_wavefront.PLAIN, rt_triton):
            generator.manual_seed(i)
            given = arguments()
            returned = getattr(pieces, name)(*given)
            returned = returned if isinstance(returned, tuple) else (returned,)
            written = given[:2] if name in ("add_pair_grad", "store_da_delta") else ()
            found.append([x.clone() for x in (*filter(torch.is_tensor, returned), *written)])
        assert [x.dtype for x in found[0]] == [x.dtype for x in found[1]], name
        assert_close(found[1], found[0], tolerance, " ".join([name] * len(found[0])))


def test_in_the_loops_of_another_model():
    """RT's blocks in Relaxed's loops count their FLOPs. They refuse several tokens with a cache, because each token
    needs the output of the one before."""
    class Looped(model_relaxed.Model):
        context_type, cached_context_type, mixer_flops = model_rt.Context, model_rt.CachedContext, model_rt.Model.mixer_flops

        def make_block(self, cfg, k):
            return model_rt.Block(cfg)

    cfg = model_rt.Config(n_layer=4, n_embd=32, n_head=4, vocab_size=61, schedule="tiled")
    for name, value in dict(n_loop=2, n_stored=2, exit_loop=0, early_exit="none", rank=0).items():
        setattr(cfg, name, value)
    model, x = Looped(cfg).double().eval(), tokens(2, 9)
    assert model.mixer_flops() == model_rt.Model(cfg).mixer_flops()
    cache = model.init_cache(2, 9)
    with pytest.raises(ValueError, match="one token a row"):
        model(x, cache=cache)
    cache.reset()
    steps = torch.cat([model(token, cache=cache)[0] for token in x.split(1, 1)], 1)
    assert rms(steps - model(x)[0]) < 1e-10
