"""What the tests of the kernels share: attention, the scan and rat written out, and cases."""
import functools
import itertools
import math
import random

import torch

FAR = 2 ** 30


def relative_rms(a, b, floor=1e-12):
    """Root mean square of a - b over b's, or over floor if that is more; infinities must agree, NaN
    never passes."""
    a, b = a.double().cpu(), b.double().cpu()
    finite = b.isfinite()
    if not torch.equal(a[~finite], b[~finite]):
        return math.inf
    if not finite.any():
        return 0.0
    a, b = a[finite], b[finite]
    error = (a - b).square().mean().sqrt() / max(b.square().mean().sqrt().item(), floor)
    return math.inf if error.isnan() else error.item()


def assert_close(found, expected, tolerance, names=("out", "lse", "dq", "dk", "dv"), floor=1e-12):
    for name, a, b in zip(names, found, expected, strict=True):
        assert a.shape == b.shape, name
        error = relative_rms(a, b, floor)
        assert error <= tolerance, (name, error)


def moved(xs, *where):
    """The tensors among xs moved to a device or dtype, the rest as it is."""
    return [x.to(*where) if isinstance(x, torch.Tensor) else x for x in xs]


# Ways for a (B, H, T, D) to lie in memory that attend's own results never have.
LAYOUTS = {"transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
           "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
           "expanded": lambda x: x[..., :1].expand(x.shape),
           "offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
           "heads expanded": lambda x: x[:, :1].expand(x.shape)}


# ---- attend -------------------------------------------------------------------------------------

