"""
The operators behind the fast paths of the models.

    attend(q, k, v, q_pos, k_pos, slopes, window)   softmax attention, masked by positions
    merge(out_a, lse_a, out_b, lse_b)               attention over two sets of keys made one
    scan(g, x, chunk, h0)                           h_t = g_t h_{t-1} + x_t inside chunks
    rat(q, k, v, g, z, bias, chunk, cos, sin)       RAT's layer: scan, attend and merge
    attend_backward(q, k, v, out, lse, do, ...)     attend's backward pass alone

This file says in plain PyTorch what each computes: the reference implementation. It runs
on a CPU, in float64 and where triton is missing. kernels_triton.py has the same in Triton
for GPUs; a line on stderr tells which of the two runs. merge has no Triton: torch.compile
fuses it. Each section below has what the models call first, then the reference
implementation, then its registration with torch.

Attention. s_ij = q_i . k_j / sqrt(D), with ALiBi - slope (q_pos_i - k_pos_j), and
lse_i = log sum_j e^{s_ij}, over the visible keys. Softmaxes over disjoint sets of keys,
a and b, become one by

    lse = log(e^{lse_a} + e^{lse_b})
    out = e^{lse_a - lse} out_a + e^{lse_b - lse} out_b

A side without visible keys has out = 0 and lse = -inf, so its weight is 0. Besides its
inputs, the backward pass needs out and lse only. With p_ij = e^{s_ij - lse_i}, and do
and dlse the gradients of out and lse,

    delta_i = do_i . out_i - dlse_i             dv_j = sum_i p_ij do_i
    ds_ij = p_ij (do_i . v_j - delta_i)         dk_j = sum_i ds_ij q_i / sqrt(D)
                                                dq_i = sum_j ds_ij k_j / sqrt(D)

Scan. Its backward pass dx_t = dh_t + g_{t+1} dx_{t+1} is a scan from right to left, and
dg_t = dx_t h_{t-1}.

RAT. With a gate a = sigmoid(g + bias), states k~_t = a_t k~_{t-1} + (1 - a_t) k_t, and
v~_t likewise, start from zero in each chunk. A query attends to the states at the ends
of earlier chunks and to its own state; with y that attention, out = sigmoid(z) y.
Backward, let p_t, ds_t belong to the own state, and dK, dV be what the end of a chunk
gets from later chunks, else 0:

    dk~_t = ds_t q_t / sqrt(D) + dK + a_{t+1} dk~_{t+1}         dk_t = (1 - a_t) dk~_t
    dv~_t = p_t dy_t + dV + a_{t+1} dv~_{t+1}                   dv_t = (1 - a_t) dv~_t
    dg_t = dk_t (k~_t - k_t) + dv_t (v~_t - v_t)                dy_t = sigmoid(z_t) dout_t
                                                dz_t = (1 - sigmoid(z_t)) out_t dout_t

Papers: Dao et al. 2022 (FlashAttention, 2205.14135); Milakov and Gimelshein 2018
(online softmax, 1805.02867); Press et al. 2022 (ALiBi, 2108.12409); Wei et al. 2025
(RAT, 2507.04416).

Shapes: B batch, H query heads, G key/value heads (in rat: groups of q and k), T, Tq, Tk
positions, D head size, C channels, n chunks. In code k~ is sk, v~ is sv.
"""
import functools
import importlib.util
import math
import os
import sys

import torch
import torch.nn.functional as F

from fused import apply_rope
from model_gpt import attention_bias

debug = False  # True: attend checks that positions ascend (this synchronizes with the GPU)
PAD_POS = NO_WINDOW = 2 ** 30  # the position of padding keys: after every query
HEAD_SIZES = (16, 32, 64, 128, 256)  # of the Triton kernels; others are padded
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def lse_dtype(x):
    """The dtype of sums: float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def heads_like(x, B, H, T, D, dtype=None):
    """An uninitialised (B, H, T, D), in memory (B, T, H, D) as projections want it."""
    return x.new_empty(B, T, H, D, dtype=dtype).transpose(1, 2)


# ---- which of the two implementations runs ----

@functools.cache
def announce(text):
    """Say once, on one rank, which code runs."""
    if os.environ.get("RANK", "0") == "0":
        print(f"kernels: {text}", file=sys.stderr)


@functools.cache
def runs_triton(device, dtype):
    """Whether Triton computes on tensors of this device and dtype. Says once which."""
    installed = importlib.util.find_spec("triton") is not None  # without importing it
    if installed and dtype != torch.float64:
        if os.environ.get("TRITON_INTERPRET") == "1":
            announce("Triton, interpreted")
            return True
        if device.type == "cuda":
            announce(f"Triton on {torch.cuda.get_device_name(device)}")
            return True
    why = ""
    if device.type == "cuda":
        why = " in float64" if installed else ": slow, triton is not installed"
    announce(f"plain PyTorch on {device.type}{why}")
    return False


def operator(schema, reference, fake):
    """The custom operator nanorecur::<name>: kernels_triton.<name> where Triton runs, else
    `reference`; `fake` gives torch.compile the outputs' shapes and strides."""
    name, _, rest = schema.partition("(")

    def run(first, *more):
        if not runs_triton(first.device, first.dtype):
            return reference(first, *more)
        import kernels_triton              # not before a GPU needs it
        with torch.cuda.device_of(first):  # Triton launches on the current device
            return getattr(kernels_triton, name)(first, *more)
    op = torch.library.custom_op(f"nanorecur::{name}", run, mutates_args=(), schema=f"({rest}")
    op.register_fake(fake)
    return op


