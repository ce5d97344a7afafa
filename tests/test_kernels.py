"""The operators of kernels.py against their definitions: in float64 the reference implementations,
on a GPU and in tests/interpreted_kernels.py the Triton code."""
import importlib.util
import itertools
import math
import random

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import kernels
from conftest import python
from kernel_cases import (ATTENDS, LAYOUTS, PRECISION, RAT_NAMES, RATS, SCANS, assert_close, attend_case,
                          compare_attend, compare_rat, compare_scan, dense_attend, few, moved, outputs_and_gradients,
                          rat_case, relative_rms, where)

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")
# Blocks so small that short sequences have many, of every kind, merged; blocks computed as elsewhere than on a CPU.
PATHS = {"small blocks": dict(QUERY_BLOCK=16, KEY_BLOCK=24), "written out": dict(has_fused_softmax=lambda x: False)}


# ---- attend ----

@where(*PRECISION)
@pytest.mark.parametrize("number", few(range(len(ATTENDS)), 16))
def test_attend_is_the_definition(number, device, dtype, tolerance):
    compare_attend(kernels.attend, *attend_case(number, *ATTENDS[number], dtype, device), tolerance)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("number", range(len(ATTENDS)))
def test_attend_on_other_paths(number, path, monkeypatch):
    for name, value in PATHS[path].items():
        monkeypatch.setattr(kernels, name, value)
    found = compare_attend(kernels.attend, *attend_case(number, *ATTENDS[number]), 1e-10)
    if min(ATTENDS[number][:2]) > 2:
        assert all(x.abs().max() > 0 for x in found[2:])


@where(PRECISION[1])
@pytest.mark.parametrize("case", [(700, 2500, "shared", None, False, (1, 2, 1), 64),
                                  (2500, 700, "per row", 300, False, (2, 1, 1), 80),
                                  (1500, 1500, "plain", None, False, (1, 2, 2), 128),
                                  (300, 3000, "shared", 1500, True, (1, 2, 1), 256)])
def test_attend_at_length(case, device, dtype, tolerance):
    compare_attend(kernels.attend, *attend_case(0, *case, dtype, device), tolerance)


@where(PRECISION[0])
@pytest.mark.parametrize("layout", few([*LAYOUTS], 2))
def test_any_strides(layout, device, dtype, tolerance):
    """Also where the elements of a row are not contiguous."""
    layout = LAYOUTS[layout]
    for kind, D in (("plain", 16), ("shared", 20)):
        tensors, arguments, (do, dlse) = attend_case(0, 20, 20, kind, None, False, (2, 2, 2), D, dtype, device)
        compare_attend(kernels.attend, [*map(layout, tensors)], arguments, (layout(do), dlse), tolerance)
    (*tensors, bias), arguments, dout = rat_case(9, 4, "chunk", (1, 4, 2), 8, dtype, device)
    compare_rat(kernels.rat, [*map(layout, tensors), bias], arguments, layout(dout), tolerance)

    def interleaved(g, x, *rest):
        both = torch.stack([g, x], -1).flatten(2)
        return kernels.scan(both[..., ::2], both[..., 1::2], *rest)
    compare_scan(interleaved, 33, 20, 16, True, tolerance, dtype, device)


def test_blocks_are_small_and_fully_masked_ones_left_out(monkeypatch):
    """Of 4,096 positions, also in a window of 100, the blocks hold few pairs beyond the visible ones. Only torch's
    operator for CPUs, which makes none, gets blocks of more scores than may be held."""
    q, at, size = torch.empty(1, 1, 4096, 1), torch.arange(4096), kernels.QUERY_BLOCK
    blocks = lambda window: [(len(at[rows]) * len(at[keys]), bias) for rows, keys, bias in
                             kernels.visible_blocks(q, q, None, None, None, window)]
    assert sum(area for area, _ in blocks(100)) <= 4096 * (size + 100)
    for fused in (True, False):
        monkeypatch.setattr(kernels, "has_fused_softmax", lambda x: fused)
        causal = blocks(kernels.NO_WINDOW)
        assert sum(area for area, _ in causal) <= 4096 * (4096 + size) / 2
        assert {bias is None for _, bias in causal} == {True, False}
    assert max(area for area, _ in causal) <= size * kernels.KEY_BLOCK


