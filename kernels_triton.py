"""
The operators of kernels.py in Triton, for CUDA and ROCm. TRITON_INTERPRET=1 runs them on
CPU tensors, slowly, for tests.

The first call for a GPU imports this file, which imports nothing of ours. The functions at
its end compute what the reference implementations in kernels.py do; the docstring there has
the formulas of the backward passes.

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

Names: B batch, H query heads, G key/value heads, T queries or tokens, S keys, D head size, C
channels; M and N are the query and key rows of a tile. x_b, x_h, x_t are the strides of x in
batch, head, position.
"""
import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
MOST_SPLITS = 32  # of the keys of one query
BEYOND = tl.constexpr(2 ** 30)  # the position of keys past the end: after every query
LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)

# One compiled variant serves all values of the first arguments, and any alignment of the
# second, which are pointers to one number a row.
ATTEND = dict(
    do_not_specialize=["T", "S", "H", "GROUP", "window", "biased", "q_pos_b", "k_pos_b"],
    do_not_specialize_on_alignment=["lse_ptr", "dlse_ptr", "delta_ptr", "q_pos_ptr", "k_pos_ptr",
                                    "slopes_ptr", "own_score_ptr"])
SCAN = dict(do_not_specialize=["T", "chunk"],
            do_not_specialize_on_alignment=["h0_ptr", "dh0_ptr"])


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
def load_pos(pos_ptr, rows, n, beyond):
    """Positions of the given rows of n; `beyond` for rows past the end."""
    return tl.where(rows < n, tl.load(pos_ptr + rows, mask=rows < n, other=0), beyond)


@triton.jit
def compose(g_a, x_a, g_b, x_b):
    """h -> g_a h + x_a, then h -> g_b h + x_b, as one such map: for associative_scan."""
    return g_a * g_b, g_b * x_a + x_b


# ---- which tiles to read ----