def call(op, reference, arguments):
    """op(*arguments). Without gradients and tracing, the reference itself: an operator's
    overhead, a tenth of a millisecond, counts in decoding on a CPU."""
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    plain = all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in tensors)
    traced = torch.compiler.is_compiling() or not plain  # not plain: a FakeTensor, say
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if traced or grad or runs_triton(tensors[0].device, tensors[0].dtype):
        return op(*arguments)
    return reference(*arguments)


# ---- checks of arguments: each raises ValueError ----

def check_first(name, x, dims):
    """The tensor with which the others are compared; dims: the names of its dimensions."""
    if not isinstance(x, torch.Tensor) or x.dtype not in DTYPES:
        kind = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"{name} is {kind}: a tensor of {', '.join(map(str, DTYPES))} is needed")
    if x.dim() != len(dims):
        needed = ", ".join(dims)
        raise ValueError(f"{name} has shape {tuple(x.shape)}: ({needed}) is needed")
    if dims[-1] == "head size" and not 1 <= x.size(-1) <= HEAD_SIZES[-1]:
        raise ValueError(f"{name} has head size {x.size(-1)}: 1 to {HEAD_SIZES[-1]} is needed")


def check_tensor(name, x, first, shape, dtype=None):
    """x must have this shape (None: any size) and dtype (None: first's), on its device."""
    dtype = dtype or first.dtype
    if not isinstance(x, torch.Tensor) or x.dtype != dtype or x.device != first.device:
        kind = f"{x.dtype} on {x.device}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"{name} is {kind}: {dtype} on {first.device} is needed")
    same = len(shape) == x.dim() and all(n in (None, m) for n, m in zip(shape, x.shape))
    if not same:
        needed = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{name} has shape {tuple(x.shape)}: ({needed}) is needed")


def check_int(name, value):
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}: an int from 1 is needed")


