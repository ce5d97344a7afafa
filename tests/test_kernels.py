"""kernels.py: the reference implementations against definitions, gradients, the contract of the
operators, and, in processes of their own, the Triton code in the interpreter and the compilers."""
import importlib.util
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from conftest import python
from kernel_cases import (COLUMNS, FAR, LAYOUTS, RAT_LENGTH, RAT_NAMES, assert_close,
                          assert_rat_states_are_float32, assert_state_is_float32, attend_case,
                          compare_attend, compare_attend_backward, compare_attend_on, compare_rat,
                          compare_rat_on, compare_scan, covering_set, dense_outputs_and_gradients,
                          moved, outputs_and_gradients, pairs, rat_case, rat_cases, rat_results,
                          rat_with_shut_gates, relative_rms)

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")
PRECISION = pytest.mark.parametrize("dtype, tolerance", [
    (torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-2)])
CASES = pytest.mark.parametrize("number", range(len(covering_set())))


@pytest.fixture(params=["the CPU's operator", "written out"])
def path(request, monkeypatch):
    """Both ways in which a block is computed: on a CPU, and elsewhere."""
    if request.param == "written out":
        monkeypatch.setattr(kernels, "has_fused_softmax", lambda x: False)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that short sequences have many: every kind of block, merged."""
    monkeypatch.setattr(kernels, "QUERY_BLOCK", 16)
    monkeypatch.setattr(kernels, "KEY_BLOCK", 24)


# ---- attend -------------------------------------------------------------------------------------

def test_the_covering_set_covers():
    cases = covering_set()
    assert len(cases) <= 40
    every = {(i, j, a, b) for j in range(7) for i in range(j) for a in COLUMNS[i] for b in COLUMNS[j]}
    missing = every - set().union(*map(pairs, cases))
    assert len(missing) < 0.05 * len(every)
    assert not [m for m in missing if m[0] >= 2 and m[1] <= 5], missing


@CASES
def test_attend_is_the_definition(number, path):
    compare_attend(kernels.attend, covering_set()[number], number, 1e-10)


@CASES
def test_attend_in_many_blocks(number, small_blocks):
    found = compare_attend(kernels.attend_ref, covering_set()[number], number, 1e-10)
    if min(covering_set()[number][:2]) > 2:
        assert all(x.abs().max() > 0 for x in found[2:])


@pytest.mark.parametrize("case", [(700, 2500, "shared", None, False, (1, 2, 1), 8),
                                  (2500, 700, "per row", 300, False, (2, 1, 1), 8),
                                  (1500, 1500, "plain", None, False, (1, 2, 2), 8),
                                  (300, 3000, "shared", 1500, True, (1, 2, 1), 8)])
def test_attend_at_length(case, path):
    compare_attend(kernels.attend, case, 0, 1e-10)


@given(Tq=st.integers(1, 70), Tk=st.integers(1, 70), kind=st.sampled_from(COLUMNS[2]),
       window=st.none() | st.integers(1, 80), slopes=st.booleans(), heads=st.sampled_from(COLUMNS[5]),
       D=st.integers(1, 20), seed=st.integers(0, 1000))
def test_any_shape_and_positions(Tq, Tk, kind, window, slopes, heads, D, seed):
    before = kernels.QUERY_BLOCK, kernels.KEY_BLOCK
    try:
        kernels.QUERY_BLOCK, kernels.KEY_BLOCK = 16, 24
        compare_attend(kernels.attend, (Tq, Tk, kind, window, slopes, heads, D), seed, 1e-10)
    finally:
        kernels.QUERY_BLOCK, kernels.KEY_BLOCK = before


def test_missing_positions_count_from_zero():
    (q, k, v), *_ = attend_case(0, 9, 12, "plain", None, False, (2, 2, 1), 4)
    later, at = torch.arange(3, 12, dtype=torch.int32), torch.arange(12, dtype=torch.int32)
    out, lse = kernels.attend(q, k, v, q_pos=later)
    assert torch.equal(out, kernels.attend(q, k, v, later, at)[0])
    assert torch.equal(kernels.attend(q, k, v, k_pos=at)[0], kernels.attend(q, k, v)[0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["plain", "shared"])
def test_attend_takes_any_strides(kind, layout, path):
    """Also where the elements of a row are not contiguous."""
    tensors, arguments, (do, dlse) = attend_case(0, 20, 20, kind, None, False, (2, 2, 2), 8)
    tensors, do = [LAYOUTS[layout](x) for x in tensors], LAYOUTS[layout](do)
    compare_attend_on(kernels.attend, tensors, arguments, (do, dlse), 1e-10)


@PRECISION
def test_attend_in_lower_precision(dtype, tolerance, path):
    compare_attend(kernels.attend, (300, 1500, "shared", None, True, (1, 2, 1), 16), 0, tolerance, dtype)


def test_attend_without_keys():
    q, k = torch.randn(1, 2, 5, 8, requires_grad=True), torch.randn(1, 2, 0, 8, requires_grad=True)
    out, lse = kernels.attend(q, k, k)
    assert (out == 0).all() and (lse == -math.inf).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum() + lse.sum(), (q, k)))


class LargestTensor(TorchDispatchMode):
    """Notes the largest number of elements of any tensor made meanwhile."""
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("slopes", [False, True])
def test_no_score_matrix_is_held(slopes, path):
    """T = 3,000 has 9 million scores a head: a block of them is held for each of two heads."""
    case = attend_case(0, 3000, 3000, "shared", None, slopes, (1, 2, 1), 8, torch.float32)
    tensors, arguments, incoming = case
    tensors = [x.nan_to_num(0).requires_grad_() for x in tensors]
    with LargestTensor() as seen:
        torch.autograd.grad(kernels.attend_ref(*tensors, *arguments), tensors, incoming)
    assert 0 < seen.elements <= 2 * kernels.QUERY_BLOCK * kernels.KEY_BLOCK


def test_fully_masked_blocks_are_left_out():
    """A window of 100 in 4,096 positions: the blocks hold few pairs beyond those that are visible."""
    at = torch.arange(4096)[None]
    area = lambda blocks: sum(len(at[0, q]) * len(at[0, k]) for q, k, _ in blocks)
    assert area(kernels.visible_blocks(at, at, 100, False, True)) <= 4096 * (kernels.QUERY_BLOCK + 100)
    causal = kernels.visible_blocks(at, at, FAR, False, True)
    assert area(causal) <= 4096 * (4096 + kernels.QUERY_BLOCK) / 2
    assert {masked for *_, masked in causal} == {True, False}


@pytest.mark.parametrize("function", [kernels.attend_backward, kernels.attend_backward_ref])
def test_attend_backward_over_some_of_the_keys(function):
    compare_attend_backward(function, torch.float64, 1e-10)
    compare_attend_backward(function, torch.float32, 1e-5)


# ---- merge --------------------------------------------------------------------------------------

def merged_halves(q, k, v, q_pos, k_pos, slopes, window, cut):
    """Attention over the keys before `cut` merged with that over the others."""
    parts = [kernels.attend(q, k[:, :, s], v[:, :, s], q_pos, k_pos[..., s], slopes, window)
             for s in (slice(0, cut), slice(cut, None))]
    return kernels.merge(*parts[0], *parts[1])


@pytest.mark.parametrize("window, slopes", [(None, False), (20, True)])
@pytest.mark.parametrize("cut", [0, 1, 40, 100])
def test_merged_parts_are_the_whole(cut, window, slopes):
    """Windows leave one side of many rows empty, queries before every key both."""
    tensors, arguments, incoming = attend_case(cut, 65, 100, "per row", window, slopes, (2, 2, 1), 8)
    found = outputs_and_gradients(merged_halves, tensors, (*arguments, cut), incoming)
    assert_close(found, dense_outputs_and_gradients(tensors, arguments, incoming), 1e-10)


@pytest.mark.parametrize("poison", [0.0, math.nan])
def test_merge_of_empty_sides(poison):
    """Rows: a empty, b empty, both empty, none. What an empty side holds, and what comes in where
    both are, is ignored."""
    lse_a = torch.tensor([-math.inf, 0.3, -math.inf, 0.3], dtype=torch.float64).view(1, 1, 4)
    lse_b = torch.tensor([0.7, -math.inf, -math.inf, 0.7], dtype=torch.float64).view(1, 1, 4)
    a, b = (torch.randn(1, 1, 4, 3, dtype=torch.float64) for _ in range(2))
    a = torch.where(lse_a[..., None] == -math.inf, poison, a)
    b = torch.where(lse_b[..., None] == -math.inf, poison, b)
    sides = [x.requires_grad_() for x in (a, lse_a, b, lse_b)]
    out, lse = kernels.merge(*sides)
    assert torch.equal(out[0, 0, 0], b[0, 0, 0]) and torch.equal(out[0, 0, 1], a[0, 0, 1])
    assert lse[0, 0].tolist()[:3] == [0.7, 0.3, -math.inf] and (out[0, 0, 2] == 0).all()
    do, dlse = torch.ones_like(out), torch.ones_like(lse)
    dlse[0, 0, 2] = math.nan
    grads = torch.autograd.grad((out, lse), sides, (do, dlse))
    da, dlse_a, db, dlse_b = (x[0, 0] for x in grads)
    assert (da[[0, 2]] == 0).all() and (db[[1, 2]] == 0).all() and (da[1] == 1).all()
    assert dlse_a.tolist()[:3] == [0, 1, 0] and dlse_b.tolist()[:3] == [1, 0, 0]
    assert abs(dlse_a[3] + dlse_b[3] - 1) < 1e-12 and (0 < da[3]).all() and (da[3] < 1).all()


# ---- scan ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("T, chunk", [(1, 1), (1, 100), (2, 7), (63, 16), (64, 64), (65, 65), (65, 1),
                                      (100, 10), (300, 300), (300, 1000), (4200, 4200)])
def test_scan_is_the_loop(T, chunk, start):
    """4,200 positions in one chunk take all levels of the recursion."""
    compare_scan(kernels.scan_ref, T, 3, chunk, start, 1e-10)


@given(T=st.integers(1, 200), C=st.integers(1, 5), chunk=st.integers(1, 250), start=st.booleans())
def test_scan_of_any_shape(T, C, chunk, start):
    compare_scan(kernels.scan, T, C, chunk, start, 1e-10)


def test_a_scan_in_two_calls_is_one():
    """h0 goes on where the last call stopped."""
    g, x = torch.rand(2, 50, 3), torch.randn(2, 50, 3)
    whole, first = kernels.scan(g, x, 50), kernels.scan(g[:, :21], x[:, :21], 50)
    assert torch.equal(first, whole[:, :21])
    rest = kernels.scan(g[:, 21:], x[:, 21:], 50, first[:, -1])
    assert relative_rms(rest, whole[:, 21:]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scan_in_16_bits(dtype):
    compare_scan(kernels.scan, 70, 3, 16, True, 1e-2, dtype)


def test_the_state_of_scan_is_float32():
    assert_state_is_float32(kernels.scan)


# ---- rat ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("T", RAT_LENGTH)
def test_rat_is_the_definition(T):
    """Every length and chunk; one group, some and as many as heads; without angles, by chunk and by
    token."""
    cases = [case for case in rat_cases() if case[0] == T]
    assert len(cases) == 18 and {case[2] for case in cases} == {None, "chunk", "token"}
    for case in cases:
        found = compare_rat(kernels.rat_ref, case, 1e-10)
        alone = T <= case[1]                        # every query has one key, its own: no dq, no dk
        nonzero = [(x.abs().max() > 1e-3).item() for x in found]
        assert nonzero == 3 * [True] + 2 * [not alone] + 4 * [True]


@given(T=st.integers(1, 90), chunk=st.integers(1, 100),
       tables=st.sampled_from([None, "chunk", "token"]),
       heads=st.sampled_from([(1, 1, 1), (2, 4, 2), (3, 3, 1), (1, 2, 2)]), D=st.sampled_from([2, 4, 10]))
def test_rat_of_any_shape(T, chunk, tables, heads, D):
    compare_rat(kernels.rat, (T, chunk, tables, heads, D + (tables is None)), 1e-10)


@pytest.mark.parametrize("case", [(300, 3, "chunk", (1, 2, 1), 4), (300, 130, "token", (1, 2, 1), 4)])
def test_rat_at_length(case, small_blocks):
    """Attention in many blocks, and chunks so long that they are scanned in two levels."""
    compare_rat(kernels.rat, case, 1e-10)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rat_takes_any_strides(layout):
    (*tensors, bias), arguments, dout = rat_case(20, 6, "chunk", (2, 4, 2), 8)
    tensors, dout = [*map(LAYOUTS[layout], tensors), bias], LAYOUTS[layout](dout)
    compare_rat_on(kernels.rat, tensors, arguments, dout, 1e-10)


def test_rat_where_gates_are_shut():
    """Everything stays finite, and what the output gate shuts out gets no gradient."""
    case = rat_with_shut_gates(40, (1, 4, 2), 8, torch.float64)
    found = compare_rat_on(kernels.rat, *case, 1e-10)
    assert (found[0][:, :, 1] == 0).all() and (found[5][:, :, 1] == 0).all()


@PRECISION
def test_rat_in_lower_precision(dtype, tolerance, path):
    compare_rat(kernels.rat, (100, 16, "chunk", (2, 4, 2), 16), tolerance, dtype)


def test_the_states_of_rat_are_float32():
    assert_rat_states_are_float32(kernels.rat)


# ---- the operators ------------------------------------------------------------------------------

def operator_calls():
    case = attend_case(0, 9, 11, "shared", 5, True, (2, 4, 2), 8, torch.float32)
    (q, k, v), mask, (do, dlse) = case
    k, v = k.nan_to_num(0), v.nan_to_num(0)
    out, lse = kernels.attend_ref(q, k, v)
    g, x, h0 = torch.rand(2, 9, 3), torch.randn(2, 9, 3), torch.randn(2, 3)
    tensors, arguments, dout = rat_case(9, 4, "chunk", (2, 4, 2), 8, torch.float32)
    results = kernels.rat_torch(*tensors, *arguments)[:2]
    lead = lambda *tensors: [t.detach().clone().requires_grad_() for t in tensors]
    plain = None, None, None, FAR
    return {"attend, plain": (kernels.attend_op, (*lead(q, k, v), *plain)),
            "attend": (kernels.attend_op, (*lead(q, k, v), *mask)),
            "attend backward": (kernels.attend_backward_op, (q, k, v, out, lse, do, dlse, *plain)),
            "scan": (kernels.scan_op, (*lead(g, x), 4, *lead(h0))),
            "scan, no start": (kernels.scan_op, (*lead(g, x), 4, None)),
            "scan backward": (kernels.scan_backward_op, (x, g, x, 4, h0)),
            "rat": (kernels.rat_op, (*lead(*tensors), *arguments)),
            "rat, no angles": (kernels.rat_op, (*lead(*tensors), 9, None, None)),
            "rat backward": (kernels.rat_backward_op, (*tensors, *results, dout, *arguments))}


@pytest.mark.parametrize("name", operator_calls())
def test_opcheck(name):
    """Schema, registration of the gradients, shapes and strides of the outputs, dynamic shapes."""
    operator, arguments = operator_calls()[name]
    assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}


def all_operators(q, k, v, g, x, gate, q_pos, k_pos, slopes):
    """A loss of every operator, for q, k, v (B, H, T, D)."""
    parts = kernels.attend(q, k, v, slopes=slopes), kernels.attend(q, k, v, q_pos, k_pos, window=5)
    out, lse = kernels.merge(*parts[0], *parts[1])
    h = kernels.scan(g, x, 4)
    tokens = [y.transpose(1, 2) for y in (q, k[:, :, :q.size(2)], q, q, v[:, :, :q.size(2)])]
    y, k_ends, _ = kernels.rat(*tokens, gate, 4)
    return out.square().sum() + lse.square().sum() + (h * x).sum() + y.square().sum() + k_ends.sum()


def operator_inputs(T=9, device="cpu"):
    """The inputs of all_operators: leaves, and positions and slopes."""
    torch.manual_seed(T)
    leaves = [torch.randn(2, 4, n, 8) for n in (T, T + 2, T + 2)]
    leaves += [torch.rand(2, T, 3), torch.randn(2, T, 3), torch.randn(32)]
    rest = torch.arange(T).int(), torch.arange(T + 2).int(), torch.rand(4)
    return [x.to(device).requires_grad_() for x in leaves], moved(rest, device)


def test_without_gradients_the_results_are_the_same(monkeypatch):
    """Then a CPU takes a short cut past the operators, unless something traces."""
    leaves, rest = operator_inputs()
    with torch.no_grad(), monkeypatch.context() as patch:
        for name in ("attend_op", "scan_op", "rat_op"):
            patch.setattr(kernels, name, None)
        quick = all_operators(*leaves, *rest)
    assert torch.equal(all_operators(*leaves, *rest), quick)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        assert all_operators(*(mode.from_tensor(x) for x in (*leaves, *rest))).shape == ()


def test_torch_compile_takes_them():
    """One graph for all lengths, the same values and gradients: traced forward and backward, run
    without the code generator."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(all_operators, fullgraph=True, dynamic=True, backend=counter)
    for T in range(5, 10):
        leaves, rest = operator_inputs(T)
        a, b = (f(*leaves, *rest) for f in (all_operators, compiled))
        assert torch.equal(a, b)
        grads = [torch.autograd.grad(y, leaves) for y in (a, b)]
        assert all(relative_rms(x, y) < 1e-6 and x.abs().max() > 0 for x, y in zip(*grads))
    assert counter.frame_count == 1


