"""kernels.py: the twins against definitions, gradients, the contract of the operators, and, in processes of their own,
the Triton code under the interpreter and through the compilers."""
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from conftest import python
from kernel_cases import (FAR, HEADS, KIND, LAYOUTS, LENGTH, RAT_LENGTH, RAT_NAMES, SIZES, SLOPES, WINDOW, assert_close,
                          assert_rat_states_are_float32, assert_state_is_float32, attend_case, compare_attend_backward,
                          compare_merge, compare_rat, compare_rat_on, compare_scan, covering_set,
                          dense_outputs_and_gradients, outputs_and_gradients, pairs, rat_case, rat_cases, rat_results,
                          relative_rms)

needs_triton = pytest.mark.skipif(kernels.triton is None, reason="triton is not installed")


@pytest.fixture(params=["the CPU's operator", "written out"])
def road(request, monkeypatch):
    """Both ways in which the twin computes a piece: on a CPU, and elsewhere."""
    if request.param == "written out":
        monkeypatch.setattr(kernels, "has_fused_pieces", lambda x: False)


@pytest.fixture
def small_blocks(monkeypatch):
    """Pieces so small that short sequences have many: every kind of piece, merged."""
    monkeypatch.setattr(kernels, "QUERY_BLOCK", 16)
    monkeypatch.setattr(kernels, "KEY_BLOCK", 24)


def compare(case, seed, function=kernels.attend_ref):
    tensors, arguments, incoming = attend_case(seed, *case)
    found = outputs_and_gradients(function, tensors, arguments, incoming)
    assert_close(found, dense_outputs_and_gradients(tensors, arguments, incoming), 1e-10)
    return found


# ---- the twin of attend ---------------------------------------------------------------------------------------------

def test_the_covering_set_covers():
    cases = covering_set()
    assert len(cases) <= 40 and all(c[5][0] * c[5][1] <= 4 for c in cases)
    values = (LENGTH, LENGTH, KIND, WINDOW, SLOPES, HEADS, SIZES)
    every = {(i, j, a, b) for j in range(7) for i in range(j) for a in values[i] for b in values[j]}
    missing = every - set().union(*map(pairs, cases))
    assert len(missing) < 0.05 * len(every) and not [m for m in missing if m[0] >= 2 and m[1] <= 5], missing
    empty = [(outputs_and_gradients(kernels.attend_ref, *attend_case(i, *c))[1] == -math.inf).any() for i, c in enumerate(cases)]
    assert 5 < sum(empty) < len(cases)


@pytest.mark.parametrize("number", range(len(covering_set())))
def test_twin_is_the_definition(number, road):
    compare(covering_set()[number], number)


@pytest.mark.parametrize("number", range(len(covering_set())))
def test_twin_is_the_definition_in_many_pieces(number, small_blocks):
    found = compare(covering_set()[number], number)
    if min(covering_set()[number][:2]) > 2:
        assert all(x.abs().max() > 0 for x in found[2:])


@pytest.mark.parametrize("case", [(700, 2500, "shared", None, False, (1, 2, 1), (8, 8)),
                                  (2500, 700, "per row", 300, False, (2, 1, 1), (8, 8)),
                                  (1500, 1500, "plain", None, False, (1, 2, 2), (8, 8)),
                                  (300, 3000, "shared", 1500, True, (1, 2, 1), (8, 8))])
def test_twin_is_the_definition_at_length(case, road):
    compare(case, 0)


@given(Tq=st.integers(1, 70), Tk=st.integers(1, 70), kind=st.sampled_from(KIND), window=st.none() | st.integers(1, 80),
       slopes=st.booleans(), heads=st.sampled_from(HEADS), D=st.integers(1, 20), DV=st.integers(1, 20),
       seed=st.integers(0, 1000))
def test_any_shape_and_positions(Tq, Tk, kind, window, slopes, heads, D, DV, seed):
    before = kernels.QUERY_BLOCK, kernels.KEY_BLOCK
    try:
        kernels.QUERY_BLOCK, kernels.KEY_BLOCK = 16, 24
        compare((Tq, Tk, kind, window, slopes, heads, (D, DV)), seed)
    finally:
        kernels.QUERY_BLOCK, kernels.KEY_BLOCK = before


@pytest.mark.parametrize("kind, window, slopes", [("plain", None, False), ("shared", 5, True), ("per row", None, True)])
def test_gradcheck_of_attend(kind, window, slopes):
    """Finite differences of out and of the finite lse."""
    tensors, arguments, _ = attend_case(3, 7, 9, kind, window, slopes, (2, 2, 1), (4, 3))
    tensors = [x.nan_to_num(0) for x in tensors]        # padding keys; finite differences would move the NaN

    def finite(*tensors):
        out, lse = kernels.attend_ref(*tensors, *arguments)
        return out, lse[lse > -math.inf]
    assert torch.autograd.gradcheck(finite, [x.requires_grad_() for x in tensors])


def test_attend_on_a_cpu_is_its_twin():
    tensors, arguments, incoming = attend_case(0, 65, 100, "per row", 20, True, (2, 2, 1), (16, 8))
    results = [outputs_and_gradients(f, tensors, arguments, incoming) for f in (kernels.attend, kernels.attend_ref)]
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_a_missing_list_of_positions_counts_from_zero():
    (q, k, v), *_ = attend_case(0, 9, 12, "plain", None, False, (2, 2, 1), (4, 4))
    later = torch.arange(3, 12, dtype=torch.int32)
    assert torch.equal(kernels.attend(q, k, v, q_pos=later)[0], kernels.attend(q, k, v, later, torch.arange(12).int())[0])
    assert torch.equal(kernels.attend(q, k, v, k_pos=later.new_tensor(range(12)))[0], kernels.attend(q, k, v)[0])


def test_plain_causal_is_torchs_own():
    (q, k, v), *_ = attend_case(0, 600, 600, "plain", None, False, (2, 4, 2), (16, 16))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert relative_rms(kernels.attend(q, k, v)[0], expected) < 1e-14


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["plain", "shared"])
def test_any_strides(kind, layout, which, road):
    """Also where the elements of a row do not lie side by side."""
    tensors, arguments, incoming = attend_case(0, 20, 20, kind, None, False, (2, 2, 2), (8, 8))
    tensors = [LAYOUTS[layout](x) if i == which else x for i, x in enumerate(tensors)]
    found = outputs_and_gradients(kernels.attend, tensors, arguments, [LAYOUTS[layout](incoming[0]), incoming[1]])
    assert_close(found, dense_outputs_and_gradients(tensors, arguments, [LAYOUTS[layout](incoming[0]), incoming[1]]), 1e-10)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-2)])
