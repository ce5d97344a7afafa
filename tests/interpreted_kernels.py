"""
The Triton kernels, run by Triton's interpreter on CPU tensors, against definitions in float64.

    TRITON_INTERPRET=1 python -m pytest tests/interpreted_kernels.py

test_kernels.py runs this file in a process of its own: the switch must be set before triton is
imported, and breaks compiling. All uninitialised memory holds NaN here.
"""
import math
import os

import pytest
import torch

import kernels
import kernels_triton
from kernel_cases import (LAYOUTS, assert_close, assert_rat_states_are_float32,
                          assert_state_is_float32, attend_case, compare_attend, compare_attend_backward,
                          compare_attend_on, compare_rat, compare_rat_on, compare_scan, covering_set,
                          outputs_and_gradients, rat_case, rat_with_shut_gates)

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
FLOAT, BF16, HALF = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {FLOAT: 1e-5, BF16: 1e-2, HALF: 1e-2}


@pytest.fixture(autouse=True)
def poison():
    """torch.empty gives NaN: what a kernel forgets to write is noticed."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


# The covering set, every third case in bfloat16; large head sizes; float16.
ATTENDS = [*((case, BF16 if i % 3 == 0 else FLOAT) for i, case in enumerate(covering_set())),
           ((65, 100, "shared", 20, True, (1, 2, 1), 256), FLOAT),
           ((65, 100, "shared", None, False, (1, 2, 1), 200), FLOAT),
           ((100, 65, "plain", None, False, (1, 2, 1), 64), HALF)]


@pytest.mark.parametrize("number", range(len(ATTENDS)))
def test_attend(number):
    case, dtype = ATTENDS[number]
    compare_attend(kernels.attend, case, number, TOLERANCE[dtype], dtype)


@pytest.mark.parametrize("dtype", [FLOAT, BF16])
def test_attend_backward_over_some_of_the_keys(dtype):
    compare_attend_backward(kernels.attend_backward, dtype, TOLERANCE[dtype])


@pytest.mark.parametrize("schedule, switch", [("tiled", dict(block=3)), *(
    (schedule, switch) for schedule in ("wavefront", "tiled") for switch in ({}, dict(pos="rope", n_kv_head=1)))])
def test_recurrent_transformer_on_these_kernels(schedule, switch):
    """Its schedules, outputs and gradients, against its loop over positions in float64."""
    from conftest import tiny
    from test_models import outputs_and_gradients, rms, tokens
    sizes, x = dict(n_embd=16, n_head=2, chunk=4, **switch), tokens(2, 10)
    want = outputs_and_gradients(tiny("rt", schedule="naive", **sizes), x)
    found = outputs_and_gradients(tiny("rt", schedule=schedule, **sizes).float(), x)
    floor = 1e-3 * max(rms(g) for g in want[2].values())
    assert rms(found[0] - want[0]) < 1e-5 * rms(want[0])
    for name, g in want[2].items():
        assert rms(found[2][name] - g) < 1e-4 * max(rms(g), floor), name


@pytest.mark.parametrize("kind", ["plain", "shared"])
def test_fully_masked_tiles_are_not_loaded(kind):
    """300 positions, window 40. Queries 200 to 299 attend to no key of the tiles 0 to 127, and no
    query of the tiles from 192 on to keys 0 to 63: NaN there, also in what comes in, reaches neither
    results nor gradients."""
    at = torch.arange(300, dtype=torch.int32)
    arguments = (None, None, None, 40) if kind == "plain" else (at, at, None, 40)
    q, k, v = (torch.randn(1, 1, 300, 16) for _ in range(3))
    do, dlse = torch.ones_like(q), torch.ones(1, 1, 300)
    whole = outputs_and_gradients(kernels.attend, (q, k, v), arguments, (do, dlse))
    k_nan, v_nan = (x.index_fill(2, torch.arange(128), math.nan) for x in (k, v))
    found = outputs_and_gradients(kernels.attend, (q, k_nan, v_nan), arguments, (do, dlse))
    assert_close(*[[x[:, :, 256:] for x in xs[:3]] for xs in (found, whole)], 1e-6, ("out", "lse", "dq"))
    q, do = (x.index_fill(2, torch.arange(192, 300), math.nan) for x in (q, do))
    found = outputs_and_gradients(kernels.attend, (q, k, v), arguments, (do, dlse))
    assert_close(*[[x[:, :, :64] for x in xs[3:]] for xs in (found, whole)], 1e-6, ("dk", "dv"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("D", [16, 20])
def test_attend_takes_any_strides(D, layout):
    tensors, arguments, (do, dlse) = attend_case(0, 20, 20, "shared", None, False, (2, 2, 2), D, FLOAT)
    tensors, do = [LAYOUTS[layout](x) for x in tensors], LAYOUTS[layout](do)
    compare_attend_on(kernels.attend, tensors, arguments, (do, dlse), 1e-5)


def test_attend_without_keys():
    q, k = torch.randn(1, 2, 5, 16, requires_grad=True), torch.randn(1, 2, 0, 16, requires_grad=True)
    out, lse = kernels.attend(q, k, k)
    assert (out == 0).all() and (lse == -math.inf).all()
    dq, dk = torch.autograd.grad((out.sum() + lse.sum()), (q, k))
    assert (dq == 0).all() and dk.shape == k.shape
    at = torch.zeros(1, 5, dtype=torch.int32)
    assert (kernels.attend(q, k, k, at, at[:, :0])[1] == -math.inf).all()


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("T, C, chunk", [(1, 1, 1), (1, 16, 16), (2, 3, 7), (63, 3, 16), (64, 20, 64),
                                         (65, 17, 65), (65, 2, 1), (100, 5, 10), (100, 3, 100),
                                         (130, 16, 1000), (9, 16, 2 ** 31 - 1)])
def test_scan(T, C, chunk, start):
    compare_scan(kernels.scan, T, C, chunk, start, 1e-5, FLOAT)


@pytest.mark.parametrize("dtype", [BF16, HALF])
def test_scan_in_16_bits(dtype):
    compare_scan(kernels.scan, 70, 3, 16, True, 1e-2, dtype)


def test_the_state_of_scan_is_float32():
    assert_state_is_float32(kernels.scan)


def test_scan_of_strided_inputs():
    both = torch.rand(2, 33, 40, requires_grad=True)
    results = []
    for function in (kernels.scan, kernels.scan_ref):
        h = function(both[..., :20], both[..., 20:], 16)
        results.append([h.detach(), torch.autograd.grad(h.sum(), both)[0]])
    assert_close(*results, 1e-5, ("h", "d"))


@pytest.fixture
def fits(monkeypatch):
    """What rat_fits said in each call: whether a chunk went to rat's own kernels."""
    said, fits = [], kernels_triton.rat_fits
    monkeypatch.setattr(kernels_triton, "rat_fits", lambda *a: said.append(fits(*a)) or said[-1])
    return said