def check_positions(name, pos, q, n, limit):
    """Positions of the n queries or keys; the debug switch also looks at their values."""
    per_row = isinstance(pos, torch.Tensor) and pos.dim() > 1
    check_tensor(name, pos, q, (q.size(0), n) if per_row else (n,), torch.int32)
    if debug:
        if not (pos.diff(dim=-1) >= 0).all():
            raise ValueError(f"{name} must ascend along its last dimension")
        inside = (pos > -PAD_POS // 2) & (pos < PAD_POS // 2)
        if not (inside | (pos == limit)).all():
            raise ValueError(f"{name} must be between -2^29 and 2^29 (keys: or PAD_POS)")


# ---- attend ----

def attend(q, k, v, q_pos=None, k_pos=None, slopes=None, window=None):
    """Softmax attention whose mask is given by positions: query i attends to key j iff
    k_pos[j] <= q_pos[i] and, given a window, q_pos[i] - k_pos[j] < window.

    q (B, H, Tq, D), k and v (B, G, Tk, D), any strides, D <= 256. H is a multiple of G:
    query head h reads key head h // (H / G); rat uses h % G.
    q_pos (Tq,) or (B, Tq), k_pos (Tk,) or (B, Tk): int32, ascending, between -2^29 and
    2^29; None is 0, 1, 2, ... Padding keys stand at PAD_POS and are never visible, whatever
    they hold; padding queries repeat the last position. What other invisible keys hold
    must be finite.
    slopes (H,): ALiBi, -slopes[h] (q_pos[i] - k_pos[j]) is added to the scores; no
    gradient.

    Returns out (B, H, Tq, D) in q's dtype and lse (B, H, Tq) in float32
    (float64 for float64), both differentiable, once, in q, k and v. Without visible
    keys out is 0 and lse -inf."""
    arguments = attend_arguments(q, k, v, q_pos, k_pos, slopes, window)
    return call(attend_op, attend_torch, arguments)


def attend_arguments(q, k, v, q_pos, k_pos, slopes, window):
    """The checked arguments as the operators take them."""
    check_first("q", q, ("batch", "heads", "positions", "head size"))
    B, H, Tq, D = q.shape
    check_tensor("k", k, q, (B, None, None, D))
    check_tensor("v", v, q, k.shape)
    G, Tk = k.shape[1:3]
    if G == 0 or H % G:
        raise ValueError(f"k has {G} heads: q's {H} are no multiple of it")
    if slopes is not None:
        check_tensor("slopes", slopes, q, (H,), getattr(slopes, "dtype", None))
    if window is not None:
        check_int("window", window)
    if q_pos is None and k_pos is not None:
        q_pos = torch.arange(Tq, device=q.device, dtype=torch.int32)
    if k_pos is None and q_pos is not None:
        k_pos = torch.arange(Tk, device=q.device, dtype=torch.int32)
    if q_pos is not None:
        check_positions("q_pos", q_pos, q, Tq, 0)
        check_positions("k_pos", k_pos, q, Tk, PAD_POS)
    window = NO_WINDOW if window is None else min(window, NO_WINDOW)
    return q, k, v, q_pos, k_pos, slopes, window


def attend_backward(q, k, v, out, lse, do, q_pos=None, k_pos=None, slopes=None, window=None):
    """dq, dk, dv of these keys' part in a softmax that may be over more keys. out
    (B, H, Tq, D) in q's dtype and lse (B, H, Tq) are those of the whole softmax, do is
    the gradient of out, the rest is as for attend. Over disjoint sets of keys the dq
    add up. Not differentiable."""
    q, k, v, *mask = attend_arguments(q, k, v, q_pos, k_pos, slopes, window)
    check_tensor("out", out, q, q.shape)
    check_tensor("lse", lse, q, q.shape[:3], lse_dtype(q))
    check_tensor("do", do, q, q.shape)
    arguments = q, k, v, out, lse, do, None, *mask  # None: lse has no gradient
    return call(attend_backward_op, attend_backward_torch, arguments)


QUERY_BLOCK, KEY_BLOCK = 256, 1024  # the largest block of the score matrix


def attend_torch(q, k, v, q_pos, k_pos, slopes, window):
    """out (B, H, Tq, D), lse (B, H, Tq), block by block; fully masked ones are left out."""
    q, k, v = prepared(q, k, v, k_pos)
    if is_plainly_causal(q, k, q_pos, slopes, window):
        out, lse = softmax_block(q, k, v, None, causal=True)
        return tokens_contiguous(out), lse.contiguous()
    dtype = lse_dtype(q)
    out = heads_like(q, *q.shape, dtype=dtype).zero_()
    lse = q.new_full(q.shape[:3], -math.inf, dtype=dtype)
    started = set()  # blocks of queries that have a result
    for rows, keys, bias in visible_blocks(q, k, q_pos, k_pos, slopes, window):
        part = softmax_block(q[:, :, rows], k[:, :, keys], v[:, :, keys], bias)
        if rows.start in started:
            part = merge_torch(out[:, :, rows], lse[:, :, rows], *part)
        out[:, :, rows], lse[:, :, rows] = part
        started.add(rows.start)
    return out.to(q.dtype), lse


def attend_backward_torch(q, k, v, out, lse, do, dlse, q_pos, k_pos, slopes, window):
    """dq, dk, dv, block by block; do (B, H, Tq, D), dlse (B, H, Tq) or None."""
    q, k, v = prepared(q, k, v, k_pos)
    if out.stride(-1) != 1:
        out = out.contiguous()  # the CPU operator would misread it
    if is_plainly_causal(q, k, q_pos, slopes, window):
        grads = softmax_block_backward(q, k, v, out, lse, do, dlse, None, causal=True)
        return tuple(map(tokens_contiguous, grads))
    dq, dk, dv = (heads_like(x, *x.shape, dtype=lse_dtype(q)).zero_() for x in (q, k, v))
    empty = lse == -math.inf
    lse = lse.masked_fill(empty, 0)
    if dlse is not None:
        dlse = dlse.masked_fill(empty, 0)  # it may be NaN there
    for rows, keys, bias in visible_blocks(q, k, q_pos, k_pos, slopes, window):
        q_i, out_i, lse_i, do_i = (x[:, :, rows] for x in (q, out, lse, do))
        dlse_i = None if dlse is None else dlse[:, :, rows]
        more = softmax_block_backward(
            q_i, k[:, :, keys], v[:, :, keys], out_i, lse_i, do_i, dlse_i, bias)
        for total, part, at in zip((dq, dk, dv), more, (rows, keys, keys)):
            total[:, :, at] += part
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def prepared(q, k, v, k_pos):
    """q, k, v as the CPU operator needs them: rows contiguous, and padding keys, which
    may hold anything, zero: 0 times NaN would be NaN."""
    if k_pos is not None and (k_pos >= PAD_POS).any():
        padding = (k_pos >= PAD_POS).view(-1, 1, k.size(2), 1)  # (B or 1, 1, Tk, 1)
        k, v = k.masked_fill(padding, 0), v.masked_fill(padding, 0)
    return [x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)]


def is_plainly_causal(q, k, q_pos, slopes, window):
    """Whether the CPU operator's causal mode is all that is needed: no blocks are made."""
    nothing_else = q_pos is None and slopes is None and window == NO_WINDOW
    return nothing_else and has_fused_softmax(q) and q.numel() and k.numel()


