"""
The operators of kernels.py in Triton, for CUDA and ROCm. TRITON_INTERPRET=1 runs them on
CPU tensors, slowly, for tests.

The first call for a GPU imports this file. The functions at its end compute what the
reference implementation <name>_torch in kernels.py does; the docstring there has the
formulas of the backward passes.

The online softmax. Query i wants out_i = sum_j e^{s_ij} v_j / sum_j e^{s_ij}; its program
reads the keys tile by tile, with the largest score so far, m, and two sums relative to it,
l = sum_j e^{s_ij - m} and acc = sum_j e^{s_ij - m} v_j. A tile after which the largest
score is m' rescales them by alpha = e^{m - m'}:

    l <- alpha l + sum_j e^{s_ij - m'}          m <- m'
    acc <- alpha acc + sum_j e^{s_ij - m'} v_j

At the end out = acc / l and lse = m + log l. Scores are in units of log 2: exp2 is fast.

Tiles. Positions ascend: the keys that some query of a tile attends to are a range of tiles
[first, last), those that all of its queries attend to a range [full, rest) in it:

    keys    | first .... full | full ....... rest | rest .... last |
            |     masked      |      no mask      |     masked     |   others: not loaded

Each program finds the ranges by four binary searches over the positions.

Padding. One compiled variant serves all lengths and strides, and all head sizes up to
BLOCK_D. Rows must lie at multiples of 16 elements: `aligned` copies those that do not.

Names: B batch, H query heads, G key/value heads (in rat: groups of q and k), T, Tq, Tk
positions, D head size, C channels; M and N are the query and key rows of a tile. x_b, x_h,
x_t are the strides of x in batch, head, position. PLAIN: a row's number is its position.
"""
import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

import kernels
from kernels import HEAD_SIZES, by_group, end_tables, heads_like, rotated

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
PAD_POS = NO_WINDOW = tl.constexpr(kernels.PAD_POS)
LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)

# One compiled variant serves all values of the first arguments, and any alignment of the
# second, which are pointers to one number a row.
ATTEND = dict(
    do_not_specialize=["Tq", "Tk", "H", "GROUP", "window", "biased", "q_pos_b", "k_pos_b"],
    do_not_specialize_on_alignment=["lse_ptr", "dlse_ptr", "delta_ptr", "q_pos_ptr", "k_pos_ptr",
                                    "slopes_ptr"])
SCAN = dict(do_not_specialize=["T", "chunk", "has_h0"],
            do_not_specialize_on_alignment=["h0_ptr", "dh0_ptr"])
RAT = dict(do_not_specialize=["T", "n", "H", "G", "chunk"],
           do_not_specialize_on_alignment=["lse_ptr", "delta_ptr", "bias_ptr"])


# ---- parts that several kernels share ----

