"""What the tests of kernels.py share: attention, the scan and rat written out, and a covering set of cases."""
import functools
import itertools
import math
import random

import torch

import kernels

FAR = 2 ** 30


def dense_attend(q, k, v, q_pos=None, k_pos=None, slopes=None, window=None, scale=None):
    """attend from its definition, with the whole score matrix; finite gradients for rows that see nothing."""
    (_, H, Tq, D), Tk = q.shape, k.size(2)
    k, v = (x.repeat_interleave(H // x.size(1), 1) for x in (k, v))
    q_pos = torch.arange(Tq) if q_pos is None else q_pos.long().cpu()
    k_pos = torch.arange(Tk) if k_pos is None else k_pos.long().cpu()
    distance = (q_pos.view(-1, 1, Tq, 1) - k_pos.view(-1, 1, 1, Tk)).to(q.device)
    seen = (distance >= 0) & (distance < (FAR if window is None else window))
    s = q @ k.transpose(-1, -2) * (1 / math.sqrt(D) if scale is None else scale)
    if slopes is not None:
        s = s - slopes.to(s)[:, None, None] * distance
    some = seen.any(-1, keepdim=True)
    s = torch.where(seen, s, torch.where(some, -math.inf, 0.0).to(s))       # an empty row: any finite scores
    lse = s.logsumexp(-1)
    out = torch.where(some, s.softmax(-1) @ v, 0)
    return out, torch.where(some[..., 0], lse, -math.inf)


def loop_scan(g, x, chunk, h0=None, offset=0):
    """scan from its definition, position by position."""
    if not x.size(1):
        return x.clone()
    state = torch.zeros_like(x[:, 0]) if h0 is None else h0
    states = []
    for t in range(x.size(1)):
        if t and (offset + t) % chunk == 0:
            state = torch.zeros_like(state)
        state = g[:, t] * state + x[:, t]
        states.append(state)
    return torch.stack(states, 1)


def random_positions(rng, per_row, B, T, first, last):
    """Ascending int32 positions from first to last, with gaps and repetitions: one row, or one per batch row."""
    rows = [sorted(rng.choices(range(first, last + 1), k=T)) for _ in range(B if per_row else 1)]
    return torch.tensor(rows if per_row else rows[0], dtype=torch.int32)


def attend_case(seed, Tq, Tk, kind, window, slopes, heads, sizes, dtype=torch.float64, device="cpu"):
    """Inputs of attend: the tensors q, k, v, the other arguments, and the incoming gradients do, dlse. Some queries
    stand before every key, some keys are padding and hold NaN."""
    (B, H, G), (D, DV), rng = heads, sizes, random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)
    q, k, v, do = normal(B, Tq, H, D), normal(B, Tk, G, D), normal(B, Tk, G, DV), normal(B, Tq, H, DV)
    q, k, v, do = (x.transpose(1, 2) for x in (q, k, v, do))
    q_pos = k_pos = None
    if kind != "plain":
        q_pos = random_positions(rng, kind in ("per row", "queries per row"), B, Tq, -2, Tk)
        k_pos = random_positions(rng, kind in ("per row", "keys per row"), B, Tk, 0, Tk)
        if Tk > 2:
            k_pos[..., -2:] = FAR
            k[:, :, -2:] = v[:, :, -2:] = math.nan
        q_pos, k_pos = q_pos.to(device), k_pos.to(device)
    bias = torch.rand(H, generator=generator).to(device) if slopes else None
    wide = torch.promote_types(dtype, torch.float32)
    dlse = torch.randn(B, H, Tq, generator=generator, dtype=torch.float64).to(device, wide)
    return (q, k, v), (q_pos, k_pos, bias, window), (do, dlse)


# The values that the covering set combines
LENGTH = (1, 2, 63, 64, 65, 100)
KIND = ("plain", "shared", "per row", "keys per row", "queries per row")
WINDOW = (None, 1, 20)
SLOPES = (False, True)
HEADS = ((1, 2, 1), (2, 2, 2), (1, 4, 2), (4, 1, 1))            # B, H, G
SIZES = ((16, 16), (8, 24), (64, 64), (40, 32), (128, 100))      # D, DV


def pairs(case):
    """All pairs of values of a case, with their columns."""
    return {(i, j, case[i], case[j]) for j in range(len(case)) for i in range(j)}


@functools.cache
def covering_set(n=38):
    """n cases (Tq, Tk, kind, window, slopes, heads, sizes) that hold nearly every pair of values: each is the one of 300
    random cases with the most pairs that are new."""
    rng, cases, seen = random.Random(0), [], set()
    for _ in range(n):
        drawn = [tuple(map(rng.choice, (LENGTH, LENGTH, KIND, WINDOW, SLOPES, HEADS, SIZES))) for _ in range(300)]
        cases.append(max(drawn, key=lambda case: len(pairs(case) - seen)))
        seen |= pairs(cases[-1])
    return cases


def outputs_and_gradients(function, tensors, arguments, incoming):
    """out, lse and the gradients of the tensors; a NaN comes in through lse where no key is seen."""
    tensors = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in tensors]
    out, lse = function(*tensors, *arguments)
    do, dlse = incoming
    dlse = torch.where(lse == -math.inf, math.nan, dlse.to(lse))
    return [x.detach() for x in (out, lse, *torch.autograd.grad((out, lse), tensors, (do.to(out), dlse)))]


