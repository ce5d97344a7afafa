"""kernels.py computes its definitions. In float64 the plain implementations run, and on a GPU and in
tests/interpreted_kernels.py the Triton code does."""
import importlib.util
import math
import re

import pytest
import torch

import kernels
from conftest import python, relative
from kernel_cases import (ATTENDS, LAYOUTS, PRECISION, SCANS, SPLITS, assert_close, attend_case, compare,
                          compare_attend, compare_own, compare_scan, dense_attend, exactly, few, where)

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")


@where(*PRECISION)
@pytest.mark.parametrize("number", few(range(len(ATTENDS)), 16))
def test_attend_is_the_definition(number, device, dtype, tolerance):
    case = attend_case(number, *ATTENDS[number], dtype, device)
    compare_attend(kernels.attend_by_position, *case, tolerance)


@pytest.mark.parametrize("number", range(0, len(ATTENDS), 3))
def test_attend_written_out(number, monkeypatch):
    """Attention is written out on devices for which torch has no attention that returns lse."""
    monkeypatch.setattr(kernels, "FUSED", ())
    found = compare_attend(kernels.attend_by_position, *attend_case(number, *ATTENDS[number]), 1e-10)
    if min(ATTENDS[number][:2]) > 2:
        assert all(x.abs().max() > 0 for x in found[2:])


@where(*PRECISION)
@pytest.mark.parametrize("number", few(range(2, len(ATTENDS)), 6))
def test_own_pairs_are_one_more_key(number, device, dtype, tolerance):
    compare_own(*attend_case(number, *ATTENDS[number], dtype, device), tolerance)


def test_autocast_rounds_no_sum(monkeypatch):
    monkeypatch.setattr(kernels, "FUSED", ())
    x = torch.randn(1, 2, 9, 16)
    plain = kernels.attend_by_position(x, x, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, kernels.attend_by_position(x, x, x), plain))


@where(*PRECISION)
@pytest.mark.parametrize("number", range(len(SPLITS)))
def test_one_query_in_splits(number, device, dtype, tolerance):
    """One of three rows attends to no key, one to keys of the first split alone, and one to all that its window
    holds."""
    tensors, (_, *mask), _ = attend_case(number, *SPLITS[number], dtype, device)
    q_pos = torch.tensor([[-1], [5], [tensors[1].size(2) - 1]], dtype=torch.int32, device=device)
    arguments = *tensors, q_pos, *mask
    found = kernels.attend_by_position(*arguments)
    assert_close(found, dense_attend(*exactly(arguments)), tolerance, "out lse")
    assert found[1][0].max() == -math.inf


@where(PRECISION[0])
@pytest.mark.parametrize("layout", few([*LAYOUTS], 2))
def test_any_strides(layout, device, dtype, tolerance):
    """Any layout is right, also where the elements of a row are not contiguous."""
    layout = LAYOUTS[layout]
    for kind, D in (("plain", 16), ("shared", 20)):
        case = attend_case(0, 20, 20, kind, None, False, (2, 2, 2), D, dtype, device)
        tensors, arguments, (do, dlse) = case
        tensors, incoming = [*map(layout, tensors)], (layout(do), dlse)
        compare_attend(kernels.attend_by_position, tensors, arguments, incoming, tolerance)

    def interleaved(g, x, *rest):
        both = torch.stack([g, x], -1).flatten(2)
        return kernels.scan(both[..., ::2], both[..., 1::2], *rest)
    compare_scan(interleaved, 33, 20, 16, True, tolerance, dtype, device)


@pytest.mark.parametrize("kind, window, heads", [("per row", 2, (2, 2, 1)), ("shared", None, (1, 2, 2))])
def test_naive_gradients(kind, window, heads):
    """The equations of the backward pass give what differences of the forward pass give."""
    tensors, arguments, _ = attend_case(0, 3, 4, kind, window, True, heads, 3)
    def function(*tensors):
        out, lse = dense_attend(*tensors, *exactly(arguments))
        return out, lse.masked_fill(lse == -math.inf, 0)
    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in tensors])