def test_one_graph_serves_all_windows_and_chunks():
    """Compiled with dynamic shapes, the checks and the operators make none of them a constant."""
    counter = CompileCounterWithBackend("aot_eager")

    def both(q, at, g, chunk, window):
        return kernels.attend(q, q, q, at, at, window=window)[0].sum() + kernels.scan(g, g, chunk).sum()
    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend=counter)
    for n in range(3, 9):
        arguments = torch.randn(2, 2, n, 8), torch.arange(n).int(), torch.rand(2, n + 7, 13), n + 2, n + 4
        assert torch.equal(compiled(*arguments), both(*arguments))
    assert counter.frame_count == 1


def saved_bytes(function, tensors, arguments=()):
    """Bytes that are kept for the backward pass, each storage once."""
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x),
                                                  lambda x: x):
        function(*[x.requires_grad_() for x in tensors], *arguments)
    return sum(x.nbytes for x in kept.values())


def test_inputs_out_and_lse_are_kept_for_backward():
    """Nothing of the size of the scores, and not rat's states: they are scanned again."""
    assert saved_bytes(kernels.attend, torch.randn(3, 2, 4, 500, 16)) == 4 * 2 * 4 * 500 * (4 * 16 + 1)
    tensors, arguments, _ = rat_case(64, 4, "chunk", (2, 4, 2), 8, torch.float32)
    inputs = sum(x.nbytes for x in (*tensors, *arguments[1:]))
    assert saved_bytes(kernels.rat, tensors, arguments) == inputs + 2 * 64 * 4 * (8 + 1) * 4