def dense_outputs_and_gradients(tensors, arguments, incoming):
    """The same from the definition in float64, whose gradients come from autograd; the NaN stay out."""
    tensors = [x.detach().cpu().double().nan_to_num(0).requires_grad_() for x in tensors]
    out, lse = dense_attend(*tensors, *[a.cpu() if isinstance(a, torch.Tensor) else a for a in arguments])
    do, dlse = (x.cpu().double() for x in incoming)
    loss = (out * do).sum() + (torch.where(lse == -math.inf, 0, lse) * dlse).sum()
    return [x.detach() for x in (out, lse, *torch.autograd.grad(loss, tensors))]


def relative_rms(a, b, floor=1e-12):
    """Root mean square of a - b over b's, or over floor if that is more; infinities must agree, NaN never passes."""
    a, b = a.double().cpu(), b.double().cpu()
    finite = b.isfinite()
    if not torch.equal(a[~finite], b[~finite]):
        return math.inf
    if not finite.any():
        return 0.0
    a, b = a[finite], b[finite]
    error = (a - b).square().mean().sqrt() / max(b.square().mean().sqrt().item(), floor)
    return math.inf if error.isnan() else error.item()


NAMES = ("out", "lse", "dq", "dk", "dv")


def assert_close(found, expected, tolerance, names=NAMES, floor=1e-12):
    for name, a, b in zip(names, found, expected, strict=True):
        assert a.shape == b.shape, name
        error = relative_rms(a, b, floor)
        assert error <= tolerance, (name, error)


# Ways for a (B, H, T, D) to lie in memory that attend's own results never have.
LAYOUTS = {"transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
           "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
           "expanded": lambda x: x[..., :1].expand(x.shape),
           "offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
           "heads expanded": lambda x: x[:, :1].expand(x.shape)}

SCAN_NAMES = ("h", "dg", "dx", "dh0")


def compare_scan(function, B, T, C, chunk, offset, start, tolerance, dtype=torch.float64, device="cpu"):
    """Assert that function and its gradients are the loop's, in float64, on the same inputs; returns function's."""
    generator = torch.Generator().manual_seed(T)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
    inputs, dh = [normal(B, T, C).sigmoid(), normal(B, T, C)] + [normal(B, C)] * start, normal(B, T, C)
    results = []
    for f, kind, where in ((function, dtype, device), (loop_scan, torch.float64, "cpu")):
        g, x, *h0 = leaves = [y.to(where, kind).requires_grad_() for y in inputs]
        h = f(g, x, chunk, h0[0] if start else None, offset)
        grads = torch.autograd.grad(h, leaves, dh.to(where, kind), allow_unused=True, materialize_grads=True)
        results.append([h.detach(), *grads])
    assert [y.dtype for y in results[0]] == [dtype] * len(results[0])
    assert_close(*results, tolerance, SCAN_NAMES[:len(results[0])])
    return results[0]