def test_merge_is_its_equations():
    sides = torch.randn(2, 2, 3, 5, 4, dtype=torch.float64)
    tensors = [y for x in sides for y in (x[..., 1:], 9 * x[..., 0])]
    compare(kernels.merge, kernels.merge_naive, tensors, (), (sides[0, ..., 1:], sides[1, ..., 0]), 1e-10,
            "out lse dout_a dlse_a dout_b dlse_b")


def test_merge_of_empty_sides():
    """a is empty, then b is, then both are. An empty side changes nothing and gets no gradient. A gradient that comes
    in through an lse of -inf is ignored."""
    (a, b), inf = torch.randn(2, 1, 1, 3, 8), math.inf
    a[..., [0, 2], :] = b[..., [1, 2], :] = 0
    lse_a, lse_b = torch.tensor([[-inf, 0.3, -inf], [0.7, -inf, -inf]])[:, None, None]
    sides = [x.requires_grad_() for x in (a, lse_a, b, lse_b)]
    out, lse = kernels.merge(*sides)
    assert torch.equal(out[0, 0], torch.stack([b[0, 0, 0], a[0, 0, 1], torch.zeros(8)]))
    assert torch.equal(lse, torch.maximum(lse_a, lse_b))
    incoming = torch.ones_like(out), torch.tensor([[[1, 1, math.nan]]])
    grads = torch.autograd.grad((out, lse), sides, incoming)
    d_a, d_lse_a, d_b, d_lse_b = (x.view(3, -1)[:, 0] for x in grads)
    assert d_a[:2].tolist() == d_lse_a[:2].tolist() == [0, 1]
    assert d_b[:2].tolist() == d_lse_b[:2].tolist() == [1, 0]
    assert d_lse_a[2] == d_lse_b[2] == 0


@where(*PRECISION)
@pytest.mark.parametrize("case", few(SCANS, 11), ids=str)
def test_scan_is_the_loop(case, device, dtype, tolerance):
    compare_scan(kernels.scan, *case, tolerance, dtype, device)


def test_a_long_scan_in_float32():
    """The product of its gates is 0 in float32. A path that divided by it would overflow."""
    compare_scan(kernels.scan, 300, 16, 300, True, 1e-5, torch.float32)


@where(PRECISION[1])
def test_states_are_float32(device, dtype, tolerance):
    """The state goes 300 steps of a 256th of the way to 1. A state in bfloat16 would stop short."""
    most = 255 / 256                        # the largest number of bfloat16 below 1
    gate = torch.full((1, 300, 16), most, device=device, dtype=torch.bfloat16)
    h = kernels.scan(gate, torch.ones_like(gate), 300)
    assert h.dtype == torch.bfloat16
    assert abs(h[0, -1, 0].item() - (1 - most ** 300)) < 0.004


def test_opcheck():
    """opcheck tests schemas and gradients, the shapes and strides of outputs, and dynamic shapes."""
    case = attend_case(0, 9, 11, "shared", 5, True, (2, 4, 2), 8, torch.float32)
    (q, k, v), mask, (do, dlse) = case
    out, lse = kernels.attend_by_position(q, k, v)
    g, x, h0 = torch.rand(2, 9, 3), torch.randn(2, 9, 3), torch.randn(2, 3)
    lead = lambda *tensors: [t.detach().clone().requires_grad_() for t in tensors]
    plain = torch.arange(9).int(), torch.arange(11).int(), None, kernels.NO_WINDOW
    alone, own = (None, None), (torch.randn(2, 4, 9), torch.randn(2, 4, 9, 8))
    calls = [(kernels.attend_op, (*lead(q, k, v), *alone, *plain)),
             (kernels.attend_op, (*lead(q, k, v, *own), *mask)),
             (kernels.attend_gradients_op, (q, k, v, out, lse, do, dlse, *plain)),
             (kernels.scan_op, (*lead(g, x, h0), 4)),
             (kernels.scan_gradients_op, (x, g, x, x, h0, 4)),
             (kernels.scan_gradients_op, (*(y.bfloat16() for y in (x, g, x, x)), h0, 4))]
    assert kernels.scan_gradients_op(*calls[-1][1])[2].dtype == h0.dtype     # as in Triton
    for call in calls:
        assert set(torch.library.opcheck(*call).values()) == {"SUCCESS"}, call[0]