# ---- wrong arguments ----------------------------------------------------------------------------

Q, TABLE, V = torch.randn(2, 5, 2, 8), torch.randn(5, 8), torch.randn(2, 5, 4, 8)
RIGHT = {
    "attend": dict(q=torch.randn(2, 4, 6, 8), k=torch.randn(2, 2, 5, 8), v=torch.randn(2, 2, 5, 8)),
    "attend_backward": dict(q=V, k=V, v=V, out=V, lse=V[..., 0], do=V),
    "merge": dict(out_a=V, lse_a=V[..., 0], out_b=V, lse_b=V[..., 0]),
    "scan": dict(g=torch.rand(2, 5, 3), x=torch.rand(2, 5, 3), chunk=4),
    "rat": dict(q=Q, k=Q, v=V, g=V, z=V, bias=torch.zeros(32), chunk=4, cos=TABLE, sin=TABLE)}
WRONG = [
    ("attend", "q", None, "q is NoneType"),
    ("attend", "q", torch.randn(4, 6, 8), "q has shape (4, 6, 8)"),
    ("attend", "q", torch.ones(2, 4, 6, 8, dtype=torch.int64), "q is torch.int64"),
    ("attend", "q", torch.randn(2, 4, 6, 300), "q has head size 300"),
    ("attend", "q", torch.randn(2, 3, 6, 8), "k has 2 heads"),
    ("attend", "k", torch.randn(1, 2, 5, 8), "k has shape (1, 2, 5, 8)"),
    ("attend", "k", torch.randn(2, 2, 5, 7), "k has shape (2, 2, 5, 7): (2, any, any, 8)"),
    ("attend", "k", torch.randn(2, 2, 5, 8).double(), "k is torch.float64"),
    ("attend", "k", torch.randn(2, 2, 5, 8, device="meta"), "k is torch.float32 on meta"),
    ("attend", "v", torch.randn(2, 2, 5, 3), "v has shape"),
    ("attend", "q_pos", torch.arange(6), "q_pos is torch.int64"),
    ("attend", "q_pos", torch.arange(5).int(), "q_pos has shape (5,)"),
    ("attend", "k_pos", torch.zeros(3, 5).int(), "k_pos has shape (3, 5)"),
    ("attend", "slopes", torch.rand(2), "slopes has shape (2,)"),
    ("attend", "window", 0, "window=0"),
    ("attend", "window", True, "window=True"),
    ("attend_backward", "out", V[:, :, 1:], "out has shape"),
    ("attend_backward", "lse", V[..., 0].double(), "lse is torch.float64"),
    ("attend_backward", "do", V.double(), "do is torch.float64"),
    ("merge", "out_a", torch.randn(2, 4, 8), "out_a has shape"),
    ("merge", "out_b", V.bfloat16(), "out_b is torch.bfloat16"),
    ("merge", "lse_a", None, "lse_a is NoneType"),
    ("merge", "lse_b", V[:, 1:, :, 0], "lse_b has shape"),
    ("scan", "x", torch.rand(5, 3), "x has shape (5, 3)"),
    ("scan", "x", torch.rand(2, 0, 3), "x has shape (2, 0, 3)"),
    ("scan", "g", torch.rand(2, 5, 4), "g has shape"),
    ("scan", "chunk", 4.0, "chunk=4.0"),
    ("scan", "h0", torch.rand(2, 5), "h0 has shape (2, 5)"),
    ("rat", "q", Q[:, :0], "q has shape (2, 0, 2, 8)"),
    ("rat", "k", V, "k has shape"),
    ("rat", "v", torch.randn(2, 5, 3, 8), "v has 3 heads"),
    ("rat", "g", Q, "g has shape"),
    ("rat", "z", V.bfloat16(), "z is torch.bfloat16"),
    ("rat", "bias", torch.zeros(16), "bias has shape (16,)"),
    ("rat", "cos", torch.randn(4, 8), "cos has shape (4, 8)"),
    ("rat", "sin", None, "sin is NoneType")]


