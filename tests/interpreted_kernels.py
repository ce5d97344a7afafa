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
from kernel_cases import (FAR, assert_close, attend_case, covering_set, loop_scan, outputs_and_gradients, relative_rms)

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


def test_attend_in_float16():
    against_the_twin((100, 65, "plain", None, False, (1, 2, 1), (64, 64)), torch.float16, 0)


@pytest.mark.parametrize("kind", ["plain", "shared"])
def test_tiles_that_no_query_sees_are_not_loaded(kind):
    """300 positions, window 40: queries 200 to 299 come with NaN in the keys of 0 to 127, which are whole tiles out of
    sight, and the keys 0 to 63 with NaN in the queries (and what comes in for them) from 192 on."""
    position = torch.arange(300, dtype=torch.int32)
    q, k, v = (torch.randn(1, 1, 300, 16) for _ in range(3))
    at = (None, None) if kind == "plain" else (position, position)
    clean = outputs_and_gradients(kernels.attend, (q, k, v), (*at, None, 40), (torch.ones_like(q), torch.ones(1, 1, 300)))
    k2, v2 = k.clone(), v.clone()
    k2[:, :, :128] = v2[:, :, :128] = math.nan
    seen = kernels.attend(q[:, :, 200:], k2, v2, position[200:], position, window=40)
    assert relative_rms(seen[0], clean[0][:, :, 200:]) < 1e-6 and seen[0].isfinite().all()
    q2, do = q.clone(), torch.ones_like(q)
    q2[:, :, 192:] = do[:, :, 192:] = math.nan
    dirty = outputs_and_gradients(kernels.attend, (q2, k, v), (*at, None, 40), (do, torch.ones(1, 1, 300)))
    for found, expected in zip(dirty[3:], clean[3:]):
        assert relative_rms(found[:, :, :64], expected[:, :, :64]) < 1e-6


def test_attend_takes_any_strides():
    """Transposed, expanded, offset and odd-sized inputs, and gradients that come in expanded."""
    base = torch.randn(2, 70, 3 * 2 * 20 + 1)
    q, k, v = (base[..., 1:].view(2, 70, 3, 2, 20)[:, :, i].transpose(1, 2) for i in range(3))
    k = k[:, :1].expand(-1, 2, -1, -1)
    expected = kernels.attend_ref(q, k, v)
    found = kernels.attend(q, k, v)
    assert relative_rms(found[0], expected[0]) < 1e-5 and relative_rms(found[1], expected[1]) < 1e-5
    leaf = base.requires_grad_()
    grads = []
    for function in (kernels.attend, kernels.attend_ref):
        q, k, v = (leaf[..., 1:].view(2, 70, 3, 2, 20)[:, :, i].transpose(1, 2) for i in range(3))
        grads.append(torch.autograd.grad(function(q, k, v)[0].sum(), leaf)[0])
    assert relative_rms(*grads) < 1e-5


def test_attend_of_nothing():
    q, k = torch.randn(1, 2, 5, 16, requires_grad=True), torch.randn(1, 2, 0, 16, requires_grad=True)
    out, lse = kernels.attend(q, k, k)
    assert (out == 0).all() and (lse == -math.inf).all()
    dq, dk = torch.autograd.grad((out.sum() + lse.sum()), (q, k))
    assert (dq == 0).all() and dk.shape == k.shape
    out, lse = kernels.attend(q[:, :, :0], q, q)
    assert out.shape == (1, 2, 0, 16) and lse.shape == (1, 2, 0)
    assert (torch.autograd.grad(out.sum(), q, allow_unused=True)[0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("D", [5, 16, 100])
def test_merge(D, dtype):
    """Positions 0 to 4 see nothing on side a, 3 to 7 nothing on side b: 3 and 4 nothing at all."""
    torch.manual_seed(D)
    a, b, do = (torch.randn(2, 3, 17, D).to(dtype) for _ in range(3))
    lse_a, lse_b, dlse = (torch.randn(2, 3, 17) for _ in range(3))
    for out, lse, empty in ((a, lse_a, slice(0, 5)), (b, lse_b, slice(3, 8))):
        out[:, :, empty], lse[:, :, empty] = math.nan, -math.inf        # what an empty side holds is never read
    dlse[:, :, 3:5] = math.nan
    found, expected = [], []
    for function, result, kind in ((kernels.merge, found, lambda x: x), (kernels.merge_ref, expected, torch.Tensor.double)):
        sides = [kind(x).clone().requires_grad_() for x in (a, lse_a, b, lse_b)]
        out, lse = function(*sides)
        result += [out, lse, *torch.autograd.grad((out, lse), sides, (kind(do), kind(dlse)))]
    assert_close(found, expected, TOLERANCE[dtype], ("out", "lse", "da", "dlse_a", "db", "dlse_b"))
    assert (found[1][:, :, 3:5] == -math.inf).all() and (found[0][:, :, 3:5] == 0).all()


SCANS = [(T, C, chunk, offset, start) for T, C, chunk, offset in
         [(1, 1, 1, 0), (1, 16, 16, 15), (2, 3, 7, 6), (63, 3, 16, 0), (64, 20, 64, 63), (65, 17, 65, 0), (65, 2, 1, 0),
          (100, 5, 10, 3), (100, 3, 100, 0), (130, 16, 130, 70), (130, 2, 1000, 900), (7, 16, 4, 2)] for start in (False, True)]


@pytest.mark.parametrize("T, C, chunk, offset, start", SCANS)
def test_scan(T, C, chunk, offset, start):
    torch.manual_seed(T)
    inputs = [torch.rand(2, T, C), torch.randn(2, T, C)] + [torch.randn(2, C)] * start
    dh = torch.randn(2, T, C)
    results = []
    for function, kind in ((kernels.scan, torch.Tensor.float), (loop_scan, torch.Tensor.double)):
        g, x, *h0 = leaves = [kind(y).clone().requires_grad_() for y in inputs]
        h = function(g, x, chunk, h0[0] if start else None, offset)
        grads = torch.autograd.grad(h, leaves, kind(dh), allow_unused=True, materialize_grads=True)
        results.append([h.detach(), *grads])
    assert_close(*results, 1e-5, ("h", "dg", "dx", "dh0")[:len(results[0])])


def test_scan_in_bfloat16_keeps_its_state_in_float32():
    """1,000 steps of 1e-3 on a state near 1: in bfloat16 each would be lost."""
    x = torch.full((1, 1000, 16), 1e-3).bfloat16()
    x[:, 0] = 1
    h = kernels.scan(torch.ones_like(x), x, 1000)
    assert h.dtype == torch.bfloat16 and abs(h[0, -1, 0].item() - 2) < 0.02


def test_scan_of_strided_inputs():
    both = torch.rand(2, 33, 40, requires_grad=True)
    results = []
    for function in (kernels.scan, kernels.scan_ref):
        h = function(both[..., :20], both[..., 20:], 16)
        results.append([h.detach(), torch.autograd.grad(h.sum(), both)[0]])
    assert_close(*results, 1e-5, ("h", "d"))


def test_the_far_position_is_the_one_of_the_kernels():
    assert FAR == kernels.FAR