@where(*PRECISION)
def test_attend_backward_over_some_of_the_keys(device, dtype, tolerance):
    """A softmax over 70 keys, its backward in two parts, of keys 0 to 39 and the rest: the dq add up. Every tensor is a
    slice of a larger one, grouped heads, ALiBi."""
    torch.manual_seed(0)
    large = [torch.randn(2, heads, 90, 48).to(dtype).double() for heads in (4, 2, 2, 4)]
    q, k, v, do = (x[:, :, 10:80, 8:40] for x in large)
    at, slopes = torch.arange(70).int(), torch.tensor([0.5, 0.3, 0.1, 0.02])
    incoming = do, torch.zeros(2, 4, 70)
    out, lse, *want = outputs_and_gradients(dense_attend, (q, k, v), (at, at, slopes), incoming)
    q, k, v, out, do = moved((q, k, v, out, do), device, dtype)
    lse = torch.stack([lse, lse], -1).to(device, torch.promote_types(dtype, torch.float32))[..., 0]
    out, at, slopes = LAYOUTS["transposed"](out), *moved((at, slopes), device)
    parts = [kernels.attend_backward(q, k[:, :, keys], v[:, :, keys], out, lse, do, at, at[keys], slopes)
             for keys in (slice(0, 40), slice(40, 70))]
    dqs, dks, dvs = zip(*parts)
    assert dqs[0].dtype == dtype
    assert_close((sum(dqs), torch.cat(dks, 2), torch.cat(dvs, 2)), want, tolerance, "dq dk dv")


# ---- merge ----

@pytest.mark.parametrize("poison", [0.0, math.nan])
def test_merge_of_empty_sides(poison):
    """a is empty, b is, both are: what an empty side holds, and what comes in where both are, is ignored."""
    (a, b), inf = torch.randn(2, 1, 1, 3, 8), math.inf
    a[..., [0, 2], :] = b[..., [1, 2], :] = poison
    lse_a, lse_b = torch.tensor([[-inf, 0.3, -inf], [0.7, -inf, -inf]])[:, None, None]
    sides = [x.requires_grad_() for x in (a, lse_a, b, lse_b)]
    out, lse = kernels.merge(*sides)
    assert torch.equal(out[0, 0], torch.stack([b[0, 0, 0], a[0, 0, 1], torch.zeros(8)]))
    assert torch.equal(lse, torch.maximum(lse_a, lse_b))
    incoming = torch.ones_like(out), torch.tensor([[[1, 1, math.nan]]])
    grads = [x.view(3, -1)[:, 0] for x in torch.autograd.grad((out, lse), sides, incoming)]
    assert torch.allclose(torch.stack(grads), torch.tensor([[0.0, 1, 0], [0, 1, 0], [1, 0, 0], [1, 0, 0]]))


# ---- scan and rat ----

@where(*PRECISION)
@pytest.mark.parametrize("case", few(SCANS, 11), ids=str)
def test_scan_is_the_loop(case, device, dtype, tolerance):
    compare_scan(kernels.scan, *case, tolerance, dtype, device)


@where(*PRECISION)
@pytest.mark.parametrize("case", RATS, ids=str)
def test_rat_is_the_definition(case, device, dtype, tolerance):
    if case[0] < 16 or case[0] < 2 * case[1]:   # dq and dk are differences of nearly equal sums
        dtype, tolerance = (dtype, tolerance) if dtype.itemsize > 2 else PRECISION[0]
    compare_rat(kernels.rat, *rat_case(*case, dtype, device), tolerance)


@where(PRECISION[0])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_rat_where_gates_are_shut(device, dtype, tolerance):
    """Gates of exactly 0 and 1: everything stays finite, and what the output gate shuts out gets no gradient."""
    tensors, arguments, dout = rat_case(20, 6, "chunk", (1, 2, 1), 16, dtype, device)
    tensors = [x.clone() for x in tensors]
    tensors[3][:, ::3], tensors[3][:, 1::5], tensors[4][:, :, 1] = 1000, -1000, -1000
    found = compare_rat(kernels.rat, tensors, arguments, dout, tolerance)
    assert (found[0][:, :, 1] == 0).all() and (found[5][:, :, 1] == 0).all()