@pytest.mark.parametrize("name, argument, value, message", WRONG, ids=lambda x: str(x)[:20])
def test_wrong_arguments_are_named(name, argument, value, message):
    getattr(kernels, name)(**RIGHT[name])
    with pytest.raises(ValueError) as error:
        getattr(kernels, name)(**{**RIGHT[name], argument: value})
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_debug_switch_finds_unsorted_positions(monkeypatch):
    with_positions = lambda **pos: kernels.attend(**RIGHT["attend"], **pos)
    backwards = torch.arange(6).flip(0).int()
    with_positions(q_pos=backwards)
    monkeypatch.setattr(kernels, "debug", True)
    with_positions(q_pos=torch.arange(6).int(), k_pos=torch.tensor([0, 1, 2, 3, FAR]).int())
    for pos, message in ((dict(q_pos=backwards), "q_pos must ascend"),
                         (dict(q_pos=torch.tensor([0, 1, 2, 3, 4, FAR]).int()), "q_pos must be between"),
                         (dict(k_pos=torch.tensor([[0, 1, 2, 2, 3], [0, 2, 1, 3, 4]]).int()),
                          "k_pos must ascend")):
        with pytest.raises(ValueError, match=message):
            with_positions(**pos)


# ---- in processes of their own ------------------------------------------------------------------