def tokens_contiguous(x):
    """x (B, H, T, D), in memory as heads_like has it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def has_fused_softmax(x):
    """Whether torch has attention that also returns lse for tensors like x: on a CPU."""
    return x.device.type == "cpu"


def softmax_block(q, k, v, bias, causal=False):
    """out and lse of queries (B, H, M, D) over keys (B, G, N, D), with an
    attention_bias or None. causal: query i attends to keys 0 .. i (only where
    has_fused_softmax)."""
    if has_fused_softmax(q):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias)
    else:
        k, v = expanded_heads(q, k, v)                    # (B, H, N, D)
        s = q.to(k.dtype) @ k.mT / math.sqrt(q.size(-1))  # (B, H, M, N)
        s = s if bias is None else s + bias
        lse = s.logsumexp(-1)                             # (B, H, M)
        finite = lse.masked_fill(lse == -math.inf, 0)
        out = torch.exp(s - finite[..., None]) @ v        # (B, H, M, D)
    if bias is not None:  # the CPU operator's lse of an empty row is 0
        lse = lse.masked_fill(bias.amax(-1) == -math.inf, -math.inf)
    return out, lse


def softmax_block_backward(q, k, v, out, lse, do, dlse, bias, causal=False):
    """What a block adds to dq, dk, dv, given out and lse (0 where empty) of whole rows."""
    D, scale = q.size(-1), 1 / math.sqrt(q.size(-1))
    if has_fused_softmax(q):
        if dlse is not None:
            # at least one more column: v gets a 1 and do gets dlse in it, so do . v grows by dlse
            q, k, v, out, do = (F.pad(x, (0, 16 - D % 16)) for x in (q, k, v, out, do))
            v[..., -1], do[..., -1] = 1, dlse
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)
        return tuple(x[..., :D] for x in grads)
    G = k.size(1)
    k, v = expanded_heads(q, k, v)                              # (B, H, N, D)
    q, out, do = (x.to(k.dtype) for x in (q, out, do))          # (B, H, M, D)
    s = q @ k.mT * scale                                        # (B, H, M, N)
    p = torch.exp((s if bias is None else s + bias) - lse[..., None])
    delta = (do * out).sum(-1) - (0 if dlse is None else dlse)  # (B, H, M)
    ds = p * (do @ v.mT - delta[..., None]) * scale             # (B, H, M, N)
    dk, dv = ds.mT @ q, p.mT @ do                               # of each query head
    return ds @ k, *(x.unflatten(1, (G, -1)).sum(2) for x in (dk, dv))


def expanded_heads(q, k, v):
    """k and v with a head for each query head, in the dtype of sums."""
    n = q.size(1) // k.size(1)
    return [x.repeat_interleave(n, 1).to(lse_dtype(q)) for x in (k, v)]


def positions(n, pos, device):
    """(B or 1, n) in int64; None is 0, 1, 2, ..."""
    return torch.arange(n, device=device)[None] if pos is None else torch.atleast_2d(pos.long())


def visible_blocks(q, k, q_pos, k_pos, slopes, window):
    """The blocks of the score matrix that hold all visible pairs: slices of the queries
    and of the keys, and their attention_bias, or None where all pairs are visible."""
    q_pos = positions(q.size(2), q_pos, q.device)
    k_pos = positions(k.size(2), k_pos, k.device)
    for rows, keys, masked in block_list(q_pos, k_pos, window, slopes is not None,
                                         has_fused_softmax(q)):
        bias = None
        if masked:
            k_at = k_pos[:, None, None, keys]
            bias = attention_bias(q_pos[:, rows], k_at, window, slopes, lse_dtype(q))
        yield rows, keys, bias


def block_list(q_pos, k_pos, window, biased, unlimited):
    """The same as (queries, keys, masked), for q_pos (B or 1, Tq), k_pos (B or 1, Tk).
    unlimited: a block without a mask may be wider than KEY_BLOCK.

    Positions ascend: the keys that some query of a block attends to are a range
    [first, last), those that all of its queries attend to a range [full, rest) in it."""
    Tq, Tk = q_pos.size(1), k_pos.size(1)
    if q_pos.numel() == 0 or k_pos.numel() == 0:
        return []
    few = Tq <= QUERY_BLOCK and Tk <= KEY_BLOCK
    if few and 4 * Tq * Tk <= QUERY_BLOCK * KEY_BLOCK:  # not worth the search
        return [(slice(0, Tq), slice(0, Tk), True)]
    # few queries of many keys: small blocks leave out much more
    size = min(QUERY_BLOCK, 64) if Tq <= min(Tk, KEY_BLOCK) else QUERY_BLOCK
    starts = list(range(0, Tq, size))
    ends = [min(start + size, Tq) for start in starts]
    low, high = q_pos[:, starts], q_pos[:, [end - 1 for end in ends]]  # (B or 1, blocks)
    # some query attends to low - window < k_pos <= high, all to high - window < k_pos <= low
    rows = max(len(q_pos), len(k_pos))
    limits = torch.cat([low - window, high, high - window, low], 1).expand(rows, -1)
    k_pos = k_pos.expand(rows, -1).contiguous()
    counts = torch.searchsorted(k_pos, limits.contiguous(), right=True)  # keys up to a limit
    counts = counts.view(rows, 4, -1)                               # (B or 1, limits, blocks)
    first, last = counts[:, 0].amin(0).tolist(), counts[:, 1].amax(0).tolist()
    full, rest = counts[:, 2].amax(0).tolist(), counts[:, 3].amin(0).tolist()
    return [(slice(start, end), keys, masked)
            for start, end, *spans in zip(starts, ends, first, full, rest, last)
            for keys, masked in key_blocks(*spans, biased, unlimited)]


def key_blocks(first, full, rest, last, biased, unlimited):
    """The keys [first, last) as (slice, masked), at most KEY_BLOCK wide. [full, rest)
    needs no mask; `unlimited` makes it one block. With a bias all blocks are masked;
    few keys are one."""
    if biased or rest <= full or last - first <= KEY_BLOCK:
        full = rest = first
    found = []
    for start, end, masked in ((first, full, True), (full, rest, False), (rest, last, True)):
        step = max(end - start, 1) if unlimited and not masked else KEY_BLOCK
        for low in range(start, end, step):
            found.append((slice(low, min(low + step, end)), masked))
    return found


def attend_save(ctx, inputs, output):
    q, k, v, q_pos, k_pos, slopes, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output, q_pos, k_pos, slopes)
    ctx.set_materialize_grads(False)


def attend_gradient(ctx, do, dlse):
    q, k, v, out, lse, *mask = ctx.saved_tensors
    do = torch.zeros_like(out) if do is None else do
    grads = attend_backward_op(q, k, v, out, lse, do, dlse, *mask, ctx.window)
    return *grads, None, None, None, None


attend_op = operator(
    "attend(Tensor q, Tensor k, Tensor v, Tensor? q_pos, Tensor? k_pos, Tensor? slopes,"
    " SymInt window) -> (Tensor, Tensor)", attend_torch,
    lambda q, *more: (heads_like(q, *q.shape), q.new_empty(q.shape[:3], dtype=lse_dtype(q))))
attend_backward_op = operator(
    "attend_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor do, Tensor? dlse,"
    " Tensor? q_pos, Tensor? k_pos, Tensor? slopes, SymInt window) -> (Tensor, Tensor, Tensor)",
    attend_backward_torch,
    lambda q, k, v, *more: tuple(heads_like(x, *x.shape) for x in (q, k, v)))
attend_op.register_autograd(attend_gradient, setup_context=attend_save)


# ---- merge ----

def merge(out_a, lse_a, out_b, lse_b):
    """out and lse of attention over two disjoint sets of keys, from those over each
    set: out_a, out_b (B, H, T, D) and lse_a, lse_b (B, H, T), as attend returns them. A
    side without visible keys (lse -inf) changes nothing and gets no gradient; two give
    0 and -inf."""
    check_first("out_a", out_a, ("batch", "heads", "positions", "head size"))
    check_tensor("out_b", out_b, out_a, out_a.shape)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_tensor(name, lse, out_a, out_a.shape[:3], lse_dtype(out_a))
    return merge_torch(out_a, lse_a, out_b, lse_b)


def merge_torch(out_a, lse_a, out_b, lse_b):
    """merge without its checks; autograd differentiates it."""
    lse, p_a, p_b = merge_weights(lse_a, lse_b)
    a = out_a.masked_fill((p_a == 0)[..., None], 0)  # an empty side may hold anything
    b = out_b.masked_fill((p_b == 0)[..., None], 0)
    out = p_a[..., None] * a + p_b[..., None] * b
    return out.to(out_a.dtype), lse


def merge_weights(lse_a, lse_b):
    """lse of both sides, and their weights e^{lse_a - lse}, e^{lse_b - lse}."""
    top = torch.maximum(lse_a, lse_b).detach()  # cancels out: no gradient
    empty = top == -math.inf                    # both sides are
    top = top.masked_fill(empty, 0)             # -inf - (-inf) would be NaN
    e_a, e_b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = (e_a + e_b).masked_fill(empty, 1)
    lse = (top + torch.log(total)).masked_fill(empty, -math.inf)
    return lse, e_a / total, e_b / total


# ---- scan ----

def scan(g, x, chunk, h0=None):
    """h_t = g_t h_{t-1} + x_t along T of g, x (B, T, C) -> h (B, T, C), in x's dtype.
    The state starts from h0 (B, C; None: zero), and from zero at each further chunk of
    `chunk` tokens.

    The state is float32 or better and rounded only in h: to go on from it without loss,
    scan in float32. Differentiable in g, x and h0. Products of successive g are formed:
    they must not overflow (gates of at most 1 never do)."""
    check_first("x", x, ("batch", "positions", "channels"))
    if x.numel() == 0:
        raise ValueError(f"x has shape {tuple(x.shape)}: nothing is there")
    check_tensor("g", g, x, x.shape)
    check_int("chunk", chunk)
    if h0 is not None:
        check_tensor("h0", h0, x, (x.size(0), x.size(2)))
    return call(scan_op, scan_torch, (g, x, chunk, h0))


def scan_torch(g, x, chunk, h0):
    """scan, all chunks at once: h (B, T, C)."""
    (B, _, C), chunk = x.shape, min(chunk, x.size(1))
    g, y = in_chunks(g, chunk), in_chunks(x, chunk)  # (B n, chunk, C)
    enter = None
    if h0 is not None:
        enter = y.new_zeros(B, len(y) // B, C)
        enter[:, 0] = h0             # the first chunk
        enter = enter.flatten(0, 1)  # (B n, C)
    h = recurrence(g, y, enter)
    return out_of_chunks(h, x).to(x.dtype).contiguous()


def scan_backward_torch(dh, g, h, chunk, h0):
    """dg, dx (B, T, C) and dh0 (B, C), of size 0 without h0."""
    B, chunk = len(h), min(chunk, h.size(1))
    gc, hc, dhc = (in_chunks(y, chunk) for y in (g, h, dh))     # (B n, chunk, C)
    dx = recurrence(gc, dhc, None, reverse=True)                # dh_t + g_{t+1} dx_{t+1}
    before = torch.cat([torch.zeros_like(hc[:, :1]), hc[:, :-1]], 1)  # h_{t-1}
    dh0 = h.new_empty(0)
    if h0 is not None:
        before.unflatten(0, (B, -1))[:, 0, 0] = h0
        n = len(gc) // B
        dh0 = (gc[::n, 0] * dx[::n, 0]).to(h0.dtype)  # g_0 dx_0 of the first chunks
    grads = dx * before, dx                           # dg_t = dx_t h_{t-1}
    return *(out_of_chunks(y, h).to(h.dtype).contiguous() for y in grads), dh0


def in_chunks(x, chunk):
    """x (B, T, C), in float32 or better, as (B n, chunk, C); zeros at the end."""
    x, missing = x.to(lse_dtype(x)), -x.size(1) % chunk
    x = F.pad(x, (0, 0, 0, missing)) if missing else x
    return x.reshape(-1, chunk, x.size(-1))


def out_of_chunks(x, like):
    """The inverse of in_chunks: a view of x in the shape of like, (B, T, ...)."""
    return x.reshape(len(like), -1, *like.shape[2:])[:, :like.size(1)]


STEPS = 64  # longer dimensions are scanned in two levels


def recurrence(g, x, h0, reverse=False, overwrite=False):
    """h_t = g_t h_{t-1} + x_t along dimension L of x (..., L, C), from h0 (..., C) or
    zero. g broadcasts to x. reverse: h_t = g_{t+1} h_{t+1} + x_t. overwrite: h may take
    x's place."""
    if x.size(-2) > STEPS:
        if reverse:  # the g that comes first meets a zero state
            return recurrence(g.flip(-2).roll(1, -2), x.flip(-2), h0).flip(-2)
        return long_recurrence(g, x, h0)
    h = x if overwrite else torch.empty_like(x)
    gs, xs, hs = (y.unbind(-2) for y in (g, x, h))  # L tensors (..., C) each
    if reverse:                                 # step t uses g_{t+1}, the first step none
        gs, xs, hs = gs[:1] + gs[:0:-1], xs[::-1], hs[::-1]
    state = h0
    for g_t, x_t, h_t in zip(gs, xs, hs):
        if state is None:
            state = h_t.copy_(x_t)
        else:
            state = torch.addcmul(x_t, g_t, state, out=h_t)  # x_t + g_t h_{t-1}
    return h