@triton.jit
def dot(a, b, acc):
    """a b + acc, summed in float32 and without tf32."""
    if INTERPRETED:  # it would multiply bfloat16's bits as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 x as dtype, rounded to the nearest."""
    if INTERPRETED and dtype == tl.bfloat16:  # it would cut the low bits off
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def program(n_tiles, H):
    """A program's tile, batch row and head (64-bit: offsets are large)."""
    pid = tl.program_id(0)
    head = pid // n_tiles  # b H + h
    return pid % n_tiles, (head // H).to(tl.int64), (head % H).to(tl.int64)


@triton.jit
def load_rows(ptr, start, stride, valid, D, BLOCK_D: tl.constexpr,
              MASKED: tl.constexpr = True):
    """Rows from `start` of a matrix with D columns: (ROWS, BLOCK_D), zeros past D; valid has
    size ROWS. Where MASKED, rows that are not valid are not read but zero."""
    row, d = tl.arange(0, valid.shape[0]), tl.arange(0, BLOCK_D)
    at = ptr + tl.cast(start, tl.int64) * stride + (row[:, None] * stride + d[None, :])
    if MASKED:
        return tl.load(at, mask=valid[:, None] & (d < D)[None, :], other=0.0)
    else:
        return tl.load(at, mask=(d < D)[None, :], other=0.0)


@triton.jit
def store_rows(ptr, start, stride, n, D, x):
    """Rows from `start` of a matrix with n rows and D columns <- x (ROWS, BLOCK_D)."""
    row, d = tl.arange(0, x.shape[0]), tl.arange(0, x.shape[1])
    at = ptr + tl.cast(start, tl.int64) * stride + (row[:, None] * stride + d[None, :])
    mask = (start + row < n)[:, None] & (d < D)[None, :]
    tl.store(at, narrow(x, ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_pos(pos_ptr, rows, n, beyond, PLAIN: tl.constexpr):
    """Positions of the given rows of n; `beyond` for rows past the end."""
    if PLAIN:
        pos = rows
    else:
        pos = tl.load(pos_ptr + rows, mask=rows < n, other=0)
    return tl.where(rows < n, pos, beyond)


@triton.jit
def compose(g_a, x_a, g_b, x_b):
    """h -> g_a h + x_a, then h -> g_b h + x_b, as one such map: for associative_scan."""
    return g_a * g_b, g_b * x_a + x_b


# ---- which tiles to read ----

@triton.jit
def count_upto(pos_ptr, n, limit, PLAIN: tl.constexpr):
    """How many of n ascending positions are <= limit: a binary search."""
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


@triton.jit
def tile_spans(pos_ptr, n, some_low, all_low, all_high, some_high, biased,
               BLOCK: tl.constexpr, PLAIN: tl.constexpr):
    """Tiles first <= full <= rest <= last of n ascending positions: [first, last) hold those
    in (some_low, some_high], [full, rest) only those in (all_low, all_high]. With a bias
    [full, rest) is empty: a bias needs all distances."""
    first = count_upto(pos_ptr, n, some_low, PLAIN) // BLOCK
    last = tl.cdiv(count_upto(pos_ptr, n, some_high, PLAIN), BLOCK)
    full = tl.minimum(tl.cdiv(count_upto(pos_ptr, n, all_low, PLAIN), BLOCK), last)
    rest = tl.maximum(count_upto(pos_ptr, n, all_high, PLAIN) // BLOCK, full)
    return tl.minimum(first, full), full, tl.where(biased != 0, full, rest), last


@triton.jit
def visible_keys(q_pos_ptr, k_pos_ptr, start, Tq, Tk, window, biased,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PLAIN: tl.constexpr):
    """tile_spans of the keys that BLOCK_M queries from `start` attend to: key j of query i
    iff i - window < j <= i."""
    low = load_pos(q_pos_ptr, start, Tq, 0, PLAIN)
    high = load_pos(q_pos_ptr, tl.minimum(start + BLOCK_M, Tq) - 1, Tq, 0, PLAIN)
    return tile_spans(k_pos_ptr, Tk, low - window, high - window, low, high, biased,
                      BLOCK_N, PLAIN)


@triton.jit
def tile_number(i, first, full, rest, MASKED: tl.constexpr):
    """Tile i of those that need a mask: first .. full, rest .. last. Else tile i."""
    if MASKED:
        return tl.where(i < full - first, first + i, rest + i - (full - first))
    else:
        return i


# ---- attend ----

@triton.jit
def scores(x, y, q_pos, k_pos, scale, slope, window, MASKED: tl.constexpr):
    """s = scale x y^T in units of log 2. Where MASKED also ALiBi's bias, and -inf where the
    key is not visible. q_pos and k_pos broadcast: queries may be rows or columns."""
    s = dot(x, tl.trans(y), None) * scale  # 2^s = e^(q . k / sqrt(D))
    if MASKED:
        distance = q_pos - k_pos           # (M, N) or (N, M)
        visible = (distance >= 0) & (distance < window)
        s = tl.where(visible, s - slope * distance, float("-inf"))
    return s


@triton.jit
def softmax_tiles(q, q_pos, m, l, acc, k_ptr, v_ptr, k_pos_ptr, k_t, v_t, Tk, D, scale, slope,
                  window, first, full, rest, last, PLAIN: tl.constexpr,
                  BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """The online softmax (m, l, acc) of a tile of queries over keys' tiles first .. last."""
    for MASKED in tl.static_range(2):  # first full .. rest without a mask
        begin, end = (0, full - first + last - rest) if MASKED else (full, rest)
        for i in range(begin, end):
            start = tile_number(i, first, full, rest, MASKED) * BLOCK_N
            rows = start + tl.arange(0, BLOCK_N)
            k_pos = load_pos(k_pos_ptr, rows, Tk, PAD_POS, PLAIN)
            k = load_rows(k_ptr, start, k_t, k_pos < PAD_POS, D, BLOCK_D, MASKED)
            s = scores(q, k, q_pos[:, None], k_pos[None, :], scale, slope, window, MASKED)
            new_m = tl.maximum(m, tl.max(s, 1))  # m'
            shift = new_m
            if MASKED:  # a row without keys so far
                shift = tl.where(new_m == float("-inf"), 0.0, new_m)
            alpha = tl.exp2(m - shift)           # e^{m - m'}
            p = tl.exp2(s - shift[:, None])      # e^{s_ij - m'}
            l = alpha * l + tl.sum(p, 1)
            v = load_rows(v_ptr, start, v_t, k_pos < PAD_POS, D, BLOCK_D, MASKED)
            acc = dot(narrow(p, v.dtype), v, alpha[:, None] * acc)  # alpha acc + p v
            m = new_m
    return m, l, acc


@triton.jit(**ATTEND)
def attend_forward_kernel(
        q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, q_pos_ptr, k_pos_ptr, slopes_ptr,
        q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, q_pos_b, k_pos_b,
        Tq, Tk, D, H, GROUP, window, scale, biased, PLAIN: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """A program computes out and lse of BLOCK_M queries of one head:
    lse_i = log sum_j e^{s_ij},  out_i = sum_j e^{s_ij - lse_i} v_j."""
    n_tiles = tl.cdiv(Tq, BLOCK_M)
    tile, b, h = program(n_tiles, H)
    start = (n_tiles - 1 - tile) * BLOCK_M  # tiles with the most work first
    k_ptr += b * k_b + h // GROUP * k_h
    v_ptr += b * v_b + h // GROUP * v_h
    q_pos_ptr += b * q_pos_b
    k_pos_ptr += b * k_pos_b
    slope = tl.load(slopes_ptr + h, mask=biased != 0, other=0.0) * LOG2E
    scale = scale * LOG2E

    rows = start + tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr + b * q_b + h * q_h, start, q_t, rows < Tq, D, BLOCK_D)
    q_pos = load_pos(q_pos_ptr, rows, Tq, -PAD_POS, PLAIN)  # padding attends to nothing
    first, full, rest, last = visible_keys(q_pos_ptr, k_pos_ptr, start, Tq, Tk, window,
                                           biased, BLOCK_M, BLOCK_N, PLAIN)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)  # the largest score so far
    l = tl.zeros((BLOCK_M,), tl.float32)                # sum_j e^{s_ij - m}
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)      # sum_j e^{s_ij - m} v_j
    m, l, acc = softmax_tiles(
        q, q_pos, m, l, acc, k_ptr, v_ptr, k_pos_ptr, k_t, v_t, Tk, D, scale, slope,
        window, first, full, rest, last, PLAIN, BLOCK_N, BLOCK_D)

    empty = l == 0.0  # no key is visible: out 0, lse -inf
    l = tl.where(empty, 1.0, l)
    out = acc / l[:, None]
    store_rows(out_ptr + b * o_b + h * o_h, start, o_t, Tq, D, out)
    lse = tl.where(empty, float("-inf"), (m + tl.log2(l)) * LN2)
    tl.store(lse_ptr + (b * H + h) * Tq + rows, lse, mask=rows < Tq)


@triton.jit(**ATTEND)
def attend_dq_kernel(
        q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, do_ptr, dlse_ptr, delta_ptr, dq_ptr,
        q_pos_ptr, k_pos_ptr, slopes_ptr,
        q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, do_b, do_h, do_t,
        dq_b, dq_h, dq_t, q_pos_b, k_pos_b,
        Tq, Tk, D, H, GROUP, window, scale, biased, PLAIN: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """A program computes dq_i = scale sum_j ds_ij k_j of BLOCK_M queries of a head, and writes
    their delta_i = do_i . out_i - dlse_i, which attend_dkv_kernel reads."""
    n_tiles = tl.cdiv(Tq, BLOCK_M)
    tile, b, h = program(n_tiles, H)
    start = (n_tiles - 1 - tile) * BLOCK_M  # tiles with the most work first
    k_ptr += b * k_b + h // GROUP * k_h
    v_ptr += b * v_b + h // GROUP * v_h
    q_pos_ptr += b * q_pos_b
    k_pos_ptr += b * k_pos_b
    slope = tl.load(slopes_ptr + h, mask=biased != 0, other=0.0) * LOG2E

    rows = start + tl.arange(0, BLOCK_M)
    valid, per_row = rows < Tq, (b * H + h) * Tq + rows
    do = load_rows(do_ptr + b * do_b + h * do_h, start, do_t, valid, D, BLOCK_D)
    out = load_rows(out_ptr + b * o_b + h * o_h, start, o_t, valid, D, BLOCK_D)
    dlse = tl.load(dlse_ptr + per_row, mask=valid, other=0.0)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1) - dlse
    lse = tl.load(lse_ptr + per_row, mask=valid, other=float("-inf"))
    empty = lse == float("-inf")
    delta = tl.where(empty, 0.0, delta)               # dlse may be NaN there
    lse = tl.where(empty, float("inf"), lse * LOG2E)  # p = 2^(s - inf) = 0
    tl.store(delta_ptr + per_row, delta, mask=valid)

    q = load_rows(q_ptr + b * q_b + h * q_h, start, q_t, valid, D, BLOCK_D)
    q_pos = load_pos(q_pos_ptr, rows, Tq, -PAD_POS, PLAIN)  # padding attends to nothing
    first, full, rest, last = visible_keys(q_pos_ptr, k_pos_ptr, start, Tq, Tk, window,
                                           biased, BLOCK_M, BLOCK_N, PLAIN)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)  # sum_j ds_ij k_j
    for MASKED in tl.static_range(2):
        begin, end = (0, full - first + last - rest) if MASKED else (full, rest)
        for i in range(begin, end):
            n = tile_number(i, first, full, rest, MASKED) * BLOCK_N
            k_pos = load_pos(k_pos_ptr, n + tl.arange(0, BLOCK_N), Tk, PAD_POS, PLAIN)
            k = load_rows(k_ptr, n, k_t, k_pos < PAD_POS, D, BLOCK_D, MASKED)
            v = load_rows(v_ptr, n, v_t, k_pos < PAD_POS, D, BLOCK_D, MASKED)
            s = scores(
                q, k, q_pos[:, None], k_pos[None, :], scale * LOG2E, slope, window, MASKED)
            p = tl.exp2(s - lse[:, None])         # p_ij = e^{s_ij - lse_i}
            dp = dot(do, tl.trans(v), None)
            ds = p * (dp - delta[:, None])        # p_ij (do_i . v_j - delta_i)
            dq = dot(narrow(ds, k.dtype), k, dq)  # dq_i + sum_j ds_ij k_j
    dq = dq * scale
    store_rows(dq_ptr + b * dq_b + h * dq_h, start, dq_t, Tq, D, dq)


@triton.jit(**ATTEND)
def attend_dkv_kernel(
        q_ptr, k_ptr, v_ptr, lse_ptr, do_ptr, delta_ptr, dk_ptr, dv_ptr,
        q_pos_ptr, k_pos_ptr, slopes_ptr,
        q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t,
        dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, q_pos_b, k_pos_b,
        Tq, Tk, D, H, GROUP, window, scale, biased, PLAIN: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """A program computes what one query head adds to dk_j = scale sum_i ds_ij q_i and
    dv_j = sum_i p_ij do_i of BLOCK_N keys; heads that share keys are summed outside."""
    tile, b, h = program(tl.cdiv(Tk, BLOCK_N), H)
    start = tile * BLOCK_N  # tiles with the most work first
    q_ptr += b * q_b + h * q_h
    do_ptr += b * do_b + h * do_h
    lse_ptr += (b * H + h) * Tq
    delta_ptr += (b * H + h) * Tq
    q_pos_ptr += b * q_pos_b
    k_pos_ptr += b * k_pos_b
    k_ptr += b * k_b + h // GROUP * k_h
    v_ptr += b * v_b + h // GROUP * v_h
    slope = tl.load(slopes_ptr + h, mask=biased != 0, other=0.0) * LOG2E

    k_pos = load_pos(k_pos_ptr, start + tl.arange(0, BLOCK_N), Tk, PAD_POS, PLAIN)
    k = load_rows(k_ptr, start, k_t, k_pos < PAD_POS, D, BLOCK_D)
    v = load_rows(v_ptr, start, v_t, k_pos < PAD_POS, D, BLOCK_D)
    low = load_pos(k_pos_ptr, start, Tk, 0, PLAIN)
    high = load_pos(k_pos_ptr, tl.minimum(start + BLOCK_N, Tk) - 1, Tk, 0, PLAIN)
    first, full, rest, last = tile_spans(  # query i of key j iff j <= i < j + window
        q_pos_ptr, Tq, low - 1, high - 1, low + (window - 1), high + (window - 1), biased,
        BLOCK_M, PLAIN)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)  # sum_i ds_ij q_i
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)  # sum_i p_ij do_i
    for MASKED in tl.static_range(2):  # p, ds transposed: rows are keys
        begin, end = (0, full - first + last - rest) if MASKED else (full, rest)
        for i in range(begin, end):
            m = tile_number(i, first, full, rest, MASKED) * BLOCK_M
            rows = m + tl.arange(0, BLOCK_M)
            q_pos = load_pos(q_pos_ptr, rows, Tq, -PAD_POS, PLAIN)
            q = load_rows(q_ptr, m, q_t, rows < Tq, D, BLOCK_D, MASKED)
            lse = tl.load(lse_ptr + rows, mask=rows < Tq, other=float("inf")) * LOG2E
            if MASKED:  # without keys: p = 2^(s - inf) = 0
                lse = tl.where(lse == float("-inf"), float("inf"), lse)
            s = scores(
                k, q, q_pos[None, :], k_pos[:, None], scale * LOG2E, slope, window, MASKED)
            p = tl.exp2(s - lse[None, :])          # p_ij, (N, M)
            do = load_rows(do_ptr, m, do_t, rows < Tq, D, BLOCK_D, MASKED)
            dv = dot(narrow(p, do.dtype), do, dv)  # dv_j + sum_i p_ij do_i
            delta = tl.load(delta_ptr + rows, mask=rows < Tq, other=0.0)
            dp = dot(v, tl.trans(do), None)
            ds = p * (dp - delta[None, :])        # p_ij (do_i . v_j - delta_i)
            dk = dot(narrow(ds, q.dtype), q, dk)  # dk_j + sum_i ds_ij q_i
    dk = dk * scale
    store_rows(dk_ptr + b * dk_b + h * dk_h, start, dk_t, Tk, D, dk)
    store_rows(dv_ptr + b * dv_b + h * dv_h, start, dv_t, Tk, D, dv)


# ---- scan ----

@triton.jit
def scan_program(T, C, chunk, BLOCK_C: tl.constexpr):
    """A program's batch row, chunk, the chunk's tokens begin .. end, and channels."""
    n_blocks, n_chunks = tl.cdiv(C, BLOCK_C), tl.cdiv(T, chunk)
    pid = tl.program_id(0)
    n, b = pid // n_blocks % n_chunks, (pid // n_blocks // n_chunks).to(tl.int64)
    c = pid % n_blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    return b, n, n * chunk, tl.minimum((n + 1) * chunk, T), c


@triton.jit
def row_of(x, row):
    """Row `row` of a tile (BLOCK_T, BLOCK_C)."""
    return tl.sum(tl.where((tl.arange(0, x.shape[0]) == row)[:, None], x, 0.0), 0)


@triton.jit(**SCAN)
def scan_forward_kernel(g_ptr, x_ptr, h0_ptr, h_ptr, g_b, g_t, x_b, x_t, T, C, chunk, has_h0,
                        BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    """A program computes h_t = g_t h_{t-1} + x_t of one chunk, BLOCK_C channels, by tiles of
    BLOCK_T tokens: each is scanned from zero in registers, then the state before added."""
    b, n, begin, end, c = scan_program(T, C, chunk, BLOCK_C)
    is_first = (n == 0) & (has_h0 != 0)
    state = tl.load(h0_ptr + b * C + c, mask=(c < C) & is_first, other=0.0).to(tl.float32)
    g_ptr += b * g_b
    x_ptr += b * x_b
    for start in range(begin, end, BLOCK_T):
        t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        mask = (t < end)[:, None] & (c < C)[None, :]
        g = tl.load(g_ptr + t[:, None] * g_t + c[None, :], mask=mask, other=1.0).to(tl.float32)
        x = tl.load(x_ptr + t[:, None] * x_t + c[None, :], mask=mask, other=0.0).to(tl.float32)
        g, x = tl.associative_scan((g, x), 0, compose)  # g: the product of the gates so far
        h = g * state[None, :] + x                      # (BLOCK_T, BLOCK_C)
        state = row_of(h, BLOCK_T - 1)         # past the end g = 1, x = 0 keep it
        at = (b * T + t[:, None]) * C + c[None, :]
        tl.store(h_ptr + at, narrow(h, h_ptr.dtype.element_ty), mask=mask)


@triton.jit(**SCAN)
def scan_backward_kernel(dh_ptr, g_ptr, h_ptr, h0_ptr, dg_ptr, dx_ptr, dh0_ptr,
                         dh_b, dh_t, g_b, g_t, T, C, chunk, has_h0,
                         BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    """A program computes dx_t = dh_t + g_{t+1} dx_{t+1}, dg_t = dx_t h_{t-1} of one chunk,
    BLOCK_C channels, last tile first; for the first chunk also dh0 = g_0 dx_0."""
    b, n, begin, end, c = scan_program(T, C, chunk, BLOCK_C)
    is_first = (n == 0) & (has_h0 != 0)
    h0 = tl.load(h0_ptr + b * C + c, mask=(c < C) & is_first, other=0.0).to(tl.float32)
    g_ptr += b * g_b
    dh_ptr += b * dh_b
    state = tl.zeros((BLOCK_C,), tl.float32)  # dx of the token after the tile
    n_tiles = tl.cdiv(end - begin, BLOCK_T)
    for i in range(0, n_tiles):
        t = (begin + (n_tiles - 1 - i) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        mask = (t < end)[:, None] & (c < C)[None, :]
        next_mask = (t + 1 < end)[:, None] & (c < C)[None, :]
        next_g = tl.load(g_ptr + (t[:, None] + 1) * g_t + c[None, :], mask=next_mask, other=0.0)
        dh = tl.load(dh_ptr + t[:, None] * dh_t + c[None, :], mask=mask, other=0.0)
        next_g, dh = next_g.to(tl.float32), dh.to(tl.float32)
        g, dx = tl.associative_scan((next_g, dh), 0, compose, reverse=True)
        dx += g * state[None, :]  # dh_t + g_{t+1} dx_{t+1}
        state = row_of(dx, 0)
        at = (b * T + t[:, None]) * C + c[None, :]
        inside = (t > begin)[:, None]                    # the token before is in this chunk
        before = tl.load(h_ptr + at - C, mask=mask & inside, other=0.0).to(tl.float32)
        dg = dx * tl.where(inside, before, h0[None, :])  # dx_t h_{t-1}
        tl.store(dx_ptr + at, narrow(dx, dx_ptr.dtype.element_ty), mask=mask)
        tl.store(dg_ptr + at, narrow(dg, dg_ptr.dtype.element_ty), mask=mask)
    g = tl.load(g_ptr + tl.cast(begin, tl.int64) * g_t + c, mask=c < C, other=0.0).to(tl.float32)
    dh0 = narrow(g * state, dh0_ptr.dtype.element_ty)
    tl.store(dh0_ptr + b * C + c, dh0, mask=(c < C) & is_first)


# ---- rat: a tile holds whole chunks, whose recurrences are one associative scan ----

@triton.jit
def rat_program(T, H, chunk, BLOCK_M: tl.constexpr):
    """A program's batch row, head, and tile: as many whole chunks as fit into BLOCK_M rows,
    the tokens start .. end, and which rows are valid."""
    size = BLOCK_M // chunk * chunk  # tokens of a tile
    n_tiles = tl.cdiv(T, size)
    tile, b, h = program(n_tiles, H)
    start = (n_tiles - 1 - tile) * size  # tiles with the most work first
    end = tl.minimum(start + size, T)
    return b, h, start, end, start + tl.arange(0, BLOCK_M) < end


@triton.jit
def forget_gate(g_ptr, bias_ptr, start, g_t, valid, D, BLOCK_D: tl.constexpr):
    """a = sigmoid(g + bias) of a tile, in float32."""
    d = tl.arange(0, BLOCK_D)
    g = load_rows(g_ptr, start, g_t, valid, D, BLOCK_D).to(tl.float32)
    return tl.sigmoid(g + tl.load(bias_ptr + d, mask=d < D, other=0.0)[None, :])


@triton.jit
def rat_states(a, x, chunk):
    """x~_t = a_t x~_{t-1} + (1 - a_t) x_t along a tile's rows, from zero in each chunk."""
    first = tl.arange(0, x.shape[0]) % chunk == 0
    x = x.to(tl.float32)
    keep = tl.where(first[:, None], 0.0, a)  # a chunk forgets the one before
    _, states = tl.associative_scan((keep, x - a * x), 0, compose)
    return states


@triton.jit(**RAT)
def rat_ends_kernel(k_ptr, v_ptr, g_ptr, bias_ptr, k_ends_ptr, v_ends_ptr,
                    k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, e_b, e_h, e_t, T, D, H, G, chunk,
                    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """A program computes the states k~_t, v~_t of the last tokens t of some chunks, for
    BLOCK_C channels (axis 1 of the grid) of one head."""
    b, h, start, end, valid = rat_program(T, H, chunk, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C
    t, d = start + tl.arange(0, BLOCK_M), c + tl.arange(0, BLOCK_C)
    is_end = (t % chunk == chunk - 1) | (t == T - 1)  # of a chunk, maybe unfinished
    at = b * e_b + h * e_h + (t // chunk).to(tl.int64)[:, None] * e_t + d[None, :]
    mask = (valid & is_end)[:, None] & (d < D)[None, :]
    g_ptr += b * g_b + h * g_h + c
    a = forget_gate(g_ptr, bias_ptr + h * D + c, start, g_t, valid, D - c, BLOCK_C)
    k_ptr += b * k_b + h % G * k_h + c
    k = load_rows(k_ptr, start, k_t, valid, D - c, BLOCK_C)
    tl.store(k_ends_ptr + at, rat_states(a, k, chunk), mask=mask)
    v_ptr += b * v_b + h * v_h + c
    v = load_rows(v_ptr, start, v_t, valid, D - c, BLOCK_C)
    tl.store(v_ends_ptr + at, rat_states(a, v, chunk), mask=mask)


@triton.jit(**RAT)
def rat_forward_kernel(
        q_ptr, rotated_q_ptr, k_ptr, v_ptr, g_ptr, z_ptr, bias_ptr, keys_ptr, values_ptr,
        out_ptr, lse_ptr,
        q_b, q_h, q_t, rotated_b, rotated_h, rotated_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t,
        z_b, z_h, z_t, e_b, e_h, e_t, o_b, o_h, o_t, T, D, H, G, n, chunk, scale,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """A program computes out and lse of some chunks of one head: a softmax over a token's own
    state and the n ends (keys, values) of the chunks before its own."""
    b, h, start, end, valid = rat_program(T, H, chunk, BLOCK_M)
    rows = start + tl.arange(0, BLOCK_M)
    g_ptr += b * g_b + h * g_h
    a = forget_gate(g_ptr, bias_ptr + h * D, start, g_t, valid, D, BLOCK_D)
    q_ptr += b * q_b + h % G * q_h
    k_ptr += b * k_b + h % G * k_h
    v_ptr += b * v_b + h * v_h
    q = load_rows(q_ptr, start, q_t, valid, D, BLOCK_D)
    k = load_rows(k_ptr, start, k_t, valid, D, BLOCK_D)
    scale = scale * LOG2E
    # the own state opens the online softmax: m = q . k~ scale, l = 1, acc = v~
    m = tl.sum(q.to(tl.float32) * rat_states(a, k, chunk), 1) * scale
    l = tl.full((BLOCK_M,), 1.0, tl.float32)
    v = load_rows(v_ptr, start, v_t, valid, D, BLOCK_D)  # not before: registers
    acc = rat_states(a, v, chunk)

    rotated_q_ptr += b * rotated_b + h % G * rotated_h  # q after RoPE
    q = load_rows(rotated_q_ptr, start, rotated_t, valid, D, BLOCK_D)
    q_pos = tl.where(valid, rows // chunk - 1, -PAD_POS)    # the last chunk that is visible
    keys_ptr += b * e_b + h * e_h
    values_ptr += b * e_b + h * e_h
    rest, last = start // chunk // BLOCK_N, tl.cdiv((end - 1) // chunk, BLOCK_N)
    m, l, acc = softmax_tiles(
        q, q_pos, m, l, acc, keys_ptr, values_ptr, keys_ptr, e_t, e_t, n, D, scale, 0.0,
        NO_WINDOW, 0, 0, rest, last, True, BLOCK_N, BLOCK_D)

    z_ptr += b * z_b + h * z_h
    z = load_rows(z_ptr, start, z_t, valid, D, BLOCK_D)
    out = tl.sigmoid(z.to(tl.float32)) * (acc / l[:, None])
    store_rows(out_ptr + b * o_b + h * o_h, start, o_t, end, D, out)
    tl.store(lse_ptr + (b * H + h) * T + rows, (m + tl.log2(l)) * LN2, mask=valid)


@triton.jit(**RAT)
def rat_gate_kernel(
        dout_ptr, out_ptr, z_ptr, dy_ptr, y_ptr, dz_ptr, dout_b, dout_h, dout_t, z_b, z_h, z_t,
        o_b, o_h, o_t, T, D, H, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """A program goes back through the output gate, out = sigmoid(z) y, of BLOCK_M tokens:
    y, dy = sigmoid(z) dout, dz = (1 - sigmoid(z)) out dout. They have out's strides."""
    b, h, start, end, valid = rat_program(T, H, 1, BLOCK_M)
    at = b * o_b + h * o_h
    dout_ptr += b * dout_b + h * dout_h
    z_ptr += b * z_b + h * z_h
    dout = load_rows(dout_ptr, start, dout_t, valid, D, BLOCK_D).to(tl.float32)
    out = load_rows(out_ptr + at, start, o_t, valid, D, BLOCK_D).to(tl.float32)
    z = load_rows(z_ptr, start, z_t, valid, D, BLOCK_D).to(tl.float32)
    s = tl.sigmoid(z)               # (BLOCK_M, BLOCK_D)
    y = out / tl.maximum(s, 1e-37)  # where y is lost dy is 0
    store_rows(dy_ptr + at, start, o_t, end, D, s * dout)
    store_rows(y_ptr + at, start, o_t, end, D, y)
    store_rows(dz_ptr + at, start, o_t, end, D, (1 - s) * out * dout)


@triton.jit
def rat_states_backward(a, next_a, x, dstates, chunk):
    """rat_states backwards, from what each state gets itself (dstates); next_a: the next
    token's gate, 0 at a chunk's end. Returns the states, dx, and what x adds to dg."""
    states = rat_states(a, x, chunk)
    _, dstates = tl.associative_scan((next_a, dstates), 0, compose, reverse=True)
    dx = dstates - a * dstates                           # (1 - a_t) dx~_t
    return states, dx, dx * (states - x.to(tl.float32))  # dx_t (x~_t - x_t)


@triton.jit(**RAT)
def rat_own_kernel(
        q_ptr, k_ptr, v_ptr, g_ptr, bias_ptr, lse_ptr, dy_ptr, delta_ptr, dk_ends_ptr, dv_ends_ptr,
        dq_ptr, dk_ptr, dv_ptr, dg_ptr, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t,
        e_b, e_h, e_t, o_b, o_h, o_t, T, D, H, G, n, chunk, scale,
        BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """A program computes, for some chunks of one head, what the own states add to dq and, back
    through the recurrence, dk (of this head), dv and dg. The n ends get dk_ends, dv_ends.

    It goes twice over the channels, BLOCK_C at a time: first for p and ds, sums over all."""
    b, h, start, end, valid = rat_program(T, H, chunk, BLOCK_M)
    rows = start + tl.arange(0, BLOCK_M)
    q_ptr += b * q_b + h % G * q_h
    k_ptr += b * k_b + h % G * k_h
    v_ptr += b * v_b + h * v_h
    g_ptr += b * g_b + h * g_h
    bias_ptr += h * D
    at = b * o_b + h * o_h
    s = tl.zeros((BLOCK_M,), tl.float32)   # q_t . k~_t
    dp = tl.zeros((BLOCK_M,), tl.float32)  # dy_t . v~_t
    for c in range(0, D, BLOCK_C):
        a = forget_gate(g_ptr + c, bias_ptr + c, start, g_t, valid, D - c, BLOCK_C)
        q = load_rows(q_ptr + c, start, q_t, valid, D - c, BLOCK_C)
        k = load_rows(k_ptr + c, start, k_t, valid, D - c, BLOCK_C)
        s += tl.sum(q.to(tl.float32) * rat_states(a, k, chunk), 1)
        v = load_rows(v_ptr + c, start, v_t, valid, D - c, BLOCK_C)
        dy = load_rows(dy_ptr + at + c, start, o_t, valid, D - c, BLOCK_C)
        dp += tl.sum(dy.to(tl.float32) * rat_states(a, v, chunk), 1)
    per_row = (b * H + h) * T + rows
    p = tl.exp(s * scale - tl.load(lse_ptr + per_row, mask=valid, other=float("inf")))
    ds = p * (dp - tl.load(delta_ptr + per_row, mask=valid, other=0.0)) * scale

    goes_on = (rows + 1 < end) & ((rows + 1) % chunk != 0)  # the next token has this state
    is_end = valid & (rows % chunk == chunk - 1) & (rows // chunk < n)  # later chunks read it
    e = b * e_b + h * e_h + (rows // chunk).to(tl.int64)[:, None] * e_t
    for c in range(0, D, BLOCK_C):
        d = c + tl.arange(0, BLOCK_C)
        mask = is_end[:, None] & (d < D)[None, :]
        a = forget_gate(g_ptr + c, bias_ptr + c, start, g_t, valid, D - c, BLOCK_C)
        next_a = forget_gate(g_ptr + c, bias_ptr + c, start + 1, g_t, goes_on, D - c, BLOCK_C)
        next_a = tl.where(goes_on[:, None], next_a, 0.0)
        q = load_rows(q_ptr + c, start, q_t, valid, D - c, BLOCK_C)
        k = load_rows(k_ptr + c, start, k_t, valid, D - c, BLOCK_C)
        dsk = tl.load(dk_ends_ptr + e + d[None, :], mask=mask, other=0.0).to(tl.float32)
        dsk += ds[:, None] * q.to(tl.float32)  # scale ds_t q_t + dK of the end
        sk, dk, dg = rat_states_backward(a, next_a, k, dsk, chunk)
        store_rows(dq_ptr + at + c, start, o_t, end, D - c, ds[:, None] * sk)
        store_rows(dk_ptr + at + c, start, o_t, end, D - c, dk)
        dy = load_rows(dy_ptr + at + c, start, o_t, valid, D - c, BLOCK_C)
        v = load_rows(v_ptr + c, start, v_t, valid, D - c, BLOCK_C)
        dsv = tl.load(dv_ends_ptr + e + d[None, :], mask=mask, other=0.0).to(tl.float32)
        dsv += p[:, None] * dy.to(tl.float32)  # p_t dy_t + dV of the end
        _, dv, dg_v = rat_states_backward(a, next_a, v, dsv, chunk)
        store_rows(dv_ptr + at + c, start, o_t, end, D - c, dv)
        store_rows(dg_ptr + at + c, start, o_t, end, D - c, dg + dg_v)


# ---- the memory layout that the kernels need ----

def strides(*tensors):
    """The tensors' strides, but the last; 0 where a dimension is 1."""
    return [s if n > 1 else 0 for x in tensors for n, s in zip(x.shape[:-1], x.stride())]


def aligned(x):
    """x (B, H, T, D) if its strides and D are multiples of 16 and its start of 16 bytes; else
    a copy, D padded with zeros."""
    D = x.size(-1)
    if (x.stride(-1) == 1 and D % 16 == 0 and x.data_ptr() % 16 == 0
            and all(s % 16 == 0 for s in strides(x))):
        return x
    padded = heads_like(x, *x.shape[:3], D + -D % 16).zero_()
    padded[..., :D] = x
    return padded


def cropped(x, D):
    """x (B, H, T, at least D) with head size D; never a view of a larger tensor."""
    return x if x.size(-1) == D else heads_like(x, *x.shape[:3], D).copy_(x[..., :D])


def summed_over_groups(x, G, D):
    """x (B, H, T, at least D) summed over query heads that share a key head: (B, G, T, D)."""
    if x.size(1) == G:
        return cropped(x, D)
    total = x[..., :D].unflatten(1, (G, -1)).sum(2)
    return heads_like(x, x.size(0), G, x.size(2), D).copy_(total)


def tokens_first(x, D):
    """x (B, H, T, at least D) as (B, T, H, D)."""
    return x.transpose(1, 2)[..., :D]


# ---- tile sizes: the largest that tests/compile_kernels.py accepts (no or few spills) ----

# (BLOCK_M, BLOCK_N, warps, stages) for each of HEAD_SIZES, by (large blocks, float32)
TILES = {
    (True, False): {
        "forward": 4 * [(128, 64, 8, 3)] + [(128, 32, 8, 3)],
        "dq": 4 * [(128, 64, 8, 2)] + [(64, 32, 8, 2)],
        "dkv": 3 * [(64, 128, 8, 2)] + [(32, 128, 8, 3), (32, 64, 8, 2)],
        "rat": 3 * [(128, 64, 8, 2)] + [(64, 64, 8, 2), (64, 32, 8, 2)]},
    (True, True): {
        "forward": [(128, 64, 8, 3)] + 2 * [(64, 32, 8, 2)] + [(32, 32, 8, 1), (32, 16, 8, 2)],
        "dq": 2 * [(128, 64, 8, 2)] + [(64, 32, 8, 2), (16, 32, 8, 2), (32, 16, 8, 2)],
        "dkv": [(32, 128, 8, 2), (32, 64, 8, 2), (32, 32, 8, 2), (16, 32, 8, 2), (32, 16, 8, 2)],
        "rat": 2 * [(128, 64, 8, 2)] + [(64, 32, 8, 2), (64, 16, 8, 2), (64, 16, 16, 1)]},
    (False, False): {
        "forward": 3 * [(128, 64, 8, 2)] + [(64, 64, 8, 2), (32, 32, 8, 2)],
        "dq": 3 * [(128, 64, 8, 2)] + [(64, 32, 8, 2), (32, 32, 8, 1)],
        "dkv": 3 * [(32, 128, 8, 2)] + [(32, 64, 8, 2), (32, 16, 8, 1)],
        "rat": 3 * [(128, 64, 8, 2)] + [(64, 32, 8, 2), (32, 32, 8, 1)]},
    (False, True): {
        "forward": 2 * [(64, 64, 8, 2)] + [(64, 32, 8, 2), (32, 32, 8, 1), (32, 16, 8, 1)],
        "dq": 2 * [(64, 64, 8, 2)] + [(64, 32, 8, 2), (32, 32, 4, 2), (16, 16, 8, 1)],
        "dkv": [(64, 64, 8, 2), (32, 64, 8, 2), (32, 32, 8, 2), (32, 16, 8, 1), (16, 16, 4, 1)],
        "rat": 2 * [(64, 64, 8, 2)] + [(64, 32, 8, 2), (64, 16, 8, 1), (32, 16, 8, 1)]},
}


@functools.cache
def has_large_blocks(device):
    """Whether a block may use 160 KB of shared memory (sm_80, sm_90), not 64 KB."""
    if device.type != "cuda":
        return True  # the interpreter
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 0)
    return torch.version.hip is None and shared >= 160 * 1024


def tile_options(name, block, dtype, large):
    """Tiles and warps of attend's ("forward", "dq", "dkv") and rat's kernels ("rat": forward,
    "gate", "ends", "own") for head size `block`."""
    if name == "gate":
        return dict(BLOCK_M=2048 // block, BLOCK_D=block, num_warps=4)
    if name in ("ends", "own"):
        return dict(BLOCK_M=16 if INTERPRETED else 128, BLOCK_C=16, num_warps=8)
    M, N, warps, stages = TILES[large, dtype == torch.float32][name][HEAD_SIZES.index(block)]
    if name == "rat" and INTERPRETED:  # then a few tokens are many tiles
        M = N = 16
    return dict(BLOCK_M=M, BLOCK_N=N, BLOCK_D=block, num_warps=warps, num_stages=stages)


def launch_options(name, x):
    """tile_options for tensors like x (B, H, T, D)."""
    block = next(n for n in HEAD_SIZES if n >= x.size(-1))
    return tile_options(name, block, x.dtype, has_large_blocks(x.device))


def scan_options(chunk):
    """Tiles of a scan kernel: a short chunk is one tile; at most 2,048 elements."""
    block = min(64, triton.next_power_of_2(chunk))
    channels = 16 if INTERPRETED else min(256, 2048 // block)  # it scans them one by one
    return dict(BLOCK_T=block, BLOCK_C=channels, num_warps=4)


# ---- the operators, as kernels.py calls them ----

def mask_arguments(q_pos, k_pos, slopes, lse):
    """The kernels' arguments for the mask: pointers, the positions' batch strides, biased."""
    if q_pos is None:  # PLAIN: nothing is read
        q_pos = k_pos = torch.empty(0, dtype=torch.int32, device=lse.device)
    pos = [p.contiguous() for p in (q_pos, k_pos)]
    bias = lse if slopes is None else slopes.to(torch.float32).contiguous()  # lse is not read
    return [*pos, bias], [p.size(-1) if p.dim() == 2 else 0 for p in pos], int(slopes is not None)


def attend(q, k, v, q_pos, k_pos, slopes, window):
    """out (B, H, Tq, D), lse (B, H, Tq)."""
    (B, H, Tq, D), (G, Tk) = q.shape, k.shape[1:3]
    q, k, v = aligned(q), aligned(k), aligned(v)  # D is a multiple of 16 now
    out, lse = heads_like(q, *q.shape), q.new_empty(B, H, Tq, dtype=torch.float32)
    pointers, pos_strides, biased = mask_arguments(q_pos, k_pos, slopes, lse)
    options = launch_options("forward", q)
    attend_forward_kernel[(triton.cdiv(Tq, options["BLOCK_M"]) * B * H,)](
        q, k, v, out, lse, *pointers, *strides(q, k, v, out), *pos_strides, Tq, Tk, q.size(-1),
        H, H // G, window, D ** -0.5, biased, PLAIN=q_pos is None, **options)
    return cropped(out, D), lse


def attend_gradients(q, k, v, out, lse, do, dlse, q_pos, k_pos, slopes, window, scale):
    """dq (B, H, Tq, D), dk, dv (B, H, Tk, D) of each query head, and delta (B, H, Tq), of
    aligned tensors."""
    (B, H, Tq, D), (G, Tk) = q.shape, k.shape[1:3]
    lse = lse.contiguous()         # the kernels count on it
    dlse = torch.zeros_like(lse) if dlse is None else dlse.contiguous()
    delta = torch.empty_like(lse)  # the first kernel writes it
    dq, dk, dv = (heads_like(q, B, H, T, D) for T in (Tq, Tk, Tk))
    pointers, pos_strides, biased = mask_arguments(q_pos, k_pos, slopes, lse)
    sizes = [*pos_strides, Tq, Tk, D, H, H // G, window, scale, biased]
    options = launch_options("dq", q)
    attend_dq_kernel[(triton.cdiv(Tq, options["BLOCK_M"]) * B * H,)](
        q, k, v, out, lse, do, dlse, delta, dq, *pointers,
        *strides(q, k, v, out, do, dq), *sizes, PLAIN=q_pos is None, **options)
    options = launch_options("dkv", q)
    attend_dkv_kernel[(triton.cdiv(Tk, options["BLOCK_N"]) * B * H,)](
        q, k, v, lse, do, delta, dk, dv, *pointers,
        *strides(q, k, v, do, dk, dv), *sizes, PLAIN=q_pos is None, **options)
    return dq, dk, dv, delta


def attend_backward(q, k, v, out, lse, do, dlse, q_pos, k_pos, slopes, window):
    """dq, dk, dv, like q, k and v."""
    D, G = q.size(-1), k.size(1)
    tensors = [aligned(x) for x in (q, k, v, out)]
    dq, dk, dv, _ = attend_gradients(*tensors, lse, aligned(do), dlse, q_pos, k_pos, slopes, window,
                                     D ** -0.5)
    return cropped(dq, D), summed_over_groups(dk, G, D), summed_over_groups(dv, G, D)


def aligned_channels(x):
    """x (B, T, C), aligned."""
    return aligned(x.unsqueeze(1)).squeeze(1)


def scan(g, x, chunk, h0):
    """h (B, T, C)."""
    (B, T, C), chunk = x.shape, min(chunk, x.size(1))
    g, x = aligned_channels(g), aligned_channels(x)
    h = x.new_empty(x.shape)
    state = h if h0 is None else F.pad(h0, (0, x.size(-1) - C)).contiguous()
    options = scan_options(chunk)
    grid = (B * triton.cdiv(T, chunk) * triton.cdiv(x.size(-1), options["BLOCK_C"]),)
    scan_forward_kernel[grid](g, x, state, h, *strides(g, x), T, x.size(-1), chunk,
                              int(h0 is not None), **options)
    return h[..., :C].contiguous()


def scan_backward(dh, g, h, chunk, h0):
    """dg, dx (B, T, C) and dh0 (B, C), of size 0 without h0."""
    (B, T, C), chunk = h.shape, min(chunk, h.size(1))
    dh, g, h = aligned_channels(dh), aligned_channels(g), aligned_channels(h).contiguous()
    dg, dx = torch.empty_like(h), torch.empty_like(h)
    state, dh0 = h, dx  # neither read nor written
    if h0 is not None:
        state = F.pad(h0, (0, h.size(-1) - C)).contiguous()
        dh0 = torch.empty_like(state)
    options = scan_options(chunk)
    grid = (B * triton.cdiv(T, chunk) * triton.cdiv(h.size(-1), options["BLOCK_C"]),)
    scan_backward_kernel[grid](dh, g, h, state, dg, dx, dh0, *strides(dh, g),
                               T, h.size(-1), chunk, int(h0 is not None), **options)
    dh0 = h.new_empty(0) if h0 is None else dh0[:, :C].contiguous()
    return dg[..., :C].contiguous(), dx[..., :C].contiguous(), dh0


def recurrence(g, x, h0, reverse=False, overwrite=False):
    """kernels.recurrence for g (N, L, C), x (2, N, L, C) from zero, by scan's kernels."""
    rows, L = x.flatten(0, 1), x.size(-2)
    g = g.repeat(2, 1, 1)
    h = scan_backward(rows, g, rows, L, None)[1] if reverse else scan(g, rows, L, None)
    return h.view_as(x)


def rat_fits(q, chunk):
    """Whether a chunk fits into a tile of rat's kernels; a line on stderr if not."""
    longest = launch_options("rat", q)["BLOCK_M"]
    if chunk > longest:
        kernels.announce(f"rat: chunks of {chunk} tokens, more than {longest}, are not fused: "
                         "attend and scan, in Triton")
    return chunk <= longest


def rat_inputs(q, k, v, g, z, bias, cos, sin):
    """What the kernels read, with one head size: rotated q, then q, k, v, g, z as
    (B, heads, T, D), and bias (H, D)."""
    D = q.size(-1)
    bias = F.pad(bias.reshape(-1, D), (0, -D % 16)).contiguous()
    tensors = rotated(q, cos, sin), q, k, v, g, z
    return *(aligned(x.transpose(1, 2)) for x in tensors), bias


def rat_ends(k, v, g, bias, D, chunk, cos, sin):
    """The states at the ends of all chunks, k_ends, v_ends (B, n, H, D), and what attention
    reads, all but the last: rotated keys, and values, (B, H, n - 1, D). k, v, g and bias are
    of rat_inputs."""
    B, H, T, _ = v.shape
    ends = [heads_like(v, B, H, -(-T // chunk), v.size(-1), torch.float32) for _ in range(2)]
    options = launch_options("ends", v)
    n_tiles = triton.cdiv(T, options["BLOCK_M"] // chunk * chunk)
    rat_ends_kernel[n_tiles * B * H, triton.cdiv(v.size(-1), options["BLOCK_C"])](
        k, v, g, bias, *ends, *strides(k, v, g, ends[0]), T, v.size(-1), H, k.size(1), chunk,
        **options)
    k_ends, v_ends = (tokens_first(x, D) for x in ends)
    read = rotated(k_ends[:, :-1], *end_tables(T, chunk, cos, sin)), v_ends[:, :-1]
    return k_ends, v_ends, *(aligned(x.to(v.dtype).contiguous().transpose(1, 2)) for x in read)


def rat(q, k, v, g, z, bias, chunk, cos, sin):
    """out (B, T, H, D), lse (B, H, T), k_ends, v_ends (B, n, H, D)."""
    (B, T, G, D), H, chunk = q.shape, v.size(2), min(chunk, q.size(1))
    if not rat_fits(q, chunk):
        return kernels.rat_torch(q, k, v, g, z, bias, chunk, cos, sin, attend, recurrence)
    rotated_q, q, k, v, g, z, bias = rat_inputs(q, k, v, g, z, bias, cos, sin)
    k_ends, v_ends, keys, values = rat_ends(k, v, g, bias, D, chunk, cos, sin)
    out, lse = heads_like(v, *v.shape), v.new_empty(B, H, T, dtype=torch.float32)
    options = launch_options("rat", v)
    rat_forward_kernel[(triton.cdiv(T, options["BLOCK_M"] // chunk * chunk) * B * H,)](
        q, rotated_q, k, v, g, z, bias, keys, values, out, lse,
        *strides(q, rotated_q, k, v, g, z, keys, out),
        T, v.size(-1), H, G, keys.size(2), chunk, D ** -0.5, **options)
    return tokens_first(out, D).contiguous(), lse, k_ends.contiguous(), v_ends.contiguous()


def rat_backward(q, k, v, g, z, bias, out, lse, dout, chunk, cos, sin):
    """dq, dk, dv, dg, dz, dbias; dout (B, T, H, D). The ends are read by attend's kernels."""
    (B, T, G, D), H, chunk = q.shape, v.size(2), min(chunk, q.size(1))
    if not rat_fits(q, chunk):
        return kernels.rat_backward_torch(q, k, v, g, z, bias, out, lse, dout, chunk, cos, sin,
                                          attend_backward, recurrence)
    rotated_q, q, k, v, g, z, bias = rat_inputs(q, k, v, g, z, bias, cos, sin)
    keys, values = rat_ends(k, v, g, bias, D, chunk, cos, sin)[2:]
    # back through the output gate
    out, dout = (aligned(x.transpose(1, 2)) for x in (out, dout))
    dy, y, dz, dq, dk, dv, dg = (heads_like(v, *v.shape) for _ in range(7))
    options = launch_options("gate", v)
    rat_gate_kernel[(triton.cdiv(T, options["BLOCK_M"]) * B * H,)](
        dout, out, z, dy, y, dz, *strides(dout, z, out), T, v.size(-1), H, **options)
    # attention over the ends
    at = torch.arange(T, device=q.device, dtype=torch.int32)
    drotated, dkeys, dvalues, delta = attend_gradients(
        rotated_q.repeat(1, H // G, 1, 1), keys, values, y, lse, dy, None,
        at // chunk - 1, at[:keys.size(2)], None, kernels.NO_WINDOW, D ** -0.5)
    dk_ends = rotated(tokens_first(dkeys, D), *end_tables(T, chunk, cos, sin), back=True)
    dk_ends = aligned(dk_ends.contiguous().transpose(1, 2))
    # attention to the own states, and the recurrence
    options = launch_options("own", v)
    rat_own_kernel[(triton.cdiv(T, options["BLOCK_M"] // chunk * chunk) * B * H,)](
        q, k, v, g, bias, lse.contiguous(), dy, delta, dk_ends, dvalues, dq, dk, dv, dg,
        *strides(q, k, v, g, dvalues, dy), T, v.size(-1), H, G, keys.size(2), chunk, D ** -0.5,
        **options)
    *shared, dv, dg, dz = (tokens_first(x, D) for x in (drotated, dq, dk, dv, dg, dz))
    # heads of a group share q and k
    drotated, dq, dk = (by_group(x, G).sum(2, dtype=torch.float32) for x in shared)
    dq = rotated(drotated, cos, sin, back=True) + dq
    dbias = dg.sum((0, 1), dtype=torch.float32).flatten()
    return *(x.to(v.dtype).contiguous() for x in (dq, dk, dv, dg, dz)), dbias