USE = """
import sys, torch
{first}
import kernels
assert "kernels_triton" not in sys.modules
for _ in range(3):
    kernels.attend(*torch.randn(3, 1, 2, 5, 16))
    kernels.scan(torch.rand(1, 5, 2), torch.rand(1, 5, 2), 4)
"""


@pytest.mark.parametrize("first, environment, line", [
    ("", {}, "kernels: plain PyTorch on cpu\n"),
    ("sys.modules['triton'] = None", {}, "kernels: plain PyTorch on cpu\n"),
    pytest.param("", {"TRITON_INTERPRET": "1"}, "kernels: Triton, interpreted\n", marks=needs_triton),
    ("", {"RANK": "1"}, "")])
def test_one_line_tells_which_code_runs(first, environment, line):
    """On stderr, once, on the first rank; triton may be missing."""
    p = python("-c", USE.format(first=first), **environment)
    assert p.returncode == 0 and p.stdout == "" and p.stderr == line, p.stderr


@needs_triton
def test_triton_code_in_the_interpreter(beside):
    """tests/interpreted_kernels.py: the kernels against definitions, uninitialised memory poisoned."""
    p = beside["test_triton_code_in_the_interpreter"].result()
    assert p.returncode == 0 and " passed" in p.stdout and "skipped" not in p.stdout, p.stdout[-3000:]