@triton.jit
def count_upto(pos_ptr, n, limit):
    """How many of n ascending positions are <= limit: a binary search."""
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
               BLOCK: tl.constexpr):
    """Tiles first <= full <= rest <= last of n ascending positions: [first, last) hold those
    in (some_low, some_high], [full, rest) only those in (all_low, all_high]. With a bias
    [full, rest) is empty: a bias needs all distances."""
    first = count_upto(pos_ptr, n, some_low) // BLOCK
    last = tl.cdiv(count_upto(pos_ptr, n, some_high), BLOCK)
    full = tl.minimum(tl.cdiv(count_upto(pos_ptr, n, all_low), BLOCK), last)
    rest = tl.maximum(count_upto(pos_ptr, n, all_high) // BLOCK, full)
    return tl.minimum(first, full), full, tl.where(biased != 0, full, rest), last


@triton.jit
def visible_tiles(q_pos_ptr, k_pos_ptr, start, T, S, window, biased,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """tile_spans of the keys that BLOCK_M queries from `start` attend to: key j of query i
    iff i - window < j <= i."""
    low = load_pos(q_pos_ptr, start, T, 0)
    high = load_pos(q_pos_ptr, tl.minimum(start + BLOCK_M, T) - 1, T, 0)
    return tile_spans(k_pos_ptr, S, low - window, high - window, low, high, biased,
                      BLOCK_N)


@triton.jit
def share_of(split, n_splits, first, full, rest, last):
    """The tiles, of tile_spans' four ranges, that fall to one of n_splits equal shares."""
    begin = first + (last - first) * split // n_splits
    end = first + (last - first) * (split + 1) // n_splits
    full, rest = tl.maximum(full, begin), tl.maximum(rest, begin)
    return begin, tl.minimum(full, end), tl.minimum(rest, end), end


@triton.jit
def tile_number(i, first, full, rest, MASKED: tl.constexpr):
    """Tile i of those that need a mask: first .. full, rest .. last. Else tile i."""
    if MASKED:
        return tl.where(i < full - first, first + i, rest + i - (full - first))
    else:
        return i


# ---- attend_by_position ----

@triton.jit
def scores(x, y, q_pos, k_pos, scale, slope, window, MASKED: tl.constexpr):
    """s = scale x y^T in units of log 2. Where MASKED also ALiBi's bias, and -inf where the
    key is not visible. q_pos and k_pos broadcast: queries may be rows or columns."""
    s = dot(x, tl.trans(y), None) * (scale * LOG2E)  # 2^s = e^(q . k / sqrt(D))
    if MASKED:
        distance = q_pos - k_pos           # (M, N) or (N, M)
        visible = (distance >= 0) & (distance < window)
        s = tl.where(visible, s - slope * LOG2E * distance, float("-inf"))
    return s


@triton.jit(**ATTEND)
def attend_forward_kernel(
        q_ptr, k_ptr, v_ptr, own_ptr, own_score_ptr, out_ptr, lse_ptr, q_pos_ptr, k_pos_ptr,
        slopes_ptr, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, own_b, own_h, own_t,
        o_s, o_b, o_h, o_t, q_pos_b, k_pos_b, T, S, D, H, GROUP, window, scale, biased,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, OWN: tl.constexpr):
    """A program computes out and lse of BLOCK_M queries of one head over the visible keys, or
    over one of several equal shares of them, its split:
    lse_i = log sum_j e^{s_ij},  out_i = sum_j e^{s_ij - lse_i} v_j."""
    n_tiles = tl.cdiv(T, BLOCK_M)
    tile, b, h = program(n_tiles, H)
    start = (n_tiles - 1 - tile) * BLOCK_M  # tiles with the most work first
    k_ptr += b * k_b + h // GROUP * k_h
    v_ptr += b * v_b + h // GROUP * v_h
    q_pos_ptr += b * q_pos_b
    k_pos_ptr += b * k_pos_b
    slope = tl.load(slopes_ptr + h, mask=biased != 0, other=0.0)

    rows = start + tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr + b * q_b + h * q_h, start, q_t, rows < T, D, BLOCK_D)
    q_pos = load_pos(q_pos_ptr, rows, T, -BEYOND)  # padding attends to nothing
    first, full, rest, last = visible_tiles(q_pos_ptr, k_pos_ptr, start, T, S, window,
                                            biased, BLOCK_M, BLOCK_N)
    split, n_splits = tl.program_id(1), tl.num_programs(1)
    first, full, rest, last = share_of(split, n_splits, first, full, rest, last)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)  # the largest score so far
    l = tl.zeros((BLOCK_M,), tl.float32)                # sum_j e^{s_ij - m}
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)      # sum_j e^{s_ij - m} v_j
    for MASKED in tl.static_range(2):  # first full .. rest without a mask
        begin, end = (0, full - first + last - rest) if MASKED else (full, rest)
        for i in range(begin, end):
            n = tile_number(i, first, full, rest, MASKED) * BLOCK_N
            keys = n + tl.arange(0, BLOCK_N)
            k_pos = load_pos(k_pos_ptr, keys, S, BEYOND)
            k = load_rows(k_ptr, n, k_t, keys < S, D, BLOCK_D, MASKED)
            s = scores(q, k, q_pos[:, None], k_pos[None, :], scale, slope, window, MASKED)
            new_m = tl.maximum(m, tl.max(s, 1))  # m'
            shift = new_m
            if MASKED:  # a row without keys so far
                shift = tl.where(new_m == float("-inf"), 0.0, new_m)
            alpha = tl.exp2(m - shift)           # e^{m - m'}
            p = tl.exp2(s - shift[:, None])      # e^{s_ij - m'}
            l = alpha * l + tl.sum(p, 1)
            v = load_rows(v_ptr, n, v_t, keys < S, D, BLOCK_D, MASKED)
            acc = dot(narrow(p, v.dtype), v, alpha[:, None] * acc)  # alpha acc + p v
            m = new_m

    if OWN:  # one more key
        own_s = tl.load(own_score_ptr + (b * H + h) * T + rows, mask=rows < T, other=0.0) * LOG2E
        own_v = load_rows(own_ptr + b * own_b + h * own_h, start, own_t, rows < T, D, BLOCK_D)
        new_m = tl.maximum(m, own_s)
        alpha, p = tl.exp2(m - new_m), tl.exp2(own_s - new_m)
        l, m = alpha * l + p, new_m
        acc = alpha[:, None] * acc + p[:, None] * own_v.to(tl.float32)

    empty = l == 0.0  # no key is visible: out 0, lse -inf
    l = tl.where(empty, 1.0, l)
    out_ptr += split * o_s + b * o_b + h * o_h
    store_rows(out_ptr, start, o_t, T, D, acc / l[:, None])
    lse = tl.where(empty, float("-inf"), (m + tl.log2(l)) * LN2)
    lse_ptr += split * (tl.num_programs(0) // n_tiles * T)  # a split has B H T of them
    tl.store(lse_ptr + (b * H + h) * T + rows, lse, mask=rows < T)


@triton.jit(do_not_specialize=["n_splits"])
def merge_splits_kernel(outs_ptr, lses_ptr, out_ptr, lse_ptr, n_splits, D,
                        SPLITS: tl.constexpr, BLOCK_D: tl.constexpr):
    """A program makes one out of a query's outs and lses over disjoint shares of the keys:
    lse = log sum_s e^{lse_s},  out = sum_s e^{lse_s - lse} out_s."""
    row, n_rows = tl.program_id(0), tl.num_programs(0)  # of B H queries
    s, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    lses = tl.load(lses_ptr + s * n_rows + row, mask=s < n_splits, other=float("-inf"))
    m = tl.max(lses, 0)
    weight = tl.exp2((lses - tl.where(m == float("-inf"), 0.0, m)) * LOG2E)
    l = tl.sum(weight, 0)  # e^{lse - m}
    mask = (s < n_splits)[:, None] & (d < D)[None, :]
    outs = tl.load(outs_ptr + (s * n_rows + row)[:, None] * D + d[None, :], mask=mask, other=0.0)
    l = tl.where(l == 0.0, 1.0, l)  # no key is visible: out 0, lse -inf
    out = narrow(tl.sum(weight[:, None] * outs, 0) / l, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * D + d, out, mask=d < D)
    tl.store(lse_ptr + row, m + tl.log2(l) * LN2)


@triton.jit(**ATTEND)
def attend_dq_kernel(
        q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, do_ptr, dlse_ptr, delta_ptr, dq_ptr,
        q_pos_ptr, k_pos_ptr, slopes_ptr,
        q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, do_b, do_h, do_t,
        dq_b, dq_h, dq_t, q_pos_b, k_pos_b,
        T, S, D, H, GROUP, window, scale, biased,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """A program computes dq_i = scale sum_j ds_ij k_j of BLOCK_M queries of a head, and writes
    their delta_i = do_i . out_i - dlse_i, which attend_dkv_kernel reads."""
    n_tiles = tl.cdiv(T, BLOCK_M)
    tile, b, h = program(n_tiles, H)
    start = (n_tiles - 1 - tile) * BLOCK_M  # tiles with the most work first
    k_ptr += b * k_b + h // GROUP * k_h
    v_ptr += b * v_b + h // GROUP * v_h
    q_pos_ptr += b * q_pos_b
    k_pos_ptr += b * k_pos_b
    slope = tl.load(slopes_ptr + h, mask=biased != 0, other=0.0)

    rows = start + tl.arange(0, BLOCK_M)
    valid, per_row = rows < T, (b * H + h) * T + rows
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
    q_pos = load_pos(q_pos_ptr, rows, T, -BEYOND)  # padding attends to nothing
    first, full, rest, last = visible_tiles(q_pos_ptr, k_pos_ptr, start, T, S, window,
                                           biased, BLOCK_M, BLOCK_N)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)  # sum_j ds_ij k_j
    for MASKED in tl.static_range(2):
        begin, end = (0, full - first + last - rest) if MASKED else (full, rest)
        for i in range(begin, end):
            n = tile_number(i, first, full, rest, MASKED) * BLOCK_N
            keys = n + tl.arange(0, BLOCK_N)
            k_pos = load_pos(k_pos_ptr, keys, S, BEYOND)
            k = load_rows(k_ptr, n, k_t, keys < S, D, BLOCK_D, MASKED)
            v = load_rows(v_ptr, n, v_t, keys < S, D, BLOCK_D, MASKED)
            s = scores(q, k, q_pos[:, None], k_pos[None, :], scale, slope, window, MASKED)
            p = tl.exp2(s - lse[:, None])         # p_ij = e^{s_ij - lse_i}
            dp = dot(do, tl.trans(v), None)
            ds = p * (dp - delta[:, None])        # p_ij (do_i . v_j - delta_i)
            dq = dot(narrow(ds, k.dtype), k, dq)  # dq_i + sum_j ds_ij k_j
    store_rows(dq_ptr + b * dq_b + h * dq_h, start, dq_t, T, D, dq * scale)


@triton.jit(**ATTEND)
def attend_dkv_kernel(
        q_ptr, k_ptr, v_ptr, lse_ptr, do_ptr, delta_ptr, dk_ptr, dv_ptr,
        q_pos_ptr, k_pos_ptr, slopes_ptr,
        q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t,
        dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, q_pos_b, k_pos_b,
        T, S, D, H, GROUP, window, scale, biased,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """A program computes what one query head adds to dk_j = scale sum_i ds_ij q_i and
    dv_j = sum_i p_ij do_i of BLOCK_N keys; heads that share keys are summed outside."""
    tile, b, h = program(tl.cdiv(S, BLOCK_N), H)
    start = tile * BLOCK_N  # tiles with the most work first
    q_ptr += b * q_b + h * q_h
    do_ptr += b * do_b + h * do_h
    lse_ptr += (b * H + h) * T
    delta_ptr += (b * H + h) * T
    q_pos_ptr += b * q_pos_b
    k_pos_ptr += b * k_pos_b
    k_ptr += b * k_b + h // GROUP * k_h
    v_ptr += b * v_b + h // GROUP * v_h
    slope = tl.load(slopes_ptr + h, mask=biased != 0, other=0.0)

    keys = start + tl.arange(0, BLOCK_N)
    k_pos = load_pos(k_pos_ptr, keys, S, BEYOND)
    k = load_rows(k_ptr, start, k_t, keys < S, D, BLOCK_D)
    v = load_rows(v_ptr, start, v_t, keys < S, D, BLOCK_D)
    low = load_pos(k_pos_ptr, start, S, 0)
    high = load_pos(k_pos_ptr, tl.minimum(start + BLOCK_N, S) - 1, S, 0)
    first, full, rest, last = tile_spans(  # query i of key j iff j <= i < j + window
        q_pos_ptr, T, low - 1, high - 1, low + (window - 1), high + (window - 1), biased,
        BLOCK_M)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)  # sum_i ds_ij q_i
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)  # sum_i p_ij do_i
    for MASKED in tl.static_range(2):  # p, ds transposed: rows are keys
        begin, end = (0, full - first + last - rest) if MASKED else (full, rest)
        for i in range(begin, end):
            m = tile_number(i, first, full, rest, MASKED) * BLOCK_M
            rows = m + tl.arange(0, BLOCK_M)
            q_pos = load_pos(q_pos_ptr, rows, T, -BEYOND)
            q = load_rows(q_ptr, m, q_t, rows < T, D, BLOCK_D, MASKED)
            lse = tl.load(lse_ptr + rows, mask=rows < T, other=float("inf")) * LOG2E
            if MASKED:  # without keys: p = 2^(s - inf) = 0
                lse = tl.where(lse == float("-inf"), float("inf"), lse)
            s = scores(k, q, q_pos[None, :], k_pos[:, None], scale, slope, window, MASKED)
            p = tl.exp2(s - lse[None, :])          # p_ij, (N, M)
            do = load_rows(do_ptr, m, do_t, rows < T, D, BLOCK_D, MASKED)
            dv = dot(narrow(p, do.dtype), do, dv)  # dv_j + sum_i p_ij do_i
            delta = tl.load(delta_ptr + rows, mask=rows < T, other=0.0)
            dp = dot(v, tl.trans(do), None)
            ds = p * (dp - delta[None, :])        # p_ij (do_i . v_j - delta_i)
            dk = dot(narrow(ds, q.dtype), q, dk)  # dk_j + sum_i ds_ij q_i
    store_rows(dk_ptr + b * dk_b + h * dk_h, start, dk_t, S, D, dk * scale)
    store_rows(dv_ptr + b * dv_b + h * dv_h, start, dv_t, S, D, dv)


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
def scan_forward_kernel(g_ptr, x_ptr, h0_ptr, h_ptr, g_b, g_t, x_b, x_t, T, C, chunk,
                        BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    """A program computes h_t = g_t h_{t-1} + (1 - g_t) x_t of one chunk, BLOCK_C channels, by
    tiles of BLOCK_T tokens: each is scanned from zero in registers, then the state before
    added."""
    b, n, begin, end, c = scan_program(T, C, chunk, BLOCK_C)
    state = tl.load(h0_ptr + b * C + c, mask=(c < C) & (n == 0), other=0.0).to(tl.float32)
    g_ptr += b * g_b
    x_ptr += b * x_b
    for start in range(begin, end, BLOCK_T):
        t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        mask = (t < end)[:, None] & (c < C)[None, :]
        g = tl.load(g_ptr + t[:, None] * g_t + c[None, :], mask=mask, other=1.0).to(tl.float32)
        x = tl.load(x_ptr + t[:, None] * x_t + c[None, :], mask=mask, other=0.0).to(tl.float32)
        # g: the product of the gates so far
        g, x = tl.associative_scan((g, x - g * x), 0, compose)
        h = g * state[None, :] + x      # (BLOCK_T, BLOCK_C)
        state = row_of(h, BLOCK_T - 1)  # past the end g = 1, x = 0 keep it
        at = (b * T + t[:, None]) * C + c[None, :]
        tl.store(h_ptr + at, narrow(h, h_ptr.dtype.element_ty), mask=mask)


@triton.jit(**SCAN)
def scan_backward_kernel(dh_ptr, g_ptr, x_ptr, h_ptr, h0_ptr, dg_ptr, dx_ptr, dh0_ptr,
                         dh_b, dh_t, g_b, g_t, x_b, x_t, T, C, chunk,
                         BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    """A program computes d_t = dh_t + g_{t+1} d_{t+1}, dx_t = (1 - g_t) d_t and
    dg_t = d_t (h_{t-1} - x_t) of one chunk, BLOCK_C channels, last tile first; for the first
    chunk also dh0 = g_0 d_0."""
    b, n, begin, end, c = scan_program(T, C, chunk, BLOCK_C)
    h0 = tl.load(h0_ptr + b * C + c, mask=(c < C) & (n == 0), other=0.0).to(tl.float32)
    dh_ptr += b * dh_b
    g_ptr += b * g_b
    x_ptr += b * x_b
    state = tl.zeros((BLOCK_C,), tl.float32)  # d of the token after the tile
    n_tiles = tl.cdiv(end - begin, BLOCK_T)
    for i in range(0, n_tiles):
        t = (begin + (n_tiles - 1 - i) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        mask = (t < end)[:, None] & (c < C)[None, :]
        next_mask = (t + 1 < end)[:, None] & (c < C)[None, :]
        g_at = g_ptr + t[:, None] * g_t + c[None, :]
        next_g = tl.load(g_at + g_t, mask=next_mask, other=0.0).to(tl.float32)
        dh = tl.load(dh_ptr + t[:, None] * dh_t + c[None, :], mask=mask, other=0.0)
        decay, d = tl.associative_scan((next_g, dh.to(tl.float32)), 0, compose, reverse=True)
        d += decay * state[None, :]  # dh_t + g_{t+1} d_{t+1}
        state = row_of(d, 0)
        at = (b * T + t[:, None]) * C + c[None, :]
        g = tl.load(g_at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, narrow(d - g * d, dx_ptr.dtype.element_ty), mask=mask)
        inside = (t > begin)[:, None]  # the token before is in this chunk
        before = tl.load(h_ptr + at - C, mask=mask & inside, other=0.0).to(tl.float32)
        before = tl.where(inside, before, h0[None, :])  # h_{t-1}
        x = tl.load(x_ptr + t[:, None] * x_t + c[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(dg_ptr + at, narrow(d * (before - x), dg_ptr.dtype.element_ty), mask=mask)
    g = tl.load(g_ptr + tl.cast(begin, tl.int64) * g_t + c, mask=c < C, other=0.0).to(tl.float32)
    dh0 = narrow(g * state, dh0_ptr.dtype.element_ty)
    tl.store(dh0_ptr + b * C + c, dh0, mask=(c < C) & (n == 0))


# ---- the memory layout that the kernels need ----

def new_heads(x, B, H, T, D):
    """An uninitialised (B, H, T, D), in memory (B, T, H, D) as projections want it."""
    return x.new_empty(B, T, H, D).transpose(1, 2)


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
    padded = new_heads(x, *x.shape[:3], D + -D % 16).zero_()
    padded[..., :D] = x
    return padded


def cropped(x, D):
    """x (B, H, T, at least D) with head size D; never a view of a larger tensor."""
    return x if x.size(-1) == D else new_heads(x, *x.shape[:3], D).copy_(x[..., :D])


def summed_over_groups(x, G, D):
    """x (B, H, T, at least D) summed over query heads that share a key head: (B, G, T, D)."""
    if x.size(1) == G:
        return cropped(x, D)
    total = x[..., :D].unflatten(1, (G, -1)).sum(2)
    return new_heads(x, x.size(0), G, x.size(2), D).copy_(total)


# ---- tile sizes: the largest that tests/compile_kernels.py accepts (no or few spills) ----

# (BLOCK_M, BLOCK_N, warps, stages) for head sizes up to 16, 32, 64, 128 and 256, by
# kernel, large blocks (0 or 1), float32 (0 or 1)
TILES = {
    ("forward", 1, 0): 3 * [(64, 64, 4, 3)] + [(128, 64, 8, 3), (128, 32, 8, 3)],
    ("forward", 1, 1): [(128, 64, 8, 3)] + 2 * [(64, 32, 8, 2)] + [(32, 32, 8, 1), (32, 16, 8, 2)],
    ("forward", 0, 0): 3 * [(128, 64, 8, 2)] + [(64, 32, 8, 2), (32, 32, 8, 2)],
    ("forward", 0, 1): 2 * [(64, 64, 8, 2)] + [(64, 32, 8, 2), (32, 32, 8, 1), (32, 16, 8, 1)],
    ("split", 1, 0): 4 * [(16, 32, 4, 4)] + [(16, 32, 4, 3)],
    ("split", 1, 1): 3 * [(16, 32, 4, 3)] + 2 * [(16, 16, 4, 3)],
    ("split", 0, 0): 2 * [(16, 64, 4, 2)] + 2 * [(16, 32, 4, 2)] + [(16, 16, 4, 2)],
    ("split", 0, 1): 3 * [(16, 32, 4, 2)] + 2 * [(16, 16, 4, 2)],
    ("dq", 1, 0): 3 * [(64, 64, 4, 3)] + [(64, 32, 4, 3), (64, 32, 8, 2)],
    ("dq", 1, 1): 2 * [(128, 64, 8, 2)] + [(64, 32, 8, 2), (16, 32, 8, 2), (32, 16, 8, 2)],
    ("dq", 0, 0): 3 * [(128, 64, 8, 2)] + [(64, 32, 8, 2), (32, 32, 8, 1)],
    ("dq", 0, 1): 2 * [(64, 64, 8, 2)] + [(64, 32, 8, 2), (32, 32, 4, 2), (16, 16, 8, 1)],
    ("dkv", 1, 0): 3 * [(64, 64, 4, 2)] + [(32, 128, 8, 3), (32, 64, 8, 2)],
    ("dkv", 1, 1): [(32, 128, 8, 2), (32, 64, 8, 2), (32, 32, 8, 2), (16, 32, 8, 2),
                    (32, 16, 8, 2)],
    ("dkv", 0, 0): 3 * [(32, 128, 8, 2)] + [(32, 64, 8, 2), (32, 16, 8, 1)],
    ("dkv", 0, 1): [(64, 64, 8, 2), (32, 64, 8, 2), (32, 32, 8, 2), (32, 16, 8, 1), (16, 16, 4, 1)],
}


@functools.cache
def has_large_blocks(device):
    """Whether a block may use 160 KB of shared memory (sm_80, sm_90), not 64 KB."""
    if device.type != "cuda":
        return True  # the interpreter
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 0)
    return torch.version.hip is None and shared >= 160 * 1024


def tile_options(name, D, dtype, large):
    """Tiles and warps of attend's kernels ("forward", "dq", "dkv") for head size D."""
    block = max(16, triton.next_power_of_2(D))
    M, N, warps, stages = TILES[name, large, dtype == torch.float32][block.bit_length() - 5]
    return dict(BLOCK_M=M, BLOCK_N=N, BLOCK_D=block, num_warps=warps, num_stages=stages)


def split_count(n_heads, S):
    """Into how many programs the keys of one query are split: all heads together (B H) make
    two for each of the 132 multiprocessors of an H200, and each has 256 keys or more. It
    depends on shapes alone, as a CUDA graph needs."""
    return max(1, min(MOST_SPLITS, 264 // n_heads, S // 256))


def scan_options(chunk):
    """Tiles of a scan kernel: a short chunk is one tile; at most 2,048 elements."""
    block = min(64, triton.next_power_of_2(chunk))
    channels = 16 if INTERPRETED else min(256, 2048 // block)  # it scans them one by one
    return dict(BLOCK_T=block, BLOCK_C=channels, num_warps=4)


# ---- the operators, as kernels.py calls them ----

def mask_pointers(q_pos, k_pos, slopes, lse):
    """The kernels' arguments for the mask: pointers, the positions' batch strides, biased."""
    pos = [p.contiguous() for p in (q_pos, k_pos)]
    bias = lse if slopes is None else slopes.to(torch.float32).contiguous()  # lse is not read
    return [*pos, bias], [p.size(-1) if p.dim() == 2 else 0 for p in pos], int(slopes is not None)


def launch_attend(q, k, v, own_score, own_value, q_pos, k_pos, slopes, window):
    """out (B, H, T, D), lse (B, H, T)."""
    (B, H, T, D), (G, S), own = q.shape, k.shape[1:3], own_score is not None
    name, splits = ("split", split_count(B * H, S)) if T == 1 and not own else ("forward", 1)
    q, k, v = aligned(q), aligned(k), aligned(v)  # D is a multiple of 16 now
    own = (aligned(own_value), own_score.float().contiguous()) if own else (q, q)
    out, lse = new_heads(own[0], *q.shape), q.new_empty(B, H, T, dtype=torch.float32)
    outs, lses = out[None], lse[None]
    if splits > 1:
        outs, lses = (lse.new_empty(splits, *x.shape) for x in (out, lse))
    pointers, pos_strides, biased = mask_pointers(q_pos, k_pos, slopes, lse)
    options = tile_options(name, D, q.dtype, has_large_blocks(q.device))
    attend_forward_kernel[(triton.cdiv(T, options["BLOCK_M"]) * B * H, splits)](
        q, k, v, *own, outs, lses, *pointers, *strides(q, k, v, own[0], outs), *pos_strides,
        T, S, q.size(-1), H, H // G, window, D ** -0.5, biased,
        OWN=own_score is not None, **options)
    if splits > 1:
        merge_splits_kernel[(B * H,)](outs, lses, out, lse, splits, q.size(-1),
                                      SPLITS=MOST_SPLITS, BLOCK_D=options["BLOCK_D"])
    return cropped(out, D), lse


def launch_attend_backward(q, k, v, out, lse, do, dlse, q_pos, k_pos, slopes, window):
    """dq, dk, dv, like q, k and v."""
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    q, k, v, out, do = (aligned(x) for x in (q, k, v, out, do))
    lse = lse.contiguous()         # the kernels count on it
    dlse = torch.zeros_like(lse) if dlse is None else dlse.contiguous()
    delta = torch.empty_like(lse)  # the first kernel writes it
    dq, dk, dv = (new_heads(q, B, H, n, q.size(-1)) for n in (T, S, S))  # of query heads
    pointers, pos_strides, biased = mask_pointers(q_pos, k_pos, slopes, lse)
    sizes = [*pos_strides, T, S, q.size(-1), H, H // G, window, D ** -0.5, biased]
    options = tile_options("dq", D, q.dtype, has_large_blocks(q.device))
    attend_dq_kernel[(triton.cdiv(T, options["BLOCK_M"]) * B * H,)](
        q, k, v, out, lse, do, dlse, delta, dq, *pointers,
        *strides(q, k, v, out, do, dq), *sizes, **options)
    options = tile_options("dkv", D, q.dtype, has_large_blocks(q.device))
    attend_dkv_kernel[(triton.cdiv(S, options["BLOCK_N"]) * B * H,)](
        q, k, v, lse, do, delta, dk, dv, *pointers,
        *strides(q, k, v, do, dk, dv), *sizes, **options)
    return cropped(dq, D), summed_over_groups(dk, G, D), summed_over_groups(dv, G, D)


def aligned_channels(x):
    """x (B, T, C), aligned."""
    return aligned(x.unsqueeze(1)).squeeze(1)


def scan_arguments(h0, x, chunk):
    """The grid, h0 with x's channels, chunk and the launch options."""
    (B, T, C), chunk = x.shape, min(chunk, x.size(1))
    options = scan_options(chunk)
    grid = (B * triton.cdiv(T, chunk) * triton.cdiv(C, options["BLOCK_C"]),)
    return grid, F.pad(h0, (0, C - h0.size(1))).contiguous(), chunk, options


def launch_scan(g, x, h0, chunk):
    """h (B, T, C)."""
    (_, T, C), g, x = x.shape, aligned_channels(g), aligned_channels(x)
    grid, h0, chunk, options = scan_arguments(h0, x, chunk)
    h = x.new_empty(x.shape)
    scan_forward_kernel[grid](g, x, h0, h, *strides(g, x), T, x.size(-1), chunk, **options)
    return h[..., :C].contiguous()


def launch_scan_backward(dh, g, x, h, h0, chunk):
    """dg, dx (B, T, C) and dh0 (B, C)."""
    (_, T, C), h = h.shape, aligned_channels(h).contiguous()
    dh, g, x = aligned_channels(dh), aligned_channels(g), aligned_channels(x)
    grid, h0, chunk, options = scan_arguments(h0, h, chunk)
    dg, dx, dh0 = torch.empty_like(h), torch.empty_like(h), torch.empty_like(h0)
    scan_backward_kernel[grid](dh, g, x, h, h0, dg, dx, dh0, *strides(dh, g, x),
                               T, h.size(-1), chunk, **options)
    return *(y[..., :C].contiguous() for y in (dg, dx)), dh0[:, :C].contiguous()
