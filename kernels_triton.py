"""
This file has the operators of kernels.py in Triton, for CUDA and ROCm. With TRITON_INTERPRET=1
they run on CPU tensors, slowly, for tests.

kernels.py and rt_triton.py import this file where a GPU needs it. This file does not import any
other file of the project. The launch_ functions at its end compute what the plain implementations
in kernels.py compute. The equations (1) to (14) stand in the docstring of kernels.py.

The online softmax. The output of query i is out_i = sum_j e^{s_ij} v_j / sum_j e^{s_ij}. A program
of the GPU computes a tile of queries and reads the keys tile by tile. For each query it keeps the
largest score so far, m, and two sums relative to it, l = sum_j e^{s_ij - m} and
acc = sum_j e^{s_ij - m} v_j. If m' is the largest score after a further tile of keys, both sums
are rescaled by alpha = e^{m - m'} and get the tile's terms:

    l <- alpha l + sum_j e^{s_ij - m'}          m <- m'
    acc <- alpha acc + sum_j e^{s_ij - m'} v_j

At the end out = acc / l and lse = m + log l. exp2 is faster than exp. So the kernels keep scores
(and the forward kernel keeps m) multiplied by log2(e), and take exp2 of their differences. Comments
give the formulas with e.

Tiles. Positions ascend. So the keys that any query of a tile attends to lie in a range of key tiles
[first, last). Inside it lies the range [full, rest). In these tiles every query of the program
attends to every key.

    keys    | first .... full | full ....... rest | rest .... last |
            |     masked      |      no mask      |     masked     |   others: not loaded

Each program finds the four numbers by four binary searches over the positions. In this example,
tiles have 4 queries or keys, the positions of both are 0, 1, 2, ..., the window is 10, and the
program has the queries 8 to 11. A cross is a visible key.

    tile          0            1            2            3
    keys       0 1 2 3      4 5 6 7     8 9 10 11    12 13 ..
    query  8   x x x x      x x x x     x . .  .     .  .          first = 0
    query  9   x x x x      x x x x     x x .  .     .  .          full  = 1
    query 10   . x x x      x x x x     x x x  .     .  .          rest  = 2
    query 11   . . x x      x x x x     x x x  x     .  .          last  = 3
               masked       no mask      masked      not loaded

Each of the keys 0 to 11 is visible to at least one query. These keys lie in the tiles 0, 1 and 2.
The keys 2 to 8 are visible to all four queries. The only tile that they fill is tile 1.

One query. A decode step has one query a row. Its tile still has 16 rows, and 15 of them are
padding. B H programs, one for each row and head, would leave most of a GPU idle. So the visible
tiles are cut into splits, and each split has a program, which writes its out and lse in float32. A
second kernel merges them by (4) and (5). With one split, the program writes the final out and lse,
and nothing is merged. The number of splits depends on shapes alone. The tiles that a split reads
depend on the positions, which are on the device. A CUDA graph over a cache of max_len slots
therefore reads only the slots in use.

Own pairs. An own pair is one more key of a query, given by its score and value (see
attend_by_position). The forward kernel adds it after its loop. Queries with an own pair are not
split, because each split would add the pair once more.

Scan. Token t maps a state h to g_t h + (1 - g_t) x_t. associative_scan composes these maps in a
tile of tokens, so that token t gets the map from the state before the tile to h_t.

Padding. BLOCK_D is the head size D, rounded up to a power of two. For each BLOCK_D and dtype one
variant of a kernel serves all lengths and strides, and all D that are rounded up to it. For this, D
must be a multiple of 16, the strides must be multiples of 16 elements, and the address must be a
multiple of 16 bytes. `aligned` copies any other tensor and pads D with zeros.

Speed. On an H200, attend_by_position takes 2.0 times as long as torch's attention (SDPA) for a
forward and backward pass over 4,096 tokens, and 1.6 times over 65,536, in bfloat16 with heads of
size 128 (lab/results/gpu.txt, `python -m lab.bench kernels`). One reason is that the backward
pass is two kernels which both compute the scores, so that it takes seven matrix products where
five would do. Splits have not been timed on a GPU yet.

torch's flex_attention also takes functions for mask and scores and returns lse. It is not used
for four reasons. It is fast only where it is compiled. Its block mask has to be built again
whenever positions change, which they do at each decode step and at each chunk of RT's wavefront.
It has no backward pass for some keys of a larger softmax (attend_by_position_backward). On CPUs
it has neither a backward pass nor lse.

Names that this file adds: M and N are the numbers of queries and keys in a tile. x_b, x_h and x_t
are the strides of x over the batch, heads and tokens, and o_s is the stride of out over splits.
x_ptr points to x. GROUP is H / G, the number of query heads that share a key head. biased is 1 with
ALiBi. A row b is a row of the batch. In load_rows, store_rows and comments on tiles, a row is one
query or one key.
"""
import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
MOST_SPLITS = 32  # The keys of one query are cut into at most so many splits.
# Keys past the end get this position, which is after every query. Queries past the end get its
# negative, so that every mask hides all keys from them. Where a tile needs no mask, numbers are
# computed for rows past the end, too, but they are never stored.
BEYOND = tl.constexpr(2 ** 30)
LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)