@needs_triton
def test_triton_code_compiles_for_gpus(beside):
    """tests/compile_kernels.py ci: registers, spills and shared memory on sm_80, sm_90 and gfx942."""
    p = beside["test_triton_code_compiles_for_gpus"].result()
    print(p.stdout)
    assert p.returncode == 0, p.stdout[-3000:] + p.stderr[-3000:]
    rows = [line.split() for line in p.stdout.splitlines()[2:-1]]
    attends, rats, scans = 3 * (3 + 6 + 3), 3 * 4 + 2, 3 * 4
    assert len(rows) == attends + rats + scans
    assert all(row[-1].isdigit() and int(row[-3]) > 10 for row in rows)


@needs_triton
def test_the_compile_check_can_fail():
    import compile_kernels as check
    import kernels_triton
    launch = dict(BLOCK_M=128, BLOCK_N=128, BLOCK_D=64, num_warps=4, num_stages=2)

    def verdict(chip, name, **changes):
        kernel, options = getattr(kernels_triton, name), {**launch, **changes}
        figures = check.measure(chip, kernel, torch.bfloat16, dict(PLAIN=True), options)
        return check.verdict(chip, torch.bfloat16, options["BLOCK_D"], figures)
    assert "bytes spilled" in verdict("sm_90", "attend_dkv_kernel")
    wide = verdict("sm_89", "attend_forward_kernel", BLOCK_D=128, num_stages=4)
    assert "bytes of shared memory" in wide
    assert "Error" in verdict("sm_80", "attend_forward_kernel", BLOCK_N=48)


@needs_triton
@pytest.mark.parametrize("large", [True, False])
def test_every_tile_choice_is_compiled(large):
    """What the launchers take for any head size and chunk is in the list that is compiled."""
    import kernels_triton as triton
    compiled = {(kernel.__name__, dtype, tuple(options.items()))
                for kernel, dtype, _, options in triton.variants(large)}
    chosen = set()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for block in {triton.block_of(D) for D in range(1, 257)}:
            for operator, options, names in (
                    ("attend", triton.attend_options, ("forward", "dq", "dkv")),
                    ("rat", triton.rat_options, ("forward", "gate", "ends", "own"))):
                chosen |= {(f"{operator}_{name}_kernel", dtype,
                            tuple(options(name, block, dtype, large).items())) for name in names}
            rows = [triton.rat_options(name, block, dtype, large)["BLOCK_M"]
                    for name in ("own", "forward")]
            assert rows[0] >= rows[1] >= (32 if block == 256 and not large else 64)  # chunks fit both
        for chunk in (*range(1, 300), 5000, 2 ** 31 - 1):
            chosen |= {(f"scan_{name}_kernel", dtype, tuple(triton.scan_options(chunk).items()))
                       for name in ("forward", "backward")}
    assert chosen == compiled