def test_lower_precision(dtype, tolerance, road):
    tensors, arguments, incoming = attend_case(0, 300, 1500, "shared", None, True, (1, 2, 1), (16, 16), dtype=dtype)
    found = outputs_and_gradients(kernels.attend, tensors, arguments, incoming)
    assert [x.dtype for x in found] == [dtype, torch.float32, dtype, dtype, dtype]
    assert_close(found, dense_outputs_and_gradients(tensors, arguments, incoming), tolerance)


def test_nothing_to_attend():
    q, k = torch.randn(1, 2, 5, 8, requires_grad=True), torch.randn(1, 2, 0, 8, requires_grad=True)
    out, lse = kernels.attend(q, k, k)
    assert (out == 0).all() and (lse == -math.inf).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum() + lse.sum(), (q, k)))
    assert kernels.attend(q[:, :, :0], q, q)[0].shape == (1, 2, 0, 8)
    q, at = torch.randn(0, 2, 500, 8), torch.zeros(0, 500, dtype=torch.int32)
    assert kernels.attend(q, q, q, at, at)[0].shape == q.shape


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
def test_no_score_matrix_is_ever_held(slopes, road):
    """T = 3,000: 9 million scores a head; the twin holds a block of them for each of two heads."""
    tensors, arguments, incoming = attend_case(0, 3000, 3000, "shared", None, slopes, (1, 2, 1), (8, 8), torch.float32)
    tensors = [x.nan_to_num(0) for x in tensors]
    with LargestTensor() as seen:
        tensors = [x.requires_grad_() for x in tensors]
        out, lse = kernels.attend_ref(*tensors, *arguments)
        torch.autograd.grad((out, lse), tensors, incoming)
    assert 0 < seen.elements <= 2 * kernels.QUERY_BLOCK * kernels.KEY_BLOCK


def test_pieces_out_of_sight_are_left_out():
    """A window of 100 in 4,096 positions: the pieces hold few pairs beyond those that are seen."""
    position = torch.arange(4096)[None]
    pairs = sum((q.stop - q.start) * (k.stop - k.start) for q, k, _ in kernels.pieces(position, position, 100, False))
    assert pairs <= 4096 * (kernels.QUERY_BLOCK + 100)
    causal = kernels.pieces(position, position, kernels.FAR, False)
    assert sum((q.stop - q.start) * (k.stop - k.start) for q, k, _ in causal) <= 4096 * (4096 + kernels.QUERY_BLOCK) / 2
    assert {masked for *_, masked in causal} == {True, False}


# ---- merge ----------------------------------------------------------------------------------------------------------

def halves(function, tensors, arguments, cut):
    """Attention over the keys before `cut` merged with that over the others."""
    q, k, v = tensors
    q_pos, k_pos, slopes, window = arguments
    parts = [kernels.attend_ref(q, k[:, :, s], v[:, :, s], q_pos, k_pos[..., s], slopes, window)
             for s in (slice(0, cut), slice(cut, None))]
    return function(*parts[0], *parts[1])


@pytest.mark.parametrize("function", [kernels.merge, kernels.merge_ref])
@pytest.mark.parametrize("window, slopes", [(None, False), (20, True)])
@pytest.mark.parametrize("cut", [0, 1, 40, 100])
def test_merged_parts_are_the_whole(cut, window, slopes, function):
    """Values and gradients; windows leave one side of many rows empty, queries before every key both."""
    tensors, arguments, incoming = attend_case(cut, 65, 100, "per row", window, slopes, (2, 2, 1), (8, 5))
    found = outputs_and_gradients(lambda *t: halves(function, t[:3], t[3:], cut), tensors, arguments, incoming)
    assert_close(found, outputs_and_gradients(kernels.attend_ref, tensors, arguments, incoming), 1e-10)


@pytest.mark.parametrize("poison", [0.0, math.nan])
def test_merge_of_empty_sides(poison):
    """Rows: a empty, b empty, both empty, none. What an empty side holds, and what comes in where both are, is ignored."""
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
    da, dlse_a, db, dlse_b = torch.autograd.grad((out, lse), sides, (do, dlse))
    assert (da[0, 0, [0, 2]] == 0).all() and (db[0, 0, [1, 2]] == 0).all() and (da[0, 0, 1] == 1).all()
    assert dlse_a[0, 0].tolist()[:3] == [0, 1, 0] and dlse_b[0, 0].tolist()[:3] == [1, 0, 0]
    assert abs(dlse_a[0, 0, 3] + dlse_b[0, 0, 3] - 1) < 1e-12 and (0 < da[0, 0, 3]).all() and (da[0, 0, 3] < 1).all()


def test_gradcheck_of_merge():
    sides = [torch.randn(2, 2, 3, *d, dtype=torch.float64, requires_grad=True) for d in ((4,), (), (4,), ())]
    assert torch.autograd.gradcheck(kernels.merge, sides)


# ---- scan -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("T, chunk, offset", [(1, 1, 0), (1, 100, 99), (2, 7, 6), (63, 16, 0), (64, 64, 63), (65, 65, 0),
                                              (65, 1, 0), (100, 10, 3), (300, 300, 0), (300, 1000, 600), (4200, 4200, 0)])
def test_scan_is_the_loop(T, chunk, offset, start):
    """4,200 positions in one chunk take all levels of the recursion."""
    found = compare_scan(kernels.scan_ref, 2, T, 3, chunk, offset, start, 1e-10)
    assert all(x.abs().max() > 0 for x in found[2:])


@given(T=st.integers(1, 200), C=st.integers(1, 5), chunk=st.integers(1, 250), offset=st.integers(0, 300),
       start=st.booleans())
def test_scan_of_any_shape(T, C, chunk, offset, start):
    compare_scan(kernels.scan, 2, T, C, chunk, offset % chunk, start, 1e-10)


def test_a_scan_in_two_calls_is_one():
    """h0 and offset go on where the last call stopped, in the middle of a chunk."""
    g, x = torch.rand(2, 50, 3), torch.randn(2, 50, 3)
    whole = kernels.scan(g, x, 16)
    first = kernels.scan(g[:, :21], x[:, :21], 16)
    assert torch.equal(first, whole[:, :21])
    assert relative_rms(kernels.scan(g[:, 21:], x[:, 21:], 16, first[:, -1], 21 % 16), whole[:, 21:]) < 1e-6


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("shape, offset", [((2, 0, 3), 0), ((2, 0, 3), 2), ((0, 5, 3), 1), ((2, 5, 0), 1)])
def test_a_scan_over_nothing(shape, offset, start):
    inputs = [torch.rand(shape), torch.rand(shape)] + [torch.rand(shape[0], shape[2])] * start
    for function in (kernels.scan, kernels.scan_ref):
        g, x, *h0 = leaves = [y.clone().requires_grad_() for y in inputs]
        h = function(g, x, 4, *h0, offset=offset)
        assert h.shape == shape
        assert all((grad == 0).all() for grad in torch.autograd.grad(h.sum(), leaves, materialize_grads=True))