# Triton compiles a variant of a kernel for each integer argument that is 1 or a multiple of 16, and
# for each pointer that is aligned to 16 bytes. These lists turn this off. One variant then serves
# all values of the arguments in the first list and any alignment of the pointers in the second
# list. These pointers point to one number for each query, key or head. Strides, D and the other
# pointers are not listed, because Triton loads several elements of a row at once if it knows that
# they are multiples of 16. `aligned` makes them so, and one variant is enough for them, too.
ATTEND = dict(do_not_specialize=["T", "S", "H", "GROUP", "window", "biased", "q_pos_b", "k_pos_b"],
              do_not_specialize_on_alignment=["lse_ptr", "dlse_ptr", "delta_ptr", "q_pos_ptr",
                                              "k_pos_ptr", "slopes_ptr", "own_score_ptr"])
SCAN = dict(do_not_specialize=["T", "chunk"], do_not_specialize_on_alignment=["h0_ptr", "dh0_ptr"])


# ---- parts that several kernels share ----

@triton.jit
def dot(a, b, acc):
    """Return a b + acc, summed in float32 and without tf32."""
    if INTERPRETED:  # The interpreter would multiply the bits of bfloat16 values as integers.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Return float32 x as dtype, rounded to the nearest."""
    if INTERPRETED and dtype == tl.bfloat16:  # The interpreter would cut the low bits off.
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def program(n_tiles, H):
    """Return a program's tile, row b and head h. b and h have 64 bits, because offsets that are
    computed from them may need more than 32."""
    pid = tl.program_id(0)
    head = pid // n_tiles  # b H + h
    return pid % n_tiles, (head // H).to(tl.int64), (head % H).to(tl.int64)


@triton.jit
def load_rows(ptr, start, stride, valid, D, BLOCK_D: tl.constexpr, MASKED: tl.constexpr = True):
    """Return the rows from `start` of a matrix with D columns as (n, BLOCK_D), with zeros past D.
    n is the size of valid. Where MASKED, rows that are not valid are zero and not read."""
    row, d = tl.arange(0, valid.shape[0]), tl.arange(0, BLOCK_D)
    at = ptr + tl.cast(start, tl.int64) * stride + (row[:, None] * stride + d[None, :])
    if MASKED:
        return tl.load(at, mask=valid[:, None] & (d < D)[None, :], other=0.0)
    else:
        return tl.load(at, mask=(d < D)[None, :], other=0.0)


@triton.jit
def store_rows(ptr, start, stride, n, D, x):
    """Write x (rows, BLOCK_D) to the rows from `start` of a matrix with n rows and D columns."""
    row, d = tl.arange(0, x.shape[0]), tl.arange(0, x.shape[1])
    at = ptr + tl.cast(start, tl.int64) * stride + (row[:, None] * stride + d[None, :])
    mask = (start + row < n)[:, None] & (d < D)[None, :]
    tl.store(at, narrow(x, ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_pos(pos_ptr, rows, n, beyond):
    """Return the positions of the given rows of n, and `beyond` for rows past the end."""
    return tl.where(rows < n, tl.load(pos_ptr + rows, mask=rows < n, other=0), beyond)


@triton.jit
def compose(g_a, x_a, g_b, x_b):
    """Return the map h -> g_a h + x_a, followed by h -> g_b h + x_b, as one such map.
    associative_scan calls this for neighbours. a is the earlier token, or with reverse=True the
    later one."""
    return g_a * g_b, g_b * x_a + x_b


# ---- which tiles to read ----

@triton.jit
def count_upto(pos_ptr, n, limit):
    """Return how many of n ascending positions are at most `limit`, by a binary search."""
    low = tl.full((), 0, tl.int32)
    high = low + n
    while low < high:
        middle = (low + high) // 2
        if tl.load(pos_ptr + middle) <= limit:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def tile_spans(pos_ptr, n, some_low, all_low, all_high, some_high, biased, BLOCK: tl.constexpr):
    """Return the numbers of four tiles, first <= full <= rest <= last, for n ascending positions.
    The tiles [first, last) hold all positions in (some_low, some_high], and the tiles [full, rest)
    hold only positions in (all_low, all_high]. At least one row of the program sees each position
    in (some_low, some_high], and all of its rows see those in (all_low, all_high]. With ALiBi every
    tile needs the distances. The loop over [full, rest) does not compute them (see tile_number),
    and so [full, rest) is then made empty."""
    first = count_upto(pos_ptr, n, some_low) // BLOCK
    last = tl.cdiv(count_upto(pos_ptr, n, some_high), BLOCK)
    full = tl.minimum(tl.cdiv(count_upto(pos_ptr, n, all_low), BLOCK), last)
    rest = tl.maximum(count_upto(pos_ptr, n, all_high) // BLOCK, full)
    return first, full, tl.where(biased != 0, full, rest), last


@triton.jit
def visible_tiles(q_pos_ptr, k_pos_ptr, start, T, S, window, biased,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return first, full, rest and last of the key tiles for BLOCK_M queries from `start`. A query
    at position i attends to the keys at positions i - window < j <= i."""
    low = tl.load(q_pos_ptr + start)
    high = tl.load(q_pos_ptr + tl.minimum(start + BLOCK_M, T) - 1)
    return tile_spans(k_pos_ptr, S, low - window, high - window, low, high, biased, BLOCK_N)


@triton.jit
def share_of(split, n_splits, first, full, rest, last):
    """Return first, full, rest and last of one split. The tiles [first, last) are cut into n_splits
    shares, whose sizes differ by at most one tile."""
    begin = first + (last - first) * split // n_splits
    end = first + (last - first) * (split + 1) // n_splits
    full, rest = tl.maximum(full, begin), tl.maximum(rest, begin)
    return begin, tl.minimum(full, end), tl.minimum(rest, end), end


@triton.jit
def tile_number(i, first, full, rest, MASKED: tl.constexpr):
    """Return the tile that a kernel visits at index i of its loop. A kernel's loop over tiles runs
    in two rounds, which are compiled separately. The first round needs no mask, and i runs over the
    tiles [full, rest) themselves. The second round is MASKED. There i counts from 0, first through
    the tiles [first, full) and then through the tiles [rest, last)."""
    if MASKED:
        return tl.where(i < full - first, first + i, rest + i - (full - first))
    else:
        return i


# ---- attend_by_position ----

@triton.jit
def scores(x, y, q_pos, k_pos, scale, slope, window, MASKED: tl.constexpr):
    """Return the scores (1), multiplied by log2(e). Their products q . k are x times y transposed.
    Where MASKED, they have ALiBi's bias, and the score of an invisible key is -inf. Where the
    queries are the rows, x is q, q_pos is (M, 1) and k_pos is (1, N). In attend_dkv_kernel the keys
    are the rows, x is k, and the shapes of the positions are (1, M) and (N, 1)."""
    s = dot(x, tl.trans(y), None) * (scale * LOG2E)  # 2^s = e^(q . k / sqrt(D))
    if MASKED:
        distance = q_pos - k_pos           # (M, N) or (N, M)
        visible = (distance >= 0) & (distance < window)
        s = tl.where(visible, s - slope * LOG2E * distance, float("-inf"))
    return s


@triton.jit(**ATTEND)
def attend_forward_kernel(
        q_ptr, k_ptr, v_ptr, own_value_ptr, own_score_ptr, out_ptr, lse_ptr, q_pos_ptr, k_pos_ptr,
        slopes_ptr, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, own_b, own_h, own_t,
        o_s, o_b, o_h, o_t, q_pos_b, k_pos_b, T, S, D, H, GROUP, window, scale, biased,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, OWN: tl.constexpr):
    """A program computes out (3) and lse (2) of BLOCK_M queries of one head. The sums are over the
    visible keys of its split. Where OWN, the query's own pair is one more key."""
    n_tiles = tl.cdiv(T, BLOCK_M)
    tile, b, h = program(n_tiles, H)
    start = (n_tiles - 1 - tile) * BLOCK_M  # The tiles with the most work come first.
    k_ptr += b * k_b + h // GROUP * k_h
    v_ptr += b * v_b + h // GROUP * v_h
    q_pos_ptr += b * q_pos_b
    k_pos_ptr += b * k_pos_b
    slope = tl.load(slopes_ptr + h, mask=biased != 0, other=0.0)

    rows = start + tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr + b * q_b + h * q_h, start, q_t, rows < T, D, BLOCK_D)
    q_pos = load_pos(q_pos_ptr, rows, T, -BEYOND)
    first, full, rest, last = visible_tiles(q_pos_ptr, k_pos_ptr, start, T, S, window,
                                            biased, BLOCK_M, BLOCK_N)
    split, n_splits = tl.program_id(1), tl.num_programs(1)
    first, full, rest, last = share_of(split, n_splits, first, full, rest, last)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)  # the largest score so far
    l = tl.zeros((BLOCK_M,), tl.float32)                # sum_j e^{s_ij - m}
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)      # sum_j e^{s_ij - m} v_j
    for MASKED in tl.static_range(2):  # tile_number explains the two rounds
        begin, end = (0, full - first + last - rest) if MASKED else (full, rest)
        for i in range(begin, end):
            first_key = tile_number(i, first, full, rest, MASKED) * BLOCK_N
            keys = first_key + tl.arange(0, BLOCK_N)
            k_pos = load_pos(k_pos_ptr, keys, S, BEYOND)
            k = load_rows(k_ptr, first_key, k_t, keys < S, D, BLOCK_D, MASKED)
            s = scores(q, k, q_pos[:, None], k_pos[None, :], scale, slope, window, MASKED)
            new_m = tl.maximum(m, tl.max(s, 1))  # m'
            shift = new_m
            if MASKED:  # For a query without keys so far, s - m' would be NaN.
                shift = tl.where(new_m == float("-inf"), 0.0, new_m)
            alpha = tl.exp2(m - shift)           # e^{m - m'}
            p = tl.exp2(s - shift[:, None])      # e^{s_ij - m'}
            l = alpha * l + tl.sum(p, 1)
            v = load_rows(v_ptr, first_key, v_t, keys < S, D, BLOCK_D, MASKED)
            acc = dot(narrow(p, v.dtype), v, alpha[:, None] * acc)  # alpha acc + p v
            m = new_m

    if OWN:  # The own pair is a tile of one key, which differs from query to query.
        own_s = tl.load(own_score_ptr + (b * H + h) * T + rows, mask=rows < T, other=0.0) * LOG2E
        own_v = load_rows(own_value_ptr + b * own_b + h * own_h, start, own_t, rows < T, D, BLOCK_D)
        new_m = tl.maximum(m, own_s)
        alpha, p = tl.exp2(m - new_m), tl.exp2(own_s - new_m)
        l, m = alpha * l + p, new_m
        acc = alpha[:, None] * acc + p[:, None] * own_v.to(tl.float32)

    empty = l == 0.0  # Where no key is visible, out is 0 and lse is -inf.
    l = tl.where(empty, 1.0, l)
    out_ptr += split * o_s + b * o_b + h * o_h
    store_rows(out_ptr, start, o_t, T, D, acc / l[:, None])
    lse = tl.where(empty, float("-inf"), (m + tl.log2(l)) * LN2)
    lse_ptr += split * (tl.num_programs(0) // n_tiles * T)  # Each split writes B H T numbers.
    tl.store(lse_ptr + (b * H + h) * T + rows, lse, mask=rows < T)


@triton.jit(do_not_specialize=["n_splits"])
def merge_splits_kernel(outs_ptr, lses_ptr, out_ptr, lse_ptr, n_splits, D,
                        SPLITS: tl.constexpr, BLOCK_D: tl.constexpr):
    """A program merges the outs and lses of one query's splits. It computes (4) and (5) for more
    than two sets of keys. outs (n_splits, B H, D) and lses (n_splits, B H) become out (B H, D) and
    lse (B H)."""
    row, n_rows = tl.program_id(0), tl.num_programs(0)  # n_rows is B H.
    s, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    lses = tl.load(lses_ptr + s * n_rows + row, mask=s < n_splits, other=float("-inf"))
    m = tl.max(lses, 0)
    weight = tl.exp2((lses - tl.where(m == float("-inf"), 0.0, m)) * LOG2E)
    l = tl.sum(weight, 0)  # e^{lse - m}
    mask = (s < n_splits)[:, None] & (d < D)[None, :]
    outs = tl.load(outs_ptr + (s * n_rows + row)[:, None] * D + d[None, :], mask=mask, other=0.0)
    l = tl.where(l == 0.0, 1.0, l)  # Where no key is visible, out is 0 and lse is -inf.
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
    """A program computes dq_i (8) of BLOCK_M queries of a head, and writes their delta_i (6), which
    attend_dkv_kernel reads."""
    n_tiles = tl.cdiv(T, BLOCK_M)
    tile, b, h = program(n_tiles, H)
    start = (n_tiles - 1 - tile) * BLOCK_M  # The tiles with the most work come first.
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
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1) - dlse  # (6)
    lse = tl.load(lse_ptr + per_row, mask=valid, other=float("-inf"))
    empty = lse == float("-inf")
    delta = tl.where(empty, 0.0, delta)               # dlse may be NaN in these rows.
    lse = tl.where(empty, float("inf"), lse * LOG2E)  # p = 2^(s - inf) is then 0 there.
    tl.store(delta_ptr + per_row, delta, mask=valid)

    q = load_rows(q_ptr + b * q_b + h * q_h, start, q_t, valid, D, BLOCK_D)
    q_pos = load_pos(q_pos_ptr, rows, T, -BEYOND)
    first, full, rest, last = visible_tiles(q_pos_ptr, k_pos_ptr, start, T, S, window,
                                           biased, BLOCK_M, BLOCK_N)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)  # sum_j ds_ij k_j
    for MASKED in tl.static_range(2):  # tile_number explains the two rounds
        begin, end = (0, full - first + last - rest) if MASKED else (full, rest)
        for i in range(begin, end):
            first_key = tile_number(i, first, full, rest, MASKED) * BLOCK_N
            keys = first_key + tl.arange(0, BLOCK_N)
            k_pos = load_pos(k_pos_ptr, keys, S, BEYOND)
            k = load_rows(k_ptr, first_key, k_t, keys < S, D, BLOCK_D, MASKED)
            v = load_rows(v_ptr, first_key, v_t, keys < S, D, BLOCK_D, MASKED)
            s = scores(q, k, q_pos[:, None], k_pos[None, :], scale, slope, window, MASKED)
            p = tl.exp2(s - lse[:, None])         # p_ij = e^{s_ij - lse_i}
            dp = dot(do, tl.trans(v), None)
            ds = p * (dp - delta[:, None])        # (7), p_ij (do_i . v_j - delta_i)
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
    """A program computes what one query head adds to dk_j (9) and dv_j (10) of BLOCK_N keys. The
    launcher sums over the query heads that share a key head."""
    tile, b, h = program(tl.cdiv(S, BLOCK_N), H)
    start = tile * BLOCK_N  # The tiles with the most work come first.
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
    low = tl.load(k_pos_ptr + start)
    high = tl.load(k_pos_ptr + tl.minimum(start + BLOCK_N, S) - 1)
    first, full, rest, last = tile_spans(  # Queries j <= i < j + window attend to key j.
        q_pos_ptr, T, low - 1, high - 1, low + (window - 1), high + (window - 1), biased, BLOCK_M)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)  # sum_i ds_ij q_i
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)  # sum_i p_ij do_i
    for MASKED in tl.static_range(2):  # p and ds are transposed here: their rows are keys.
        begin, end = (0, full - first + last - rest) if MASKED else (full, rest)
        for i in range(begin, end):
            first_row = tile_number(i, first, full, rest, MASKED) * BLOCK_M
            rows = first_row + tl.arange(0, BLOCK_M)
            q_pos = load_pos(q_pos_ptr, rows, T, -BEYOND)
            q = load_rows(q_ptr, first_row, q_t, rows < T, D, BLOCK_D, MASKED)
            lse = tl.load(lse_ptr + rows, mask=rows < T, other=float("inf")) * LOG2E
            if MASKED:  # A query without keys gets p = 2^(s - inf) = 0.
                lse = tl.where(lse == float("-inf"), float("inf"), lse)
            s = scores(k, q, q_pos[None, :], k_pos[:, None], scale, slope, window, MASKED)
            p = tl.exp2(s - lse[None, :])          # p_ij, (N, M)
            do = load_rows(do_ptr, first_row, do_t, rows < T, D, BLOCK_D, MASKED)
            dv = dot(narrow(p, do.dtype), do, dv)  # dv_j + sum_i p_ij do_i
            delta = tl.load(delta_ptr + rows, mask=rows < T, other=0.0)
            dp = dot(v, tl.trans(do), None)
            ds = p * (dp - delta[None, :])        # (7), p_ij (do_i . v_j - delta_i)
            dk = dot(narrow(ds, q.dtype), q, dk)  # dk_j + sum_i ds_ij q_i
    store_rows(dk_ptr + b * dk_b + h * dk_h, start, dk_t, S, D, dk * scale)
    store_rows(dv_ptr + b * dv_b + h * dv_h, start, dv_t, S, D, dv)