@where(PRECISION[1])
def test_states_are_float32(device, dtype, tolerance):
    """300 steps of 1e-3: on a state near 1, and of the way to 1; bfloat16 would lose them."""
    x = torch.full((1, 300, 16), 1e-3, device=device).bfloat16()
    x[:, 0] = 1
    h = kernels.scan(torch.ones_like(x), x, 300)
    assert h.dtype == torch.bfloat16 and abs(h[0, -1, 0].item() - 1.3) < 0.01
    ones, want = torch.ones(1, 300, 1, 16, device=device).bfloat16(), 1 - 0.999 ** 300
    _, *ends = kernels.rat(ones, ones, ones, 0 * ones, ones, torch.full((16,), math.log(999), device=device), 300)
    assert all(x.dtype == torch.float32 and (x - want).abs().max() < 1e-4 for x in ends)


# ---- the operators ----

def operator_calls():
    (q, k, v), mask, (do, dlse) = attend_case(0, 9, 11, "shared", 5, True, (2, 4, 2), 8, torch.float32)
    k, v = k.nan_to_num(0), v.nan_to_num(0)
    out, lse = kernels.attend(q, k, v)
    g, x, h0 = torch.rand(2, 9, 3), torch.randn(2, 9, 3), torch.randn(2, 3)
    tensors, arguments, dout = rat_case(9, 4, "chunk", (2, 4, 2), 8, torch.float32)
    results = kernels.rat_torch(*tensors, *arguments)[:2]
    lead = lambda *tensors: [t.detach().clone().requires_grad_() for t in tensors]
    plain = None, None, None, kernels.NO_WINDOW
    return [(kernels.attend_op, (*lead(q, k, v), *plain)), (kernels.attend_op, (*lead(q, k, v), *mask)),
            (kernels.attend_backward_op, (q, k, v, out, lse, do, dlse, *plain)),
            (kernels.scan_op, (*lead(g, x), 4, *lead(h0))), (kernels.scan_op, (*lead(g, x), 4, None)),
            (kernels.scan_backward_op, (x, g, x, 4, h0)),
            (kernels.rat_op, (*lead(*tensors), *arguments)), (kernels.rat_op, (*lead(*tensors), 9, None, None)),
            (kernels.rat_backward_op, (*tensors, *results, dout, *arguments))]


@pytest.mark.parametrize("number", range(9))
def test_opcheck(number):
    """Schema, registration of the gradients, shapes and strides of the outputs, dynamic shapes."""
    assert set(torch.library.opcheck(*operator_calls()[number]).values()) == {"SUCCESS"}


def all_operators(q, k, v, g, x, bias, q_pos, k_pos, slopes, chunk):
    """A loss of every operator, for q, k, v (B, H, T, D)."""
    window = chunk + 1
    a = kernels.attend(q, k, v, slopes=slopes)
    b = kernels.attend(q, k, v, q_pos, k_pos, None, window)
    out, lse = kernels.merge(*a, *b)
    loss = out.square().sum() + lse.square().sum() + (kernels.scan(g, x, chunk) * x).sum()
    q, k, v = (y[:, :, :x.size(1)].transpose(1, 2) for y in (q, k, v))
    y, k_ends, _ = kernels.rat(q, k, v, q, v, bias, chunk)
    return loss + y.square().sum() + k_ends.sum()


def operator_inputs(T=9, device="cpu"):
    """The inputs of all_operators: leaves, and the rest."""
    torch.manual_seed(T)
    leaves = [torch.randn(2, 4, n, 8) for n in (T, T + 2, T + 2)]
    leaves += [torch.rand(2, T, 3), torch.randn(2, T, 3), torch.randn(32)]
    rest = torch.arange(T).int(), torch.arange(T + 2).int(), torch.rand(4), T - 2
    return [x.to(device).requires_grad_() for x in leaves], moved(rest, device)


