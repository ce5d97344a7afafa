"""
The operations behind the fast paths: attention over explicit positions, the gated scan inside chunks, and both in one.

    attend(q, k, v, q_pos, k_pos, slopes, window, scale) -> out, lse     softmax attention whose mask is positions
    merge(out_a, lse_a, out_b, lse_b) -> out, lse                        two partial softmaxes made one
    scan(g, x, chunk, h0, offset) -> h                                   h_t = g_t h_{t-1} + x_t inside chunks
    attend_backward(q, k, v, out, lse, do, ...) -> dq, dk, dv            attend's backward, for others written by hand
    rat(q, k, v, g, z, bias, chunk, cos, sin) -> out, k_ends, v_ends     recurrence in chunks, attention over their ends

Each exists twice: Triton kernels for GPUs, and a twin in plain PyTorch (attend_ref and so on), which is also what
runs on a CPU, in float64, and where triton is missing. One line on stderr tells which of the two runs.
All are differentiable, in every output but rat's ends, and torch.compile takes them. TRITON_INTERPRET=1 runs the
Triton code on CPU tensors, slowly, for tests.

The online softmax, once for all kernels below. Query i wants out_i = sum_j e^{s_ij} v_j / sum_j e^{s_ij} over the
keys it sees, and reads them tile by tile. It carries the largest score so far m, the sum l = sum_j e^{s_ij - m} and
acc = sum_j e^{s_ij - m} v_j. A new tile, after which the largest is m' >= m, rescales them by alpha = e^{m - m'}:

    l <- alpha l + sum_j e^{s_ij - m'}        acc <- alpha acc + sum_j e^{s_ij - m'} v_j        m <- m'

At the end out = acc / l and lse = m + log l = log sum_j e^{s_ij}. Two disjoint sets of keys, a and b, merge by
the same algebra: lse = log(e^{lse_a} + e^{lse_b}), out = e^{lse_a - lse} out_a + e^{lse_b - lse} out_b. A side that
saw no key has lse = -inf and out = 0, hence weight 0. The kernels keep scores in units of log 2: exp2 is the GPU's own.

Backward, from out and lse alone, with p_ij = e^{s_ij - lse_i} and the incoming do, dlse:

    dv_j = sum_i p_ij do_i       ds_ij = p_ij (do_i . v_j - delta_i)       delta_i = do_i . out_i - dlse_i
    dq_i = scale sum_j ds_ij k_j                                           dk_j = scale sum_i ds_ij q_i

Which tiles to read: positions ascend, so the keys that some query of a tile sees are one range, and inside it those
that all of its queries see are another. Tiles outside the first are never loaded; tiles inside the second need no
mask. Both ranges come from four binary searches over the positions, made by each program for itself.

rat is scan, attend and merge in one. With a gate a = sigmoid(g + bias) the states k~_t = a_t k~_{t-1} + (1 - a_t) k_t,
and v~ likewise, start from zero in each chunk; a token's own state opens the online softmax (m = q . k~ scale, l = 1,
acc = v~), the ends of earlier chunks follow, rotated like q, and out = sigmoid(z) acc / l. States are not stored but at
the ends: forward and backward scan them again, a tile of whole chunks at a time. Backward, with p_t, ds_t of the own
column, dK, dV of the ends, and delta_t = dout_t . out_t, which is the same on both sides of the gate z:

    do_t = sigmoid(z_t) dout_t        dz_t = (1 - sigmoid(z_t)) out_t dout_t
    Dk_t = scale ds_t q_t + [t ends a chunk] dK + a_{t+1} Dk_{t+1}        dk_t = (1 - a_t) Dk_t
    Dv_t =      p_t do_t  + [t ends a chunk] dV + a_{t+1} Dv_{t+1}        dv_t = (1 - a_t) Dv_t
    dg_t = dk_t (k~_t - k_t) + dv_t (v~_t - v_t)                          (a_{t+1} = 0 where t ends a chunk)

Papers: Milakov and Gimelshein 2018 (online softmax); Dao 2023 (FlashAttention-2); Press et al. 2022 (ALiBi); Wei et
al. 2025 (RAT).

Names: B batch, H query heads, G key/value heads, Tq, Tk queries and keys, D head size; M and N in a kernel are the
query and key rows of a tile; C channels of the scan. In rat G counts the groups of q and k, n chunks or their ends.
"""
import contextlib
import functools
import math
import os
import sys

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:         # no wheel for this system: the twins run
    triton = None

    class tl:
        constexpr = float

debug = False               # True: attend also checks that positions ascend (reads them: a GPU waits for it)
FAR = 2 ** 30               # position of padding keys, after every query; also the window that hides nothing
HEAD_SIZES = (16, 32, 64, 128, 256)     # of the kernels; others are padded to the next
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTERPRETED = tl.constexpr(triton is not None and triton.knobs.runtime.interpret)


LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


def jit(**options):
    """triton.jit where there is triton; else the function stays as it is and is never called."""
    return triton.jit(**options) if triton else lambda fn: fn


# One compiled variant serves all values of these, and any alignment of the pointers to one number a row.
ATTEND = dict(do_not_specialize=["Tq", "Tk", "H", "GROUP", "window", "biased", "q_pos_b", "k_pos_b"],
              do_not_specialize_on_alignment=["lse_ptr", "dlse_ptr", "delta_ptr", "q_pos_ptr", "k_pos_ptr",
                                              "slopes_ptr"])
MERGE = dict(do_not_specialize=["n", "T", "H"],
             do_not_specialize_on_alignment=["lse_ptr", "lse_a_ptr", "lse_b_ptr", "dlse_ptr", "dlse_a_ptr",
                                             "dlse_b_ptr"])
RAT = dict(do_not_specialize=["T", "n", "H", "G", "chunk"],
           do_not_specialize_on_alignment=["lse_ptr", "delta_ptr", "bias_ptr", "q_pos_ptr"])
SCAN = dict(do_not_specialize=["T", "chunk", "offset", "has_h0"], do_not_specialize_on_alignment=["h0_ptr", "dh0_ptr"])


# ---------------------------------------------------------------------------------------------------------------------
# attend: the Triton kernels
# ---------------------------------------------------------------------------------------------------------------------

@jit()
def dot(a, b, acc):
    """a b + acc, summed in float32 and without tf32."""
    if INTERPRETED:         # it would multiply bfloat16's bits as integers; exact all the same: products are float32's
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@jit()
def narrow(x, dtype: tl.constexpr):
    """float32 x as dtype, rounded to the nearest; the interpreter would cut bfloat16's low bits off."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(dtype)


@jit()
def positions_at(pos_ptr, at, n, beyond, PLAIN: tl.constexpr):
    """Positions of the rows `at` of n; `beyond` for rows past the end. PLAIN: the row's number is its position."""
    if PLAIN:
        pos = at
    else:
        pos = tl.load(pos_ptr + at, mask=at < n, other=0)
    return tl.where(at < n, pos, beyond)


@jit()
def count_upto(pos_ptr, n, limit, PLAIN: tl.constexpr):
    """How many of n ascending positions are <= limit."""
    if PLAIN:
        low = tl.minimum(tl.maximum(limit + 1, 0), n)
    else:
        low = tl.full((), 0, tl.int32)
        high = tl.full((), 0, tl.int32) + n
        while low < high:
            middle = (low + high) // 2
            if tl.load(pos_ptr + middle) <= limit:
                low = middle + 1
            else:
                high = middle
    return low