def calls_of_all_kernels(rng):
    """One call of each operator, forward and backward, with random sizes, layouts and alignments."""
    def draw(B, H, T, D):
        return rng.choice([lambda: torch.randn(B, T, H, D).transpose(1, 2),
                           lambda: torch.randn(B, H, T, D),
                           lambda: torch.randn(B * H * T * D + 3)[3:].view(B, H, T, D),
                           lambda: torch.randn(1, 1, T, D).expand(B, H, T, D)])().requires_grad_()

    def positions(n):
        per_row = rng.random() < 0.5
        return torch.arange(3 + n * B).int()[3:].view(B, n) if per_row else torch.arange(1 + n).int()[1:]
    (B, H, G), D = rng.choice([(1, 2, 1), (2, 2, 2), (2, 1, 1)]), rng.choice([1, 16, 24, 64])
    Tq, Tk = rng.choice([1, 2, 16, 17]), rng.choice([1, 2, 16])
    q, k, v = draw(B, H, Tq, D), draw(B, G, Tk, D), draw(B, G, Tk, D)
    at = (positions(Tq), positions(Tk)) if rng.random() < 0.7 else (None, None)
    slopes = torch.rand(H + 1)[1:] if rng.random() < 0.5 else None
    out, lse = kernels.attend(q, k, v, *at, slopes, rng.choice([None, 1, 16]))
    torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    g, h0 = draw(B, 1, Tq, D)[:, 0], torch.randn(B * D + 1)[1:].view(B, D).requires_grad_()
    h = kernels.scan(g, g, rng.choice([1, 4, 100]), h0 if rng.random() < 0.5 else None)
    torch.autograd.grad(h.sum(), g)
    T, D = rng.choice([1, 16, 17, 33]), rng.choice([2, 16, 24, 64])
    q, k, *vgz = (draw(B, heads, T, D).transpose(1, 2) for heads in (G, G, H, H, H))
    tables = torch.rand(2, T, D) if rng.random() < 0.5 else (None, None)
    bias, chunk = torch.randn(H * D + 1)[1:], rng.choice([1, 16, 17])
    out, *_ = kernels.rat(q, k, *vgz, bias, chunk, *tables)
    torch.autograd.grad(out.sum(), (q, k, *vgz))


@needs_triton
def test_launches_have_the_types_that_are_compiled(monkeypatch):
    """Triton makes a variant of every combination of types, alignments and multiples of 16 that it
    meets. Here its own code binds the arguments of 60 random calls for a CUDA and a ROCm chip: none
    differs from what compile_kernels.py compiles."""
    import compile_kernels as check
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature
    bound = set()

    def bind(kernel, *arguments, grid, warmup, **options):
        for chip in ("sm_90", "gfx942"):
            backend = make_backend(check.CHIPS[chip][0])
            binder = create_function_from_signature(kernel.signature, kernel.params, backend)
            values, specialization, rest = binder(*arguments, **options)
            packed = kernel._pack_args(backend, dict(options), values, specialization, rest)
            _, signature, _, attributes = packed
            constants = {n: v for n, v in options.items() if n in kernel.arg_names}
            dtype = values[kernel.arg_names[0]].dtype
            expected = check.source(kernel, dtype, constants, chip)
            assert signature == expected.signature, kernel.__name__
            plain = [{k: sorted(v) for k, v in a.items() if v} for a in (attributes, expected.attrs)]
            assert plain[0] == plain[1], kernel.__name__
            bound.add((chip, kernel.__name__))
    monkeypatch.setattr(JITFunction, "run", bind)
    monkeypatch.setattr(kernels, "runs_triton", lambda device, dtype: True)
    rng = random.Random(0)
    for _ in range(60):
        calls_of_all_kernels(rng)
    assert len(bound) == 2 * (3 + 2 + 4)


def test_the_bench_runs(capsys):
    """At small sizes every line is there."""
    import bench
    bench.bench_attend(torch.device("cpu"), 1, (1, 2, 64, 8), 128)
    bench.bench_scan(torch.device("cpu"), 1, (1, 64, 8))
    out = capsys.readouterr().out
    assert out.count("SDPA ") >= 5 and out.count("(goal ") == 5 and out.count("(goal on a GPU") == 2
    assert "nan" not in out and "inf" not in out


# ---- on a GPU -----------------------------------------------------------------------------------

@pytest.mark.gpu
@PRECISION
@CASES
def test_gpu_attend(number, dtype, tolerance):
    compare_attend(kernels.attend, covering_set()[number], number, tolerance, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 80, 128, 256])