def compare_merge(function, D, dtype, tolerance, device="cpu"):
    """Assert that function and its gradients are the twin's in float64. Of 17 positions 0 to 4 see nothing on side a, 3 to
    7 nothing on side b, so 3 and 4 nothing at all; an empty side holds NaN, and NaN comes in where both are."""
    torch.manual_seed(D)
    a, b, do = (torch.randn(2, 3, 17, D).to(dtype) for _ in range(3))
    lse_a, lse_b, dlse = (torch.randn(2, 3, 17) for _ in range(3))
    for out, lse, empty in ((a, lse_a, slice(0, 5)), (b, lse_b, slice(3, 8))):
        out[:, :, empty], lse[:, :, empty] = math.nan, -math.inf
    dlse[:, :, 3:5] = math.nan
    results = []
    for f, move in ((function, lambda x: x.to(device)), (kernels.merge_ref, torch.Tensor.double)):
        sides = [move(x).clone().requires_grad_() for x in (a, lse_a, b, lse_b)]
        out, lse = f(*sides)
        grads = torch.autograd.grad((out, lse), sides, (move(do), move(dlse)))
        results.append([out.detach(), lse.detach(), *grads])
    assert_close(*results, tolerance, ("out", "lse", "da", "dlse_a", "db", "dlse_b"))
    assert (results[0][1][:, :, 3:5] == -math.inf).all() and (results[0][0][:, :, 3:5] == 0).all()


def compare_attend_backward(function, dtype, tolerance, device="cpu"):
    """A softmax over 70 keys, its backward in two parts, of keys 0 to 39 and the rest: the dq add up, dk and dv stand side
    by side, all equal to the dense float64 ones. Every tensor is a slice of a larger one, grouped heads, ALiBi."""
    torch.manual_seed(0)
    wide = [torch.randn(2, heads, 90, 48, dtype=torch.float64).to(dtype).double() for heads in (4, 2, 2, 4)]
    q, k, v, do = (x[:, :, 10:80, 8:40] for x in wide)
    at = torch.arange(70, dtype=torch.int32, device=device)
    slopes = torch.tensor([0.5, 0.3, 0.1, 0.02], dtype=torch.float64)
    out, lse, *want = dense_outputs_and_gradients((q, k, v), (at.cpu(), at.cpu(), slopes, None, None),
                                                  (do, torch.zeros(2, 4, 70, dtype=torch.float64)))
    state = torch.promote_types(dtype, torch.float32)
    q, k, v, out, do = (x.to(device, dtype) for x in (q, k, v, out, do))
    lse = torch.stack([lse, lse], -1).to(device, state)[..., 0]                  # strided
    out = LAYOUTS["transposed"](out)
    parts = [function(q, k[:, :, keys], v[:, :, keys], out, lse, do, at, at[keys], slopes.to(device, state))
             for keys in (slice(0, 40), slice(40, 70))]
    dq, dk, dv = parts[0][0] + parts[1][0], *(torch.cat(x, 2) for x in list(zip(*parts))[1:])
    assert dq.dtype == dtype
    assert_close([x.cpu() for x in (dq, dk, dv)], want, tolerance, ("dq", "dk", "dv"))


def assert_state_is_float32(scan):
    """1,000 steps of 1e-3 on a state near 1: in bfloat16 each would be lost."""
    x = torch.full((1, 1000, 16), 1e-3).bfloat16()
    x[:, 0] = 1
    h = scan(torch.ones_like(x), x, 1000)
    assert h.dtype == torch.bfloat16 and abs(h[0, -1, 0].item() - 2) < 0.02


RAT_NAMES = ("out", "k_ends", "v_ends", "dq", "dk", "dv", "dg", "dz", "dbias")