# ---- scan ----

@triton.jit
def scan_program(T, C, chunk, BLOCK_C: tl.constexpr):
    """Return a program's row, its chunk, begin and end of its tokens [begin, end), and the
    program's channels."""
    n_blocks, n_chunks = tl.cdiv(C, BLOCK_C), tl.cdiv(T, chunk)
    pid = tl.program_id(0)
    n, b = pid // n_blocks % n_chunks, (pid // n_blocks // n_chunks).to(tl.int64)
    c = pid % n_blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    return b, n, n * chunk, tl.minimum((n + 1) * chunk, T), c


@triton.jit
def row_of(x, row):
    """Return row `row` of a tile (BLOCK_T, BLOCK_C)."""
    return tl.sum(tl.where((tl.arange(0, x.shape[0]) == row)[:, None], x, 0.0), 0)


@triton.jit(**SCAN)
def scan_forward_kernel(g_ptr, x_ptr, h0_ptr, h_ptr, g_b, g_t, x_b, x_t, T, C, chunk,
                        BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    """A program computes h_t (11) of one chunk and BLOCK_C channels, in tiles of BLOCK_T tokens. It
    scans a tile from zero in registers, and then adds what the state before the tile contributes.
    """
    b, n, begin, end, c = scan_program(T, C, chunk, BLOCK_C)
    state = tl.load(h0_ptr + b * C + c, mask=(c < C) & (n == 0), other=0.0).to(tl.float32)
    g_ptr += b * g_b
    x_ptr += b * x_b
    for start in range(begin, end, BLOCK_T):
        t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        mask = (t < end)[:, None] & (c < C)[None, :]
        g = tl.load(g_ptr + t[:, None] * g_t + c[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + t[:, None] * x_t + c[None, :], mask=mask, other=0.0).to(tl.float32)
        # Afterwards g is the product of the gates so far, and x the state from zero.
        g, x = tl.associative_scan((g, x - g * x), 0, compose)
        h = g * state[None, :] + x      # (BLOCK_T, BLOCK_C)
        state = row_of(h, BLOCK_T - 1)  # the state before the next tile
        at = (b * T + t[:, None]) * C + c[None, :]
        tl.store(h_ptr + at, narrow(h, h_ptr.dtype.element_ty), mask=mask)


@triton.jit(**SCAN)
def scan_backward_kernel(dh_ptr, g_ptr, x_ptr, h_ptr, h0_ptr, dg_ptr, dx_ptr, dh0_ptr,
                         dh_b, dh_t, g_b, g_t, x_b, x_t, T, C, chunk,
                         BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    """A program computes d_t (12), dx_t (13) and dg_t (14) of one chunk and BLOCK_C channels, the
    last tile first. For the first chunk it also computes dh0 = g_0 d_0. Three masks are needed,
    because g is read at t + 1 and h at t - 1, and both must lie in the chunk."""
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
        d += decay * state[None, :]  # (12)
        state = row_of(d, 0)
        at = (b * T + t[:, None]) * C + c[None, :]
        g = tl.load(g_at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, narrow(d - g * d, dx_ptr.dtype.element_ty), mask=mask)  # (13)
        inside = (t > begin)[:, None]  # The token before is in this chunk.
        before = tl.load(h_ptr + at - C, mask=mask & inside, other=0.0).to(tl.float32)
        before = tl.where(inside, before, h0[None, :])  # h_{t-1}
        x = tl.load(x_ptr + t[:, None] * x_t + c[None, :], mask=mask, other=0.0).to(tl.float32)
        # (14)
        tl.store(dg_ptr + at, narrow(d * (before - x), dg_ptr.dtype.element_ty), mask=mask)
    g = tl.load(g_ptr + tl.cast(begin, tl.int64) * g_t + c, mask=c < C, other=0.0).to(tl.float32)
    dh0 = narrow(g * state, dh0_ptr.dtype.element_ty)
    tl.store(dh0_ptr + b * C + c, dh0, mask=(c < C) & (n == 0))


# ---- the memory layout that the kernels need ----

def new_heads(x, B, H, T, D):
    """Return an uninitialised (B, H, T, D). Memory holds it as (B, T, H, D), so that the output
    projection needs no copy. (kernels.py has heads_like for this, but this file imports no
    other.)"""
    return x.new_empty(B, T, H, D).transpose(1, 2)


def strides(*tensors):
    """Return all strides of the tensors but the last ones. A dimension of size 1 gets 0, because it
    may have any stride, no kernel steps along it, and 0 is a multiple of 16."""
    return [s if n > 1 else 0 for x in tensors for n, s in zip(x.shape[:-1], x.stride())]


def aligned(x):
    """Return x (B, H, T, D) itself if its strides and D are multiples of 16 and its address is a
    multiple of 16 bytes. Otherwise return a copy whose D is padded with zeros."""
    D = x.size(-1)
    if (x.stride(-1) == 1 and D % 16 == 0 and x.data_ptr() % 16 == 0
            and all(s % 16 == 0 for s in strides(x))):
        return x
    padded = new_heads(x, *x.shape[:3], D + -D % 16).zero_()
    padded[..., :D] = x
    return padded


def cropped(x, D):
    """Return x (B, H, T, at least D) with head size D. The result is never a view of a larger
    tensor, because kernels.py promises torch.compile the strides of new_heads (register_fake)."""
    return x if x.size(-1) == D else new_heads(x, *x.shape[:3], D).copy_(x[..., :D])


def summed_over_groups(x, G, D):
    """Return x (B, H, T, at least D) as (B, G, T, D), where the query heads that share a key head
    are summed."""
    if x.size(1) == G:
        return cropped(x, D)
    total = x[..., :D].unflatten(1, (G, -1)).sum(2)
    return new_heads(x, x.size(0), G, x.size(2), D).copy_(total)


# ---- tile sizes ----

# All tiles compile with no or few register spills, which tests/compile_kernels.py counts. Most are
# the largest such tiles. In 16 bits with large blocks, tiles for head sizes up to 64 are smaller
# (64, 64), because they are faster on an H200. A key has the kernel's name, then 1 for GPUs with
# large blocks (has_large_blocks) or 0 for others, then 1 for float32 or 0 for 16 bits. "split" is
# the forward kernel for one query. A value lists (BLOCK_M, BLOCK_N, warps, stages) for head sizes
# up to 16, 32, 64, 128 and 256.
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
    """Return whether a program may use 160 KB of a multiprocessor's shared memory, as on sm_80 and
    sm_90. Otherwise tiles are chosen for 64 KB. (The keys' gradients need 1 KB more in float32 with
    head sizes above 128, so that sm_75 cannot train these.)"""
    if device.type != "cuda":
        return True  # the interpreter
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 0)
    return torch.version.hip is None and shared >= 160 * 1024


def tile_options(name, D, dtype, large):
    """Return the tiles, warps and stages of a kernel of TILES for head size D."""
    block = max(16, triton.next_power_of_2(D))
    M, N, warps, stages = TILES[name, large, dtype == torch.float32][block.bit_length() - 5]
    return dict(BLOCK_M=M, BLOCK_N=N, BLOCK_D=block, num_warps=warps, num_stages=stages)


def split_count(n_heads, S):
    """Return how many splits the S keys of one query are cut into. n_heads is B H. There are so
    many that all heads together have about two programs for each of the 132 multiprocessors of an
    H200, but no more than S / 256 and MOST_SPLITS, and at least one."""
    return max(1, min(MOST_SPLITS, 264 // max(1, n_heads), S // 256))


def scan_options(chunk):
    """Return the tile sizes and warps of a scan kernel. A chunk of at most 64 tokens is one tile,
    and a tile has at most 2,048 elements."""
    block = min(64, triton.next_power_of_2(chunk))
    channels = 16 if INTERPRETED else min(256, 2048 // block)  # The interpreter scans one by one.
    return dict(BLOCK_T=block, BLOCK_C=channels, num_warps=4)


# ---- the launchers, which kernels.py calls ----

def mask_pointers(q_pos, k_pos, slopes, lse):
    """Return the kernels' arguments for the mask: the pointers, the strides of the positions over
    rows, and whether there is a bias. lse stands in for slopes that are not there."""
    pos = [p.contiguous() for p in (q_pos, k_pos)]
    bias = lse if slopes is None else slopes.to(torch.float32).contiguous()  # Any pointer will do.
    return [*pos, bias], [p.size(-1) if p.dim() == 2 else 0 for p in pos], int(slopes is not None)


def launch_attend(q, k, v, own_score, own_value, q_pos, k_pos, slopes, window):
    """Return out (B, H, T, D) and lse (B, H, T)."""
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    name, splits = "forward", 1
    if T == 1 and own_score is None:
        name, splits = "split", split_count(B * H, S)
    # After this, q.size(-1) is a multiple of 16. D stays the size without padding.
    q, k, v = aligned(q), aligned(k), aligned(v)
    value, score = q, q  # Without own pairs, any pointers will do.
    if own_score is not None:
        value, score = aligned(own_value), own_score.float().contiguous()
    # out has the dtype of own's value.
    out, lse = new_heads(value, *q.shape), q.new_empty(B, H, T, dtype=torch.float32)
    outs, lses = out[None], lse[None]  # One split writes out and lse themselves.
    if splits > 1:
        outs, lses = (lse.new_empty(splits, *x.shape) for x in (out, lse))  # in float32
    pointers, pos_strides, biased = mask_pointers(q_pos, k_pos, slopes, lse)
    options = tile_options(name, D, q.dtype, has_large_blocks(q.device))
    attend_forward_kernel[(triton.cdiv(T, options["BLOCK_M"]) * B * H, splits)](
        q, k, v, value, score, outs, lses, *pointers, *strides(q, k, v, value, outs), *pos_strides,
        T, S, q.size(-1), H, H // G, window, D ** -0.5, biased,
        OWN=own_score is not None, **options)
    if splits > 1:
        merge_splits_kernel[(B * H,)](outs, lses, out, lse, splits, q.size(-1),
                                      SPLITS=MOST_SPLITS, BLOCK_D=options["BLOCK_D"])
    return cropped(out, D), lse


def launch_attend_backward(q, k, v, out, lse, do, dlse, q_pos, k_pos, slopes, window):
    """Return dq, dk and dv, which are like q, k and v."""
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    q, k, v, out, do = (aligned(x) for x in (q, k, v, out, do))
    lse = lse.contiguous()         # The kernels need it.
    dlse = torch.zeros_like(lse) if dlse is None else dlse.contiguous()
    delta = torch.empty_like(lse)  # The first kernel writes it.
    dq, dk, dv = (new_heads(q, B, H, n, q.size(-1)) for n in (T, S, S))  # one for each query head
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
    """Return x (B, T, C) as `aligned` does."""
    return aligned(x.unsqueeze(1)).squeeze(1)


def scan_arguments(h0, x, chunk):
    """Return the grid, h0 padded to x's channels, chunk and the launch options."""
    (B, T, C), chunk = x.shape, min(chunk, x.size(1))
    options = scan_options(chunk)
    grid = (B * triton.cdiv(T, chunk) * triton.cdiv(C, options["BLOCK_C"]),)
    return grid, F.pad(h0, (0, C - h0.size(1))).contiguous(), chunk, options


def launch_scan(g, x, h0, chunk):
    """Return h (B, T, C)."""
    (_, T, C), g, x = x.shape, aligned_channels(g), aligned_channels(x)
    grid, h0, chunk, options = scan_arguments(h0, x, chunk)
    h = x.new_empty(x.shape)
    scan_forward_kernel[grid](g, x, h0, h, *strides(g, x), T, x.size(-1), chunk, **options)
    return h[..., :C].contiguous()


def launch_scan_backward(dh, g, x, h, h0, chunk):
    """Return dg, dx (B, T, C) and dh0 (B, C)."""
    (_, T, C), h = h.shape, aligned_channels(h).contiguous()
    dh, g, x = aligned_channels(dh), aligned_channels(g), aligned_channels(x)
    grid, h0, chunk, options = scan_arguments(h0, h, chunk)
    dg, dx, dh0 = torch.empty_like(h), torch.empty_like(h), torch.empty_like(h0)
    scan_backward_kernel[grid](dh, g, x, h, h0, dg, dx, dh0, *strides(dh, g, x),
                               T, h.size(-1), chunk, **options)
    return *(y[..., :C].contiguous() for y in (dg, dx)), dh0[:, :C].contiguous()
