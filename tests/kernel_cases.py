"""The tests of the kernels share this file. It has attention and scan written out, and random cases."""
import math
import os
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PRECISION = [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-2)]


def where(*precision):
    """Return a parametrization of where an operator runs: the plain implementation in float64, and Triton."""
    on_gpu = [pytest.param("cuda", *p, marks=pytest.mark.gpu) for p in precision]
    found = [("cpu", *PRECISION[0])] if INTERPRETED else [("cpu", torch.float64, 1e-10), *on_gpu]
    return pytest.mark.parametrize("device, dtype, tolerance", found)


def assert_close(found, expected, tolerance, names, floor=1e-12):
    """Compare the root mean square of a - b with that of b, or with floor if that is more. Infinities must agree, and
    NaN never passes."""
    for name, a, b in zip(names.split(), found, expected, strict=True):
        assert a.shape == b.shape, name
        a, b = a.double().cpu(), b.double().cpu()
        finite = b.isfinite()
        assert torch.equal(a[~finite], b[~finite]), name
        a, b = a[finite], b[finite]
        error, size = (a - b).norm(), max(b.norm(), floor * math.sqrt(len(b)))
        assert error <= tolerance * size, (name, float(error / size))


def moved(xs, *where):
    """Return the tensors among xs moved to a device and dtype, and the rest as it is."""
    return [x.to(*where) if isinstance(x, torch.Tensor) else x for x in xs]


def exactly(xs):
    """Return the tensors among xs on the CPU, in float64 unless they are integers, and the rest as it is."""
    is_real = lambda x: isinstance(x, torch.Tensor) and x.is_floating_point()
    return [x.double() if is_real(x) else x for x in moved(xs, "cpu")]


def few(cases, n):
    """Return the cases. Triton's interpreter is slow, so that it takes those after the first n only with --full."""
    marks = pytest.mark.full if INTERPRETED else ()
    return [*cases[:n], *(pytest.param(case, marks=marks) for case in cases[n:])]