@pytest.mark.parametrize("device, backend", [
    ("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=pytest.mark.gpu)])
def test_torch_compile_takes_them(device, backend):
    """One graph for all lengths, windows and chunks, as no check makes a size a constant; the same gradients."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(all_operators, fullgraph=True, dynamic=True, backend=counter)
    for T in range(5, 10):
        leaves, rest = operator_inputs(T, device)
        a, b = (f(*leaves, *rest) for f in (all_operators, compiled))
        assert relative_rms(b, a) < 1e-5
        grads = [torch.autograd.grad(y, leaves) for y in (a, b)]
        assert all(relative_rms(y, x) < 1e-5 and x.abs().max() > 0 for x, y in zip(*grads))
    assert counter.frame_count == 1


def test_inputs_out_and_lse_are_kept_for_backward():
    """Nothing of the size of the scores, and not rat's states: they are scanned again."""
    def kept(function, tensors, arguments=()):
        found = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda x: found.setdefault(x.data_ptr(), x), lambda x: x):
            function(*[x.requires_grad_() for x in tensors], *arguments)
        return sum(x.nbytes for x in found.values())
    assert kept(kernels.attend, torch.randn(3, 2, 4, 500, 16)) == 4 * 2 * 4 * 500 * (4 * 16 + 1)
    tensors, arguments, _ = rat_case(64, 4, "chunk", (2, 4, 2), 8, torch.float32)
    inputs = sum(x.nbytes for x in (*tensors, *arguments[1:]))
    assert kept(kernels.rat, tensors, arguments) == inputs + 2 * 64 * 4 * (8 + 1) * 4


@pytest.mark.parametrize("name, value, message", [
    ("q", None, "q is NoneType"), ("q", torch.randn(2, 4, 6, 300), "q has head size 300"), ("window", 0, "window=0"),
    ("q", torch.randn(2, 3, 6, 8), "k has 2 heads"), ("k", torch.randn(2, 2, 5, 7), "k has shape (2, 2, 5, 7)"),
    ("q_pos", torch.arange(6), "q_pos is torch.int64"),
    ("k_pos", torch.tensor([0, 2, 1, 3, 4]).int(), "k_pos must ascend")])
def test_wrong_arguments_are_named(name, value, message, monkeypatch):
    monkeypatch.setattr(kernels, "debug", True)
    right = dict(q=torch.randn(2, 4, 6, 8), k=torch.randn(2, 2, 5, 8), v=torch.randn(2, 2, 5, 8))
    with pytest.raises(ValueError) as error:
        kernels.attend(**{**right, name: value})
    assert message in str(error.value)


# ---- in processes of their own ----

@pytest.mark.parametrize("environment, line", [({}, "kernels: plain PyTorch on cpu\n"), ({"RANK": "1"}, "")])
def test_without_triton_it_runs_and_says_so_once(environment, line):
    use = ("import sys, torch; sys.modules['triton'] = None; import kernels\n"
           "for _ in range(3): kernels.attend(*torch.randn(3, 1, 2, 5, 16))")
    p = python("-c", use, **environment)
    assert p.returncode == 0 and p.stdout == "" and p.stderr == line, p.stderr


@needs_triton
def test_triton_code_in_the_interpreter(beside):
    """tests/interpreted_kernels.py: against definitions, uninitialised memory poisoned."""
    p = beside["test_triton_code_in_the_interpreter"].result()
    assert p.returncode == 0 and " passed" in p.stdout, p.stdout[-3000:]


@needs_triton
def test_triton_code_compiles_for_gpus(beside):
    """tests/compile_kernels.py ci: registers, spills, shared memory on sm_80, sm_90 and gfx942."""
    p = beside["test_triton_code_compiles_for_gpus"].result()
    assert p.returncode == 0, p.stdout[-3000:] + p.stderr[-3000:]
    rows = [line.split() for line in p.stdout.splitlines()[2:-1]]
    for chip in ("sm_80", "sm_90", "gfx942"):
        assert len({row[1] for row in rows if row[0] == chip}) == 9, "one of the kernels is missing"
    assert all(row[-1].isdigit() and int(row[-3]) > 5 for row in rows)


@needs_triton
def test_chunks_that_fit_one_kernel_of_rat_fit_all():
    from kernels_triton import tile_options
    for block, (dtype, _), large in itertools.product(kernels.HEAD_SIZES, PRECISION, (True, False)):
        own, rat = (tile_options(name, block, dtype, large)["BLOCK_M"] for name in ("own", "rat"))
        assert own >= rat >= (32 if block == 256 and not large else 64)


# ---- on a GPU, beside the tests above that run there too ----

@pytest.mark.gpu
@pytest.mark.parametrize("chunk, heads, D", [(1, (1, 2, 1), 64), (16, (2, 4, 2), 128), (13, (1, 2, 2), 64),
                                             (300, (1, 2, 1), 64)])
def test_gpu_rat_at_length(chunk, heads, D):
    """Many tiles of everything; the reference implementation in float64 on the same device."""
    case = rat_case(4000, chunk, "chunk", heads, D, torch.bfloat16, "cuda")
    tensors, arguments = (moved(xs, torch.float64) for xs in case[:2])
    exact = outputs_and_gradients(kernels.rat, tensors, arguments, [case[2].double()])
    found = outputs_and_gradients(kernels.rat, *case[:2], [case[2]])
    assert_close(found, exact, 1e-2, RAT_NAMES)


@pytest.mark.gpu
def test_gpu_rows_beyond_two_billion_elements():
    """Offsets of rows are 64-bit: rows 32,768 apart, 70,000 of them."""
    wide = torch.randn(1, 70000, 1, 32768, device="cuda", dtype=torch.bfloat16)
    whole, results = wide[..., :16].transpose(1, 2).detach().requires_grad_(), []
    for x in (whole, whole[:, :, -200:].detach().clone().requires_grad_()):
        out, lse = (y[:, :, -60:] for y in kernels.attend(x, x, x, window=32))
        grad = torch.autograd.grad(out.sum() + lse.sum(), x)[0][:, :, -60:]
        results.append([out.detach(), lse.detach(), grad])
    assert_close(*results, 1e-2, "out lse dx")


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


def calls_of_all_kernels(rng):
    """Each operator, forward and backward, with random sizes, layouts and alignments."""
    dtype, offset = rng.choice(PRECISION)[0], LAYOUTS["offset"]
    shuffled = lambda xs: [rng.choice([lambda x: x, *LAYOUTS.values()])(x) for x in xs]
    tensors, arguments, (do, dlse) = attend_case(0, *rng.choice(ATTENDS), dtype)
    arguments = [offset(x) if isinstance(x, torch.Tensor) else x for x in arguments]
    outputs_and_gradients(kernels.attend, shuffled(tensors), arguments, (*shuffled([do]), offset(dlse)))
    T, C, chunk, start = rng.choice(SCANS)
    g, x, h0 = (y.requires_grad_() for y in shuffled(torch.rand(3, 2, 1, T, C, dtype=dtype)))
    h = kernels.scan(g[:, 0], x[:, 0], chunk, offset(h0[:, 0, 0]) if start else None)
    torch.autograd.grad(h.sum(), (g, x))
    (*tensors, bias), arguments, dout = rat_case(*rng.choice(RATS), dtype)
    outputs_and_gradients(kernels.rat, [*shuffled(tensors), offset(bias)], arguments, shuffled([dout]))


@needs_triton
def test_launches_have_the_types_that_are_compiled(monkeypatch):
    """Triton makes a variant of every combination of types, alignments and multiples of 16 that it meets. 60 random
    calls meet none but those that compile_kernels.py compiles."""
    import compile_kernels as check
    from triton.runtime.jit import JITFunction
    seen, compiled = set(), [(k, d, {**c, **o}) for k, d, c, o in check.variants(True)]

    def launch(kernel, *arguments, grid, warmup, **options):
        dtype = next(x.dtype for x in arguments if isinstance(x, torch.Tensor))
        assert (kernel, dtype, options) in compiled
        constants = {n: v for n, v in options.items() if n in kernel.arg_names}
        source = check.source(kernel, dtype, constants, "sm_90")
        for number, (parameter, x) in enumerate(zip(kernel.params, arguments)):
            kind = source.signature[parameter.name]
            if isinstance(x, torch.Tensor):
                assert kind == "*" + check.POINTERS[x.dtype], (kernel, parameter.name)
                x = x.data_ptr()
            assert (number,) not in source.attrs or x % 16 == 0, (kernel, parameter.name)
        seen.add(kernel)
    monkeypatch.setattr(JITFunction, "run", launch)
    monkeypatch.setattr(kernels, "runs_triton", lambda device, dtype: True)
    rng = random.Random(0)
    for _ in range(60):
        calls_of_all_kernels(rng)
    assert len(seen) == 9