def long_recurrence(g, x, h0):
    """L as n chunks of about sqrt(L), scanned from zero. The states that enter the
    chunks are a recurrence too, and decay inside a chunk by the product of gates."""
    L = x.size(-2)
    size = math.isqrt(L - 1) + 1
    n = -(-L // size)
    g, x = (F.pad(y, (0, 0, 0, n * size - L)).unflatten(-2, (n, size)) for y in (g, x))
    h = recurrence(g, x, None)                               # (..., n, size, C)
    decay = g.cumprod(-2)
    ends = recurrence(decay[..., -1, :], h[..., -1, :], h0)  # (..., n, C)
    first = torch.zeros_like(ends[..., :1, :]) if h0 is None else h0[..., None, :]
    enter = torch.cat([first, ends[..., :-1, :]], -2)
    return torch.addcmul(h, decay, enter[..., None, :]).flatten(-3, -2)[..., :L, :]


def scan_save(ctx, inputs, output):
    g, _, ctx.chunk, h0 = inputs
    ctx.save_for_backward(g, output, h0)


def scan_gradient(ctx, dh):
    g, h, h0 = ctx.saved_tensors
    dg, dx, dh0 = scan_backward_op(dh, g, h, ctx.chunk, h0)
    return dg, dx, None, None if h0 is None else dh0


scan_op = operator("scan(Tensor g, Tensor x, SymInt chunk, Tensor? h0) -> Tensor", scan_torch,
                   lambda g, x, *more: x.new_empty(x.shape))
scan_backward_op = operator(
    "scan_backward(Tensor dh, Tensor g, Tensor h, SymInt chunk, Tensor? h0)"
    " -> (Tensor, Tensor, Tensor)", scan_backward_torch,
    lambda dh, g, h, chunk, h0: (h.new_empty(h.shape), h.new_empty(h.shape),
                                 h.new_empty(0 if h0 is None else h0.shape)))
scan_op.register_autograd(scan_gradient, setup_context=scan_save)


# ---- rat: the backward pass scans again, states are not stored ----

def rat(q, k, v, g, z, bias, chunk, cos=None, sin=None):
    """The RAT layer between its projections: a gated recurrence inside chunks, softmax
    attention over the states at the ends of earlier chunks and the token's own state,
    an output gate.

    q, k (B, T, G, D): queries and keys of G groups, head h uses group h % G.
    v, g, z (B, T, H, D): values and the logits of the forget and output gates, H a
    multiple of G.
    bias (H D,), cos, sin (T, D): in float32 (float64 for float64). bias is added to g.
    The tables are apply_rope's, for q and the states at the ends of chunks; they get no
    gradient.
    chunk: tokens a chunk. Any strides: slices of one projection are read where they
    are. D <= 256.

    Returns out (B, T, H, D), differentiable, once, in the first six arguments, and the
    states of keys (not rotated) and values at the last token of each chunk, the last of
    them maybe unfinished: k_ends, v_ends (B, n, H, D), in float32 (float64), without
    gradient."""
    check_first("q", q, ("batch", "positions", "groups", "head size"))
    B, T, G, D = q.shape
    if q.numel() == 0:
        raise ValueError(f"q has shape {tuple(q.shape)}: nothing is there")
    check_tensor("k", k, q, q.shape)
    check_tensor("v", v, q, (B, T, None, D))
    H = v.size(2)
    if H == 0 or H % G:
        raise ValueError(f"v has {H} heads: no multiple of q's {G} groups")
    check_tensor("g", g, q, v.shape)
    check_tensor("z", z, q, v.shape)
    check_tensor("bias", bias, q, (H * D,), lse_dtype(q))
    check_int("chunk", chunk)
    if cos is not None or sin is not None:
        check_tensor("cos", cos, q, (T, D), lse_dtype(q))
        check_tensor("sin", sin, q, (T, D), lse_dtype(q))
        if D % 2:
            raise ValueError(f"q has head size {D}: rotation needs an even one")
    out, _, *ends = call(rat_op, rat_torch, (q, k, v, g, z, bias, chunk, cos, sin))
    return out, *(x.detach() for x in ends)


def rat_torch(q, k, v, g, z, bias, chunk, cos, sin, attend=attend_torch, recur=recurrence):
    """rat: out (B, T, H, D), lse (B, H, T), k_ends, v_ends (B, n, H, D)."""
    T, dtype, chunk = q.size(1), lse_dtype(q), min(chunk, q.size(1))
    _, states = rat_states(k, v, g, bias, chunk, recur)
    sk, sv = (out_of_chunks(x, v) for x in states)  # (B, T, H, D)
    # attention over the ends, merged with the own state
    y, lse = attend(*end_attention(q, sk, sv, chunk, cos, sin))
    lse, *weights = merge_weights(lse, own_scores(q, sk).transpose(1, 2))
    p, p_own = (x.transpose(1, 2)[..., None] for x in weights)  # (B, T, H, 1)
    y = y.transpose(1, 2).to(dtype).mul_(p).addcmul_(sv, p_own)
    # the output gate
    out = y.mul_(torch.sigmoid(z.to(dtype))).to(q.dtype)
    ends = end_rows(T, chunk)
    k_ends, v_ends = (torch.cat([x[:, ends], x[:, -1:]], 1) for x in (sk, sv))
    return out.contiguous(), lse.contiguous(), k_ends, v_ends


def rat_backward_torch(q, k, v, g, z, bias, out, lse, dout, chunk, cos, sin,
                       attend_backward=attend_backward_torch, recur=recurrence):
    """dq, dk, dv, dg, dz, dbias; dout (B, T, H, D)."""
    (B, T, G, D), dtype, chunk = q.shape, lse_dtype(q), min(chunk, q.size(1))
    a, states = rat_states(k, v, g, bias, chunk, recur)
    sk, sv = (out_of_chunks(x, v) for x in states)  # (B, T, H, D)
    # the output gate, out = s y
    s, dout = torch.sigmoid(z.to(dtype)), dout.to(dtype)
    dy, dz = dout * s, dout * out
    delta = dz.sum(-1, keepdim=True)       # dy . y = dout . out
    dz.addcmul_(dz, s, value=-1)           # (1 - s) out dout
    s.clamp_(min=torch.finfo(dtype).tiny)  # where it was 0, dy is 0
    y = torch.div(out, s, out=s)
    # attention over the ends
    queries, keys, values, *mask = end_attention(q, sk, sv, chunk, cos, sin)
    y, do = (x.to(q.dtype).transpose(1, 2) for x in (y, dy))
    grads = attend_backward(queries, keys, values, y, lse, do, None, *mask)
    dqs, dkeys, dvalues = (x.transpose(1, 2) for x in grads)
    dq = rotated(by_group(dqs, G).sum(2, dtype=dtype), cos, sin, back=True)
    # attention to the own state
    p = torch.exp(own_scores(q, sk) - lse.transpose(1, 2))[..., None]  # (B, T, H, 1)
    ds = p * ((dy * sv).sum(-1, keepdim=True) - delta) / math.sqrt(D)
    dq += by_group(ds * sk, G).sum(2)
    # what each state gets: from its own token and, at ends, from later chunks
    dstates = torch.empty_like(states)
    dstates.view(2, B, -1, dstates.size(-1))[:, :, T:] = 0      # padding
    dsk, dsv = (out_of_chunks(x, v) for x in dstates)
    torch.mul(q.unsqueeze(2), by_group(ds, G), out=by_group(dsk, G))  # ds_t q_t
    torch.mul(dy, p, out=dsv)                                         # p_t dy_t
    ends = end_rows(T, chunk)
    dsk[:, ends] += rotated(dkeys, *end_tables(T, chunk, cos, sin), back=True)
    dsv[:, ends] += dvalues
    # back through the recurrence, and times (1 - a)
    dx = recur(a, dstates, None, reverse=True, overwrite=True).mul_(a.neg_().add_(1))
    dk, dv = (out_of_chunks(x, v) for x in dx)  # dk: of each head
    dg = (dk * sk).addcmul_(dv, sv).addcmul_(dv, v, value=-1)
    by_group(dg, G).addcmul_(by_group(dk, G), k.unsqueeze(2), value=-1)
    dbias = dg.sum((0, 1)).flatten().to(bias.dtype)
    dk = by_group(dk, G).sum(2)
    return *(x.to(q.dtype).contiguous() for x in (dq, dk, dv, dg, dz)), dbias


def rat_states(k, v, g, bias, chunk, recur):
    """The gate a (B n, chunk, H D), and k~ and v~ in one (2, B n, chunk, H D). recur:
    recurrence, or the same by other means."""
    k, v, g = (in_chunks(x.flatten(2), chunk) for x in (k, v, g))
    a = torch.add(g, bias).sigmoid_()
    x = a.new_empty(2, *a.shape)
    for x_i, y in zip(x, (k, v)):
        # the heads of all groups, which share k: (B n, chunk, H / G, G D)
        x_i, y, a_i = (z.unflatten(-1, (-1, k.size(-1))) for z in (x_i, y, a))
        torch.addcmul(y, a_i, y, value=-1, out=x_i)  # (1 - a) y
    return a, recur(a, x, None, overwrite=True)


def end_rows(T, chunk):
    """The last tokens of all chunks but the last, whose end no query reads."""
    return slice(chunk - 1, T - 1, chunk)


def end_tables(T, chunk, cos, sin):
    """The tables of the end_rows."""
    return [x if x is None else x[end_rows(T, chunk)] for x in (cos, sin)]


def end_attention(q, sk, sv, chunk, cos, sin):
    """The arguments of attention over the end_rows. Positions are numbers of chunks:
    token t attends to the ends of chunks 0 .. t // chunk - 1."""
    (_, T, G, _), H = q.shape, sk.size(2)
    ends = end_rows(T, chunk)
    keys = rotated(sk[:, ends], *end_tables(T, chunk, cos, sin))  # (B, n - 1, H, D)
    queries = rotated(q, cos, sin).repeat(1, 1, H // G, 1)        # (B, T, H, D)
    q_pos = torch.arange(T, device=q.device, dtype=torch.int32) // chunk - 1
    k_pos = torch.arange(keys.size(1), device=q.device, dtype=torch.int32)
    tensors = (x.to(q.dtype).transpose(1, 2) for x in (queries, keys, sv[:, ends]))
    return *tensors, q_pos, k_pos, None, NO_WINDOW


def own_scores(q, sk):
    """q_t . k~_t / sqrt(D), (B, T, H): a query and its own key have the same angle."""
    q = q.to(sk.dtype).unsqueeze(2)            # (B, T, 1, G, D)
    s = (q * by_group(sk, q.size(3))).sum(-1)  # (B, T, H / G, G)
    return s.flatten(2) / math.sqrt(q.size(-1))


def by_group(x, G):
    """Heads (B, T, H, ...) as (B, T, H / G, G, ...): head h uses group h % G."""
    return x.unflatten(2, (-1, G))


def rotated(x, cos, sin, back=False):
    """apply_rope to x (B, T, heads, D) with tables (T, D), or its inverse. None: no-op."""
    if cos is None:
        return x
    return apply_rope(x, cos[:, None], (-sin if back else sin)[:, None])


def rat_save(ctx, inputs, output):
    q, k, v, g, z, bias, ctx.chunk, cos, sin = inputs
    out, lse, *_ = output
    ctx.save_for_backward(q, k, v, g, z, bias, out, lse, cos, sin)
    ctx.set_materialize_grads(False)  # the ends have none: nothing to fill with zeros


def rat_gradient(ctx, dout, *ends):
    if dout is None:
        return (None,) * 9
    *tensors, cos, sin = ctx.saved_tensors
    grads = rat_backward_op(*tensors, dout, ctx.chunk, cos, sin)
    return *grads, None, None, None


def rat_shapes(q, k, v, g, z, bias, chunk, cos, sin):
    (B, T, H, D), dtype = v.shape, lse_dtype(q)
    ends = lambda: v.new_empty(B, (T + chunk - 1) // chunk, H, D, dtype=dtype)
    return v.new_empty(v.shape), q.new_empty(B, H, T, dtype=dtype), ends(), ends()


rat_op = operator(
    "rat(Tensor q, Tensor k, Tensor v, Tensor g, Tensor z, Tensor bias, SymInt chunk, Tensor? cos,"
    " Tensor? sin) -> (Tensor, Tensor, Tensor, Tensor)", rat_torch, rat_shapes)
rat_backward_op = operator(
    "rat_backward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor z, Tensor bias, Tensor out,"
    " Tensor lse, Tensor dout, SymInt chunk, Tensor? cos, Tensor? sin)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", rat_backward_torch,
    lambda *inputs: tuple(x.new_empty(x.shape) for x in inputs[:6]))
rat_op.register_autograd(rat_gradient, setup_context=rat_save)