class Largest(TorchDispatchMode):
    """Counts the bytes of the largest tensor that is made under it."""
    nbytes = 0

    def __torch_dispatch__(self, op, types, arguments=(), options=None):
        if op.namespace == "nanorecur":     # a mode is blind in an operator, so take its body
            with self:
                return getattr(kernels, op.overloadpacket.__name__)(*arguments)
        out = op(*arguments, **(options or {}))
        sizes = [x.untyped_storage().nbytes() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.nbytes = max(self.nbytes, *sizes, 0)
        return out


def outputs_and_gradients(function, tensors, arguments, incoming):
    """Return the outputs of function and the gradients of the tensors. incoming has the gradients of the first outputs.
    They are made NaN where lse is -inf, because they must not matter there."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    outputs = function(*tensors, *arguments)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    incoming = [dy.to(y).masked_fill(y == -math.inf, math.nan) if (y == -math.inf).any() else dy.to(y)
                for y, dy in zip(outputs, incoming)]
    grads = torch.autograd.grad(outputs[:len(incoming)], tensors, incoming)
    return [x.detach() for x in (*outputs, *grads)]


def compare(function, definition, tensors, arguments, incoming, tolerance, names, floor=1e-12):
    """Assert that function and its gradients are the definition's in float64. The outputs after the first must be in
    float32 at least. Returns the outputs and gradients of function."""
    found = outputs_and_gradients(function, tensors, arguments, incoming)
    exact = outputs_and_gradients(definition, *map(exactly, (tensors, arguments, incoming)))
    first, *more = (x.dtype for x in found[:len(found) - len(tensors)])
    assert first == tensors[-1].dtype and {*more} <= {torch.promote_types(first, torch.float32)}
    assert_close(found, exact, tolerance, names, floor)
    return found


# These are layouts of a (B, H, T, D) in memory.
LAYOUTS = {"transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
           "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
           "expanded": lambda x: x[..., :1].expand(x.shape),
           "offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
           "heads expanded": lambda x: x[:, :1].expand(x.shape)}


class Naive(torch.autograd.Function):
    """Computes attend_naive, and its gradients by attend_backward_naive."""

    @staticmethod
    def forward(ctx, q, k, v, *mask):
        ctx.mask, outputs = mask, kernels.attend_naive(q, k, v, *mask)
        ctx.save_for_backward(q, k, v, *outputs)
        return outputs

    @staticmethod
    def backward(ctx, do, dlse):
        return *kernels.attend_backward_naive(*ctx.saved_tensors, do, dlse, *ctx.mask), *[None] * 4


def dense_attend(q, k, v, q_pos=None, k_pos=None, slopes=None, window=None):
    """Compute attend_by_position from its definition."""
    q_pos, k_pos = ((torch.arange(x.size(2)) if p is None else p).expand(len(q), -1)
                    for x, p in ((q, q_pos), (k, k_pos)))
    slopes = torch.zeros(q.size(1)) if slopes is None else slopes
    return Naive.apply(q, k, v, q_pos, k_pos, slopes, math.inf if window is None else window)


LENGTHS, HEADS = (1, 2, 63, 64, 65, 100), ((1, 2, 1), (2, 2, 2), (1, 4, 2), (4, 1, 1))     # B, H, G
KINDS = "plain", "shared", "per row", "keys per row", "queries per row"
WINDOWS, SLOPES, SIZES = (None, 1, 20), (False, True), (16, 8, 64, 40, 100, 3)
COLUMNS = LENGTHS, LENGTHS, KINDS, WINDOWS, SLOPES, HEADS, SIZES
DRAW = random.Random(0).choice
ATTENDS = [(65, 100, "shared", 20, True, (1, 2, 1), 256), (65, 100, "plain", None, False, (1, 2, 1), 200),
           (5, 0, "plain", None, False, (1, 2, 2), 16), (5, 0, "shared", None, True, (1, 2, 2), 16),
           (9, 12, "queries alone", None, False, (2, 2, 1), 4), (9, 12, "keys alone", None, False, (2, 2, 1), 4),
           *(tuple(map(DRAW, COLUMNS)) for _ in range(36))]
if not INTERPRETED:     # these would take minutes there
    ATTENDS += [(1200, 700, "per row", 300, False, (2, 1, 1), 80), (150, 2000, "shared", 1000, True, (1, 2, 1), 256),
                (1100, 1100, "plain", None, False, (1, 1, 1), 128)]
# One query a row meets so many keys that they are split.
SPLITS = [(1, 1100, "keys per row", None, False, (3, 4, 2), 16), (1, 600, "keys alone", 300, True, (3, 2, 1), 20),
          (1, 1300, "plain", None, False, (3, 2, 2), 64), (1, 900, "plain", 20, True, (3, 2, 1), 128)]


def attend_case(seed, T, S, kind, window, slopes, heads, D, dtype=torch.float64, device="cpu"):
    """Return inputs of attend: q, k, v, the other arguments, and the incoming gradients do, dlse. Some queries stand
    before every key."""
    (B, H, G), rng = heads, random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    normal = lambda n, heads: draw(B, n, heads, D).to(device, dtype).transpose(1, 2)

    def positions(per_row, n, first):       # they ascend, with gaps and repetitions
        rows = [sorted(rng.choices(range(first, S + 1), k=n)) for _ in range(B if per_row else 1)]
        return torch.tensor(rows if per_row else rows[0], dtype=torch.int32)
    q, k, v, do = normal(T, H), normal(S, G), normal(S, G), normal(T, H)
    q_pos = k_pos = None
    if kind not in ("plain", "keys alone"):
        q_pos = positions(kind in ("per row", "queries per row"), T, -2)
    if kind not in ("plain", "queries alone"):
        k_pos = positions(kind in ("per row", "keys per row"), S, 0)
    bias = torch.rand(H, generator=generator) if slopes else None
    dlse = draw(B, H, T).to(device, torch.promote_types(dtype, torch.float32))
    return (q, k, v), (*moved((q_pos, k_pos, bias), device), window), (do, dlse)


def compare_attend(function, tensors, arguments, incoming, tolerance):
    """Compare with gradients through out and lse. In float64 compare also with gradients through out alone, because
    other code runs then."""
    names = "out lse dq dk dv"
    if tensors[0].dtype == torch.float64:   # dq and dk of a single key through out are 0
        compare(function, dense_attend, tensors, arguments, incoming[:1], tolerance, names, floor=0.01)
    return compare(function, dense_attend, tensors, arguments, incoming, tolerance, names)


def compare_own(tensors, arguments, incoming, tolerance):
    """Compare attend with an own pair of each query, whose value is float32 or better."""
    def function(q, k, v, score, value, *mask):
        return kernels.attend_by_position(q, k, v, *mask, own=(score, value))
    def definition(q, k, v, score, value, *mask):
        return kernels.merge_naive(value, score, *dense_attend(q, k, v, *mask))
    score, value = incoming[1].cos(), incoming[0].cos().to(incoming[1].dtype)
    tensors, names = (*tensors, score, value), "out lse dq dk dv dscore dvalue"
    if score.dtype == torch.float64:
        compare(function, definition, tensors, arguments, incoming[:1], tolerance, names, floor=0.01)
    compare(function, definition, tensors, arguments, incoming, tolerance, names)


SCANS = [(T, C, chunk, start) for start in (True, False) for T, C, chunk in (
    (1, 1, 1), (1, 16, 100), (2, 3, 7), (63, 3, 16), (64, 20, 64), (65, 17, 65), (33, 2, 1), (100, 5, 10),
    (130, 16, 1000), (9, 16, 2 ** 31 - 1))]


def compare_scan(function, T, C, chunk, start, tolerance, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(T)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)
    tensors = [normal(2, T, C).sigmoid(), normal(2, T, C)] + [normal(2, C)] * start
    run, loop = (lambda g, x, *h0, f=f: f(g, x, chunk, *h0) for f in (function, kernels.scan_naive))
    compare(run, loop, tensors, (), [normal(2, T, C)], tolerance, "h dg dx dh0" if start else "h dg dx")
