"""
The Triton kernels, run by Triton's interpreter on CPU tensors, against the twins in float64.

    TRITON_INTERPRET=1 python -m pytest tests/interpreted_kernels.py

test_kernels.py runs this file in a process of its own: the switch must be set before triton is imported, and breaks
compiling. All uninitialised memory holds NaN here.
"""
import math

import pytest
import torch

import kernels
from kernel_cases import (FAR, LAYOUTS, assert_close, assert_rat_states_are_float32, assert_state_is_float32,
                          attend_case, compare_attend_backward, compare_merge, compare_rat, compare_rat_on, compare_scan,
                          covering_set, dense_outputs_and_gradients, outputs_and_gradients, rat_case)

assert kernels.INTERPRETED, "set TRITON_INTERPRET=1"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


@pytest.fixture(autouse=True)
def poison():
    """torch.empty gives NaN: what a kernel forgets to write is noticed."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def against_the_twin(case, dtype, seed):
    tensors, arguments, incoming = attend_case(seed, *case, dtype=dtype)
    found = outputs_and_gradients(kernels.attend, tensors, arguments, incoming)
    exact = outputs_and_gradients(kernels.attend_ref, [x.double() for x in tensors], arguments,
                                  [x.double() for x in incoming])
    assert found[0].dtype == dtype and found[1].dtype == torch.float32
    assert_close(found, exact, TOLERANCE[dtype])


@pytest.mark.parametrize("number", range(38))
def test_attend(number):
    """The covering set, every third case in bfloat16."""
    dtype = torch.bfloat16 if number % 3 == 0 else torch.float32
    against_the_twin(covering_set()[number], dtype, number)


@pytest.mark.parametrize("sizes", [(256, 256), (200, 16)])
def test_attend_at_large_head_sizes(sizes):
    against_the_twin((65, 100, "shared", 20, True, (1, 2, 1), sizes), torch.float32, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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
    assert all(rms(found[2][n] - want[2][n]) < 1e-4 * max(rms(want[2][n]), floor) for n in want[2])


def test_attend_in_float16():
    against_the_twin((100, 65, "plain", None, False, (1, 2, 1), (64, 64)), torch.float16, 0)


@pytest.mark.parametrize("kind", ["plain", "shared"])
def test_tiles_that_no_query_sees_are_not_loaded(kind):
    """300 positions, window 40. Whole tiles of keys (0 to 127) are out of sight of queries 200 to 299, whole tiles of
    queries (192 on) of keys 0 to 63: NaN there, also in what comes in, reaches neither results nor gradients."""
    position = torch.arange(300, dtype=torch.int32)
    arguments = (None, None, None, 40) if kind == "plain" else (position, position, None, 40)
    q, k, v = (torch.randn(1, 1, 300, 16) for _ in range(3))
    incoming = torch.ones_like(q), torch.ones(1, 1, 300)
    out, lse, dq, dk, dv = outputs_and_gradients(kernels.attend, (q, k, v), arguments, incoming)
    hidden = [x.index_fill(2, torch.arange(128), math.nan) for x in (k, v)]
    found = outputs_and_gradients(kernels.attend, (q, *hidden), arguments, incoming)
    assert_close([x[:, :, 256:] for x in found[:3]], [x[:, :, 256:] for x in (out, lse, dq)], 1e-6, ("out", "lse", "dq"))
    late = [x.index_fill(2, torch.arange(192, 300), math.nan) for x in (q, incoming[0])]
    found = outputs_and_gradients(kernels.attend, (late[0], k, v), arguments, (late[1], incoming[1]))
    assert_close([x[:, :, :64] for x in found[3:]], [x[:, :, :64] for x in (dk, dv)], 1e-6, ("dk", "dv"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("D", [16, 20])
def test_attend_takes_any_strides(D, layout):
    tensors, arguments, incoming = attend_case(0, 20, 20, "shared", None, False, (2, 2, 2), (D, D), dtype=torch.float32)
    tensors, incoming = [LAYOUTS[layout](x) for x in tensors], [LAYOUTS[layout](incoming[0]), incoming[1]]
    found = outputs_and_gradients(kernels.attend, tensors, arguments, incoming)
    assert_close(found, dense_outputs_and_gradients(tensors, arguments, incoming), 1e-5)


def test_attend_of_nothing():
    q, k = torch.randn(1, 2, 5, 16, requires_grad=True), torch.randn(1, 2, 0, 16, requires_grad=True)
    out, lse = kernels.attend(q, k, k)
    assert (out == 0).all() and (lse == -math.inf).all()
    dq, dk = torch.autograd.grad((out.sum() + lse.sum()), (q, k))
    assert (dq == 0).all() and dk.shape == k.shape
    at = torch.zeros(2, 5, dtype=torch.int32)
    none = torch.randn(2, 2, 0, 16)
    assert (kernels.attend(torch.randn(2, 2, 5, 16), none, none, at, at[:, :0])[1] == -math.inf).all()
    out, lse = kernels.attend(q[:, :, :0], q, q)
    assert out.shape == (1, 2, 0, 16) and lse.shape == (1, 2, 0)
    assert (torch.autograd.grad(out.sum(), q, allow_unused=True)[0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("D", [5, 16, 100])
def test_merge(D, dtype):
    compare_merge(kernels.merge, D, dtype, TOLERANCE[dtype])


SCANS = [(T, C, chunk, offset, start) for T, C, chunk, offset in
         [(1, 1, 1, 0), (1, 16, 16, 15), (2, 3, 7, 6), (63, 3, 16, 0), (64, 20, 64, 63), (65, 17, 65, 0), (65, 2, 1, 0),
          (100, 5, 10, 3), (100, 3, 100, 0), (130, 16, 130, 70), (130, 2, 1000, 900), (7, 16, 4, 2), (9, 16, 2 ** 31 - 1, 5)] for start in (False, True)]


@pytest.mark.parametrize("T, C, chunk, offset, start", SCANS)
def test_scan(T, C, chunk, offset, start):
    compare_scan(kernels.scan, 2, T, C, chunk, offset, start, 1e-5, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scan_in_16_bits(dtype):
    compare_scan(kernels.scan, 2, 70, 3, 16, 5, True, 1e-2, dtype)


@pytest.mark.parametrize("offset", [0, 2])
def test_scan_of_nothing(offset):
    g, h0 = torch.rand(2, 0, 16, requires_grad=True), torch.rand(2, 16, requires_grad=True)
    h = kernels.scan(g, g, 4, h0, offset)
    assert h.shape == g.shape
    assert (torch.autograd.grad(h.sum(), h0, materialize_grads=True)[0] == 0).all()


def test_scan_in_bfloat16_keeps_its_state_in_float32():
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
    said, fits = [], kernels.rat_fits
    monkeypatch.setattr(kernels, "rat_fits", lambda *inputs: said.append(fits(*inputs)) or said[-1])
    return said


# Tiles are 16 rows here: several of them, of ends too, rows left over, and in the longest case tiles without a mask.
RATS = [((1, 1, None, (2, 1, 1), 16), torch.float32), ((5, 2, None, (1, 2, 1), 16), torch.float32),
        ((35, 5, "token", (1, 2, 1), 8), torch.float32), ((20, 3, "chunk", (1, 4, 2), 12), torch.bfloat16),
        ((37, 16, "chunk", (1, 1, 1), 16), torch.bfloat16), ((9, 2 ** 31 - 1, "token", (1, 2, 1), 16), torch.float32),
        ((200, 1, None, (1, 1, 1), 16), torch.float32), ((18, 7, "token", (2, 1, 1), 20), torch.float16)]


@pytest.mark.parametrize("case, dtype", RATS)
def test_rat(case, dtype, fits):
    compare_rat(kernels.rat, case, TOLERANCE[dtype], dtype)
    assert fits == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rat_with_chunks_too_long_for_its_kernels(dtype, fits, capfd):
    kernels.announce.cache_clear()
    compare_rat(kernels.rat, (70, 20, "chunk", (2, 4, 2), 16), TOLERANCE[dtype], dtype)
    assert fits == [False, False] and "rat: chunks of 20 tokens" in capfd.readouterr().err


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rat_takes_any_strides(layout):
    (*tensors, bias), arguments, dout = rat_case(0, 9, 4, "chunk", (1, 2, 1), 16, dtype=torch.float32)
    compare_rat_on(kernels.rat, [*map(LAYOUTS[layout], tensors), bias], arguments, LAYOUTS[layout](dout), 1e-5)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_rat_where_gates_are_shut():
    """Gates of exactly 0 and 1: everything stays finite, and what the output gate shuts out gets no gradient."""
    tensors, arguments, dout = rat_case(0, 20, 6, "chunk", (1, 2, 1), 16, dtype=torch.float32)
    tensors = [x.clone() for x in tensors]
    tensors[3][:, ::3], tensors[3][:, 1::5], tensors[4][:, :, 1] = 1000, -1000, -1000
    found = compare_rat_on(kernels.rat, tensors, arguments, dout, 1e-5)
    assert (found[0][:, :, 1] == 0).all() and (found[5][:, :, 1] == 0).all()


def test_rat_in_bfloat16_keeps_its_states_in_float32():
    assert_rat_states_are_float32(kernels.rat)


def test_the_far_position_is_the_one_of_the_kernels():
    assert FAR == kernels.FAR