@pytest.mark.parametrize("kind, window, slopes", [("plain", None, False), ("shared", 700, True),
                                                  ("per row", None, False)])
def test_gpu_attend_at_length(kind, window, slopes, D):
    case = 2000, 2100, kind, window, slopes, (2, 4, 2), D
    compare_attend(kernels.attend, case, 0, 1e-2, torch.bfloat16, "cuda")


@pytest.mark.gpu
@PRECISION
def test_gpu_attend_backward_over_some_of_the_keys(dtype, tolerance):
    compare_attend_backward(kernels.attend_backward, dtype, tolerance, "cuda")


@pytest.mark.gpu
def test_gpu_rows_beyond_two_billion_elements():
    """Offsets of rows are 64-bit: rows 32,768 apart, 70,000 of them."""
    wide = torch.randn(1, 70000, 1, 32768, device="cuda", dtype=torch.bfloat16)
    whole = wide[..., :16].transpose(1, 2).detach().requires_grad_()
    end = whole[:, :, -200:].detach().clone().requires_grad_()
    results = []
    for x in (whole, end):
        out, lse = (y[:, :, -60:] for y in kernels.attend(x, x, x, window=32))
        grad = torch.autograd.grad(out.sum() + lse.sum(), x)[0][:, :, -60:]
        results.append([out.detach(), lse.detach(), grad])
    assert_close(*results, 1e-2, ("out", "lse", "dx"))
    leaves = [wide[..., i:i + 16].detach().requires_grad_() for i in (16, 32, 48, 64, 80)]
    bias, results = torch.zeros(16, device="cuda"), []
    for xs in (leaves, [x[:, -16:].detach().clone().requires_grad_() for x in leaves]):
        out, *_ = kernels.rat(*xs, bias, 16)                # dz and dg of the last chunk
        results.append([y[:, -16:] for y in torch.autograd.grad(out[:, -16:].sum(), xs)])
    assert all(y.isfinite().all() and y.abs().max() > 0 for y in results[0])


@pytest.mark.gpu
@PRECISION
@pytest.mark.parametrize("T, C, chunk", [(1, 1, 1), (65, 17, 65), (1000, 100, 16), (1000, 64, 10),
                                         (3000, 32, 3000), (5, 16, 2 ** 31 - 1)])
def test_gpu_scan(T, C, chunk, dtype, tolerance):
    compare_scan(kernels.scan, T, C, chunk, True, tolerance, dtype, "cuda")


@pytest.mark.gpu
@PRECISION
@pytest.mark.parametrize("case", [
    (1, 1, None, (2, 2, 1), 64), (100, 1, "token", (2, 4, 2), 64), (300, 16, "chunk", (2, 4, 2), 64),
    (300, 7, "chunk", (2, 2, 1), 20), (300, 64, "token", (1, 4, 4), 128),
    (257, 50, None, (1, 2, 1), 256), (300, 128, "chunk", (1, 2, 1), 32),
    (40, 2 ** 31 - 1, "chunk", (1, 2, 2), 16), (700, 300, "chunk", (1, 2, 1), 64)])
def test_gpu_rat(case, dtype, tolerance):
    compare_rat(kernels.rat, case, tolerance, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("chunk, heads, D", [(1, (1, 2, 1), 64), (16, (2, 4, 2), 128),
                                             (13, (1, 2, 2), 64)])
def test_gpu_rat_at_length(chunk, heads, D):
    """Many tiles of everything; the reference implementation in float64 on the same device."""
    case = rat_case(4000, chunk, "chunk", heads, D, torch.bfloat16, "cuda")
    tensors, arguments, dout = case
    exact = rat_results(kernels.rat_ref, moved(tensors, torch.float64),
                        moved(arguments, torch.float64), dout.double())
    assert_close(rat_results(kernels.rat, *case), exact, 1e-2, RAT_NAMES)


@pytest.mark.gpu
def test_gpu_states_of_rat_are_float32():
    assert_rat_states_are_float32(lambda *a: moved(kernels.rat(*moved(a, "cuda")), "cpu"))


@pytest.mark.gpu
def test_gpu_operators_compile():
    leaves, rest = operator_inputs(100, "cuda")
    values = [f(*leaves, *rest) for f in (all_operators, torch.compile(all_operators, fullgraph=True))]
    assert relative_rms(values[1], values[0]) < 1e-5
    for a, b in zip(*(torch.autograd.grad(y, leaves) for y in values)):
        assert relative_rms(b, a) < 1e-5


@pytest.mark.gpu
def test_gpu_graph_capture():
    """Nothing waits for the GPU: a CUDA graph takes the operators, forward and backward."""
    leaves, rest = operator_inputs(100, "cuda")
    step = lambda: torch.autograd.grad(all_operators(*leaves, *rest), leaves)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        expected = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(relative_rms(a, b) < 1e-5 for a, b in zip(found, expected))