@jit()
def tile_spans(pos_ptr, n, some_low, all_low, all_high, some_high, biased, BLOCK: tl.constexpr, PLAIN: tl.constexpr):
    """Tiles first <= a <= z <= last of n ascending positions: [first, last) hold positions in (some_low, some_high],
    [a, z) hold only positions in (all_low, all_high] (none if biased: a bias needs every distance)."""
    first = count_upto(pos_ptr, n, some_low, PLAIN) // BLOCK
    last = tl.cdiv(count_upto(pos_ptr, n, some_high, PLAIN), BLOCK)
    a = tl.minimum(tl.cdiv(count_upto(pos_ptr, n, all_low, PLAIN), BLOCK), last)
    z = tl.maximum(count_upto(pos_ptr, n, all_high, PLAIN) // BLOCK, a)
    return tl.minimum(first, a), a, tl.where(biased != 0, a, z), last


@jit()
def side_tile(i, first, a, z):
    """Number i of the tiles that need a mask: first .. a, then z .. last."""
    return tl.where(i < a - first, first + i, z + i - (a - first))


@jit()
def load_rows(ptr, start, stride, there, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Rows start .. start + ROWS of a matrix with D columns: (ROWS, BLOCK_D), zeros past D and, where MASKED, in the
    rows that are not `there`, which are not read."""
    row, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    at = ptr + tl.cast(start, tl.int64) * stride + (row[:, None] * stride + d[None, :])
    if MASKED:
        return tl.load(at, mask=there[:, None] & (d < D)[None, :], other=0.0)
    else:
        return tl.load(at, mask=(d < D)[None, :], other=0.0)


@jit()
def load_one_each(ptr, rows, n, other, MASKED: tl.constexpr):
    """One number a row; `other` for rows past the end of n."""
    if MASKED:
        return tl.load(ptr + rows, mask=rows < n, other=other)
    else:
        return tl.load(ptr + rows)


@jit()
def store_rows(ptr, start, stride, n, D, x, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    row, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    at = ptr + tl.cast(start, tl.int64) * stride + (row[:, None] * stride + d[None, :])
    tl.store(at, narrow(x, ptr.dtype.element_ty), mask=(start + row < n)[:, None] & (d < D)[None, :])


@jit()
def scores(a, b, q_at, k_at, scale, slope, window, MASKED: tl.constexpr):
    """a b^T scale, in units of log 2. Where MASKED also ALiBi's bias, and -inf where the key is not seen; q_at and k_at
    broadcast to the tile, so that queries may be its rows or its columns."""
    s = dot(a, tl.trans(b), None) * scale
    if MASKED:
        distance = q_at - k_at
        s = tl.where((distance >= 0) & (distance < window), s - slope * distance, float("-inf"))
    return s


@jit()
def softmax_tile(q, q_at, m, l, acc, k_ptr, v_ptr, k_pos_ptr, start, k_t, v_t, Tk, D, DV, scale, slope, window,
                 PLAIN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """One tile of keys enters the online softmax (m, l, acc) of a tile of queries."""
    k_at = positions_at(k_pos_ptr, start + tl.arange(0, BLOCK_N), Tk, 1 << 30, PLAIN) if MASKED else 0
    k = load_rows(k_ptr, start, k_t, k_at < 1 << 30, D, BLOCK_N, BLOCK_D, MASKED)           # padding is not read
    s = scores(q, k, q_at[:, None], k_at[None, :] if MASKED else 0, scale, slope, window, MASKED)
    new_m = tl.maximum(m, tl.max(s, 1))
    shift = tl.where(new_m == float("-inf"), 0.0, new_m) if MASKED else new_m   # a row that has seen nothing yet
    alpha = tl.exp2(m - shift)
    p = tl.exp2(s - shift[:, None])
    v = load_rows(v_ptr, start, v_t, k_at < 1 << 30, DV, BLOCK_N, BLOCK_D, MASKED)
    acc = dot(narrow(p, v.dtype), v, acc * alpha[:, None])
    return new_m, l * alpha + tl.sum(p, 1), acc


@jit(**ATTEND)
def attend_forward_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, q_pos_ptr, k_pos_ptr, slopes_ptr,
                          q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, q_pos_b, k_pos_b,
                          Tq, Tk, D, DV, H, GROUP, window, scale, biased, PLAIN: tl.constexpr,
                          BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """A program: BLOCK_M queries of one head, over the keys they see. Strides: _b batch, _h head, _t position."""
    n_tiles = tl.cdiv(Tq, BLOCK_M)
    head, start = tl.program_id(0) // n_tiles, (n_tiles - 1 - tl.program_id(0) % n_tiles) * BLOCK_M   # longest first
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    k_ptr += b * k_b + h // GROUP * k_h
    v_ptr += b * v_b + h // GROUP * v_h
    q_pos_ptr += b * q_pos_b
    k_pos_ptr += b * k_pos_b
    slope = tl.load(slopes_ptr + h, mask=biased != 0, other=0.0) * LOG2E
    scale = scale * LOG2E

    rows = start + tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr + b * q_b + h * q_h, start, q_t, rows < Tq, D, BLOCK_M, BLOCK_D, True)
    q_at = positions_at(q_pos_ptr, rows, Tq, -(1 << 30), PLAIN)
    q_min = positions_at(q_pos_ptr, start, Tq, 0, PLAIN)
    q_max = positions_at(q_pos_ptr, tl.minimum(start + BLOCK_M, Tq) - 1, Tq, 0, PLAIN)
    first, a, z, last = tile_spans(k_pos_ptr, Tk, q_min - window, q_max - window, q_min, q_max, biased, BLOCK_N, PLAIN)

    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for n in range(a, z):                                           # every query sees all of these
        m, l, acc = softmax_tile(q, q_at, m, l, acc, k_ptr, v_ptr, k_pos_ptr, n * BLOCK_N, k_t, v_t, Tk, D, DV,
                                 scale, slope, window, PLAIN, BLOCK_N, BLOCK_D, False)
    for i in range(0, a - first + last - z):                        # the tiles on either side of them
        n = side_tile(i, first, a, z)
        m, l, acc = softmax_tile(q, q_at, m, l, acc, k_ptr, v_ptr, k_pos_ptr, n * BLOCK_N, k_t, v_t, Tk, D, DV,
                                 scale, slope, window, PLAIN, BLOCK_N, BLOCK_D, True)

    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    store_rows(out_ptr + b * o_b + h * o_h, start, o_t, Tq, DV, acc / l[:, None], BLOCK_M, BLOCK_D)
    lse = tl.where(empty, float("-inf"), (m + tl.log2(l)) * LN2)
    tl.store(lse_ptr + head.to(tl.int64) * Tq + rows, lse, mask=rows < Tq)


@jit()
def dq_tile(q, do, q_at, lse, delta, dq, k_ptr, v_ptr, k_pos_ptr, start, k_t, v_t, Tk, D, DV, scale, slope, window,
            PLAIN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """What one tile of keys adds to dq / scale."""
    k_at = positions_at(k_pos_ptr, start + tl.arange(0, BLOCK_N), Tk, 1 << 30, PLAIN) if MASKED else 0
    k = load_rows(k_ptr, start, k_t, k_at < 1 << 30, D, BLOCK_N, BLOCK_D, MASKED)
    v = load_rows(v_ptr, start, v_t, k_at < 1 << 30, DV, BLOCK_N, BLOCK_D, MASKED)
    s = scores(q, k, q_at[:, None], k_at[None, :] if MASKED else 0, scale, slope, window, MASKED)
    ds = tl.exp2(s - lse[:, None]) * (dot(do, tl.trans(v), None) - delta[:, None])
    return dot(narrow(ds, k.dtype), k, dq)


@jit(**ATTEND)
def attend_dq_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, do_ptr, dlse_ptr, delta_ptr, dq_ptr,
                     q_pos_ptr, k_pos_ptr, slopes_ptr, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t,
                     do_b, do_h, do_t, dq_b, dq_h, dq_t, q_pos_b, k_pos_b,
                     Tq, Tk, D, DV, H, GROUP, window, scale, biased, PLAIN: tl.constexpr,
                     BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """A program: dq of BLOCK_M queries of one head; also writes their delta, which attend_dkv_kernel reads."""
    n_tiles = tl.cdiv(Tq, BLOCK_M)
    head, start = tl.program_id(0) // n_tiles, (n_tiles - 1 - tl.program_id(0) % n_tiles) * BLOCK_M
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    k_ptr += b * k_b + h // GROUP * k_h
    v_ptr += b * v_b + h // GROUP * v_h
    q_pos_ptr += b * q_pos_b
    k_pos_ptr += b * k_pos_b
    slope = tl.load(slopes_ptr + h, mask=biased != 0, other=0.0) * LOG2E
    scale2 = scale * LOG2E

    rows = start + tl.arange(0, BLOCK_M)
    per_row = head.to(tl.int64) * Tq + rows
    do = load_rows(do_ptr + b * do_b + h * do_h, start, do_t, rows < Tq, DV, BLOCK_M, BLOCK_D, True)
    out = load_rows(out_ptr + b * o_b + h * o_h, start, o_t, rows < Tq, DV, BLOCK_M, BLOCK_D, True)
    lse = tl.load(lse_ptr + per_row, mask=rows < Tq, other=float("-inf"))
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1) - tl.load(dlse_ptr + per_row, mask=rows < Tq, other=0.0)
    empty = lse == float("-inf")
    delta = tl.where(empty, 0.0, delta)                             # whatever came in: dlse may be NaN there
    tl.store(delta_ptr + per_row, delta, mask=rows < Tq)
    lse = tl.where(empty, float("inf"), lse * LOG2E)   # p = 2^(s - inf) = 0

    q = load_rows(q_ptr + b * q_b + h * q_h, start, q_t, rows < Tq, D, BLOCK_M, BLOCK_D, True)
    q_at = positions_at(q_pos_ptr, rows, Tq, -(1 << 30), PLAIN)
    q_min = positions_at(q_pos_ptr, start, Tq, 0, PLAIN)
    q_max = positions_at(q_pos_ptr, tl.minimum(start + BLOCK_M, Tq) - 1, Tq, 0, PLAIN)
    first, a, z, last = tile_spans(k_pos_ptr, Tk, q_min - window, q_max - window, q_min, q_max, biased, BLOCK_N, PLAIN)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for n in range(a, z):
        dq = dq_tile(q, do, q_at, lse, delta, dq, k_ptr, v_ptr, k_pos_ptr, n * BLOCK_N, k_t, v_t, Tk, D, DV,
                     scale2, slope, window, PLAIN, BLOCK_N, BLOCK_D, False)
    for i in range(0, a - first + last - z):
        n = side_tile(i, first, a, z)
        dq = dq_tile(q, do, q_at, lse, delta, dq, k_ptr, v_ptr, k_pos_ptr, n * BLOCK_N, k_t, v_t, Tk, D, DV,
                     scale2, slope, window, PLAIN, BLOCK_N, BLOCK_D, True)
    store_rows(dq_ptr + b * dq_b + h * dq_h, start, dq_t, Tq, D, dq * scale, BLOCK_M, BLOCK_D)


@jit()
def dkv_tile(k, v, k_at, dk, dv, q_ptr, do_ptr, lse_ptr, delta_ptr, q_pos_ptr, start, q_t, do_t, Tq, D, DV,
             scale, slope, window,
             PLAIN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """What one tile of queries adds to dk / scale and dv. Keys are the rows here: p and ds come out transposed."""
    rows = start + tl.arange(0, BLOCK_M)
    q_at = positions_at(q_pos_ptr, rows, Tq, -(1 << 30), PLAIN) if MASKED else 0
    q = load_rows(q_ptr, start, q_t, rows < Tq, D, BLOCK_M, BLOCK_D, MASKED)
    lse = load_one_each(lse_ptr, rows, Tq, float("inf"), MASKED) * LOG2E
    if MASKED:
        lse = tl.where(lse == float("-inf"), float("inf"), lse)     # a query that sees nothing: p = 2^(s - inf) = 0
    s = scores(k, q, q_at[None, :] if MASKED else 0, k_at[:, None], scale, slope, window, MASKED)
    p = tl.exp2(s - lse[None, :])
    do = load_rows(do_ptr, start, do_t, rows < Tq, DV, BLOCK_M, BLOCK_D, MASKED)
    dv = dot(narrow(p, do.dtype), do, dv)
    delta = load_one_each(delta_ptr, rows, Tq, 0.0, MASKED)
    ds = p * (dot(v, tl.trans(do), None) - delta[None, :])
    dk = dot(narrow(ds, q.dtype), q, dk)
    return dk, dv


@jit(**ATTEND)
def attend_dkv_kernel(q_ptr, k_ptr, v_ptr, lse_ptr, do_ptr, delta_ptr, dk_ptr, dv_ptr, q_pos_ptr, k_pos_ptr, slopes_ptr,
                      q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
                      q_pos_b, k_pos_b, Tq, Tk, D, DV, H, GROUP, window, scale, biased, PLAIN: tl.constexpr,
                      BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """A program: what one query head adds to dk and dv of BLOCK_N keys (heads that share keys are summed outside)."""
    n_tiles = tl.cdiv(Tk, BLOCK_N)
    head, start = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles * BLOCK_N     # longest first
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    q_ptr += b * q_b + h * q_h
    do_ptr += b * do_b + h * do_h
    lse_ptr += head.to(tl.int64) * Tq
    delta_ptr += head.to(tl.int64) * Tq
    q_pos_ptr += b * q_pos_b
    k_pos_ptr += b * k_pos_b
    slope = tl.load(slopes_ptr + h, mask=biased != 0, other=0.0) * LOG2E
    scale2 = scale * LOG2E

    k_at = positions_at(k_pos_ptr, start + tl.arange(0, BLOCK_N), Tk, 1 << 30, PLAIN)
    k = load_rows(k_ptr + b * k_b + h // GROUP * k_h, start, k_t, k_at < 1 << 30, D, BLOCK_N, BLOCK_D, True)
    v = load_rows(v_ptr + b * v_b + h // GROUP * v_h, start, v_t, k_at < 1 << 30, DV, BLOCK_N, BLOCK_D, True)
    k_min = positions_at(k_pos_ptr, start, Tk, 0, PLAIN)
    k_max = positions_at(k_pos_ptr, tl.minimum(start + BLOCK_N, Tk) - 1, Tk, 0, PLAIN)
    first, a, z, last = tile_spans(q_pos_ptr, Tq, k_min - 1, k_max - 1, k_min + (window - 1), k_max + (window - 1),
                                   biased, BLOCK_M, PLAIN)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for n in range(a, z):
        dk, dv = dkv_tile(k, v, k_at, dk, dv, q_ptr, do_ptr, lse_ptr, delta_ptr, q_pos_ptr, n * BLOCK_M, q_t, do_t,
                          Tq, D, DV, scale2, slope, window, PLAIN, BLOCK_M, BLOCK_D, False)
    for i in range(0, a - first + last - z):
        n = side_tile(i, first, a, z)
        dk, dv = dkv_tile(k, v, k_at, dk, dv, q_ptr, do_ptr, lse_ptr, delta_ptr, q_pos_ptr, n * BLOCK_M, q_t, do_t,
                          Tq, D, DV, scale2, slope, window, PLAIN, BLOCK_M, BLOCK_D, True)
    store_rows(dk_ptr + b * dk_b + h * dk_h, start, dk_t, Tk, D, dk * scale, BLOCK_N, BLOCK_D)
    store_rows(dv_ptr + b * dv_b + h * dv_h, start, dv_t, Tk, DV, dv, BLOCK_N, BLOCK_D)


# ---------------------------------------------------------------------------------------------------------------------
# merge and scan: the Triton kernels
# ---------------------------------------------------------------------------------------------------------------------

@jit()
def merge_weights(lse_a_ptr, lse_b_ptr, at, valid):
    """lse of two sides together and each side's share e^{lse_a - lse}, e^{lse_b - lse}: 0 for an empty side."""
    lse_a = tl.load(lse_a_ptr + at, mask=valid, other=float("-inf"))
    lse_b = tl.load(lse_b_ptr + at, mask=valid, other=float("-inf"))
    top = tl.maximum(lse_a, lse_b)
    shift = tl.where(top == float("-inf"), 0.0, top)
    w_a, w_b = tl.exp(lse_a - shift), tl.exp(lse_b - shift)
    total = tl.where(top == float("-inf"), 1.0, w_a + w_b)
    return tl.where(top == float("-inf"), top, top + tl.log(total)), w_a / total, w_b / total


@jit()
def merge_program(n, T, H, D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """What a program of merge works on: BLOCK_M of the n = B T H rows, which lie in this order (offsets, mask), and
    their lse, which lie in the order B H T (offsets, mask)."""
    row, d = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    valid = row < n
    at = row // (T * H) * (T * H) + row % H * T + row // H % T
    return row[:, None] * D + d[None, :], valid[:, None] & (d < D)[None, :], at, valid


@jit(**MERGE)
def merge_forward_kernel(a_ptr, lse_a_ptr, b_ptr, lse_b_ptr, out_ptr, lse_ptr, n, T, H, D,
                         BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """out = p_a a + p_b b with shares p; what an empty side holds is not read."""
    here, mask, at, valid = merge_program(n, T, H, D, BLOCK_M, BLOCK_D)
    lse, p_a, p_b = merge_weights(lse_a_ptr, lse_b_ptr, at, valid)
    a = tl.load(a_ptr + here, mask=mask & (p_a > 0)[:, None], other=0.0).to(tl.float32)
    b = tl.load(b_ptr + here, mask=mask & (p_b > 0)[:, None], other=0.0).to(tl.float32)
    tl.store(out_ptr + here, narrow(p_a[:, None] * a + p_b[:, None] * b, out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + at, lse, mask=valid)


@jit(**MERGE)
def merge_backward_kernel(a_ptr, lse_a_ptr, b_ptr, lse_b_ptr, do_ptr, dlse_ptr, da_ptr, dlse_a_ptr, db_ptr, dlse_b_ptr,
                          n, T, H, D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """With shares p: da = p_a do, dlse_a = p_a (dlse + do . (a - out)), and the same for b; 0 for an empty side."""
    here, mask, at, valid = merge_program(n, T, H, D, BLOCK_M, BLOCK_D)
    _, p_a, p_b = merge_weights(lse_a_ptr, lse_b_ptr, at, valid)
    has_a, has_b = p_a > 0, p_b > 0
    a = tl.load(a_ptr + here, mask=mask & has_a[:, None], other=0.0).to(tl.float32)
    b = tl.load(b_ptr + here, mask=mask & has_b[:, None], other=0.0).to(tl.float32)
    do = tl.load(do_ptr + here, mask=mask & (has_a | has_b)[:, None], other=0.0).to(tl.float32)
    dlse = tl.load(dlse_ptr + at, mask=valid & (has_a | has_b), other=0.0)
    out = p_a[:, None] * a + p_b[:, None] * b
    tl.store(da_ptr + here, narrow(p_a[:, None] * do, da_ptr.dtype.element_ty), mask=mask)
    tl.store(db_ptr + here, narrow(p_b[:, None] * do, db_ptr.dtype.element_ty), mask=mask)
    tl.store(dlse_a_ptr + at, tl.where(has_a, p_a * (dlse + tl.sum(do * (a - out), 1)), 0.0), mask=valid)
    tl.store(dlse_b_ptr + at, tl.where(has_b, p_b * (dlse + tl.sum(do * (b - out), 1)), 0.0), mask=valid)


@jit()
def compose(g_a, x_a, g_b, x_b):
    """The map h -> g_a h + x_a followed by h -> g_b h + x_b is one such map: what an associative scan needs."""
    return g_a * g_b, g_b * x_a + x_b


@jit()
def scan_program(T, C, chunk, offset, BLOCK_C: tl.constexpr):
    """What a program of the scan works on: batch row, number of the chunk, its first and last + 1 token, channels."""
    n_blocks, n_chunks = tl.cdiv(C, BLOCK_C), tl.cdiv(T + offset, chunk)
    pid = tl.program_id(0)
    n, b = pid // n_blocks % n_chunks, (pid // n_blocks // n_chunks).to(tl.int64)
    begin, end = tl.maximum(n * chunk - offset, 0), tl.minimum((n + 1) * chunk - offset, T)
    return b, n, begin, end, pid % n_blocks * BLOCK_C + tl.arange(0, BLOCK_C)


@jit()
def row_of(x, row, BLOCK_T: tl.constexpr):
    """Row `row` of a tile (BLOCK_T, BLOCK_C)."""
    return tl.sum(tl.where((tl.arange(0, BLOCK_T) == row)[:, None], x, 0.0), 0)


@jit(**SCAN)
def scan_forward_kernel(g_ptr, x_ptr, h0_ptr, h_ptr, g_b, g_t, x_b, x_t, T, C, chunk, offset, has_h0,
                        BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    """A program: one chunk of BLOCK_C channels, in tiles of BLOCK_T tokens, each scanned in registers."""
    b, n, begin, end, c = scan_program(T, C, chunk, offset, BLOCK_C)
    carry = tl.load(h0_ptr + b * C + c, mask=(c < C) & (n == 0) & (has_h0 != 0), other=0.0).to(tl.float32)
    for start in range(begin, end, BLOCK_T):
        t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        mask = (t < end)[:, None] & (c < C)[None, :]
        g = tl.load(g_ptr + b * g_b + t[:, None] * g_t + c[None, :], mask=mask, other=1.0).to(tl.float32)
        x = tl.load(x_ptr + b * x_b + t[:, None] * x_t + c[None, :], mask=mask, other=0.0).to(tl.float32)
        g, x = tl.associative_scan((g, x), 0, compose)
        h = g * carry[None, :] + x
        carry = row_of(h, BLOCK_T - 1, BLOCK_T)         # past the end g = 1 and x = 0 hand the state on
        tl.store(h_ptr + (b * T + t[:, None]) * C + c[None, :], narrow(h, h_ptr.dtype.element_ty), mask=mask)


@jit(**SCAN)
def scan_backward_kernel(dh_ptr, g_ptr, h_ptr, h0_ptr, dg_ptr, dx_ptr, dh0_ptr, dh_b, dh_t, g_b, g_t,
                         T, C, chunk, offset, has_h0, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    """The scan backwards: dx_t = dh_t + g_{t+1} dx_{t+1}, dg_t = dx_t h_{t-1}, dh0 = g_0 dx_0 (first chunk)."""
    b, n, begin, end, c = scan_program(T, C, chunk, offset, BLOCK_C)
    h0 = tl.load(h0_ptr + b * C + c, mask=(c < C) & (n == 0) & (has_h0 != 0), other=0.0).to(tl.float32)
    carry = tl.zeros((BLOCK_C,), tl.float32)
    for i in range(0, tl.cdiv(end - begin, BLOCK_T)):
        start = begin + (tl.cdiv(end - begin, BLOCK_T) - 1 - i) * BLOCK_T
        t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        mask, later = (t < end)[:, None] & (c < C)[None, :], (t + 1 < end)[:, None] & (c < C)[None, :]
        g = tl.load(g_ptr + b * g_b + (t[:, None] + 1) * g_t + c[None, :], mask=later, other=0.0).to(tl.float32)
        dh = tl.load(dh_ptr + b * dh_b + t[:, None] * dh_t + c[None, :], mask=mask, other=0.0).to(tl.float32)
        g, dx = tl.associative_scan((g, dh), 0, compose, reverse=True)
        dx += g * carry[None, :]
        carry = row_of(dx, 0, BLOCK_T)
        here = (b * T + t[:, None]) * C + c[None, :]
        before = tl.load(h_ptr + here - C, mask=mask & (t > begin)[:, None], other=0.0).to(tl.float32)
        before = tl.where((t > begin)[:, None], before, h0[None, :])
        tl.store(dx_ptr + here, narrow(dx, dx_ptr.dtype.element_ty), mask=mask)
        tl.store(dg_ptr + here, narrow(dx * before, dg_ptr.dtype.element_ty), mask=mask)
    g = tl.load(g_ptr + b * g_b + tl.cast(begin, tl.int64) * g_t + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(dh0_ptr + b * C + c, narrow(g * carry, dh0_ptr.dtype.element_ty), mask=(c < C) & (n == 0) & (has_h0 != 0))


# ---------------------------------------------------------------------------------------------------------------------
# rat: the Triton kernels
# ---------------------------------------------------------------------------------------------------------------------

@jit()
def rat_program(T, H, chunk, BLOCK_M: tl.constexpr):
    """What a program works on: batch row, head, and a tile of as many whole chunks as fit into BLOCK_M rows: its first
    and last + 1 token, and which of its rows are there."""
    size = BLOCK_M // chunk * chunk
    n_tiles = tl.cdiv(T, size)
    head, start = tl.program_id(0) // n_tiles, (n_tiles - 1 - tl.program_id(0) % n_tiles) * size    # longest first
    end = tl.minimum(start + size, T)
    return (head // H).to(tl.int64), (head % H).to(tl.int64), start, end, start + tl.arange(0, BLOCK_M) < end


@jit()
def rat_gate(g_ptr, bias_ptr, start, g_t, there, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The forget gate of a tile, in float32."""
    d = tl.arange(0, BLOCK_D)
    g = load_rows(g_ptr, start, g_t, there, D, ROWS, BLOCK_D, True).to(tl.float32)
    return tl.sigmoid(g + tl.load(bias_ptr + d, mask=d < D, other=0.0)[None, :])


@jit()
def rat_state(gate, x, chunk, ROWS: tl.constexpr):
    """h_t = gate_t h_{t-1} + (1 - gate_t) x_t along the rows of a tile, from zero at each chunk's start."""
    first = tl.arange(0, ROWS) % chunk == 0
    x = x.to(tl.float32)
    _, h = tl.associative_scan((tl.where(first[:, None], 0.0, gate), x - gate * x), 0, compose)
    return h


@jit(**RAT)
def rat_ends_kernel(k_ptr, v_ptr, g_ptr, bias_ptr, k_ends_ptr, v_ends_ptr, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t,
                    e_b, e_h, e_t, T, D, H, G, chunk, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """A program: the states at the ends of some chunks, BLOCK_C channels of one head (axis 1 of the grid)."""
    b, h, start, end, there = rat_program(T, H, chunk, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C
    t, d = start + tl.arange(0, BLOCK_M), c + tl.arange(0, BLOCK_C)
    at = b * e_b + h * e_h + (t // chunk).to(tl.int64)[:, None] * e_t + d[None, :]
    mask = (there & ((t % chunk == chunk - 1) | (t == T - 1)))[:, None] & (d < D)[None, :]
    gate = rat_gate(g_ptr + b * g_b + h * g_h + c, bias_ptr + h * D + c, start, g_t, there, D - c, BLOCK_M, BLOCK_C)
    k = load_rows(k_ptr + b * k_b + h % G * k_h + c, start, k_t, there, D - c, BLOCK_M, BLOCK_C, True)
    tl.store(k_ends_ptr + at, rat_state(gate, k, chunk, BLOCK_M), mask=mask)
    v = load_rows(v_ptr + b * v_b + h * v_h + c, start, v_t, there, D - c, BLOCK_M, BLOCK_C, True)
    tl.store(v_ends_ptr + at, rat_state(gate, v, chunk, BLOCK_M), mask=mask)


@jit(**RAT)
def rat_forward_kernel(q_ptr, turned_ptr, k_ptr, v_ptr, g_ptr, z_ptr, bias_ptr, keys_ptr, values_ptr, out_ptr, lse_ptr,
                       q_b, q_h, q_t, turned_b, turned_h, turned_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t,
                       z_b, z_h, z_t, e_b, e_h, e_t, o_b, o_h, o_t, T, D, H, G, n, chunk, scale,
                       BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """A program: some chunks of one head. Their states are scanned in registers; a token's own state opens its online
    softmax, then come the ends (keys, values), of whose n chunk c sees the first c; turned is q, rotated."""
    b, h, start, end, there = rat_program(T, H, chunk, BLOCK_M)
    rows = start + tl.arange(0, BLOCK_M)
    gate = rat_gate(g_ptr + b * g_b + h * g_h, bias_ptr + h * D, start, g_t, there, D, BLOCK_M, BLOCK_D)
    q = load_rows(q_ptr + b * q_b + h % G * q_h, start, q_t, there, D, BLOCK_M, BLOCK_D, True)
    k = load_rows(k_ptr + b * k_b + h % G * k_h, start, k_t, there, D, BLOCK_M, BLOCK_D, True)
    scale = scale * LOG2E
    m = tl.sum(q.to(tl.float32) * rat_state(gate, k, chunk, BLOCK_M), 1) * scale
    l = tl.full((BLOCK_M,), 1.0, tl.float32)
    v = load_rows(v_ptr + b * v_b + h * v_h, start, v_t, there, D, BLOCK_M, BLOCK_D, True)
    acc = rat_state(gate, v, chunk, BLOCK_M)

    q = load_rows(turned_ptr + b * turned_b + h % G * turned_h, start, turned_t, there, D, BLOCK_M, BLOCK_D, True)
    q_at = tl.where(there, rows // chunk - 1, -(1 << 30))
    keys_ptr += b * e_b + h * e_h
    values_ptr += b * e_b + h * e_h
    every = start // chunk // BLOCK_N                               # tiles of ends that all of these queries see
    for i in range(0, every):
        m, l, acc = softmax_tile(q, q_at, m, l, acc, keys_ptr, values_ptr, keys_ptr, i * BLOCK_N, e_t, e_t, n, D, D,
                                 scale, 0.0, 1 << 30, True, BLOCK_N, BLOCK_D, False)
    for i in range(every, tl.cdiv((end - 1) // chunk, BLOCK_N)):
        m, l, acc = softmax_tile(q, q_at, m, l, acc, keys_ptr, values_ptr, keys_ptr, i * BLOCK_N, e_t, e_t, n, D, D,
                                 scale, 0.0, 1 << 30, True, BLOCK_N, BLOCK_D, True)

    z = load_rows(z_ptr + b * z_b + h * z_h, start, z_t, there, D, BLOCK_M, BLOCK_D, True)
    out = acc / l[:, None] * tl.sigmoid(z.to(tl.float32))
    store_rows(out_ptr + b * o_b + h * o_h, start, o_t, end, D, out, BLOCK_M, BLOCK_D)
    tl.store(lse_ptr + (b * H + h) * T + rows, (m + tl.log2(l)) * LN2, mask=there)


@jit(**RAT)
def rat_prepare_kernel(dout_ptr, out_ptr, z_ptr, do_ptr, dz_ptr, delta_ptr, dout_b, dout_h, dout_t, z_b, z_h, z_t,
                       o_b, o_h, o_t, T, D, H, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """A program: of BLOCK_M tokens of one head the gradients of the softmax's result (do) and of z, and delta, which is
    the same before and after the gate. do and dz lie in memory as out does."""
    b, h, start, end, there = rat_program(T, H, 1, BLOCK_M)
    dout = load_rows(dout_ptr + b * dout_b + h * dout_h, start, dout_t, there, D, BLOCK_M, BLOCK_D, True).to(tl.float32)
    z = load_rows(z_ptr + b * z_b + h * z_h, start, z_t, there, D, BLOCK_M, BLOCK_D, True)
    out = load_rows(out_ptr + b * o_b + h * o_h, start, o_t, there, D, BLOCK_M, BLOCK_D, True).to(tl.float32)
    gate = tl.sigmoid(z.to(tl.float32))
    store_rows(do_ptr + b * o_b + h * o_h, start, o_t, end, D, dout * gate, BLOCK_M, BLOCK_D)
    store_rows(dz_ptr + b * o_b + h * o_h, start, o_t, end, D, dout * out * (1 - gate), BLOCK_M, BLOCK_D)
    tl.store(delta_ptr + (b * H + h) * T + start + tl.arange(0, BLOCK_M), tl.sum(dout * out, 1), mask=there)


@jit(**RAT)
def rat_dq_kernel(turned_ptr, keys_ptr, values_ptr, lse_ptr, do_ptr, delta_ptr, dturned_ptr,
                  turned_b, turned_h, turned_t, e_b, e_h, e_t, o_b, o_h, o_t, T, D, H, G, n, chunk, scale,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """A program: what the ends add to the gradient of BLOCK_M rotated queries, for one head."""
    b, h, start, end, there = rat_program(T, H, 1, BLOCK_M)
    rows = start + tl.arange(0, BLOCK_M)
    q = load_rows(turned_ptr + b * turned_b + h % G * turned_h, start, turned_t, there, D, BLOCK_M, BLOCK_D, True)
    do = load_rows(do_ptr + b * o_b + h * o_h, start, o_t, there, D, BLOCK_M, BLOCK_D, True)
    lse = tl.load(lse_ptr + (b * H + h) * T + rows, mask=there, other=float("inf")) * LOG2E
    delta = tl.load(delta_ptr + (b * H + h) * T + rows, mask=there, other=0.0)
    q_at = tl.where(there, rows // chunk - 1, -(1 << 30))
    keys_ptr += b * e_b + h * e_h
    values_ptr += b * e_b + h * e_h
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    every = start // chunk // BLOCK_N
    for i in range(0, every):
        dq = dq_tile(q, do, q_at, lse, delta, dq, keys_ptr, values_ptr, keys_ptr, i * BLOCK_N, e_t, e_t, n, D, D,
                     scale * LOG2E, 0.0, 1 << 30, True, BLOCK_N, BLOCK_D, False)
    for i in range(every, tl.cdiv((end - 1) // chunk, BLOCK_N)):
        dq = dq_tile(q, do, q_at, lse, delta, dq, keys_ptr, values_ptr, keys_ptr, i * BLOCK_N, e_t, e_t, n, D, D,
                     scale * LOG2E, 0.0, 1 << 30, True, BLOCK_N, BLOCK_D, True)
    store_rows(dturned_ptr + b * o_b + h * o_h, start, o_t, end, D, dq * scale, BLOCK_M, BLOCK_D)


@jit(**RAT)
def rat_dkv_kernel(turned_ptr, keys_ptr, values_ptr, lse_ptr, do_ptr, delta_ptr, dkeys_ptr, dvalues_ptr, q_pos_ptr,
                   turned_b, turned_h, turned_t, e_b, e_h, e_t, o_b, o_h, o_t, T, D, H, G, n, chunk, scale,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """A program: the gradients of BLOCK_N ends of one head. The position of an end is the number of its chunk, that of
    a query (q_pos) the number of the last chunk it sees: token (j + 1) chunk is the first that sees end j."""
    n_tiles = tl.cdiv(n, BLOCK_N)
    head, start = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles * BLOCK_N     # longest first
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    turned_ptr += b * turned_b + h % G * turned_h
    do_ptr += b * o_b + h * o_h
    lse_ptr += (b * H + h) * T
    delta_ptr += (b * H + h) * T
    here = b * e_b + h * e_h
    k_at = positions_at(q_pos_ptr, start + tl.arange(0, BLOCK_N), n, 1 << 30, True)
    k = load_rows(keys_ptr + here, start, e_t, k_at < 1 << 30, D, BLOCK_N, BLOCK_D, True)
    v = load_rows(values_ptr + here, start, e_t, k_at < 1 << 30, D, BLOCK_N, BLOCK_D, True)
    first, last = (start + 1) * chunk // BLOCK_M, tl.cdiv(T, BLOCK_M)       # tiles of queries that see some end,
    a = tl.minimum(tl.cdiv(tl.minimum(start + BLOCK_N, n) * chunk, BLOCK_M), last)     # and from a to z every one
    z = tl.maximum(T // BLOCK_M, a)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for i in range(a, z):
        dk, dv = dkv_tile(k, v, k_at, dk, dv, turned_ptr, do_ptr, lse_ptr, delta_ptr, q_pos_ptr, i * BLOCK_M, turned_t,
                          o_t, T, D, D, scale * LOG2E, 0.0, 1 << 30, False, BLOCK_M, BLOCK_D, False)
    for i in range(0, a - first + last - z):
        dk, dv = dkv_tile(k, v, k_at, dk, dv, turned_ptr, do_ptr, lse_ptr, delta_ptr, q_pos_ptr,
                          side_tile(i, first, a, z) * BLOCK_M, turned_t, o_t, T, D, D, scale * LOG2E, 0.0, 1 << 30,
                          False, BLOCK_M, BLOCK_D, True)
    store_rows(dkeys_ptr + here, start, e_t, n, D, dk * scale, BLOCK_N, BLOCK_D)
    store_rows(dvalues_ptr + here, start, e_t, n, D, dv, BLOCK_N, BLOCK_D)


@jit()
def rat_back(gate, later, x, dh, chunk, ROWS: tl.constexpr):
    """The recurrence of rat_state backwards, from what each state gets by itself (dh); later: the next token's gate, 0
    at a chunk's end. Returns the states, dx, and what this adds to the gradient of the gate's logit."""
    h = rat_state(gate, x, chunk, ROWS)
    _, dh = tl.associative_scan((later, dh), 0, compose, reverse=True)
    dx = dh - gate * dh
    return h, dx, dx * (h - x.to(tl.float32))


@jit(**RAT)
def rat_own_kernel(q_ptr, k_ptr, v_ptr, g_ptr, bias_ptr, lse_ptr, do_ptr, delta_ptr, dk_ends_ptr, dv_ends_ptr,
                   dq_ptr, dk_ptr, dv_ptr, dg_ptr, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t,
                   e_b, e_h, e_t, o_b, o_h, o_t, T, D, H, G, n, chunk, scale,
                   BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """A program: for some chunks of one head what the tokens' own columns add to dq, then, back through the recurrence,
    dk (of this head), dv and dg. BLOCK_C channels at a time, twice: first for the sums over all channels, p and ds."""
    b, h, start, end, there = rat_program(T, H, chunk, BLOCK_M)
    q_ptr += b * q_b + h % G * q_h
    k_ptr += b * k_b + h % G * k_h
    v_ptr += b * v_b + h * v_h
    g_ptr += b * g_b + h * g_h
    bias_ptr += h * D
    o = b * o_b + h * o_h
    s, dp = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    for c in range(0, D, BLOCK_C):
        gate = rat_gate(g_ptr + c, bias_ptr + c, start, g_t, there, D - c, BLOCK_M, BLOCK_C)
        k = load_rows(k_ptr + c, start, k_t, there, D - c, BLOCK_M, BLOCK_C, True)
        q = load_rows(q_ptr + c, start, q_t, there, D - c, BLOCK_M, BLOCK_C, True)
        s += tl.sum(q.to(tl.float32) * rat_state(gate, k, chunk, BLOCK_M), 1)
        v = load_rows(v_ptr + c, start, v_t, there, D - c, BLOCK_M, BLOCK_C, True)
        do = load_rows(do_ptr + o + c, start, o_t, there, D - c, BLOCK_M, BLOCK_C, True)
        dp += tl.sum(do.to(tl.float32) * rat_state(gate, v, chunk, BLOCK_M), 1)
    rows = start + tl.arange(0, BLOCK_M)
    p = tl.exp(s * scale - tl.load(lse_ptr + (b * H + h) * T + rows, mask=there, other=float("inf")))
    ds = p * (dp - tl.load(delta_ptr + (b * H + h) * T + rows, mask=there, other=0.0)) * scale

    on = (rows + 1 < end) & ((rows + 1) % chunk != 0)               # the state goes on to the next token
    seen = there & (rows % chunk == chunk - 1) & (rows // chunk < n)        # attention sees this end
    e = b * e_b + h * e_h + (rows // chunk).to(tl.int64)[:, None] * e_t
    for c in range(0, D, BLOCK_C):
        d = c + tl.arange(0, BLOCK_C)
        mask = seen[:, None] & (d < D)[None, :]
        gate = rat_gate(g_ptr + c, bias_ptr + c, start, g_t, there, D - c, BLOCK_M, BLOCK_C)
        later = rat_gate(g_ptr + c, bias_ptr + c, start + 1, g_t, on, D - c, BLOCK_M, BLOCK_C)
        later = tl.where(on[:, None], later, 0.0)
        q = load_rows(q_ptr + c, start, q_t, there, D - c, BLOCK_M, BLOCK_C, True)
        k = load_rows(k_ptr + c, start, k_t, there, D - c, BLOCK_M, BLOCK_C, True)
        dh = ds[:, None] * q.to(tl.float32) + tl.load(dk_ends_ptr + e + d[None, :], mask=mask, other=0.0)
        sk, dk, dg = rat_back(gate, later, k, dh, chunk, BLOCK_M)
        store_rows(dq_ptr + o + c, start, o_t, end, D - c, ds[:, None] * sk, BLOCK_M, BLOCK_C)
        store_rows(dk_ptr + o + c, start, o_t, end, D - c, dk, BLOCK_M, BLOCK_C)
        do = load_rows(do_ptr + o + c, start, o_t, there, D - c, BLOCK_M, BLOCK_C, True)
        v = load_rows(v_ptr + c, start, v_t, there, D - c, BLOCK_M, BLOCK_C, True)
        dh = p[:, None] * do.to(tl.float32) + tl.load(dv_ends_ptr + e + d[None, :], mask=mask, other=0.0)
        _, dv, dg_v = rat_back(gate, later, v, dh, chunk, BLOCK_M)
        store_rows(dv_ptr + o + c, start, o_t, end, D - c, dv, BLOCK_M, BLOCK_C)
        store_rows(dg_ptr + o + c, start, o_t, end, D - c, dg + dg_v, BLOCK_M, BLOCK_C)


# ---------------------------------------------------------------------------------------------------------------------
# Launching them
# ---------------------------------------------------------------------------------------------------------------------

def heads_like(x, B, H, T, D, dtype=None):
    """An uninitialised (B, H, T, D) that lies in memory as (B, T, H, D), as projections want it."""
    return x.new_empty(B, T, H, D, dtype=dtype).transpose(1, 2)


def is_aligned(x):
    """Whether x's strides and last dimension are multiples of 16 elements and its start of 16 bytes: what the one
    compiled variant takes for granted."""
    return not (x.stride(-1) != 1 or x.size(-1) % 16 or x.data_ptr() % 16 or any(s % 16 for s in strides(x)))


def aligned(x):
    """x (B, H, T, D), or a copy that is_aligned, its head size padded with zeros."""
    if is_aligned(x):
        return x
    padded = heads_like(x, *x.shape[:3], x.size(-1) + -x.size(-1) % 16).zero_()
    padded[..., :x.size(-1)] = x
    return padded


def cropped(x, D):
    """The inverse of aligned's padding: x (B, H, T, at least D) with head size D, never a view of a larger tensor."""
    return x if x.size(-1) == D else heads_like(x, *x.shape[:3], D).copy_(x[..., :D])


def summed_over_groups(x, G, D):
    """x (B, H, T, at least D), a part for each query head, summed over those that share a key head: (B, G, T, D)."""
    if x.size(1) == G:
        return cropped(x, D)
    return heads_like(x, x.size(0), G, x.size(2), D).copy_(x[..., :D].unflatten(1, (G, -1)).sum(2))


def strides(*tensors):
    """Strides of all dimensions but the last, of each tensor; 0 where there is only one."""
    return [s if n > 1 else 0 for x in tensors for n, s in zip(x.shape[:-1], x.stride())]


def block_of(*sizes):
    """The head size a kernel is compiled for."""
    return next(n for n in HEAD_SIZES if n >= max(sizes))


# (BLOCK_M, BLOCK_N, warps, stages) for each of HEAD_SIZES
LARGE = {"forward": 4 * [(128, 64, 8, 3)] + [(128, 32, 8, 3)], "dq": 4 * [(128, 64, 8, 2)] + [(64, 32, 8, 2)],
         "dkv": 3 * [(64, 128, 8, 2)] + [(32, 128, 8, 3), (32, 64, 8, 2)],
         "rat": 3 * [(128, 64, 8, 2)] + [(64, 64, 8, 2), (64, 32, 8, 2)]}
LARGE_FLOAT32 = {"forward": [(128, 64, 8, 3), (64, 32, 8, 2), (64, 32, 8, 2), (32, 32, 8, 1), (32, 16, 8, 2)],
                 "dq": 2 * [(128, 64, 8, 2)] + [(64, 32, 8, 2), (16, 32, 8, 2), (32, 16, 8, 2)],
                 "dkv": [(32, 128, 8, 2), (32, 64, 8, 2), (32, 32, 8, 2), (16, 32, 8, 2), (32, 16, 8, 2)],
                 "rat": 2 * [(128, 64, 8, 2)] + [(64, 32, 8, 2), (64, 16, 8, 2), (64, 16, 16, 1)]}
SMALL = {"forward": 3 * [(128, 64, 8, 2)] + [(64, 64, 8, 2), (32, 32, 8, 2)],
         "dq": 3 * [(128, 64, 8, 2)] + [(64, 32, 8, 2), (32, 32, 8, 1)],
         "dkv": 3 * [(32, 128, 8, 2)] + [(32, 64, 8, 2), (32, 16, 8, 1)],
         "rat": 3 * [(128, 64, 8, 2)] + [(64, 32, 8, 2), (32, 32, 8, 1)]}
SMALL_FLOAT32 = {"forward": 2 * [(64, 64, 8, 2)] + [(64, 32, 8, 2), (32, 32, 8, 1), (32, 16, 8, 1)],
                 "dq": 2 * [(64, 64, 8, 2)] + [(64, 32, 8, 2), (32, 32, 4, 2), (16, 16, 8, 1)],
                 "dkv": [(64, 64, 8, 2), (32, 64, 8, 2), (32, 32, 8, 2), (32, 16, 8, 1), (16, 16, 4, 1)],
                 "rat": 2 * [(64, 64, 8, 2)] + [(64, 32, 8, 2), (64, 16, 8, 1), (32, 16, 8, 1)]}


def attend_options(kernel, head_size, dtype, large):
    """Tile sizes and warps of an attend kernel ("forward", "dq", "dkv") for a compiled head size; large: the chip has
    160 KB of shared memory a block (sm_80, sm_90), else 64 KB must do. What keeps registers from spilling."""
    wide = dtype == torch.float32                               # products without tensor cores: many registers
    table = LARGE_FLOAT32 if large and wide else LARGE if large else SMALL_FLOAT32 if wide else SMALL
    M, N, warps, stages = table[kernel][HEAD_SIZES.index(head_size)]
    return dict(BLOCK_M=M, BLOCK_N=N, num_warps=warps, num_stages=stages)


@functools.cache
def has_large_blocks(device):
    """Whether a block may use 160 KB of shared memory on this device."""
    if device.type != "cuda":
        return True                                             # the interpreter
    shared = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return torch.version.hip is None and shared >= 160 * 1024


def attend_launch(kernel, x, head_size):
    """attend_options for tensors like x."""
    return attend_options(kernel, head_size, x.dtype, has_large_blocks(x.device))


def on_device(x):
    """Triton launches on the current device: make it x's."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def mask_arguments(q, q_pos, k_pos, slopes, lse):
    """What the kernels take for the positions and slopes: (pointers, batch strides of the positions, biased)."""
    if q_pos is None:
        q_pos = k_pos = torch.empty(0, dtype=torch.int32, device=q.device)
    at = [p.contiguous() for p in (q_pos, k_pos)]
    bias = lse if slopes is None else slopes.to(torch.float32).contiguous()     # without slopes nothing is read
    return [*at, bias], [p.size(-1) if p.dim() == 2 else 0 for p in at], int(slopes is not None)


def attend_triton(q, k, v, q_pos, k_pos, slopes, window, scale):
    """attend by the kernel: out (B, H, Tq, DV), lse (B, H, Tq)."""
    (B, H, Tq, _), (G, Tk), Dv = q.shape, k.shape[1:3], v.size(-1)
    q, k, v = aligned(q), aligned(k), aligned(v)
    out = heads_like(q, B, H, Tq, v.size(-1))
    lse = q.new_empty(B, H, Tq, dtype=torch.float32)
    pointers, pos_strides, biased = mask_arguments(q, q_pos, k_pos, slopes, lse)
    D = block_of(q.size(-1), v.size(-1))
    launch = attend_launch("forward", q, D)
    grid = (triton.cdiv(Tq, launch["BLOCK_M"]) * B * H,)
    with on_device(q):
        attend_forward_kernel[grid](q, k, v, out, lse, *pointers, *strides(q, k, v, out), *pos_strides, Tq, Tk,
                                    q.size(-1), v.size(-1), H, H // G, window, scale, biased, PLAIN=q_pos is None,
                                    BLOCK_D=D, **launch)
    return cropped(out, Dv), lse


def attend_triton_backward(q, k, v, out, lse, do, dlse, q_pos, k_pos, slopes, window, scale):
    """dq, dk, dv by the two kernels; do (B, H, Tq, DV), dlse (B, H, Tq) or None."""
    (B, H, Tq, Dq), (G, Tk), Dv = q.shape, k.shape[1:3], v.size(-1)
    q, k, v, out, do = (aligned(x) for x in (q, k, v, out, do))
    lse = lse.contiguous()                                          # the kernels count on it; a caller's may be a slice
    dlse = torch.zeros_like(lse) if dlse is None else dlse.contiguous()
    delta = torch.empty_like(lse)
    dq, dk, dv = (heads_like(q, B, H, *x.shape[2:]) for x in (q, k, v))
    pointers, pos_strides, biased = mask_arguments(q, q_pos, k_pos, slopes, lse)
    D = block_of(q.size(-1), v.size(-1))
    sizes = [*pos_strides, Tq, Tk, q.size(-1), v.size(-1), H, H // G, window, scale, biased]
    with on_device(q):
        launch = attend_launch("dq", q, D)
        attend_dq_kernel[(triton.cdiv(Tq, launch["BLOCK_M"]) * B * H,)](
            q, k, v, out, lse, do, dlse, delta, dq, *pointers, *strides(q, k, v, out, do, dq), *sizes,
            PLAIN=q_pos is None, BLOCK_D=D, **launch)
        launch = attend_launch("dkv", q, D)
        attend_dkv_kernel[(triton.cdiv(Tk, launch["BLOCK_N"]) * B * H,)](
            q, k, v, lse, do, delta, dk, dv, *pointers, *strides(q, k, v, do, dk, dv), *sizes,
            PLAIN=q_pos is None, BLOCK_D=D, **launch)
    return cropped(dq, Dq), summed_over_groups(dk, G, Dq), summed_over_groups(dv, G, Dv)


def rows_of(x):
    """x (B, H, T, D) as rows (B T H, D), D padded to a multiple of 16: a view where it lies in memory so."""
    x = x.transpose(1, 2)
    if x.size(-1) % 16:
        return F.pad(x, (0, -x.size(-1) % 16)).contiguous()
    return x.contiguous() if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def merge_options(D):
    block = max(16, triton.next_power_of_2(D))
    return dict(BLOCK_M=max(1, 2048 // block), BLOCK_D=block, num_warps=4)


def merge_triton(out_a, lse_a, out_b, lse_b):
    """merge by the kernel."""
    B, H, T, D = out_a.shape
    a, b = rows_of(out_a), rows_of(out_b)
    out, lse = torch.empty_like(a), lse_a.new_empty(B, H, T)
    launch = merge_options(a.size(-1))
    with on_device(a):
        merge_forward_kernel[(triton.cdiv(B * T * H, launch["BLOCK_M"]),)](
            a, lse_a.contiguous(), b, lse_b.contiguous(), out, lse, B * T * H, T, H, a.size(-1), **launch)
    return cropped(out.transpose(1, 2), D), lse


def merge_triton_backward(out_a, lse_a, out_b, lse_b, do, dlse):
    """Gradients of the four inputs; do (B, H, T, D), dlse (B, H, T)."""
    B, H, T, D = out_a.shape
    a, b, do = rows_of(out_a), rows_of(out_b), rows_of(do)
    da, db = torch.empty_like(a), torch.empty_like(b)
    dlse_a, dlse_b = lse_a.new_empty(B, H, T), lse_a.new_empty(B, H, T)
    launch = merge_options(a.size(-1))
    with on_device(a):
        merge_backward_kernel[(triton.cdiv(B * T * H, launch["BLOCK_M"]),)](
            a, lse_a.contiguous(), b, lse_b.contiguous(), do, dlse.contiguous(), da, dlse_a, db, dlse_b,
            B * T * H, T, H, a.size(-1), **launch)
    return cropped(da.transpose(1, 2), D), dlse_a, cropped(db.transpose(1, 2), D), dlse_b


def scan_options(chunk):
    """Tiles of the scan: a short chunk is one tile; at most 2,048 elements (the interpreter takes them one by one)."""
    block = min(64, triton.next_power_of_2(chunk))
    return dict(BLOCK_T=block, BLOCK_C=16 if INTERPRETED else min(256, 2048 // block), num_warps=4)


def scan_rows(x):
    """x (B, T, C), or a copy that is_aligned, its channels padded with zeros; and its strides."""
    if not is_aligned(x):
        x = F.pad(x, (0, -x.size(-1) % 16)).contiguous()
    return x, *strides(x)


def no_gradient(h, h0):
    """The gradients of a scan over nothing: dg, dx and dh0, of size 0 without h0."""
    dx = torch.zeros_like(h, memory_format=torch.contiguous_format)
    return dx, dx.clone(), h.new_zeros(0 if h0 is None else h0.shape)


def scan_triton(g, x, chunk, h0, offset):
    """scan by the kernel: h (B, T, C)."""
    B, T, C = x.shape
    if x.numel() == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    chunk = min(chunk, offset + T)
    (g, *g_strides), (x, *x_strides) = scan_rows(g), scan_rows(x)
    h = x.new_empty(x.shape)
    state = h if h0 is None else F.pad(h0, (0, x.size(-1) - C)).contiguous()    # without h0 nothing is read
    launch = scan_options(chunk)
    grid = (B * triton.cdiv(T + offset, chunk) * triton.cdiv(x.size(-1), launch["BLOCK_C"]),)
    with on_device(x):
        scan_forward_kernel[grid](g, x, state, h, *g_strides, *x_strides, T, x.size(-1), chunk, offset,
                                  int(h0 is not None), **launch)
    return h[..., :C].contiguous()


def scan_triton_backward(dh, g, h, chunk, h0, offset):
    """dg, dx (B, T, C) and dh0 (B, C), of size 0 without h0."""
    B, T, C = h.shape
    if h.numel() == 0:
        return no_gradient(h, h0)
    chunk = min(chunk, offset + T)
    (dh, *dh_strides), (g, *g_strides), h = scan_rows(dh), scan_rows(g), scan_rows(h)[0].contiguous()
    dg, dx = torch.empty_like(h), torch.empty_like(h)
    state = h if h0 is None else F.pad(h0, (0, h.size(-1) - C)).contiguous()
    dh0 = dx if h0 is None else torch.empty_like(state)                         # nor written
    launch = scan_options(chunk)
    grid = (B * triton.cdiv(T + offset, chunk) * triton.cdiv(h.size(-1), launch["BLOCK_C"]),)
    with on_device(h):
        scan_backward_kernel[grid](dh, g, h, state, dg, dx, dh0, *dh_strides, *g_strides, T, h.size(-1), chunk, offset,
                                   int(h0 is not None), **launch)
    dh0 = h.new_empty(0) if h0 is None else dh0[:, :C].contiguous()
    return dg[..., :C].contiguous(), dx[..., :C].contiguous(), dh0


def rat_options(name, head_size, dtype, large):
    """Tiles of a kernel of rat ("ends", "forward", "prepare", "dq", "dkv", "own") for a compiled head size. The
    interpreter takes the elements of a scan one by one: small tiles for it, then a few tokens are many."""
    if name in ("dq", "dkv"):
        return attend_options(name, head_size, dtype, large)
    if name == "prepare":
        return dict(BLOCK_M=2048 // head_size, BLOCK_D=head_size, num_warps=4)
    if name in ("ends", "own"):
        return dict(BLOCK_M=16 if INTERPRETED else 128, BLOCK_C=16, num_warps=8)
    launch = attend_options("rat", head_size, dtype, large)
    return {**launch, **dict(BLOCK_M=16, BLOCK_N=16)} if INTERPRETED else launch


def rat_launch(name, x):
    """rat_options for tensors like x (B, H, T, D)."""
    return rat_options(name, block_of(x.size(-1)), x.dtype, has_large_blocks(x.device))


def rat_fits(q, chunk):
    """Whether a chunk fits into a tile of rat's kernels. Never silent."""
    longest = rat_launch("forward", q)["BLOCK_M"]
    if chunk > longest:
        announce(f"rat: chunks of {chunk} tokens, more than {longest}, are not fused: attend and scan, in Triton")
    return chunk <= longest


def rat_inputs(q, k, v, g, z, bias, cos, sin):
    """What the kernels read, with one head size: rotated q, then q, k, v, g, z as (B, heads, T, D), bias (H, D)."""
    D = q.size(-1)
    turned = q if cos is None else rotated(q, cos, sin)
    bias = bias.reshape(-1, D).contiguous() if D % 16 == 0 else F.pad(bias.reshape(-1, D), (0, -D % 16))
    return *(aligned(x.transpose(1, 2)) for x in (turned, q, k, v, g, z)), bias


def tokens_first(x, D):
    """x (B, H, T, at least D) as (B, T, H, D)."""
    return x.transpose(1, 2)[..., :D]


def end_operands(k, v, g, bias, D, chunk, cos, sin):
    """By rat_ends_kernel the states at the ends of all chunks, k_ends, v_ends (B, n, H, D), and what attention reads of
    them, all but the last: keys, rotated, and values, both (B, H, n - 1, D). k, v, g, bias as rat_inputs gives them."""
    B, H, T, _ = v.shape
    ends = [heads_like(v, B, H, triton.cdiv(T, chunk), v.size(-1), torch.float32) for _ in range(2)]
    launch = rat_launch("ends", v)
    grid = (triton.cdiv(T, launch["BLOCK_M"] // chunk * chunk) * B * H, triton.cdiv(v.size(-1), launch["BLOCK_C"]))
    rat_ends_kernel[grid](k, v, g, bias, *ends, *strides(k, v, g, ends[0]), T, v.size(-1), H, k.size(1), chunk,
                          **launch)
    k_ends, v_ends = (tokens_first(x, D) for x in ends)
    operands = rotated(k_ends[:, :-1], *end_tables(T, chunk, cos, sin)), v_ends[:, :-1]
    return k_ends, v_ends, *(aligned(x.to(v.dtype).contiguous().transpose(1, 2)) for x in operands)


def rat_triton(q, k, v, g, z, bias, chunk, cos, sin):
    """rat by the kernels: out (B, T, H, D), lse (B, H, T), k_ends, v_ends (B, n, H, D)."""
    (B, T, G, D), H, chunk = q.shape, v.size(2), min(chunk, q.size(1))
    if not rat_fits(q, chunk):
        return rat_plain(q, k, v, g, z, bias, chunk, cos, sin, attend_triton, recurrence_triton)
    with on_device(q):
        turned, q, k, v, g, z, bias = rat_inputs(q, k, v, g, z, bias, cos, sin)
        k_ends, v_ends, keys, values = end_operands(k, v, g, bias, D, chunk, cos, sin)
        out, lse = heads_like(v, *v.shape), v.new_empty(B, H, T, dtype=torch.float32)
        launch = rat_launch("forward", v)
        rat_forward_kernel[(triton.cdiv(T, launch["BLOCK_M"] // chunk * chunk) * B * H,)](
            q, turned, k, v, g, z, bias, keys, values, out, lse, *strides(q, turned, k, v, g, z, keys, out),
            T, v.size(-1), H, G, keys.size(2), chunk, 1 / math.sqrt(D), BLOCK_D=block_of(D), **launch)
    return tokens_first(out, D).contiguous(), lse, k_ends.contiguous(), v_ends.contiguous()


def rat_triton_backward(q, k, v, g, z, bias, out, lse, dout, chunk, cos, sin):
    """dq, dk, dv, dg, dz, dbias by the kernels; dout (B, T, H, D)."""
    (B, T, G, D), H, chunk = q.shape, v.size(2), min(chunk, q.size(1))
    if not rat_fits(q, chunk):
        return rat_plain_backward(q, k, v, g, z, bias, out, lse, dout, chunk, cos, sin, attend_triton_backward,
                                  recurrence_triton)
    with on_device(q):
        turned, q, k, v, g, z, bias = rat_inputs(q, k, v, g, z, bias, cos, sin)
        keys, values = end_operands(k, v, g, bias, D, chunk, cos, sin)[2:]
        out, dout = (aligned(x.transpose(1, 2)) for x in (out, dout))
        do, dz, dturned, dq, dk, dv, dg = (heads_like(v, *v.shape) for _ in range(7))
        dkeys, dvalues = (heads_like(keys, *keys.shape, dtype=torch.float32) for _ in range(2))
        lse = lse.contiguous()
        delta = torch.empty_like(lse)
        q_pos = torch.arange(T, device=q.device, dtype=torch.int32) // chunk - 1
        sizes = [T, v.size(-1), H, G, keys.size(2), chunk, 1 / math.sqrt(D)]
        cut = lambda rows: (triton.cdiv(T, rows) * B * H,)

        launch = rat_launch("prepare", v)
        rat_prepare_kernel[cut(launch["BLOCK_M"])](dout, out, z, do, dz, delta, *strides(dout, z, out), T, v.size(-1),
                                                   H, **launch)
        common = [*strides(turned, keys, do), *sizes]
        launch = rat_launch("dkv", v)
        rat_dkv_kernel[(triton.cdiv(keys.size(2), launch["BLOCK_N"]) * B * H,)](
            turned, keys, values, lse, do, delta, dkeys, dvalues, q_pos, *common, BLOCK_D=block_of(D), **launch)
        launch = rat_launch("dq", v)
        rat_dq_kernel[cut(launch["BLOCK_M"])](turned, keys, values, lse, do, delta, dturned, *common,
                                              BLOCK_D=block_of(D), **launch)
        dk_ends = rotated(tokens_first(dkeys, D), *end_tables(T, chunk, cos, sin), back=True)
        dk_ends = aligned(dk_ends.contiguous().transpose(1, 2))
        launch = rat_launch("own", v)
        rat_own_kernel[cut(launch["BLOCK_M"] // chunk * chunk)](
            q, k, v, g, bias, lse, do, delta, dk_ends, dvalues, dq, dk, dv, dg, *strides(q, k, v, g, dvalues, do),
            *sizes, **launch)
    dturned, dq, dk, dv, dg, dz = (tokens_first(x, D) for x in (dturned, dq, dk, dv, dg, dz))
    dturned, dq, dk = (by_group(x, G).sum(2, dtype=torch.float32) for x in (dturned, dq, dk))
    dq = rotated(dturned, cos, sin, back=True) + dq
    return *(x.to(v.dtype).contiguous() for x in (dq, dk, dv, dg, dz)), dg.sum((0, 1), dtype=torch.float32).flatten()


def recurrence_triton(g, x, h0, reverse=False, overwrite=False):
    """What `recurrence` does with h0 = None, for g (N, L, C), x (2, N, L, C), by the kernels of scan."""
    rows, L = x.flatten(0, 1), x.size(-2)
    g = g.repeat(2, 1, 1)
    h = scan_triton_backward(rows, g, rows, L, None, 0)[1] if reverse else scan_triton(g, rows, L, None, 0)
    return h.view_as(x)


def variants(large):
    """All that the launchers can choose on a chip, as (kernel, dtype, constants, launch options): what compiling ahead
    of time compiles. Everything else is a run-time argument: any length, strides and head sizes that are multiples of
    16 (the launchers see to it), positions, slopes and windows."""
    attends = dict(forward=attend_forward_kernel, dq=attend_dq_kernel, dkv=attend_dkv_kernel)
    rats = dict(forward=rat_forward_kernel, prepare=rat_prepare_kernel, dq=rat_dq_kernel, dkv=rat_dkv_kernel)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for D in HEAD_SIZES:
            for name, kernel in attends.items():
                for plain in (True, False):
                    yield kernel, dtype, dict(PLAIN=plain, BLOCK_D=D), attend_options(name, D, dtype, large)
            for kernel in (merge_forward_kernel, merge_backward_kernel):
                yield kernel, dtype, {}, merge_options(D)
            for name, kernel in rats.items():
                constants = {} if name == "prepare" else dict(BLOCK_D=D)
                yield kernel, dtype, constants, rat_options(name, D, dtype, large)
        for name, kernel in dict(ends=rat_ends_kernel, own=rat_own_kernel).items():
            yield kernel, dtype, {}, rat_options(name, None, dtype, large)
        for chunk in (1, 2, 4, 8, 16, 32, 64):
            for kernel in (scan_forward_kernel, scan_backward_kernel):
                yield kernel, dtype, {}, scan_options(chunk)


# ---------------------------------------------------------------------------------------------------------------------
# The twins in plain PyTorch
# ---------------------------------------------------------------------------------------------------------------------

QUERY_BLOCK, KEY_BLOCK = 256, 1024      # the largest piece of the score matrix, or of its mask, that the twin holds


def positions_of(n, pos, device):
    """Positions (B or 1, n) in int64; None is 0, 1, 2, ..."""
    return torch.arange(n, device=device)[None] if pos is None else pos.long().reshape(-1 if n else 1, n)


def pieces(q_pos, k_pos, window, biased, whole=True):
    """The pieces of the score matrix to compute: a list of (queries, keys, masked), slices, such that all other pairs
    are out of sight; not masked: every pair is seen. q_pos (B or 1, Tq), k_pos (B or 1, Tk); whole: pieces without a
    mask may be wider than KEY_BLOCK."""
    Tq, Tk = q_pos.size(1), k_pos.size(1)
    if q_pos.numel() == 0 or k_pos.numel() == 0:
        return []
    if Tq <= QUERY_BLOCK and Tk <= KEY_BLOCK and 4 * Tq * Tk <= QUERY_BLOCK * KEY_BLOCK:    # not worth the search
        return [(slice(0, Tq), slice(0, Tk), True)]
    # few queries of many keys: small steps skip much more of what is hidden
    block = min(QUERY_BLOCK, 64) if Tq <= min(Tk, KEY_BLOCK) else QUERY_BLOCK
    starts = range(0, Tq, block)
    low = q_pos[:, list(starts)]
    high = q_pos[:, [min(a + block, Tq) - 1 for a in starts]]
    limits = torch.stack([low - window, high, high - window, low])                      # (4, B or 1, blocks)
    rows = max(len(q_pos), len(k_pos))
    counts = torch.searchsorted(k_pos.expand(rows, -1).contiguous(),
                                limits.expand(-1, rows, -1).transpose(0, 1).flatten(1).contiguous(), right=True)
    counts = counts.view(rows, 4, -1)
    first, last = counts[:, 0].amin(0).tolist(), counts[:, 1].amax(0).tolist()
    a, z = counts[:, 2].amax(0).tolist(), counts[:, 3].amin(0).tolist()
    return [(slice(start, min(start + block, Tq)), keys, masked) for i, start in enumerate(starts)
            for keys, masked in key_pieces(first[i], a[i], z[i], last[i], biased, whole)]


def key_pieces(first, a, z, last, biased, whole):
    """The keys [first, last) of a block of queries, which all see [a, z), as (slice, masked): the middle in one piece
    if it may stay whole, others at most KEY_BLOCK wide; one piece where all is small."""
    if biased or z <= a or last - first <= KEY_BLOCK:
        a = z = first
    found = []
    for start, end, masked in ((first, a, True), (a, z, False), (z, last, True)):
        step = max(end - start, 1) if whole and not masked else KEY_BLOCK
        found += [(slice(low, min(low + step, end)), masked) for low in range(start, end, step)]
    return found


def piece_bias(q_pos, k_pos, slopes, window, dtype):
    """What is added to a piece's scores: ALiBi's bias, and -inf where the key is not seen: (B or 1, H or 1, M, N)."""
    distance = q_pos[:, None, :, None] - k_pos[:, None, None, :]
    hidden = (distance < 0) | (distance >= window)
    if slopes is None:
        bias = torch.zeros(distance.shape, dtype=dtype, device=q_pos.device)
    else:
        bias = -slopes.to(dtype)[:, None, None] * distance
    return bias.masked_fill_(hidden, -math.inf)


def has_fused_pieces(x):
    """Whether torch has an attention operator for tensors like x that also gives lse: the CPU's."""
    return x.device.type == "cpu"


def softmax_piece(q, k, v, bias, scale, causal=False):
    """Attention of queries (B, H, M, D) over keys (B, G, N, D): out and lse, bias None or as piece_bias gives it.
    causal: query i sees keys 0 to i (only where has_fused_pieces)."""
    if has_fused_pieces(q):
        q, k, v, size = *widened(q, k, v), v.size(-1)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias,
                                                                              scale=scale)
        out = out[..., :size]
    else:
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1).to(lse_dtype(q)) for x in (k, v))
        s = q.to(k.dtype) @ k.transpose(-2, -1) * scale
        s = s if bias is None else s + bias
        lse = s.logsumexp(-1)
        out = torch.exp(s - lse.masked_fill(lse == -math.inf, 0)[..., None]) @ v
    if bias is not None:                                            # the CPU operator's lse of an empty row is 0
        lse = lse.masked_fill(bias.amax(-1) == -math.inf, -math.inf)
    return out, lse


def softmax_piece_backward(q, k, v, out, lse, do, dlse, bias, scale, causal=False):
    """What a piece adds to dq, dk, dv, given the whole rows' out and lse (0 for an empty one); dlse may be None."""
    D, DV = q.size(-1), v.size(-1)
    if has_fused_pieces(q):
        # dlse as one more column: v gets a 1 and do gets dlse there, so that do . v grows by dlse
        column = dlse is not None
        q, k, v, out, do = widened(q, k, v, out, do, more=column)
        if column:
            v[..., -1], do[..., -1] = 1, dlse
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)
        return dq[..., :D], dk[..., :D], dv[..., :DV]
    G, dtype = k.size(1), lse_dtype(q)
    q, out, do = (x.to(dtype) for x in (q, out, do))
    k, v = (x.repeat_interleave(q.size(1) // G, 1).to(dtype) for x in (k, v))
    s = q @ k.transpose(-2, -1) * scale
    p = torch.exp((s if bias is None else s + bias) - lse[..., None])
    delta = (do * out).sum(-1) - (0 if dlse is None else dlse)
    ds = p * (do @ v.transpose(-2, -1) - delta[..., None]) * scale
    dk, dv = (x.unflatten(1, (G, -1)).sum(2) for x in (ds.transpose(-2, -1) @ q, p.transpose(-2, -1) @ do))
    return ds @ k, dk, dv


def widened(*tensors, more=False):
    """The tensors with one head size for all, which the CPU operator wants: zeros appended; more: at least one."""
    size = max(x.size(-1) for x in tensors)
    if more:
        size += 16 - size % 16
    return [F.pad(x, (0, size - x.size(-1))) if x.size(-1) < size else x for x in tensors]


def ready(q, k, v, k_pos):
    """q, k, v as the CPU operator needs them: the elements of a row side by side. What padding keys hold, which may be
    anything, becomes 0: 0 times NaN would be NaN."""
    if k_pos is not None and (k_pos >= FAR).any():
        k, v = (x.masked_fill((k_pos >= FAR).view(-1, 1, k.size(2), 1), 0) for x in (k, v))
    return [x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)]


def lse_dtype(x):
    """float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def is_torchs_own(q, k, q_pos, slopes, window):
    """Whether the CPU operator's causal mode is all that is asked for: then there are no pieces."""
    return has_fused_pieces(q) and q_pos is None and slopes is None and window == FAR and q.numel() and k.numel()


def laid_out(x):
    """x (B, H, T, D), in memory as heads_like has it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def attend_plain(q, k, v, q_pos, k_pos, slopes, window, scale):
    """attend piece by piece: out (B, H, Tq, DV), lse (B, H, Tq)."""
    q, k, v = ready(q, k, v, k_pos)
    if is_torchs_own(q, k, q_pos, slopes, window):
        out, lse = softmax_piece(q, k, v, None, scale, causal=True)
        return laid_out(out), lse.contiguous()
    (B, H, Tq, _), Tk, dtype = q.shape, k.size(2), lse_dtype(q)
    q_at, k_at = positions_of(Tq, q_pos, q.device), positions_of(Tk, k_pos, q.device)
    out = heads_like(q, B, H, Tq, v.size(-1), dtype=dtype).zero_()
    lse = q.new_full((B, H, Tq), -math.inf, dtype=dtype)
    started = set()
    for rows, keys, masked in pieces(q_at, k_at, window, slopes is not None, has_fused_pieces(q)):
        bias = piece_bias(q_at[:, rows], k_at[:, keys], slopes, window, dtype) if masked else None
        piece = softmax_piece(q[:, :, rows], k[:, :, keys], v[:, :, keys], bias, scale)
        if rows.start in started:
            piece = merge_plain(out[:, :, rows], lse[:, :, rows], piece[0].to(dtype), piece[1])
        out[:, :, rows], lse[:, :, rows] = piece
        started.add(rows.start)
    return out.to(q.dtype), lse


def attend_plain_backward(q, k, v, out, lse, do, dlse, q_pos, k_pos, slopes, window, scale):
    """dq, dk, dv, piece by piece; do (B, H, Tq, DV), dlse (B, H, Tq) or None."""
    q, k, v = ready(q, k, v, k_pos)
    out = out if out.stride(-1) == 1 else out.contiguous()          # else the CPU operator reads it wrongly
    if is_torchs_own(q, k, q_pos, slopes, window):
        grads = softmax_piece_backward(q, k, v, out, lse, do, dlse, None, scale, causal=True)
        return tuple(laid_out(x) for x in grads)
    dtype = lse_dtype(q)
    q_at, k_at = positions_of(q.size(2), q_pos, q.device), positions_of(k.size(2), k_pos, q.device)
    dq, dk, dv = (heads_like(x, *x.shape, dtype=dtype).zero_() for x in (q, k, v))
    empty = lse == -math.inf
    lse = lse.masked_fill(empty, 0)
    dlse = None if dlse is None else dlse.masked_fill(empty, 0)     # whatever came in: it may be NaN there
    for rows, keys, masked in pieces(q_at, k_at, window, slopes is not None, has_fused_pieces(q)):
        bias = piece_bias(q_at[:, rows], k_at[:, keys], slopes, window, dtype) if masked else None
        more = softmax_piece_backward(q[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows], lse[:, :, rows],
                                      do[:, :, rows], None if dlse is None else dlse[:, :, rows], bias, scale)
        for total, part, at in zip((dq, dk, dv), more, (rows, keys, keys)):
            total[:, :, at] += part
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def shares(lse_a, lse_b):
    """lse of two sides together, and each side's share e^{lse_a - lse}, e^{lse_b - lse}: 0 for an empty side."""
    top = torch.maximum(lse_a, lse_b)
    shift = top.masked_fill(top == -math.inf, 0)
    w_a, w_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    total = (w_a + w_b).masked_fill(top == -math.inf, 1)
    return top + torch.log(total), w_a / total, w_b / total


def weighted(p, x):
    """p (B, H, T) times x (B, H, T, D), exactly 0 where p is, whatever x is there."""
    return (p[..., None] * x).masked_fill((p == 0)[..., None], 0)


def merge_plain(out_a, lse_a, out_b, lse_b):
    """merge: out (B, H, T, D), lse (B, H, T)."""
    lse, p_a, p_b = shares(lse_a, lse_b)
    out = weighted(p_a, out_a) + weighted(p_b, out_b)
    return laid_out(out.to(out_a.dtype)), lse.contiguous()


def merge_plain_backward(out_a, lse_a, out_b, lse_b, do, dlse):
    """Gradients of the four inputs, with shares p: da = p_a do, dlse_a = p_a (dlse + do . (a - out)), likewise b."""
    lse, p_a, p_b = shares(lse_a, lse_b)
    a, b, g = (x.to(lse.dtype) for x in (out_a, out_b, do))
    out = weighted(p_a, a) + weighted(p_b, b)
    grads = []
    for p, x in ((p_a, a), (p_b, b)):
        grads.append(laid_out(weighted(p, g).to(do.dtype)))
        grads.append((p * (dlse + (g * (x - out)).sum(-1))).masked_fill(p == 0, 0).contiguous())
    return tuple(grads)


STEPS = 64                  # a run of more tokens is scanned in two levels


def recurrence(g, x, h0, reverse=False, overwrite=False):
    """h_t = g_t h_{t-1} + x_t along L of x (..., L, C), from h0 (..., C); g has x's shape or broadcasts to it. All runs
    take a step together. reverse: h_t = g_{t+1} h_{t+1} + x_t. overwrite: h may take x's place.
    A long run is cut into about sqrt(L) runs, scanned from zero; what enters each of them is a recurrence too."""
    L = x.size(-2)
    if L > STEPS:
        if reverse:                                                 # the g that comes first meets a state of zero
            return recurrence(g.flip(-2).roll(1, -2), x.flip(-2), h0).flip(-2)
        size = math.isqrt(L - 1) + 1
        n = -(-L // size)
        g, x = (F.pad(y, (0, 0, 0, n * size - L)).unflatten(-2, (n, size)) for y in (g, x))
        h = recurrence(g, x, None)
        g = g.cumprod(-2)
        ends = recurrence(g[..., -1, :], h[..., -1, :], h0)         # (..., n, C)
        first = torch.zeros_like(ends[..., :1, :]) if h0 is None else h0[..., None, :]
        enter = torch.cat([first, ends[..., :-1, :]], -2)
        return torch.addcmul(h, g, enter[..., None, :]).flatten(-3, -2)[..., :L, :]
    h = x if overwrite else torch.empty_like(x)
    gs, xs, hs = (y.unbind(-2) for y in (g, x, h))
    if reverse:
        gs, xs, hs = gs[:1] + gs[:0:-1], xs[::-1], hs[::-1]
    state = h0
    for g_t, x_t, h_t in zip(gs, xs, hs):
        state = h_t.copy_(x_t) if state is None else torch.addcmul(x_t, g_t, state, out=h_t)
    return h


def in_chunks(x, chunk, fill):
    """x (B, T, C) in float32 at least, cut into chunks: (B n, chunk, C), the last one filled up."""
    x, missing = x.to(lse_dtype(x)), -x.size(1) % chunk
    x = F.pad(x, (0, 0, 0, missing), value=fill) if missing else x
    return x.reshape(-1, chunk, x.size(-1))


def out_of_chunks(x, B, T, dtype):
    return x.reshape(B, -1, x.size(-1))[:, :T].to(dtype).contiguous()


def scan_plain(g, x, chunk, h0, offset):
    """scan, all chunks side by side: h (B, T, C)."""
    (B, T, C), cut = x.shape, chunk - offset
    if x.numel() == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    if offset and cut < T:                                          # the rest of the first chunk, then whole ones
        return torch.cat([scan_plain(g[:, :cut], x[:, :cut], cut, h0, 0),
                          scan_plain(g[:, cut:], x[:, cut:], chunk, None, 0)], 1)
    chunk = min(cut, T)
    g4, x4 = in_chunks(g, chunk, 1.0), in_chunks(x, chunk, 0.0)
    enter = None
    if h0 is not None:
        enter = x4.new_zeros(B, len(x4) // B, C)
        enter[:, 0] = h0
        enter = enter.view(-1, C)
    return out_of_chunks(recurrence(g4, x4, enter), B, T, x.dtype)


def scan_plain_backward(dh, g, h, chunk, h0, offset):
    """dg, dx (B, T, C) and dh0 (B, C), of size 0 without h0: dx_t = dh_t + g_{t+1} dx_{t+1}, dg_t = dx_t h_{t-1}."""
    (B, T, C), cut = h.shape, chunk - offset
    if h.numel() == 0:
        return no_gradient(h, h0)
    if offset and cut < T:
        first = scan_plain_backward(dh[:, :cut], g[:, :cut], h[:, :cut], cut, h0, 0)
        rest = scan_plain_backward(dh[:, cut:], g[:, cut:], h[:, cut:], chunk, None, 0)
        return *(torch.cat(halves, 1) for halves in zip(first[:2], rest[:2])), first[2]
    chunk = min(cut, T)
    g4, h4, dh4 = (in_chunks(y, chunk, 0.0) for y in (g, h, dh))
    dx = recurrence(g4, dh4, None, reverse=True)
    before = torch.cat([torch.zeros_like(h4[:, :1]), h4[:, :-1]], 1)
    if h0 is not None:
        before.view(B, -1, chunk, C)[:, 0, 0] = h0
    dh0 = h.new_empty(0) if h0 is None else (g4[::len(g4) // B, 0] * dx[::len(g4) // B, 0]).to(h0.dtype)
    return out_of_chunks(dx * before, B, T, g.dtype), out_of_chunks(dx, B, T, h.dtype), dh0


def rotated(x, cos, sin, back=False):
    """x (B, T, heads, D) turned by the angles of the tables (T, D), or turned back. Without tables: as it is."""
    if cos is None:
        return x
    turned = x.roll(x.size(-1) // 2, -1)
    return torch.addcmul(x * cos[:, None], turned, sin[:, None], value=-1 if back else 1).to(x.dtype)


def by_group(x, G):
    """Heads (B, T, H, ...) as (B, T, H / G, G, ...): head h uses group h % G."""
    return x.unflatten(2, (-1, G))


def own_scores(q, sk):
    """scale q_t . sk_t: every query with its own key, whose angle is the same: (B, T, H)."""
    return (q.to(sk.dtype).unsqueeze(2) * by_group(sk, q.size(2))).sum(-1).flatten(2) / math.sqrt(q.size(-1))


def end_tables(T, chunk, cos, sin):
    """The rows of the tables at the ends of chunks, but for the last chunk, whose end no query sees."""
    ends = slice(chunk - 1, T - 1, chunk)
    return [x if x is None else x[ends] for x in (cos, sin)]


def end_attention(q, sk, sv, chunk, cos, sin):
    """The arguments of attention over the ends of chunks but the last: queries (B, H, T, D), keys and values (B, H,
    n - 1, D), positions, which are numbers of chunks, and the rest."""
    (_, T, G, D), H = q.shape, sk.size(2)
    ends = slice(chunk - 1, T - 1, chunk)
    keys = rotated(sk[:, ends], *end_tables(T, chunk, cos, sin))
    queries = rotated(q, cos, sin).repeat(1, 1, H // G, 1)
    q_pos = torch.arange(T, device=q.device, dtype=torch.int32) // chunk - 1
    k_pos = torch.arange(keys.size(1), device=q.device, dtype=torch.int32)
    operands = (x.to(q.dtype).transpose(1, 2) for x in (queries, keys, sv[:, ends]))
    return *operands, q_pos, k_pos, None, FAR, 1 / math.sqrt(D)


def rat_states(k, v, g, bias, chunk, recur):
    """The recurrence of keys and values under one gate, all chunks side by side, the last one filled up: the gate
    (N, chunk, H D) and the states (2, N, chunk, H D)."""
    k, v, g = (in_chunks(x.flatten(2), chunk, 0.0) for x in (k, v, g))
    gate = torch.add(g, bias).sigmoid_()
    x = gate.new_empty(2, *gate.shape)
    for x_i, y in zip(x, (k, v)):
        x_i, y, a = (z.unflatten(-1, (-1, k.size(-1))) for z in (x_i, y, gate))     # heads that share k side by side
        torch.addcmul(y, a, y, value=-1, out=x_i)                                   # (1 - gate) y
    return gate, recur(gate, x, None, overwrite=True)


def of_tokens(x, B, T, D):
    """Chunks (B n, chunk, H D) as a view (B, T, H, D)."""
    return x.reshape(B, -1, x.size(-1))[:, :T].unflatten(-1, (-1, D))


def rat_plain(q, k, v, g, z, bias, chunk, cos, sin, attend=attend_plain, recur=recurrence):
    """rat: out (B, T, H, D), lse (B, H, T), k_ends, v_ends (B, n, H, D). attend, recur: who does that."""
    (B, T, _, D), dtype = q.shape, lse_dtype(q)
    chunk = min(chunk, T)
    sk, sv = (of_tokens(x, B, T, D) for x in rat_states(k, v, g, bias, chunk, recur)[1])
    out, lse = attend(*end_attention(q, sk, sv, chunk, cos, sin))
    lse, *weights = shares(lse, own_scores(q, sk).transpose(1, 2))
    p, p_own = (x.transpose(1, 2)[..., None] for x in weights)
    out = out.transpose(1, 2).to(dtype).mul_(p).addcmul_(sv, p_own).mul_(torch.sigmoid(z.to(dtype)))
    k_ends, v_ends = (torch.cat([x[:, chunk - 1:T - 1:chunk], x[:, -1:]], 1) for x in (sk, sv))
    return out.to(q.dtype).contiguous(), lse.contiguous(), k_ends, v_ends


def rat_plain_backward(q, k, v, g, z, bias, out, lse, dout, chunk, cos, sin, attend_backward=attend_plain_backward,
                       recur=recurrence):
    """dq, dk, dv, dg, dz, dbias; dout (B, T, H, D)."""
    (B, T, G, D), dtype = q.shape, lse_dtype(q)
    chunk = min(chunk, T)
    gate, h = rat_states(k, v, g, bias, chunk, recur)
    sk, sv = (of_tokens(x, B, T, D) for x in h)
    s, dout = torch.sigmoid(z.to(dtype)), dout.to(dtype)
    do, dz = dout * s, dout * out
    delta = dz.sum(-1, keepdim=True)
    dz.addcmul_(dz, s, value=-1)
    y = torch.div(out, s.clamp_(min=torch.finfo(dtype).tiny), out=s)    # out before z; where it is lost do is 0
    queries, keys, values, *rest = end_attention(q, sk, sv, chunk, cos, sin)
    dqs, dkeys, dvalues = (x.transpose(1, 2) for x in attend_backward(
        queries, keys, values, y.to(q.dtype).transpose(1, 2), lse, do.to(q.dtype).transpose(1, 2), None, *rest))

    p = torch.exp(own_scores(q, sk) - lse.transpose(1, 2))[..., None]
    ds = p * ((do * sv).sum(-1, keepdim=True) - delta) / math.sqrt(D)
    dq = rotated(by_group(dqs, G).sum(2, dtype=dtype), cos, sin, back=True) + by_group(ds * sk, G).sum(2)
    dh = torch.empty_like(h)
    dh.view(2, B, -1, dh.size(-1))[:, :, T:] = 0
    dk, dv = (of_tokens(x, B, T, D) for x in dh)
    torch.mul(q.unsqueeze(2), by_group(ds, G), out=by_group(dk, G))
    torch.mul(do, p, out=dv)
    ends = slice(chunk - 1, T - 1, chunk)
    dk[:, ends] += rotated(dkeys, *end_tables(T, chunk, cos, sin), back=True)
    dv[:, ends] += dvalues

    dh = recur(gate, dh, None, reverse=True, overwrite=True).mul_(gate.neg_().add_(1))
    dk, dv = (of_tokens(x, B, T, D) for x in dh)
    dg = (dk * sk).addcmul_(dv, sv).addcmul_(dv, v, value=-1)
    by_group(dg, G).addcmul_(by_group(dk, G), k.unsqueeze(2), value=-1)
    dbias = dg.sum((0, 1)).flatten().to(bias.dtype)
    return *(x.to(q.dtype).contiguous() for x in (dq, by_group(dk, G).sum(2), dv, dg, dz)), dbias


# ---------------------------------------------------------------------------------------------------------------------
# The operators: one of the two implementations, by device, known to autograd and to torch.compile
# ---------------------------------------------------------------------------------------------------------------------

@functools.cache
def announce(text):
    """Say once, on one rank, which code runs."""
    if os.environ.get("RANK", "0") == "0":
        print(f"kernels: {text}", file=sys.stderr)


@functools.cache
def runs_triton(device, dtype):
    """Whether the Triton kernels take tensors of this device and dtype. Never silent."""
    if INTERPRETED and dtype != torch.float64:
        announce("Triton, interpreted")
        return True
    if device.type == "cuda" and triton and dtype != torch.float64:
        announce(f"Triton on {torch.cuda.get_device_name(device)}")
        return True
    missing = device.type == "cuda" and not triton
    announce(f"plain PyTorch on {device.type}" + (": slow, triton is not installed" if missing else
                                                  " in float64" if device.type == "cuda" else ""))
    return False


def operator(schema, fast, plain, fake):
    """The custom operator nanorecur::<name>(...) of a schema: `fast` where Triton runs, else `plain`; `fake` gives
    torch.compile the outputs' shapes and strides."""
    name, _, rest = schema.partition("(")

    def run(first, *more):
        return (fast if runs_triton(first.device, first.dtype) else plain)(first, *more)
    op = torch.library.custom_op(f"nanorecur::{name}", run, mutates_args=(), schema="(" + rest)
    op.register_fake(fake)
    return op


def call(op, plain, arguments):
    """op(*arguments); or, without its ceremony, the plain code that it would run, where nothing asks for gradients or
    traces (a subclass of Tensor does): a tenth of a millisecond counts when decoding on a CPU."""
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    eager = not torch.compiler.is_compiling() and all(type(x) is torch.Tensor for x in tensors)
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if eager and not grad and not runs_triton(tensors[0].device, tensors[0].dtype):
        return plain(*arguments)
    return op(*arguments)


def twin(forward, setup_context, backward):
    """forward as a differentiable function: the same rules as the operator's, on the plain implementation."""
    rules = dict(forward=forward, setup_context=setup_context, backward=backward)
    return type("Twin", (torch.autograd.Function,), {name: staticmethod(f) for name, f in rules.items()}).apply


def attend_save(ctx, inputs, output):
    q, k, v, q_pos, k_pos, slopes, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, q_pos, k_pos, slopes)
    ctx.set_materialize_grads(False)


def attend_gradient(backward):
    def gradient(ctx, do, dlse):
        q, k, v, out, lse, *mask = ctx.saved_tensors
        if do is None:
            do = torch.zeros_like(out)
        return *backward(q, k, v, out, lse, do, dlse, *mask, ctx.window, ctx.scale), None, None, None, None, None
    return gradient


attend_op = operator(
    "attend(Tensor q, Tensor k, Tensor v, Tensor? q_pos, Tensor? k_pos, Tensor? slopes, SymInt window, float scale)"
    " -> (Tensor, Tensor)", attend_triton, attend_plain,
    lambda q, k, v, *mask: (heads_like(q, *q.shape[:3], v.size(-1)), q.new_empty(q.shape[:3], dtype=lse_dtype(q))))
attend_backward_op = operator(
    "attend_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor do, Tensor? dlse, Tensor? q_pos,"
    " Tensor? k_pos, Tensor? slopes, SymInt window, float scale) -> (Tensor, Tensor, Tensor)",
    attend_triton_backward, attend_plain_backward,
    lambda q, k, v, *more: tuple(heads_like(x, *x.shape) for x in (q, k, v)))
attend_op.register_autograd(attend_gradient(attend_backward_op), setup_context=attend_save)
attend_twin = twin(attend_plain, attend_save, attend_gradient(attend_plain_backward))


def merge_save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def merge_gradient(backward):
    return lambda ctx, do, dlse: backward(*ctx.saved_tensors, do, dlse)


merge_op = operator("merge(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
                    merge_triton, merge_plain,
                    lambda out_a, lse_a, *b: (heads_like(out_a, *out_a.shape), lse_a.new_empty(lse_a.shape)))
merge_backward_op = operator(
    "merge_backward(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor do, Tensor dlse)"
    " -> (Tensor, Tensor, Tensor, Tensor)", merge_triton_backward, merge_plain_backward,
    lambda out_a, lse_a, out_b, lse_b, *more: (heads_like(out_a, *out_a.shape), lse_a.new_empty(lse_a.shape),
                                               heads_like(out_b, *out_b.shape), lse_b.new_empty(lse_b.shape)))
merge_op.register_autograd(merge_gradient(merge_backward_op), setup_context=merge_save)
merge_twin = twin(merge_plain, merge_save, merge_gradient(merge_plain_backward))


def scan_save(ctx, inputs, output):
    g, _, ctx.chunk, h0, ctx.offset = inputs
    ctx.save_for_backward(g, output, h0)


def scan_gradient(backward):
    def gradient(ctx, dh):
        g, h, h0 = ctx.saved_tensors
        dg, dx, dh0 = backward(dh, g, h, ctx.chunk, h0, ctx.offset)
        return dg, dx, None, None if h0 is None else dh0, None
    return gradient


scan_op = operator("scan(Tensor g, Tensor x, SymInt chunk, Tensor? h0, SymInt offset) -> Tensor", scan_triton,
                   scan_plain, lambda g, x, *more: x.new_empty(x.shape))
scan_backward_op = operator(
    "scan_backward(Tensor dh, Tensor g, Tensor h, SymInt chunk, Tensor? h0, SymInt offset) -> (Tensor, Tensor, Tensor)",
    scan_triton_backward, scan_plain_backward,
    lambda dh, g, h, chunk, h0, offset: (h.new_empty(h.shape), h.new_empty(h.shape),
                                         h.new_empty(0 if h0 is None else h0.shape)))
scan_op.register_autograd(scan_gradient(scan_backward_op), setup_context=scan_save)
scan_twin = twin(scan_plain, scan_save, scan_gradient(scan_plain_backward))


def rat_save(ctx, inputs, output):
    q, k, v, g, z, bias, ctx.chunk, cos, sin = inputs
    out, lse, *_ = output
    ctx.save_for_backward(q, k, v, g, z, bias, out, lse, cos, sin)
    ctx.set_materialize_grads(False)            # the other outputs, which have none, would be filled with zeros


def rat_gradient(backward):
    def gradient(ctx, dout, *ends):
        if dout is None:
            return (None,) * 9
        *tensors, cos, sin = ctx.saved_tensors
        return *backward(*tensors, dout, ctx.chunk, cos, sin), None, None, None
    return gradient


def rat_shapes(q, k, v, g, z, bias, chunk, cos, sin):
    (B, T, H, D), dtype = v.shape, lse_dtype(q)
    ends = lambda: v.new_empty(B, (T + chunk - 1) // chunk, H, D, dtype=dtype)
    return v.new_empty(v.shape), q.new_empty(B, H, T, dtype=dtype), ends(), ends()


rat_op = operator(
    "rat(Tensor q, Tensor k, Tensor v, Tensor g, Tensor z, Tensor bias, SymInt chunk, Tensor? cos, Tensor? sin)"
    " -> (Tensor, Tensor, Tensor, Tensor)", rat_triton, rat_plain, rat_shapes)
rat_backward_op = operator(
    "rat_backward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor z, Tensor bias, Tensor out, Tensor lse, Tensor dout,"
    " SymInt chunk, Tensor? cos, Tensor? sin) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    rat_triton_backward, rat_plain_backward, lambda *inputs: tuple(x.new_empty(x.shape) for x in inputs[:6]))
rat_op.register_autograd(rat_gradient(rat_backward_op), setup_context=rat_save)
rat_twin = twin(lambda *inputs: rat_plain(*inputs), rat_save, rat_gradient(rat_plain_backward))


# ---------------------------------------------------------------------------------------------------------------------
# What the models call
# ---------------------------------------------------------------------------------------------------------------------

def check(fine, message):
    """Raise ValueError unless `fine`. message is a function: a text made on every call would, by naming a size, have
    torch.compile take that size for a constant."""
    if not fine:
        raise ValueError(message())


def check_tensor(name, x, like_name, like, dims, same_dtype=True):
    """Raise ValueError unless x is a tensor with the named dimensions, on the device of `like`, maybe of its dtype."""
    check(isinstance(x, torch.Tensor), lambda: f"{name} is {type(x).__name__}: a tensor is needed")
    check(x.dim() == len(dims), lambda: f"{name} has shape {tuple(x.shape)}: ({', '.join(dims)}) is needed")
    check(x.device == like.device, lambda: f"{name} is on {x.device}, {like_name} on {like.device}")
    check(not same_dtype or x.dtype == like.dtype, lambda: f"{name} is {x.dtype}, {like_name} is {like.dtype}")
    check(not same_dtype or x.dtype in DTYPES,
          lambda: f"{name} is {x.dtype}: float64, float32, bfloat16 and float16 are supported")


def check_head_size(name, x):
    check(1 <= x.size(-1) <= HEAD_SIZES[-1],
          lambda: f"{name} has head size {x.size(-1)}: 1 to {HEAD_SIZES[-1]} are supported")


def check_shape(name, x, shape, why):
    check(x.shape == shape, lambda: f"{name} has shape {tuple(x.shape)}: {tuple(shape)}, {why}, is needed")


def check_int(name, value, least):
    check(isinstance(value, int) and not isinstance(value, bool) and value >= least,
          lambda: f"{name}={value!r}: an int from {least} is needed")


def check_positions(name, pos, q, n, limit):
    """Positions pos of the n queries or keys; the debug switch also looks at them."""
    check(isinstance(pos, torch.Tensor), lambda: f"{name} is {type(pos).__name__}: a tensor is needed")
    check(pos.dtype == torch.int32, lambda: f"{name} is {pos.dtype}: positions are torch.int32")
    check(pos.dim() in (1, 2), lambda: f"{name} has shape {tuple(pos.shape)}: one or two dimensions are needed")
    check_shape(name, pos, (n,) if pos.dim() == 1 else (q.size(0), n), "a position for each, maybe in each batch row")
    check(pos.device == q.device, lambda: f"{name} is on {pos.device}, q on {q.device}")
    if debug:
        check((pos.diff(dim=-1) >= 0).all(), lambda: f"{name} must ascend along its last dimension")
        check(((pos > -FAR // 2) & (pos < FAR // 2) | (pos == limit)).all(),
              lambda: f"{name} must be between -2^29 and 2^29" + (" or FAR" if limit == FAR else ""))


def check_attend(q, k, v, q_pos, k_pos, slopes, window, scale):
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, "q", q, ("batch", "heads", "positions", "head size"))
        check_head_size(name, x)
    check(k.size(0) == q.size(0), lambda: f"k has batch size {k.size(0)}, q has {q.size(0)}")
    check(k.size(1) > 0 and q.size(1) % k.size(1) == 0,
          lambda: f"k has {k.size(1)} heads: q's {q.size(1)} are no multiple of it")
    check(k.size(-1) == q.size(-1), lambda: f"k has head size {k.size(-1)}, q has {q.size(-1)}")
    check_shape("v", v, (*k.shape[:3], v.size(-1)), "k's but for the head size")
    if q_pos is not None:
        check_positions("q_pos", q_pos, q, q.size(2), 0)
    if k_pos is not None:
        check_positions("k_pos", k_pos, q, k.size(2), FAR)
    if slopes is not None:
        check_tensor("slopes", slopes, "q", q, ("query heads",), same_dtype=False)
        check_shape("slopes", slopes, (q.size(1),), "one a query head")
        check(slopes.is_floating_point() and not slopes.requires_grad,
              lambda: "slopes must be floating point, without gradient")
    if window is not None:
        check_int("window", window, 1)
    check(scale is None or isinstance(scale, (int, float)) and 0 < scale < math.inf,
          lambda: f"scale={scale!r}: a positive number is needed")


def attend_arguments(q, k, v, q_pos, k_pos, slopes, window, scale):
    """The checked arguments as the operators take them."""
    check_attend(q, k, v, q_pos, k_pos, slopes, window, scale)
    if (q_pos is None) != (k_pos is None):
        if q_pos is None:
            q_pos = torch.arange(q.size(2), device=q.device, dtype=torch.int32)
        else:
            k_pos = torch.arange(k.size(2), device=q.device, dtype=torch.int32)
    window = FAR if window is None else min(window, FAR)
    return q, k, v, q_pos, k_pos, slopes, window, 1 / math.sqrt(q.size(-1)) if scale is None else float(scale)


def attend(q, k, v, q_pos=None, k_pos=None, slopes=None, window=None, scale=None):
    """Softmax attention whose mask is given by positions (FlashAttention-2's algorithm; see the top of this file).

    q (B, H, Tq, D), k (B, G, Tk, D), v (B, G, Tk, DV), H a multiple of G: query head h reads key head h // (H / G).
    Float64, float32, bfloat16 or float16, any strides (rows that are not at multiples of 16 elements are copied on a
    GPU); D, DV <= 256.
    q_pos (Tq,) or (B, Tq), k_pos (Tk,) or (B, Tk): int32, ascending, above -2^29 and below 2^29; padding keys stand
    at FAR = 2^30 and are never seen, whatever they hold; padding queries repeat the last position. None is 0, 1, 2 and
    so on; with neither, the attention is plainly causal and no positions are read.
    Query i sees key j iff k_pos[j] <= q_pos[i] and, given a window, q_pos[i] - k_pos[j] < window. What hidden keys
    other than padding hold must be finite.
    slopes (H,): ALiBi, -slopes[h] (q_pos[i] - k_pos[j]) is added to the scores. scale: of q . k, default 1/sqrt(D).

    Returns out (B, H, Tq, DV) in q's dtype and lse (B, H, Tq), log sum_j exp(score_ij), in float32 (float64 for
    float64), both differentiable, once, in q, k and v. A query that sees nothing: out 0, lse -inf, no gradient.
    Raises ValueError, naming the argument, where shapes, dtypes or devices do not fit.
    """
    return call(attend_op, attend_plain, attend_arguments(q, k, v, q_pos, k_pos, slopes, window, scale))


def attend_ref(q, k, v, q_pos=None, k_pos=None, slopes=None, window=None, scale=None):
    """attend in plain PyTorch, in blocks of queries and keys, on any device."""
    return attend_twin(*attend_arguments(q, k, v, q_pos, k_pos, slopes, window, scale))


def attend_backward_arguments(q, k, v, out, lse, do, *mask):
    """The checked arguments as the operator takes them."""
    q, k, v, *mask = attend_arguments(q, k, v, *mask)
    shape = (*q.shape[:3], v.size(-1))
    for name, x in (("out", out), ("do", do)):
        check_tensor(name, x, "q", q, ("batch", "heads", "positions", "head size"))
        check_shape(name, x, shape, "q's with v's head size")
    check_tensor("lse", lse, "q", q, ("batch", "heads", "positions"), same_dtype=False)
    check_shape("lse", lse, shape[:3], "one a query")
    check(lse.dtype == lse_dtype(q), lambda: f"lse is {lse.dtype}: {lse_dtype(q)} is needed")
    return q, k, v, out, lse, do, None, *mask


def attend_backward(q, k, v, out, lse, do, q_pos=None, k_pos=None, slopes=None, window=None, scale=None):
    """dq, dk, dv of these keys' part in a softmax that may be over more keys: out (B, H, Tq, DV) in q's dtype and lse
    (B, H, Tq) are of the whole softmax, do is the gradient of out, the rest is as for attend. For backward passes
    written by hand: over disjoint sets of keys, the dq add up and dk, dv stand side by side. Not differentiable.
    Raises ValueError, naming the argument, where shapes, dtypes or devices do not fit."""
    arguments = attend_backward_arguments(q, k, v, out, lse, do, q_pos, k_pos, slopes, window, scale)
    return call(attend_backward_op, attend_plain_backward, arguments)


def attend_backward_ref(q, k, v, out, lse, do, q_pos=None, k_pos=None, slopes=None, window=None, scale=None):
    """attend_backward in plain PyTorch, on any device."""
    return attend_plain_backward(*attend_backward_arguments(q, k, v, out, lse, do, q_pos, k_pos, slopes, window, scale))


def check_merge(out_a, lse_a, out_b, lse_b):
    for name, x in (("out_a", out_a), ("out_b", out_b)):
        check_tensor(name, x, "out_a", out_a, ("batch", "heads", "positions", "head size"))
        check_shape(name, x, out_a.shape, "out_a's")
        check_head_size(name, x)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_tensor(name, lse, "out_a", out_a, ("batch", "heads", "positions"), same_dtype=False)
        check_shape(name, lse, out_a.shape[:3], "out_a's but for the head size")
        check(lse.dtype == lse_dtype(out_a), lambda: f"{name} is {lse.dtype}: {lse_dtype(out_a)} is needed")
    return out_a, lse_a, out_b, lse_b


def merge(out_a, lse_a, out_b, lse_b):
    """Attention over two disjoint sets of keys from attention over each: out_a, out_b (B, H, T, D), lse_a, lse_b
    (B, H, T) as attend returns them -> out, lse of the same shapes; differentiable in all four. A side that saw nothing
    (lse -inf) changes nothing and gets no gradient; if neither saw anything the result is 0, -inf.
    Raises ValueError, naming the argument, where shapes, dtypes or devices do not fit."""
    return call(merge_op, merge_plain, check_merge(out_a, lse_a, out_b, lse_b))


def merge_ref(out_a, lse_a, out_b, lse_b):
    """merge in plain PyTorch."""
    return merge_twin(*check_merge(out_a, lse_a, out_b, lse_b))


def check_scan(g, x, chunk, h0, offset):
    check_tensor("x", x, "x", x, ("batch", "positions", "channels"))
    check_tensor("g", g, "x", x, ("batch", "positions", "channels"))
    check_shape("g", g, x.shape, "x's")
    check_int("chunk", chunk, 1)
    check_int("offset", offset, 0)
    check(offset < chunk, lambda: f"offset={offset} must be less than chunk={chunk}")
    if h0 is not None:
        check_tensor("h0", h0, "x", x, ("batch", "channels"))
        check_shape("h0", h0, (x.size(0), x.size(2)), "x's batch and channels")
    return g, x, chunk, h0, offset


def scan(g, x, chunk, h0=None, offset=0):
    """h_t = g_t h_{t-1} + x_t along T of g, x (B, T, C), in chunks: -> h (B, T, C), in x's dtype.

    Position t is number offset + t of the sequence; the state starts from zero where that is a multiple of `chunk`.
    The first chunk, of which `offset` (0 to chunk - 1) tokens were done before, starts from h0 (B, C) if given, else
    from zero. The state is float32 at least, rounded only where it leaves in h: to go on from it without loss, scan in
    float32. Differentiable in g, x and h0. Products of successive g are formed, up to 64 of them or the root of chunk:
    they must not overflow (gates of at most 1 never do).
    Raises ValueError, naming the argument, where shapes, dtypes or devices do not fit."""
    return call(scan_op, scan_plain, check_scan(g, x, chunk, h0, offset))


def scan_ref(g, x, chunk, h0=None, offset=0):
    """scan in plain PyTorch: the chunks of all rows take each step together."""
    return scan_twin(*check_scan(g, x, chunk, h0, offset))


def rat_arguments(q, k, v, g, z, bias, chunk, cos, sin):
    """The checked arguments as the operators take them."""
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("z", z)):
        check_tensor(name, x, "q", q, ("batch", "positions", "heads or groups", "head size"))
    check_head_size("q", q)
    check(q.numel() > 0, lambda: f"q has shape {tuple(q.shape)}: nothing is there")
    check_shape("k", k, q.shape, "q's")
    check_shape("v", v, (*q.shape[:2], v.size(2), q.size(-1)), "q's but for the heads")
    check(v.size(2) > 0 and v.size(2) % q.size(2) == 0,
          lambda: f"v has {v.size(2)} heads: no multiple of q's {q.size(2)} groups")
    check_shape("g", g, v.shape, "v's")
    check_shape("z", z, v.shape, "v's")
    check_tensor("bias", bias, "q", q, ("channels",), same_dtype=False)
    check_shape("bias", bias, (v.size(2) * v.size(3),), "one a channel of v")
    check(bias.dtype == lse_dtype(q), lambda: f"bias is {bias.dtype}: {lse_dtype(q)} is needed")
    check_int("chunk", chunk, 1)
    for name, x, other in (("cos", cos, "sin"), ("sin", sin, "cos")):
        check(x is not None or (cos is None and sin is None), lambda: f"{name} is missing beside {other}")
        if x is not None:
            check_tensor(name, x, "q", q, ("positions", "head size"), same_dtype=False)
            check_shape(name, x, (q.size(1), q.size(3)), "a row a position")
            check(x.dtype == lse_dtype(q), lambda: f"{name} is {x.dtype}: {lse_dtype(q)} is needed")
            check(not x.requires_grad, lambda: f"{name} must be without gradient")
            check(q.size(-1) % 2 == 0, lambda: f"q has head size {q.size(-1)}: an even one is needed beside {name}")
    return q, k, v, g, z, bias, chunk, cos, sin


def rat(q, k, v, g, z, bias, chunk, cos=None, sin=None):
    """The RAT layer between its projections: a gated recurrence inside chunks, softmax attention over the states at the
    ends of earlier chunks and the token's own state, an output gate.

    q, k (B, T, G, D): queries and keys of G groups, head h uses group h % G. v, g, z (B, T, H, D), H a multiple of G:
    values and the logits of the two gates; g + bias is the forget gate's, bias (H D,) in float32 (float64 for float64).
    Any strides: slices of one projection are read where they are. chunk: tokens a chunk. cos, sin (T, D): tables of the
    angles of q and of the states at chunk ends, rotated(x) = x cos + x.roll(D / 2) sin, sin negative on the first half.
    Float64, float32, bfloat16 or float16, D <= 256; the states are float32 at least.

    Returns out (B, T, H, D), differentiable, once, in the first six arguments, and the states of keys (not rotated) and
    of values at the last token of each chunk, the last of them maybe unfinished: k_ends, v_ends (B, ceil(T / chunk), H,
    D), in float32 (float64), without gradient: they fill a decoding cache.
    Raises ValueError, naming the argument, where shapes, dtypes or devices do not fit."""
    out, _, *ends = call(rat_op, rat_plain, rat_arguments(q, k, v, g, z, bias, chunk, cos, sin))
    return out, *(x.detach() for x in ends)


def rat_ref(q, k, v, g, z, bias, chunk, cos=None, sin=None):
    """rat in plain PyTorch, on any device."""
    out, _, *ends = rat_twin(*rat_arguments(q, k, v, g, z, bias, chunk, cos, sin))
    return out, *(x.detach() for x in ends)