def dense_attend(q, k, v, q_pos=None, k_pos=None, slopes=None, window=None):
    """attend from its definition, with the whole score matrix; finite gradients of empty rows."""
    (_, H, Tq, D), Tk = q.shape, k.size(2)
    k, v = (x.repeat_interleave(H // x.size(1), 1) for x in (k, v))
    q_pos = torch.arange(Tq) if q_pos is None else q_pos.long().cpu()
    k_pos = torch.arange(Tk) if k_pos is None else k_pos.long().cpu()
    distance = (q_pos.view(-1, 1, Tq, 1) - k_pos.view(-1, 1, 1, Tk)).to(q.device)
    visible = (distance >= 0) & (distance < (FAR if window is None else window))
    s = q @ k.transpose(-1, -2) / math.sqrt(D)
    if slopes is not None:
        s = s - slopes.to(s)[:, None, None] * distance
    some = visible.any(-1, keepdim=True)
    s = torch.where(visible, s, torch.where(some, -math.inf, 0.0).to(s))    # empty: any scores
    out = torch.where(some, s.softmax(-1) @ v, 0)
    return out, torch.where(some[..., 0], s.logsumexp(-1), -math.inf)


def random_positions(rng, per_row, B, T, first, last):
    """Ascending int32 positions, with gaps and repetitions: one row, or one per batch row."""
    rows = [sorted(rng.choices(range(first, last + 1), k=T)) for _ in range(B if per_row else 1)]
    return torch.tensor(rows if per_row else rows[0], dtype=torch.int32)


def attend_case(seed, Tq, Tk, kind, window, slopes, heads, D, dtype=torch.float64, device="cpu"):
    """Inputs of attend: the tensors q, k, v, the other arguments, and the incoming gradients do,
    dlse. Some queries stand before every key, some keys are padding and hold NaN."""
    (B, H, G), rng = heads, random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    normal = lambda T, heads: draw(B, T, heads, D).to(device, dtype).transpose(1, 2)
    q, k, v, do = normal(Tq, H), normal(Tk, G), normal(Tk, G), normal(Tq, H)
    q_pos = k_pos = None
    if kind != "plain":
        q_pos = random_positions(rng, kind in ("per row", "queries per row"), B, Tq, -2, Tk)
        k_pos = random_positions(rng, kind in ("per row", "keys per row"), B, Tk, 0, Tk)
        if Tk > 2:
            k_pos[..., -2:] = FAR
            k[:, :, -2:] = v[:, :, -2:] = math.nan
        q_pos, k_pos = q_pos.to(device), k_pos.to(device)
    bias = torch.rand(H, generator=generator).to(device) if slopes else None
    dlse = draw(B, H, Tq).to(device, torch.promote_types(dtype, torch.float32))
    return (q, k, v), (q_pos, k_pos, bias, window), (do, dlse)


COLUMNS = [(1, 2, 63, 64, 65, 100), (1, 2, 63, 64, 65, 100),                # Tq, Tk
           ("plain", "shared", "per row", "keys per row", "queries per row"),
           (None, 1, 20), (False, True),                                    # window, slopes
           ((1, 2, 1), (2, 2, 2), (1, 4, 2), (4, 1, 1)),                    # B, H, G
           (16, 8, 64, 40, 100)]                                            # D


def pairs(case):
    """All pairs of values of a case, with their columns."""
    return {(i, j, case[i], case[j]) for j in range(len(case)) for i in range(j)}


@functools.cache
def covering_set(n=38):
    """n cases of attend that hold nearly every pair of values of two columns: each is the one of 300
    random cases with the most pairs that are new."""
    rng, cases, seen = random.Random(0), [], set()
    for _ in range(n):
        drawn = [tuple(map(rng.choice, COLUMNS)) for _ in range(300)]
        cases.append(max(drawn, key=lambda case: len(pairs(case) - seen)))
        seen |= pairs(cases[-1])
    return cases


def outputs_and_gradients(function, tensors, arguments, incoming):
    """out, lse and the gradients of the tensors; a NaN comes in through lse of empty rows."""
    tensors = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in tensors]
    out, lse = function(*tensors, *arguments)
    do, dlse = incoming
    dlse = torch.where(lse == -math.inf, math.nan, dlse.to(lse))
    grads = torch.autograd.grad((out, lse), tensors, (do.to(out), dlse))
    return [x.detach() for x in (out, lse, *grads)]


def dense_outputs_and_gradients(tensors, arguments, incoming):
    """The same from the definition in float64, with autograd's gradients; the NaN stay out."""
    tensors = [x.detach().cpu().double().nan_to_num(0).requires_grad_() for x in tensors]
    out, lse = dense_attend(*tensors, *moved(arguments, "cpu"))
    do, dlse = (x.cpu().double() for x in incoming)
    loss = (out * do).sum() + (torch.where(lse == -math.inf, 0, lse) * dlse).sum()
    return [x.detach() for x in (out, lse, *torch.autograd.grad(loss, tensors))]


def compare_attend_on(function, tensors, arguments, incoming, tolerance):
    """Assert that function and its gradients are the definition's; returns function's."""
    found = outputs_and_gradients(function, tensors, arguments, incoming)
    dtype, wide = tensors[0].dtype, torch.promote_types(tensors[0].dtype, torch.float32)
    assert [x.dtype for x in found] == [dtype, wide, dtype, dtype, dtype]
    assert_close(found, dense_outputs_and_gradients(tensors, arguments, incoming), tolerance)
    return found


def compare_attend(function, case, seed, tolerance, dtype=torch.float64, device="cpu"):
    return compare_attend_on(function, *attend_case(seed, *case, dtype, device), tolerance)


def compare_attend_backward(function, dtype, tolerance, device="cpu"):
    """A softmax over 70 keys, its backward in two parts, of keys 0 to 39 and the rest: the dq add up,
    dk and dv stand side by side. Every tensor is a slice of a larger one, grouped heads, ALiBi."""
    torch.manual_seed(0)
    large = [torch.randn(2, heads, 90, 48).to(dtype).double() for heads in (4, 2, 2, 4)]
    q, k, v, do = (x[:, :, 10:80, 8:40] for x in large)
    at = torch.arange(70, dtype=torch.int32, device=device)
    slopes = torch.tensor([0.5, 0.3, 0.1, 0.02], dtype=torch.float64)
    no_dlse = torch.zeros(2, 4, 70, dtype=torch.float64)
    out, lse, *want = dense_outputs_and_gradients((q, k, v), (at, at, slopes, None), (do, no_dlse))
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v, out, do = (x.to(device, dtype) for x in (q, k, v, out, do))
    lse = torch.stack([lse, lse], -1).to(device, wide)[..., 0]              # strided
    out, slopes = LAYOUTS["transposed"](out), slopes.to(device, wide)
    parts = [function(q, k[:, :, keys], v[:, :, keys], out, lse, do, at, at[keys], slopes)
             for keys in (slice(0, 40), slice(40, 70))]
    dqs, dks, dvs = zip(*parts)
    assert dqs[0].dtype == dtype
    found = sum(dqs), torch.cat(dks, 2), torch.cat(dvs, 2)
    assert_close(found, want, tolerance, ("dq", "dk", "dv"))


# ---- scan ---------------------------------------------------------------------------------------

def loop_scan(g, x, chunk, h0=None):
    """scan from its definition, position by position."""
    state = torch.zeros_like(x[:, 0]) if h0 is None else h0
    states = []
    for t in range(x.size(1)):
        if t and t % chunk == 0:
            state = torch.zeros_like(state)
        state = g[:, t] * state + x[:, t]
        states.append(state)
    return torch.stack(states, 1)


def compare_scan(function, T, C, chunk, start, tolerance, dtype=torch.float64, device="cpu"):
    """Assert that function and its gradients are the loop's, in float64, on the same inputs."""
    generator = torch.Generator().manual_seed(T)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
    inputs = [normal(2, T, C).sigmoid(), normal(2, T, C)] + [normal(2, C)] * start
    dh, results = normal(2, T, C), []
    for f, *where in ((function, device, dtype), (loop_scan, "cpu", torch.float64)):
        g, x, *h0 = leaves = [y.to(*where).requires_grad_() for y in inputs]
        h = f(g, x, chunk, *h0)
        grads = torch.autograd.grad(h, leaves, dh.to(*where))
        results.append([h.detach(), *grads])
    assert {y.dtype for y in results[0]} == {dtype}
    assert_close(*results, tolerance, ("h", "dg", "dx", "dh0")[:len(results[0])])


def assert_state_is_float32(scan):
    """1,000 steps of 1e-3 on a state near 1: in bfloat16 each would be lost."""
    x = torch.full((1, 1000, 16), 1e-3).bfloat16()
    x[:, 0] = 1
    h = scan(torch.ones_like(x), x, 1000)
    assert h.dtype == torch.bfloat16 and abs(h[0, -1, 0].item() - 2) < 0.02


# ---- rat ----------------------------------------------------------------------------------------

RAT_NAMES = ("out", "k_ends", "v_ends", "dq", "dk", "dv", "dg", "dz", "dbias")


def dense_rat(q, k, v, g, z, bias, chunk, cos=None, sin=None):
    """rat from its equations, token by token: out, k_ends, v_ends."""
    (_, T, G, D), H = q.shape, v.size(2)
    rotated = lambda x, t: x if cos is None else x * cos[t] + x.roll(D // 2, -1) * sin[t]
    outs, ends = [], []                         # ends: (rotated key, key, value) of each chunk
    for t in range(T):
        if t % chunk == 0:
            sk = sv = torch.zeros_like(v[:, 0])
        gate = (g[:, t] + bias.view(H, D)).sigmoid()
        qt, kt = (x[:, t, [h % G for h in range(H)]] for x in (q, k))
        sk, sv = gate * sk + (1 - gate) * kt, gate * sv + (1 - gate) * v[:, t]
        s = [(rotated(qt, t) * key).sum(-1) for key, *_ in ends] + [(qt * sk).sum(-1)]
        p = (torch.stack(s) / math.sqrt(D)).softmax(0)
        y = (p[..., None] * torch.stack([value for *_, value in ends] + [sv])).sum(0)
        outs.append(z[:, t].sigmoid() * y)
        if (t + 1) % chunk == 0:
            ends.append((rotated(sk, t), sk, sv))
    if T % chunk:
        ends.append((sk, sk, sv))
    return torch.stack(outs, 1), *(torch.stack([end[i] for end in ends], 1).detach() for i in (1, 2))


def rat_case(T, chunk, tables, heads, D, dtype=torch.float64, device="cpu"):
    """Inputs of rat, slices of one projection: tensors (q, k, v, g, z, bias), arguments (chunk, cos,
    sin), and dout. tables: None, or what has an angle of its own: "chunk" or "token"."""
    (B, H, G), generator = heads, torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    projection = normal(B, T, (2 * G + 3 * H) * D).to(device, dtype)
    q, k, v, g, z = projection.split([G * D] * 2 + [H * D] * 3, -1)
    wide = torch.promote_types(dtype, torch.float32)
    cos = sin = None
    if tables:
        step = torch.arange(T) // (chunk if tables == "chunk" else 1)
        angle = 0.5 * step[:, None] * normal(D // 2)
        cos = torch.cat([angle.cos(), angle.cos()], -1).to(device, wide)
        sin = torch.cat([-angle.sin(), angle.sin()], -1).to(device, wide)
    bias, dout = normal(H * D).to(device, wide), normal(B, T, H, D).to(device, dtype)
    return [x.unflatten(-1, (-1, D)) for x in (q, k, v, g, z)] + [bias], (chunk, cos, sin), dout


def rat_results(function, tensors, arguments, dout):
    """What function returns and the gradients of the tensors."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    out, *ends = function(*tensors, *arguments)
    assert out.requires_grad and not any(x.requires_grad for x in ends)
    return [x.detach() for x in (out, *ends, *torch.autograd.grad(out, tensors, dout))]


def compare_rat_on(function, tensors, arguments, dout, tolerance):
    """Assert that function and its gradients are the definition's in float64 on the same inputs, and
    that the states are float32's at least; returns function's."""
    dtype, wide = dout.dtype, torch.promote_types(dout.dtype, torch.float32)
    found = rat_results(function, tensors, arguments, dout)
    assert [x.dtype for x in found] == [dtype, wide, wide, *5 * [dtype], wide]
    cpu = [[x.cpu().double() if isinstance(x, torch.Tensor) else x for x in xs]
           for xs in (tensors, arguments)]
    exact = rat_results(dense_rat, *cpu, dout.cpu().double())
    assert_close(found, exact, tolerance, RAT_NAMES, floor=0.01)    # a single token's dq, dk are 0
    assert_close(found[1:3], exact[1:3], min(tolerance, 1e-5), RAT_NAMES[1:3])
    return found


def compare_rat(function, case, tolerance, dtype=torch.float64, device="cpu"):
    return compare_rat_on(function, *rat_case(*case, dtype, device), tolerance)


def rat_with_shut_gates(T, heads, D, dtype):
    """A rat_case in which gates are exactly 0 and 1, and the output gate shuts head 1 out."""
    tensors, arguments, dout = rat_case(T, 6, "chunk", heads, D, dtype)
    tensors = [x.clone() for x in tensors]
    tensors[3][:, ::3], tensors[3][:, 1::5], tensors[4][:, :, 1] = 1000, -1000, -1000
    return tensors, arguments, dout


RAT_LENGTH, RAT_CHUNK = (1, 2, 15, 16, 17, 63, 64, 100), (1, 2, 3, 16, 64, 200)


def rat_cases():
    """(T, chunk, tables, heads, D) for every length, chunk and number of groups."""
    kinds = itertools.product(RAT_LENGTH, RAT_CHUNK, ((2, 4, 1), (1, 4, 2), (2, 2, 2)))
    return [(T, chunk, (None, "chunk", "token")[i % 7 % 3], heads, (8, 6)[i % 2])
            for i, (T, chunk, heads) in enumerate(kinds)]


def assert_rat_states_are_float32(rat):
    """1,000 steps of 1e-3 of the way to 1: in bfloat16 the later ones would be lost."""
    ones = torch.ones(1, 1000, 1, 16).bfloat16()
    gate = torch.full((16,), math.log(999))
    out, k_end, v_end = rat(ones, ones, ones, 0 * ones, 100 * ones, gate, 1000)
    assert out.dtype == torch.bfloat16 and k_end.dtype == v_end.dtype == torch.float32
    assert all((x - (1 - 0.999 ** 1000)).abs().max() < 1e-4 for x in (k_end, v_end))
    assert abs(out[0, -1, 0, 0].item() - (1 - 0.999 ** 1000)) < 0.005