def test_plain_gradients_are_not_rounded_by_autocast():
    case, mask, dlse = [torch.randn(1, 2, 9, 16) for _ in range(4)], (torch.arange(9).int(),) * 2, torch.randn(1, 2, 9)
    def gradients(autocast):
        q, k, v, do = (x.clone().requires_grad_() for x in case)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out, lse = kernels.attend_by_position(q, k, v, *mask)
            ((out * do).sum() + (lse * dlse).sum()).backward()
        return q.grad, k.grad, v.grad
    for rounded, exact in zip(gradients(True), gradients(False)):
        assert relative(rounded, exact) < 1e-5


@pytest.mark.parametrize("name, value, message", [
    ("q", torch.randn(2, 4, 6, 300), "q (2, 4, 6, 300)"), ("window", 0, "window=0"), ("slopes", torch.ones(3), "slopes (3,)"),
    ("q", torch.randn(2, 3, 6, 8), "H % G"), ("k", torch.randn(2, 2, 5, 7), "k (2, 2, 5, 7)"),
    ("q_pos", torch.arange(6), "q_pos (6,) is torch.int64"),
    ("k_pos", torch.arange(6).int(), "k_pos (6,)"), ("own", 2 * [torch.ones(2, 4, 6, 8)], "own (2, 4, 6, 8)")])
def test_wrong_arguments_are_named(name, value, message):
    right = dict(q=torch.randn(2, 4, 6, 8), k=torch.randn(2, 2, 5, 8), v=torch.randn(2, 2, 5, 8))
    with pytest.raises(ValueError) as error:
        kernels.attend_by_position(**{**right, name: value})
    assert message in str(error.value)


def test_scan_names_wrong_arguments():
    x = torch.rand(2, 5, 3)
    for arguments, message in (((x, x[:1], 2), "x (1, 5, 3)"), ((x, x, 0), "chunk=0"), ((x, x, 2, x[:1, 0]), "h0 (1, 3)")):
        with pytest.raises(ValueError, match=re.escape(message)):
            kernels.scan(*arguments)


def test_without_triton_it_runs_and_says_so_once():
    use = ("import sys, torch; sys.modules['triton'] = None; import kernels\n"
           "for _ in range(3): kernels.attend_by_position(*torch.randn(3, 1, 2, 5, 16))")
    p = python("-c", use)
    assert (p.returncode, p.stdout, p.stderr) == (0, "", "kernels: plain PyTorch on cpu\n"), p.stderr


@needs_triton
def test_triton_code_in_the_interpreter(pytestconfig):
    p = python("-m", "pytest", "-n0", "-q", "-x", "tests/interpreted_kernels.py",
               *["--full"] * pytestconfig.getoption("full"), TRITON_INTERPRET="1")
    assert p.returncode == 0 and " passed" in p.stdout, p.stdout[-3000:]


@needs_triton
def test_triton_code_compiles_for_gpus(pytestconfig):
    p = python("tests/compile_kernels.py", *["ci"] * (not pytestconfig.getoption("full")))
    assert p.returncode == 0, p.stdout[-3000:] + p.stderr[-3000:]
    rows = [line.split() for line in p.stdout.splitlines()[1:-1]]
    for chip in ("sm_80", "sm_90", "gfx942"):
        assert len({row[1] for row in rows if row[0] == chip}) == 13, "one of the kernels is missing"
    assert all(row[-1].isdigit() and int(row[-3]) > 5 for row in rows)


@pytest.mark.gpu
def test_gpu_rows_beyond_two_billion_elements():
    """Offsets of rows need 64 bits, because 70,000 rows are 32,768 elements apart."""
    wide = torch.randn(1, 70000, 1, 32768, device="cuda", dtype=torch.bfloat16)
    whole, results = wide[..., :16].transpose(1, 2).detach().requires_grad_(), []
    for x in (whole, whole[:, :, -200:].detach().clone().requires_grad_()):
        out, lse = (y[:, :, -60:] for y in kernels.attend_by_position(x, x, x, window=32))
        grad = torch.autograd.grad(out.sum() + lse.sum(), x)[0][:, :, -60:]
        results.append([out.detach(), lse.detach(), grad])
    assert_close(*results, 1e-2, "out lse dx")