def test_a_late_token_of_a_long_chunk_costs_one_step(monkeypatch):
    """Decoding: what was done before is neither padded nor scanned again."""
    lengths = []
    recurrence = kernels.recurrence
    monkeypatch.setattr(kernels, "recurrence", lambda g, x, h0: lengths.append(x.size(1)) or recurrence(g, x, h0))
    g, x, h0 = torch.rand(2, 1, 3), torch.randn(2, 1, 3), torch.randn(2, 3)
    assert torch.allclose(kernels.scan(g, x, 65536, h0, 60000)[:, 0], g[:, 0] * h0 + x[:, 0])
    assert lengths == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scan_in_16_bits(dtype):
    compare_scan(kernels.scan, 2, 70, 3, 16, 5, True, 1e-2, dtype)


@pytest.mark.parametrize("function", [kernels.attend_backward, kernels.attend_backward_ref])
def test_attend_backward_over_some_of_the_keys(function):
    compare_attend_backward(function, torch.float64, 1e-10)
    compare_attend_backward(function, torch.float32, 1e-5)


@pytest.mark.parametrize("name, wrong", [("out", lambda x: x[:, :, 1:]), ("do", lambda x: x[..., 1:]), ("do", lambda x: x.float()),
                                         ("lse", lambda x: x), ("lse", lambda x: x[..., 0].bfloat16())])
def test_attend_backward_names_what_does_not_fit(name, wrong):
    x = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    arguments = dict(q=x, k=x, v=x, out=x, lse=x[..., 0], do=x)
    with pytest.raises(ValueError, match=f"^{name} "):
        kernels.attend_backward(**{**arguments, name: wrong(x)})


def test_the_bench_runs(capsys):
    """At small sizes: every line is there, and the loop is the same scan."""
    import bench
    g, x = torch.rand(1, 50, 3), torch.randn(1, 50, 3)
    assert relative_rms(bench.loop_scan(g, x, 16), kernels.scan(g, x, 16)) < 1e-6
    bench.bench_attend(torch.device("cpu"), 1, (1, 2, 64, 8), 128)
    bench.bench_scan(torch.device("cpu"), 1, (1, 64, 8))
    out = capsys.readouterr().out
    assert out.count("SDPA ") >= 5 and out.count("(goal ") == 5 and out.count("(goal on a GPU") == 2 and "nan" not in out and "inf" not in out


def test_gradcheck_of_scan():
    g, x, h0 = torch.rand(2, 7, 3).double(), torch.randn(2, 7, 3).double(), torch.randn(2, 3).double()
    assert torch.autograd.gradcheck(lambda g, x, h0: kernels.scan(g, x, 4, h0, 3), [y.requires_grad_() for y in (g, x, h0)])


def test_the_state_is_float32_under_bfloat16():
    assert_state_is_float32(kernels.scan)


# ---- rat ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("T", RAT_LENGTH)
def test_rat_is_the_definition(T):
    """Every length and chunk, one group, some and as many as heads, without angles, by chunk and by token."""
    cases = [case for case in rat_cases() if case[0] == T]
    assert len(cases) == 18 and {case[2] for case in cases} == {None, "chunk", "token"}
    for case in cases:
        found = compare_rat(kernels.rat_ref, case, 1e-10)
        alone = T <= case[1]                                # every query has one key, its own: no dq, no dk
        assert [(x.abs().max() > 1e-3).item() for x in found] == 3 * [True] + 2 * [not alone] + 4 * [True]


@given(T=st.integers(1, 90), chunk=st.integers(1, 100), tables=st.sampled_from([None, "chunk", "token"]),
       heads=st.sampled_from([(1, 1, 1), (2, 4, 2), (3, 3, 1), (1, 2, 2)]), D=st.sampled_from([2, 4, 10]))
def test_rat_of_any_shape(T, chunk, tables, heads, D):
    compare_rat(kernels.rat, (T, chunk, tables, heads, D + (tables is None)), 1e-10)


def test_rat_at_length(small_blocks):
    """Attention in many pieces, and chunks so long that they are scanned in two levels."""
    compare_rat(kernels.rat, (300, 3, "chunk", (1, 2, 1), 4), 1e-10)
    compare_rat(kernels.rat, (300, 130, "token", (1, 2, 1), 4), 1e-10)


def test_gradcheck_of_rat():
    tensors, arguments, _ = rat_case(0, 7, 3, "token", (1, 2, 1), 2)
    leaves = [x.detach().requires_grad_() for x in tensors]
    assert torch.autograd.gradcheck(lambda *leaves: kernels.rat(*leaves, *arguments)[0], leaves)


def test_rat_is_scan_attend_and_merge():
    """The composition that rat replaces, in float32."""
    (q, k, v, g, z, bias), (chunk, cos, sin), _ = rat_case(0, 64, 16, "chunk", (2, 4, 2), 8, torch.float32)
    turned = lambda x, rows: x * cos[rows, None] + x.roll(4, -1) * sin[rows, None]
    heads = lambda x: x.repeat(1, 1, 2, 1).transpose(1, 2)
    gate = (g + bias.view(4, 8)).sigmoid()
    sk, sv = (kernels.scan(gate.flatten(2), ((1 - gate) * x).flatten(2), chunk).view(2, 64, 4, 8)
              for x in (heads(k).transpose(1, 2), v))
    chunks = torch.arange(64, dtype=torch.int32) // chunk
    far = kernels.attend(heads(turned(q, slice(None))), turned(sk[:, 15::16], slice(15, None, 16)).transpose(1, 2),
                         sv[:, 15::16].transpose(1, 2), chunks - 1, chunks[::16])
    own = (heads(q) * sk.transpose(1, 2)).sum(-1) / math.sqrt(8)
    y = kernels.merge(*far, sv.transpose(1, 2), own)[0].transpose(1, 2)
    out, k_ends, v_ends = kernels.rat(q, k, v, g, z, bias, chunk, cos, sin)
    assert_close((out, k_ends, v_ends), (z.sigmoid() * y, sk[:, 15::16], sv[:, 15::16]), 1e-6, RAT_NAMES[:3])