def dense_rat(q, k, v, g, z, bias, chunk, cos=None, sin=None):
    """rat from its equations, token by token: out, k_ends, v_ends."""
    (_, T, G, D), H = q.shape, v.size(2)
    turned = lambda x, t: x if cos is None else x * cos[t] + x.roll(D // 2, -1) * sin[t]
    outs, ends = [], []                                     # ends: (rotated key, key, value) of each finished chunk
    for t in range(T):
        if t % chunk == 0:
            sk = sv = torch.zeros_like(v[:, 0])
        gate = (g[:, t] + bias.view(H, D)).sigmoid()
        qt, kt = (x[:, t, [h % G for h in range(H)]] for x in (q, k))
        sk, sv = gate * sk + (1 - gate) * kt, gate * sv + (1 - gate) * v[:, t]
        own = (qt * sk).sum(-1)
        s = torch.stack([(turned(qt, t) * key).sum(-1) for key, *_ in ends] + [own]) / math.sqrt(D)
        values = torch.stack([value for *_, value in ends] + [sv])
        outs.append(z[:, t].sigmoid() * (s.softmax(0)[..., None] * values).sum(0))
        if (t + 1) % chunk == 0:
            ends.append((turned(sk, t), sk, sv))
    if T % chunk:
        ends.append((sk, sk, sv))
    return torch.stack(outs, 1), *(torch.stack([end[i] for end in ends], 1).detach() for i in (1, 2))


def rat_case(seed, T, chunk, tables, heads, D, dtype=torch.float64, device="cpu"):
    """Inputs of rat, slices of one projection: tensors (q, k, v, g, z, bias), arguments (chunk, cos, sin), and dout.
    tables: None, or what has an angle of its own: "chunk" or "token"."""
    (B, H, G), generator = heads, torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    q, k, v, g, z = normal(B, T, (2 * G + 3 * H) * D).to(device, dtype).split([G * D] * 2 + [H * D] * 3, -1)
    wide = torch.promote_types(dtype, torch.float32)
    cos = sin = None
    if tables:
        angle = 0.5 * (torch.arange(T) // (chunk if tables == "chunk" else 1))[:, None] * normal(D // 2)
        cos = torch.cat([angle.cos(), angle.cos()], -1).to(device, wide)
        sin = torch.cat([-angle.sin(), angle.sin()], -1).to(device, wide)
    tensors = [x.unflatten(-1, (-1, D)) for x in (q, k, v, g, z)] + [normal(H * D).to(device, wide)]
    return tensors, (chunk, cos, sin), normal(B, T, H, D).to(device, dtype)


def rat_results(function, tensors, arguments, dout):
    """What function returns and the gradients of the tensors."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    out, *ends = function(*tensors, *arguments)
    assert out.requires_grad and not any(x.requires_grad for x in ends)
    return [x.detach() for x in (out, *ends, *torch.autograd.grad(out, tensors, dout))]


def compare_rat_on(function, tensors, arguments, dout, tolerance):
    """Assert that function and its gradients are the definition's in float64 on the same inputs, and that the states
    are float32's at least; returns function's."""
    dtype, wide = dout.dtype, torch.promote_types(dout.dtype, torch.float32)
    found = rat_results(function, tensors, arguments, dout)
    assert [x.dtype for x in found] == [dtype, wide, wide, *5 * [dtype], wide]
    exact = rat_results(dense_rat, *[[x.cpu().double() if isinstance(x, torch.Tensor) else x for x in xs]
                                     for xs in (tensors, arguments)], dout.cpu().double())
    assert_close(found, exact, tolerance, RAT_NAMES, floor=0.01)            # of a single token dq and dk are 0
    assert_close(found[1:3], exact[1:3], min(tolerance, 1e-5), RAT_NAMES[1:3])
    return found


def compare_rat(function, case, tolerance, dtype=torch.float64, device="cpu"):
    return compare_rat_on(function, *rat_case(0, *case, dtype=dtype, device=device), tolerance)


RAT_LENGTH, RAT_CHUNK = (1, 2, 15, 16, 17, 63, 64, 100), (1, 2, 3, 16, 64, 200)


def rat_cases():
    """(T, chunk, tables, heads, D) for every length, chunk and number of groups of four heads, or of two."""
    kinds = itertools.product(RAT_LENGTH, RAT_CHUNK, ((2, 4, 1), (1, 4, 2), (2, 2, 2)))
    return [(T, chunk, (None, "chunk", "token")[i % 7 % 3], heads, (8, 6)[i % 2]) for i, (T, chunk, heads) in
            enumerate(kinds)]


def assert_rat_states_are_float32(rat):
    """1,000 steps of 1e-3 of the way to 1: in bfloat16 the later ones would be lost."""
    ones = torch.ones(1, 1000, 1, 16).bfloat16()
    gate = torch.full((16,), math.log(999))
    out, k_end, v_end = rat(ones, ones, ones, 0 * ones, 100 * ones, gate, 1000)
    assert out.dtype == torch.bfloat16 and k_end.dtype == v_end.dtype == torch.float32
    assert all((x - (1 - 0.999 ** 1000)).abs().max() < 1e-4 for x in (k_end, v_end))
    assert abs(out[0, -1, 0, 0].item() - (1 - 0.999 ** 1000)) < 0.005