# Tiles are 16 rows here: several of them, of ends too, rows left over, and in the longest case tiles
# without a mask.
RATS = [((1, 1, None, (2, 1, 1), 16), FLOAT), ((5, 2, None, (1, 2, 1), 16), FLOAT),
        ((35, 5, "token", (1, 2, 1), 8), FLOAT), ((20, 3, "chunk", (1, 4, 2), 12), BF16),
        ((37, 16, "chunk", (1, 1, 1), 16), BF16), ((9, 2 ** 31 - 1, "token", (1, 2, 1), 16), FLOAT),
        ((200, 1, None, (1, 1, 1), 16), FLOAT), ((18, 7, "token", (2, 1, 1), 20), HALF)]


@pytest.mark.parametrize("case, dtype", RATS)
def test_rat(case, dtype, fits):
    compare_rat(kernels.rat, case, TOLERANCE[dtype], dtype)
    assert fits == [True, True]


@pytest.mark.parametrize("dtype", [FLOAT, BF16])
def test_rat_with_chunks_too_long_for_its_kernels(dtype, fits, capfd):
    kernels.announce.cache_clear()
    compare_rat(kernels.rat, (70, 20, "chunk", (2, 4, 2), 16), TOLERANCE[dtype], dtype)
    assert fits == [False, False] and "rat: chunks of 20 tokens" in capfd.readouterr().err


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rat_takes_any_strides(layout):
    (*tensors, bias), arguments, dout = rat_case(9, 4, "chunk", (1, 2, 1), 16, FLOAT)
    tensors, dout = [*map(LAYOUTS[layout], tensors), bias], LAYOUTS[layout](dout)
    compare_rat_on(kernels.rat, tensors, arguments, dout, 1e-5)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_rat_where_gates_are_shut():
    """Everything stays finite, and what the output gate shuts out gets no gradient."""
    found = compare_rat_on(kernels.rat, *rat_with_shut_gates(20, (1, 2, 1), 16, FLOAT), 1e-5)
    assert (found[0][:, :, 1] == 0).all() and (found[5][:, :, 1] == 0).all()


def test_the_states_of_rat_are_float32():
    assert_rat_states_are_float32(kernels.rat)