def test_rat_on_a_cpu_is_its_twin():
    case = rat_case(0, 37, 5, "token", (2, 4, 2), 8, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(rat_results(kernels.rat, *case), rat_results(kernels.rat_ref, *case)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rat_takes_any_strides(layout):
    (*tensors, bias), arguments, dout = rat_case(0, 20, 6, "chunk", (2, 4, 2), 8)
    compare_rat_on(kernels.rat, [*map(LAYOUTS[layout], tensors), bias], arguments, LAYOUTS[layout](dout), 1e-10)


def test_rat_where_gates_are_shut():
    """Gates of exactly 0 and 1: everything stays finite, and what the output gate shuts out gets no gradient."""
    tensors, arguments, dout = rat_case(0, 40, 6, "chunk", (1, 4, 2), 8)
    tensors = [x.clone() for x in tensors]
    tensors[3][:, ::3], tensors[3][:, 1::5], tensors[4][:, :, 1] = 1000, -1000, -1000
    found = compare_rat_on(kernels.rat, tensors, arguments, dout, 1e-10)
    assert (found[0][:, :, 1] == 0).all() and (found[5][:, :, 1] == 0).all()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-2)])
def test_rat_in_lower_precision(dtype, tolerance, road):
    compare_rat(kernels.rat, (100, 16, "chunk", (2, 4, 2), 16), tolerance, dtype)


def test_rat_in_bfloat16_keeps_its_states_in_float32():
    assert_rat_states_are_float32(kernels.rat)


# ---- the operators --------------------------------------------------------------------------------------------------

def operator_calls():
    (q, k, v), (q_pos, k_pos, slopes, window), (do, dlse) = attend_case(0, 9, 11, "shared", 5, True, (2, 4, 2), (8, 6), torch.float32)
    k, v = k.nan_to_num(0), v.nan_to_num(0)
    out, lse = kernels.attend_ref(q, k, v)
    turned = lse.transpose(1, 2).contiguous().transpose(1, 2)           # a layout that attend does not give
    g, x, h0 = torch.rand(2, 9, 3), torch.randn(2, 9, 3), torch.randn(2, 3)
    tensors, arguments, dout = rat_case(0, 9, 4, "chunk", (2, 4, 2), 8, torch.float32)
    lead = lambda *tensors: [t.detach().clone().requires_grad_() for t in tensors]
    return {"attend, plain": (kernels.attend_op, (*lead(q, k, v), None, None, None, FAR, 0.3)),
            "attend": (kernels.attend_op, (*lead(q, k, v), q_pos, k_pos, slopes, window, 0.3)),
            "attend backward": (kernels.attend_backward_op, (q, k, v, out, lse, do, dlse, None, None, None, FAR, 0.3)),
            "merge": (kernels.merge_op, lead(out, lse, out, lse)),
            "merge, other layouts": (kernels.merge_op, (out.contiguous(), turned, out, turned)),
            "merge backward": (kernels.merge_backward_op, (out, lse, out, lse, do, dlse)),
            "scan": (kernels.scan_op, (*lead(g, x), 4, *lead(h0), 1)),
            "scan, no start": (kernels.scan_op, (*lead(g, x), 4, None, 0)),
            "scan backward": (kernels.scan_backward_op, (x, g, x, 4, h0, 1)),
            "rat": (kernels.rat_op, (*lead(*tensors), *arguments)),
            "rat, no angles": (kernels.rat_op, (*lead(*tensors), 9, None, None)),
            "rat backward": (kernels.rat_backward_op, (*tensors, *kernels.rat_plain(*tensors, *arguments)[:2], dout,
                                                       *arguments))}


@pytest.mark.parametrize("name", ["attend, plain", "attend", "attend backward", "merge", "merge, other layouts",
                                  "merge backward", "scan", "scan, no start", "scan backward", "rat", "rat, no angles",
                                  "rat backward"])
def test_opcheck(name):
    """Schema, registration of the gradients, shapes and strides of the outputs, dynamic shapes under compilation."""
    operator, arguments = operator_calls()[name]
    assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}


def all_three(q, k, v, g, x, q_pos, k_pos, slopes):
    parts = kernels.attend(q, k, v, slopes=slopes), kernels.attend(q, k, v, q_pos, k_pos, window=5)
    out, lse = kernels.merge(*parts[0], *parts[1])
    return out.square().sum() + lse.square().sum() + (kernels.scan(g, x, 4) * x).sum()


def test_without_gradients_the_results_are_the_same(monkeypatch):
    """Then a CPU takes a short cut past the operators, unless something traces."""
    calls = []
    monkeypatch.setattr(kernels, "call", lambda op, *rest, call=kernels.call: calls.append(op) or call(op, *rest))
    (q, k, v), *_ = attend_case(0, 9, 11, "plain", None, False, (2, 4, 2), (8, 6), torch.float32)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, torch.rand(2, 9, 3), torch.randn(2, 9, 3))]
    rest = torch.arange(9).int(), torch.arange(11).int(), torch.rand(4)
    with torch.no_grad():
        quick = all_three(*leaves, *rest)
    assert torch.equal(all_three(*leaves, *rest), quick) and len(calls) == 8
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        assert all_three(*(mode.from_tensor(x) for x in (*leaves, *rest))).shape == ()


def test_torch_compile_takes_them():
    """One graph, the same values and gradients: forward and backward traced, run without the code generator."""
    (q, k, v), *_ = attend_case(0, 9, 11, "plain", None, False, (2, 4, 2), (8, 6), torch.float32)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, torch.rand(2, 9, 3), torch.randn(2, 9, 3))]
    rest = torch.arange(9).int(), torch.arange(11).int(), torch.rand(4)
    compiled = torch.compile(all_three, fullgraph=True, backend="aot_eager")
    a, b = (f(*leaves, *rest) for f in (all_three, compiled))
    assert torch.equal(a, b)
    grads = [torch.autograd.grad(y, leaves) for y in (a, b)]
    assert all(torch.equal(x, y) and x.abs().max() > 0 for x, y in zip(*grads))


def test_one_graph_serves_all_lengths_windows_and_offsets():
    """Compiled with dynamic shapes, the checks and the operators make none of them a constant."""
    from torch._dynamo.testing import CompileCounterWithBackend
    counter = CompileCounterWithBackend("aot_eager")

    def both(q, at, g, chunk, offset, window):
        return kernels.attend(q, q, q, at, at, window=window)[0].sum() + kernels.scan(g, g, chunk, None, offset).sum()
    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend=counter)
    for n in range(3, 9):
        arguments = torch.randn(2, 2, n, 8), torch.arange(n).int(), torch.rand(2, n + 7, 13), n + 20, n + 1, n + 2
        assert torch.equal(compiled(*arguments), both(*arguments))
    assert counter.frame_count == 1


def rat_loss(*inputs):
    out, k_ends, v_ends = kernels.rat(*inputs)
    return out.square().sum() + k_ends.sum() + v_ends.sum()


def test_rat_without_gradients_and_compiled():
    """Without gradients the same results; compiled one graph, with the same values and gradients."""
    tensors, arguments, _ = rat_case(0, 21, 4, "chunk", (2, 4, 2), 8, torch.float32)
    leaves = [x.detach().requires_grad_() for x in tensors]
    compiled = torch.compile(rat_loss, fullgraph=True, backend="aot_eager")
    losses = [f(*leaves, *arguments) for f in (rat_loss, compiled)]
    with torch.no_grad():
        assert torch.equal(losses[0], rat_loss(*leaves, *arguments))
    assert torch.equal(*losses)
    a, b = (torch.autograd.grad(loss, leaves) for loss in losses)
    assert all(torch.equal(x, y) and x.abs().max() > 0 for x, y in zip(a, b))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        assert kernels.rat(*map(mode.from_tensor, tensors), *arguments)[1].shape == (2, 6, 4, 8)


def test_one_graph_of_rat_serves_all_lengths():
    from torch._dynamo.testing import CompileCounterWithBackend
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(rat_loss, fullgraph=True, dynamic=True, backend=counter)
    for T in range(5, 10):
        tensors, arguments, _ = rat_case(0, T + 9, T, "token", (2, 4, 2), 8, torch.float32)
        assert torch.equal(compiled(*tensors, *arguments), rat_loss(*tensors, *arguments))
    assert counter.frame_count == 1


def test_rat_keeps_its_inputs_out_and_lse_for_backward():
    """Nothing else: the states are scanned again."""
    tensors, arguments, _ = rat_case(0, 64, 4, "chunk", (2, 4, 2), 8, torch.float32)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        kernels.rat(*[x.requires_grad_() for x in tensors], *arguments)
    inputs = sum(x.nbytes for x in (*tensors, *arguments[1:]))
    assert sum(x.nbytes for x in kept.values()) == inputs + 2 * 64 * 4 * (8 + 1) * 4


def test_only_q_k_v_out_and_lse_are_kept_for_backward():
    """And nothing of the size of the scores."""
    tensors = [torch.randn(2, 4, 500, 16, requires_grad=True) for _ in range(3)]
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        kernels.attend(*tensors)
    assert sum(x.nbytes for x in kept.values()) == 4 * 2 * 4 * 500 * (4 * 16 + 1)


# ---- wrong arguments ------------------------------------------------------------------------------------------------

def attend_with(**changes):
    q = torch.randn(2, 4, 6, 8)
    arguments = dict(q=q, k=torch.randn(2, 2, 5, 8), v=torch.randn(2, 2, 5, 3))
    return kernels.attend(**{**arguments, **changes})


def merge_with(**changes):
    out, lse = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3)
    return kernels.merge(**{**dict(out_a=out, lse_a=lse, out_b=out, lse_b=lse), **changes})


def scan_with(**changes):
    return kernels.scan(**{**dict(g=torch.rand(2, 5, 3), x=torch.rand(2, 5, 3), chunk=4), **changes})


def rat_with(**changes):
    q, v, table = torch.randn(2, 5, 2, 8), torch.randn(2, 5, 4, 8), torch.randn(5, 8)
    arguments = dict(q=q, k=q, v=v, g=v, z=v, bias=torch.zeros(32), chunk=4, cos=table, sin=table)
    return kernels.rat(**{**arguments, **changes})


WRONG = [
    (attend_with, "q", torch.randn(4, 6, 8), "q has shape"),
    (attend_with, "q", None, "q is NoneType"),
    (attend_with, "q_pos", [0, 1, 2, 3, 4, 5], "q_pos is list"),
    (attend_with, "window", True, "window=True"),
    (attend_with, "scale", torch.tensor(1.0), "scale=tensor(1.)"),
    (attend_with, "scale", "a", "scale='a'"),
    (scan_with, "offset", True, "offset=True"),
    (scan_with, "h0", 0, "h0 is int"),
    (merge_with, "lse_a", None, "lse_a is NoneType"),
    (merge_with, "out_a", torch.randn(1, 2, 3, 300), "out_a has head size 300"),
    (attend_with, "q", torch.randn(2, 4, 6, 300), "q has head size 300"),
    (attend_with, "q", torch.randn(2, 3, 6, 8), "k has 2 heads"),
    (attend_with, "q", torch.randn(1, 4, 6, 8), "k has batch size 2"),
    (attend_with, "q", torch.ones(2, 4, 6, 8, dtype=torch.int64), "q is torch.int64"),
    (attend_with, "k", torch.randn(2, 2, 5, 7), "k has head size 7"),
    (attend_with, "k", torch.randn(2, 2, 5, 8).double(), "k is torch.float64"),
    (attend_with, "k", torch.randn(2, 2, 5, 8, device="meta"), "k is on meta"),
    (attend_with, "k", torch.randn(2, 0, 5, 8), "k has 0 heads"),
    (attend_with, "v", torch.randn(2, 2, 4, 8), "v has shape"),
    (attend_with, "v", torch.randn(2, 2, 5, 257), "v has head size 257"),
    (attend_with, "v", torch.randn(2, 2, 5, 0), "v has head size 0"),
    (attend_with, "q_pos", torch.arange(6), "q_pos is torch.int64"),
    (attend_with, "q_pos", torch.arange(5).int(), "q_pos has shape (5,)"),
    (attend_with, "k_pos", torch.zeros(3, 5).int(), "k_pos has shape (3, 5)"),
    (attend_with, "k_pos", torch.zeros(5, device="meta").int(), "k_pos is on meta"),
    (attend_with, "slopes", torch.rand(2), "slopes has shape (2,)"),
    (attend_with, "slopes", torch.rand(4, requires_grad=True), "slopes must be"),
    (attend_with, "slopes", torch.ones(4).int(), "slopes must be"),
    (attend_with, "window", 0, "window=0"),
    (attend_with, "window", 2.5, "window=2.5"),
    (attend_with, "scale", 0.0, "scale=0.0"),
    (attend_with, "scale", math.nan, "scale=nan"),
    (merge_with, "out_a", torch.randn(1, 2, 3), "out_a has shape"),
    (merge_with, "out_a", torch.ones(1, 2, 3, 4).int(), "out_a is torch.int32"),
    (merge_with, "out_b", torch.randn(1, 2, 3, 5), "out_b has shape"),
    (merge_with, "out_b", torch.randn(1, 2, 3, 4).double(), "out_b is torch.float64"),
    (merge_with, "lse_a", torch.randn(1, 2, 4), "lse_a has shape"),
    (merge_with, "lse_b", torch.randn(1, 2, 3).double(), "lse_b is torch.float64"),
    (merge_with, "lse_b", torch.randn(1, 2, 3, device="meta"), "lse_b is on meta"),
    (scan_with, "x", torch.rand(5, 3), "x has shape"),
    (scan_with, "g", torch.rand(2, 5, 4), "g has shape"),
    (scan_with, "g", torch.rand(2, 5, 3).double(), "g is torch.float64"),
    (scan_with, "chunk", 0, "chunk=0"),
    (scan_with, "chunk", 4.0, "chunk=4.0"),
    (scan_with, "offset", 4, "offset=4"),
    (scan_with, "offset", -1, "offset=-1"),
    (scan_with, "h0", torch.rand(2, 5), "h0 has shape"),
    (scan_with, "h0", torch.rand(2, 3).bfloat16(), "h0 is torch.bfloat16"),
    (rat_with, "q", torch.randn(2, 5, 8), "q has shape"),
    (rat_with, "q", torch.ones(2, 5, 2, 8).int(), "q is torch.int32"),
    (rat_with, "k", torch.randn(2, 5, 4, 8), "k has shape"),
    (rat_with, "k", torch.randn(2, 5, 2, 8).double(), "k is torch.float64"),
    (rat_with, "v", torch.randn(2, 5, 3, 8), "v has 3 heads"),
    (rat_with, "v", torch.randn(2, 6, 4, 8), "v has shape"),
    (rat_with, "v", None, "v is NoneType"),
    (rat_with, "g", torch.randn(2, 5, 2, 8), "g has shape"),
    (rat_with, "z", torch.randn(2, 5, 4, 6), "z has shape"),
    (rat_with, "z", torch.randn(2, 5, 4, 8, device="meta"), "z is on meta"),
    (rat_with, "bias", torch.zeros(4, 8), "bias has shape"),
    (rat_with, "bias", torch.zeros(16), "bias has shape (16,)"),
    (rat_with, "bias", torch.zeros(32).bfloat16(), "bias is torch.bfloat16"),
    (rat_with, "chunk", 0, "chunk=0"),
    (rat_with, "chunk", 2.0, "chunk=2.0"),
    (rat_with, "cos", torch.randn(4, 8), "cos has shape (4, 8)"),
    (rat_with, "sin", torch.randn(5, 8).double(), "sin is torch.float64"),
    (rat_with, "sin", torch.randn(5, 8, requires_grad=True), "sin must"),
    (rat_with, "sin", None, "sin is missing"),
    (rat_with, "cos", None, "cos is missing"),
]


@pytest.mark.parametrize("call, name, value, message", WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_arguments_are_named(call, name, value, message):
    call()
    with pytest.raises(ValueError) as error:
        call(**{name: value})
    assert message in str(error.value) and "\n" not in str(error.value)


def test_rat_names_sizes_that_do_not_fit_together():
    """No tokens, heads that are too large, an odd head size with angles: q has them first."""
    for T, D, message in ((0, 8, "q has shape (2, 0, 2, 8)"), (5, 258, "q has head size 258"), (5, 7, "q has head size 7")):
        q, v, table = torch.randn(2, T, 2, D), torch.randn(2, T, 4, D), torch.randn(T, D)
        with pytest.raises(ValueError) as error:
            kernels.rat(q, q, v, v, v, torch.zeros(4 * D), 4, table, table)
        assert message in str(error.value)


def test_the_debug_switch_finds_unsorted_positions(monkeypatch):
    backwards = torch.arange(6).flip(0).int()
    attend_with(q_pos=backwards)
    monkeypatch.setattr(kernels, "debug", True)
    attend_with(q_pos=torch.arange(6).int())
    with pytest.raises(ValueError, match="q_pos must ascend"):
        attend_with(q_pos=backwards)
    with pytest.raises(ValueError, match="q_pos must be between"):
        attend_with(q_pos=torch.tensor([0, 1, 2, 3, 4, FAR]).int())
    attend_with(k_pos=torch.tensor([0, 1, 2, 3, FAR]).int())
    with pytest.raises(ValueError, match="k_pos must ascend"):
        attend_with(k_pos=torch.tensor([[0, 1, 2, 2, 3], [0, 2, 1, 3, 4]]).int())


# ---- in processes of their own --------------------------------------------------------------------------------------

USE = """
import sys, torch
{first}
import kernels
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
    """tests/interpreted_kernels.py: the kernels against the twins, uninitialised memory poisoned."""
    p = beside["test_triton_code_in_the_interpreter"].result()
    assert p.returncode == 0 and " passed" in p.stdout and "skipped" not in p.stdout, p.stdout[-3000:]


@needs_triton
def test_triton_code_compiles_for_gpus(beside):
    """tests/compile_kernels.py ci: registers, spills and shared memory on sm_80, sm_90 and gfx942."""
    p = beside["test_triton_code_compiles_for_gpus"].result()
    print(p.stdout)
    assert p.returncode == 0, p.stdout[-3000:] + p.stderr[-3000:]
    rows = [line.split() for line in p.stdout.splitlines()[2:-1]]
    assert len(rows) == 3 * (3 * 3 + 2 * 3 + 2 * 2) + 3 * 3 + 3 * 6 + 4
    assert all(row[-1].isdigit() and int(row[-3]) > 10 for row in rows)


@needs_triton
def test_the_compile_check_can_fail():
    import compile_kernels as check
    launch = dict(BLOCK_M=128, BLOCK_N=128, num_warps=4, num_stages=2)
    constants = dict(PLAIN=True, BLOCK_D=64)
    figures = check.measure("sm_90", kernels.attend_dkv_kernel, torch.bfloat16, constants, launch)
    assert "bytes spilled" in check.verdict("sm_90", torch.bfloat16, 64, figures)
    wide = dict(PLAIN=True, BLOCK_D=128)
    figures = check.measure("sm_89", kernels.attend_forward_kernel, torch.bfloat16, wide, {**launch, "num_stages": 4})
    assert "bytes of shared memory" in check.verdict("sm_89", torch.bfloat16, 128, figures)
    figures = check.measure("sm_80", kernels.attend_forward_kernel, torch.bfloat16, constants, {**launch, "BLOCK_N": 48})
    assert isinstance(figures, str) and check.verdict("sm_80", torch.bfloat16, 64, figures) == figures
    assert check.verdict("sm_90", torch.bfloat16, 128, (255, 0, 1000)) == ""
    assert check.verdict("sm_90", torch.bfloat16, 256, (255, 1000, 1000)) == ""


@needs_triton
@pytest.mark.parametrize("large", [True, False])
def test_every_tile_choice_is_compiled(large):
    """What the launchers take for any head size and chunk is in the list that is compiled ahead of time."""
    compiled = {(k.__name__, d, tuple({**c, **o}.items())) for k, d, c, o in kernels.variants(large)}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for D in range(1, 257):
            for name in ("forward", "dq", "dkv"):
                block = kernels.block_of(D)
                launch = {**dict(PLAIN=True, BLOCK_D=block), **kernels.attend_options(name, block, dtype, large)}
                assert (f"attend_{name}_kernel", dtype, tuple(launch.items())) in compiled
            assert ("merge_forward_kernel", dtype, tuple(kernels.merge_options(D + -D % 16).items())) in compiled
            for name in ("forward", "dq", "dkv", "prepare"):
                constants = {} if name == "prepare" else dict(BLOCK_D=block)
                launch = {**constants, **kernels.rat_options(name, block, dtype, large)}
                assert (f"rat_{name}_kernel", dtype, tuple(launch.items())) in compiled
            for name in ("ends", "own"):
                launch = kernels.rat_options(name, block, dtype, large)
                assert (f"rat_{name}_kernel", dtype, tuple(launch.items())) in compiled
                least = 32 if block == 256 and not large else 64
                assert launch["BLOCK_M"] >= kernels.rat_options("forward", block, dtype, large)["BLOCK_M"] >= least
        for chunk in (*range(1, 300), 5000, 2 ** 31 - 1):
            assert ("scan_backward_kernel", dtype, tuple(kernels.scan_options(chunk).items())) in compiled


def calls_of_all_kernels(rng):
    """One call of each operator, forward and backward, with random sizes, layouts and alignments."""
    def draw(B, H, T, D):
        return rng.choice([lambda: torch.randn(B, T, H, D).transpose(1, 2), lambda: torch.randn(B, H, T, D),
                           lambda: torch.randn(B * H * T * D + 3)[3:].view(B, H, T, D),
                           lambda: torch.randn(1, 1, T, D).expand(B, H, T, D)])().requires_grad_()

    def positions(n):
        per_row = rng.random() < 0.5
        return torch.arange(3 + n * B, dtype=torch.int32)[3:].view(B, n) if per_row else torch.arange(1 + n).int()[1:]
    B, H, G = rng.choice([(1, 2, 1), (2, 2, 2), (2, 1, 1)])
    Tq, Tk, D, DV = rng.choice([1, 2, 16, 17]), rng.choice([1, 2, 16]), rng.choice([1, 16, 24, 64]), rng.choice([1, 16, 40])
    q, k, v = draw(B, H, Tq, D), draw(B, G, Tk, D), draw(B, G, Tk, DV)
    at = (positions(Tq), positions(Tk)) if rng.random() < 0.7 else (None, None)
    slopes = torch.rand(H + 1)[1:] if rng.random() < 0.5 else None
    out, lse = kernels.attend(q, k, v, *at, slopes, rng.choice([None, 1, 16]), 1.0)
    torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    a, lse = draw(B, H, Tq, DV), torch.randn(B * H * Tq + 1)[1:].view(B, H, Tq).requires_grad_()
    torch.autograd.grad(sum(y.sum() for y in kernels.merge(a, lse, a, lse)), (a, lse))
    g, h0 = draw(B, 1, Tq, DV)[:, 0], torch.randn(B * DV + 1)[1:].view(B, DV).requires_grad_()
    h = kernels.scan(g, g, 4, h0 if rng.random() < 0.5 else None, rng.choice([0, 1, 3]))
    torch.autograd.grad(h.sum(), g)
    T, D = rng.choice([1, 16, 17, 33]), rng.choice([2, 16, 24, 64])
    q, k, *vgz = (draw(B, heads, T, D).transpose(1, 2) for heads in (G, G, H, H, H))
    tables = torch.rand(2, T, D) if rng.random() < 0.5 else (None, None)
    out, *_ = kernels.rat(q, k, *vgz, torch.randn(H * D + 1)[1:], rng.choice([1, 16, 17]), *tables)
    torch.autograd.grad(out.sum(), (q, k, *vgz))


@needs_triton
def test_launches_have_the_types_that_are_compiled(monkeypatch):
    """Triton makes a variant of every combination of types, alignments and multiples of 16 that it meets. Here its own
    code binds the arguments of 60 random calls for a CUDA and a ROCm chip: none differs from what compile_kernels.py
    compiles."""
    import compile_kernels as check
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature
    bound = set()

    def bind(kernel, *arguments, grid, warmup, **options):
        for chip in ("sm_90", "gfx942"):
            backend = make_backend(check.CHIPS[chip][0])
            values, specialization, rest = create_function_from_signature(kernel.signature, kernel.params, backend)(
                *arguments, **options)
            _, signature, _, attributes = kernel._pack_args(backend, dict(options), values, specialization, rest)
            constants = {n: v for n, v in options.items() if n in kernel.arg_names}
            expected = check.source(kernel, values[kernel.arg_names[0]].dtype, constants, chip)
            assert signature == expected.signature, kernel.__name__
            assert {k: sorted(v) for k, v in attributes.items() if v} == {k: sorted(v) for k, v in expected.attrs.items()}
            bound.add((chip, kernel.__name__, str(signature)))
    monkeypatch.setattr(JITFunction, "run", bind)
    monkeypatch.setattr(kernels, "runs_triton", lambda device, dtype: True)
    rng = random.Random(0)
    for _ in range(60):
        calls_of_all_kernels(rng)
    assert len(bound) == 2 * (3 + 2 + 2 + 6)


# ---- on a GPU -------------------------------------------------------------------------------------------------------

@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-2)])
@pytest.mark.parametrize("number", range(len(covering_set())))
def test_gpu_attend(number, dtype, tolerance):
    tensors, arguments, incoming = attend_case(number, *covering_set()[number], dtype=dtype, device="cuda")
    found = outputs_and_gradients(kernels.attend, tensors, arguments, incoming)
    assert_close(found, dense_outputs_and_gradients(tensors, arguments, incoming), tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [5, 64, 256])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-2)])
def test_gpu_merge(D, dtype, tolerance):
    compare_merge(kernels.merge, D, dtype, tolerance, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_attend_backward_over_some_of_the_keys_on_a_gpu(dtype, tolerance):
    compare_attend_backward(kernels.attend_backward, dtype, tolerance, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kind, window, slopes", [("plain", None, False), ("shared", 700, True), ("per row", None, False)])
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (256, 256), (80, 80)])
def test_gpu_attend_at_length(kind, window, slopes, sizes):
    case = (2000, 2100, kind, window, slopes, (2, 4, 2), sizes)
    tensors, arguments, incoming = attend_case(0, *case, dtype=torch.bfloat16, device="cuda")
    found = outputs_and_gradients(kernels.attend, tensors, arguments, incoming)
    assert_close(found, dense_outputs_and_gradients(tensors, arguments, incoming), 1e-2)


@pytest.mark.gpu
def test_gpu_rows_beyond_two_billion_elements():
    """Offsets of rows are 64-bit: rows 32,768 apart, 70,000 of them."""
    wide = torch.randn(1, 70000, 1, 32768, device="cuda", dtype=torch.bfloat16)
    q = wide[..., :16].transpose(1, 2)
    end = q[:, :, -200:].contiguous().requires_grad_()
    leaf = q.detach().requires_grad_()
    results = []
    for x in (leaf, end):
        out, lse = kernels.attend(x, x, x, window=32)
        grad = torch.autograd.grad(out[:, :, -60:].sum() + lse[:, :, -60:].sum(), x)[0]
        results.append([y[:, :, -60:] for y in (out.detach(), lse.detach(), grad)])
    assert_close(*results, 1e-2, ("out", "lse", "dx"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-2)])
@pytest.mark.parametrize("T, C, chunk, offset", [(1, 1, 1, 0), (65, 17, 65, 3), (1000, 100, 16, 5), (1000, 64, 10, 0),
                                                 (3000, 32, 3000, 0), (0, 16, 4, 2), (5, 16, 2 ** 31 - 1, 3)])
def test_gpu_scan(T, C, chunk, offset, dtype, tolerance):
    compare_scan(kernels.scan, 2, T, C, chunk, offset, True, tolerance, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-2)])
@pytest.mark.parametrize("T, chunk, tables, heads, D", [
    (1, 1, None, (2, 2, 1), 64), (100, 1, "token", (2, 4, 2), 64), (300, 16, "chunk", (2, 4, 2), 64),
    (300, 7, "chunk", (2, 2, 1), 20), (300, 64, "token", (1, 4, 4), 128), (257, 50, None, (1, 2, 1), 256),
    (300, 128, "chunk", (1, 2, 1), 32), (40, 2 ** 31 - 1, "chunk", (1, 2, 2), 16), (700, 300, "chunk", (1, 2, 1), 64)])
def test_gpu_rat(T, chunk, tables, heads, D, dtype, tolerance):
    compare_rat(kernels.rat, (T, chunk, tables, heads, D), tolerance, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("chunk, heads, D", [(1, (1, 2, 1), 64), (16, (2, 4, 2), 128), (13, (1, 2, 2), 64)])
def test_gpu_rat_at_length(chunk, heads, D):
    """Many tiles of everything; the twin in float64 on the same device."""
    tensors, arguments, dout = rat_case(0, 4000, chunk, "chunk", heads, D, torch.bfloat16, "cuda")
    found = rat_results(kernels.rat, tensors, arguments, dout)
    exact = rat_results(kernels.rat_ref, *[[x.double() if isinstance(x, torch.Tensor) else x for x in xs]
                                           for xs in (tensors, arguments)], dout.double())
    assert_close(found, exact, 1e-2, RAT_NAMES)


@pytest.mark.gpu
def test_gpu_rat_of_rows_beyond_two_billion_elements():
    """Offsets of rows are 64-bit: rows 32,768 apart, 70,000 of them. q = 0: all keys of the last chunk, the ends of the
    4,374 before it and its own, weigh the same."""
    wide = torch.randn(1, 70000, 1, 32768, device="cuda", dtype=torch.bfloat16)
    leaves = [wide[..., i:i + 16].detach().requires_grad_() for i in (16, 32, 48, 64)]
    q, bias, last = torch.zeros_like(wide[..., :16]), torch.zeros(16, device="cuda"), slice(70000 - 16, None)
    out, _, v_ends = kernels.rat(q, *leaves, bias, 16)
    found = [x[:, last] for x in (out.detach(), *torch.autograd.grad(out[:, last].sum(), leaves))]
    leaves = [x[:, last].detach().float().requires_grad_() for x in leaves]
    gate, v = leaves[2].sigmoid().flatten(2), leaves[1].flatten(2)
    sv = kernels.scan(gate, (1 - gate) * v, 16).view(1, 16, 1, 16)
    want = leaves[3].sigmoid() * (v_ends[:, :-1].sum(1, keepdim=True) + sv) / 4375
    grads = torch.autograd.grad(want.sum(), leaves, allow_unused=True, materialize_grads=True)
    assert_close(found, [want.detach(), *grads], 1e-2, ("out", "dk", "dv", "dg", "dz"))


@pytest.mark.gpu
def test_gpu_rat_in_bfloat16_keeps_its_states_in_float32():
    assert_rat_states_are_float32(lambda *inputs: [x.cpu() for x in kernels.rat(*[
        x.cuda() if isinstance(x, torch.Tensor) else x for x in inputs])])


def replayed(step):
    """What a CUDA graph of step gives, and what step itself does."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        expected = step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    torch.cuda.synchronize()
    return found, expected


@pytest.mark.gpu
def test_gpu_graph_capture_of_rat():
    tensors, arguments, dout = rat_case(0, 100, 16, "chunk", (2, 4, 2), 32, torch.bfloat16, "cuda")
    step = lambda: rat_results(kernels.rat, tensors, arguments, dout)
    found, expected = replayed(step)
    assert_close(found, expected, 1e-3, RAT_NAMES)


@pytest.mark.gpu
def test_gpu_operators_compile():
    leaves = [x.to("cuda").requires_grad_() for x in (*torch.randn(3, 2, 4, 100, 32), torch.rand(2, 9, 3), torch.randn(2, 9, 3))]
    position = torch.arange(100, device="cuda").int()
    rest = position, position, torch.rand(4, device="cuda")
    values = [f(*leaves, *rest) for f in (all_three, torch.compile(all_three, fullgraph=True))]
    assert relative_rms(values[1], values[0]) < 1e-5
    for a, b in zip(*(torch.autograd.grad(y, leaves) for y in values)):
        assert relative_rms(b, a) < 1e-5


@pytest.mark.gpu
def test_gpu_graph_capture():
    """Nothing in attend, merge or scan waits for the GPU: a CUDA graph takes them, forward and backward."""
    q, k, v = (torch.randn(2, 4, 100, 32, device="cuda", requires_grad=True) for _ in range(3))
    g, x = (torch.rand(2, 9, 3, device="cuda", requires_grad=True) for _ in range(2))
    position = torch.arange(100, device="cuda").int()
    step = lambda: torch.autograd.grad(all_three(q, k, v, g, x, position, position, None), (q, k, v, g, x))
    found, expected = replayed(step)
    assert all(relative_rms(a, b) < 1e-5 for a, b in zip(found, expected))
