"""
The fast paths of RT, LRT and RAT are built on these functions.

    attend_by_position(q, k, v, q_pos, ...)    softmax attention, masked by positions
    attend_by_position_backward(q, k, v, ...)  its backward pass alone
    merge(out_a, lse_a, out_b, lse_b)          merges attention over two sets of keys
    scan(g, x, chunk, h0)                      a gated recurrence inside chunks

Attention. Key j is visible to query i iff k_pos_j <= q_pos_i and, with a window, q_pos_i - k_pos_j
< window. Query i attends to the keys j that are visible to it, and every sum over j runs over these
keys. slope is ALiBi's slope of the head (m_h in model_gpt.py), and 0 without ALiBi.

    (1)  s_ij  = q_i . k_j / sqrt(D) - slope (q_pos_i - k_pos_j)
    (2)  lse_i = log sum_j e^{s_ij}
    (3)  out_i = sum_j p_ij v_j,   p_ij = e^{s_ij - lse_i}

With lse, softmaxes over two disjoint sets of keys, a and b, are merged into one:

    (4)  lse = log(e^{lse_a} + e^{lse_b})
    (5)  out = e^{lse_a - lse} out_a + e^{lse_b - lse} out_b

A query without visible keys has out = 0 and lse = -inf, so that this set of keys has weight 0 in
(5). (If it has none in either set, merge returns 0 and -inf.) In this example, attention over all
keys is merged from attention over the first 100 keys and over the others:

    first = attend_by_position(q, k[:, :, :100], v[:, :, :100], q_pos, k_pos[:100])    # out, lse
    others = attend_by_position(q, k[:, :, 100:], v[:, :, 100:], q_pos, k_pos[100:])
    out, lse = merge(*first, *others)

The backward pass needs the inputs, out and lse, but it does not need a stored matrix of all p_ij,
because (3) gives them again. A d before a name stands for the gradient of the loss with respect to
it. The sums over i in (9) and (10) run over the queries that key j is visible to, in all query
heads that share the key.

    (6)  delta_i = do_i . out_i - dlse_i
    (7)  ds_ij   = p_ij (do_i . v_j - delta_i)
    (8)  dq_i    = sum_j ds_ij k_j / sqrt(D)
    (9)  dk_j    = sum_i ds_ij q_i / sqrt(D)
    (10) dv_j    = sum_i p_ij do_i

Scan. The state h_t has the gate g_t and the input x_t. It enters the loss directly and through
h_{t+1}. In scan, dh_t is only the part of the gradient that reaches h_t directly. The whole
gradient of h_t is d_t.

    (11) h_t  = g_t h_{t-1} + (1 - g_t) x_t
    (12) d_t  = dh_t + g_{t+1} d_{t+1}
    (13) dx_t = (1 - g_t) d_t
    (14) dg_t = d_t (h_{t-1} - x_t)

(12) is a linear recurrence from right to left, whose inputs dh_t have no factor 1 - g. Each chunk
starts anew: at its first token 0 takes the place of h_{t-1}, and in the first chunk h0 does. At the
last token of a chunk the second term of (12) is 0. h0 is the state before token 0, and h_0 is the
state at token 0. The gradient of h0 is dh0 = g_0 d_0.

A function whose name ends in _naive follows the equations as they are written, and the tests
compare with it. For (12) to (14) the tests differentiate scan_naive. There are four operators:
attention, its backward pass, scan and its backward pass. Each has a plain PyTorch implementation in
this file, which is fast code without Triton, and one in Triton, in kernels_triton.py. Triton's runs
on a GPU with triton (and where Triton's interpreter is on), unless the tensors are float64. A line
on stderr tells which of the two runs. The end of this file says which functions a call goes
through.

Papers: Dao et al. 2022 (FlashAttention, 2205.14135); Milakov and Gimelshein 2018
(online softmax, 1805.02867); Press et al. 2022 (ALiBi, 2108.12409); Wei et al. 2025
(RAT, whose recurrence is scan's, 2507.04416).

The letters B, T, S, C, H, G and D are those of model_gpt.py. In addition, i is a query and j is a
key. In the functions of scan, C is any number of channels, K is the length of a chunk, n is the
number of chunks, and a name that ends in _n, such as g_n, is a tensor (B, n, K, C). Where a
function works on a block of queries, T and S count the block's queries and keys.
"""
import functools
import importlib.util
import itertools
import math
import os
import sys
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

HEAD_SIZES = (16, 32, 64, 128, 256)  # The Triton kernels have these; other sizes are padded.
NO_WINDOW = 2 ** 30  # This window holds all positions.
FUSED = {"cpu"}  # On these devices torch has a fast attention that returns lse, too.


def sum_dtype(x):
    """Return the dtype in which sums are taken: float64 for float64, else float32."""
    return torch.promote_types(x.dtype, torch.float32)


def heads_like(x, B, H, T, D, dtype=None):
    """Return an uninitialised (B, H, T, D). Memory holds it as (B, T, H, D), so that the output
    projection needs no copy."""
    return x.new_empty(B, T, H, D, dtype=dtype).transpose(1, 2)


# ---- attend_by_position ----
# Some functions annotate the types of their arguments, because custom_op, at the end of this file,
# makes an operator's signature from these annotations.

def attend_by_position(q, k, v, q_pos=None, k_pos=None, slopes=None, window=None, own=None):
    """Return softmax attention, (1) to (3), with the mask by positions that stands at the top of
    this file.

    q (B, H, T, D), k and v (B, G, S, D) may have any strides, and D is at most 256. H is a
    multiple of G: query head h reads key head h // (H / G). Keys and values must be finite even
    where they are visible to no query.
    q_pos (T,) or (B, T), k_pos (S,) or (B, S): int32, ascending, between -2^29 and 2^29. (The
    Triton kernels give the position 2^30 to keys past the end, and differences with it must fit
    into int32.) None stands for 0, 1, 2, ... So with T < S the queries are the first T tokens, and
    not the last ones as in model_gpt.attend.
    slopes (H,): ALiBi's. -slopes[h] (q_pos[i] - k_pos[j]) is added to the scores. Slopes get no
    gradient.
    window: an int of at least 1. A query attends to keys at its own position and at the window - 1
    positions before it. None stands for no window.
    own (score, value): each query has one more key, which is visible to this query alone. It is
    given by its score (B, H, T), which must be finite and which takes the place of (1), and by
    its value (B, H, T, D). The result is that of merge(value, score, out, lse). In Triton it costs
    no further pass over out, but merge would cost one.

    Returns out (B, H, T, D) in q's dtype, or in the dtype of own's value, and lse (B, H, T) in
    float32 (float64 for float64). Both are differentiable in q, k, v and own, by first
    derivatives only. Without visible keys out is 0 and lse is -inf."""
    mask = checked_mask(q, k, v, q_pos, k_pos, slopes, window)
    if own and (own[0].shape, own[1].shape) != (q.shape[:3], q.shape):
        raise ValueError(f"attend_by_position: own {tuple(own[0].shape)}, {tuple(own[1].shape)} "
                         f"must be {tuple(q.shape[:3])}, {tuple(q.shape)}")
    # autograd and torch.compile need the registered operator. It costs a tenth of a millisecond,
    # which is noticeable in decoding on a CPU, so that other calls go without it.
    registered = torch.is_grad_enabled() or torch.compiler.is_compiling()
    return (attend_op if registered else run_attend)(q, k, v, *(own or (None, None)), *mask)


def attend_by_position_backward(q, k, v, out, lse, do, q_pos=None, k_pos=None, slopes=None,
                                window=None):
    """Return dq, dk and dv of these queries and keys. The softmax may be over further keys. So out
    and its gradient do, both (B, H, T, D) in q's dtype, and lse (B, H, T) must be those of the
    whole softmax. The loss must depend on the whole softmax through out alone and not through its
    lse, so that dlse is 0. dq is then what these keys contribute, and the contributions of disjoint
    sets of keys add up. The other arguments are attend_by_position's. The result is not
    differentiable."""
    mask = checked_mask(q, k, v, q_pos, k_pos, slopes, window)
    return run_attend_gradients(q, k, v, out, lse, do, None, *mask)


def attend_naive(q, k, v, q_pos, k_pos, slopes, window):
    """Return out and lse, computed query by query. Positions are (B, T) and (B, S) here, and no
    argument is None."""
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[:3])
    for b, h, i, g, j, s in each_query(q, k, q_pos, k_pos, slopes, window):
        lse[b, h, i] = s.logsumexp(0)                          # (2)
        p = torch.exp(s - lse[b, h, i])
        out[b, h, i] = p @ v[b, g, j]                          # (3)
    return out, lse


def attend_backward_naive(q, k, v, out, lse, do, dlse, q_pos, k_pos, slopes, window):
    """Return dq, dk and dv, computed query by query. The arguments are as for attend_naive."""
    (dq, dk, dv), scale = (torch.zeros_like(x) for x in (q, k, v)), q.size(-1) ** -0.5
    for b, h, i, g, j, s in each_query(q, k, q_pos, k_pos, slopes, window):
        p = torch.exp(s - lse[b, h, i])
        delta = do[b, h, i] @ out[b, h, i] - dlse[b, h, i]     # (6)
        ds = p * (v[b, g, j] @ do[b, h, i] - delta)            # (7)
        dq[b, h, i] = ds @ k[b, g, j] * scale                  # (8)
        dk[b, g, j] += torch.outer(ds, q[b, h, i]) * scale     # (9)
        dv[b, g, j] += torch.outer(p, do[b, h, i])             # (10)
    return dq, dk, dv


def each_query(q, k, q_pos, k_pos, slopes, window):
    """Yield row b, head h and number i of each query, its key head g, the numbers j of the keys
    that are visible to it, and their scores s."""
    for b, h, i in itertools.product(*map(range, q.shape[:3])):
        g = h // (q.size(1) // k.size(1))
        distance = q_pos[b, i] - k_pos[b]
        j = ((distance >= 0) & (distance < window)).nonzero()[:, 0]
        s = k[b, g, j] @ q[b, h, i] / math.sqrt(q.size(-1)) - slopes[h] * distance[j]  # (1)
        yield b, h, i, g, j, s


def attend_forward(q: Tensor, k: Tensor, v: Tensor, own_score: Optional[Tensor],
                   own_value: Optional[Tensor], q_pos: Tensor, k_pos: Tensor,
                   slopes: Optional[Tensor], window: int) -> tuple[Tensor, Tensor]:
    """Return out (B, H, T, D) and lse (B, H, T). Each block of queries reads a range of keys."""
    # torch's function for a CPU reads wrong numbers if a last stride is not 1.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out = heads_like(q if own_value is None else own_value, *q.shape).zero_()
    lse = q.new_full(q.shape[:3], -math.inf, dtype=sum_dtype(q))
    block = fused_block if q.device.type in FUSED else attend_block
    for queries, keys, bias in query_blocks(q_pos, k_pos, slopes, window, lse.dtype):
        out[:, :, queries], lse[:, :, queries] = block(
            q[:, :, queries], k[:, :, keys], v[:, :, keys], bias)
    if own_score is not None:
        out[:], lse[:] = merge(own_value, own_score.to(lse.dtype), out, lse)
    return out, lse


def attend_block(q, k, v, bias):
    """Return out and lse of a block of queries (B, H, T, D) over keys (B, G, S, D)."""
    q, k, v = expanded_heads(q, k, v)
    with torch.autocast(q.device.type, enabled=False):  # It would round the factors to 16 bits.
        s = q @ k.mT / math.sqrt(q.size(-1)) + bias  # (1), (B, H, T, S)
        lse = s.logsumexp(-1)  # (2), (B, H, T)
        finite = lse.masked_fill(lse == -math.inf, 0)  # else an empty row has NaN in s - lse
        return torch.exp(s - finite[..., None]) @ v, lse  # (3), (B, H, T, D)


def attend_gradients(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, do: Tensor,
                     dlse: Optional[Tensor], q_pos: Tensor, k_pos: Tensor,
                     slopes: Optional[Tensor], window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv. do (B, H, T, D) is in q's dtype, and so is out. dlse (B, H, T) may be
    None, which stands for 0."""
    q, k, v, out = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, out))
    empty = lse == -math.inf  # For these queries dlse may be NaN, and exp(s - lse) would be.
    lse, dlse = (x if x is None else x.masked_fill(empty, 0) for x in (lse, dlse))
    dq, dk, dv = (heads_like(x, *x.shape, dtype=lse.dtype).zero_() for x in (q, k, v))
    fused = q.device.type in FUSED and dlse is None
    block = fused_block_backward if fused else attend_block_backward
    for queries, keys, bias in query_blocks(q_pos, k_pos, slopes, window, lse.dtype):
        of_queries = (x if x is None else x[:, :, queries] for x in (out, lse, do, dlse))
        dq[:, :, queries], dk_part, dv_part = block(
            q[:, :, queries], k[:, :, keys], v[:, :, keys], *of_queries, bias)
        dk[:, :, keys] += dk_part
        dv[:, :, keys] += dv_part
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def attend_block_backward(q, k, v, out, lse, do, dlse, bias):
    """Return what a block of queries (B, H, T, D) adds to dq, and to dk and dv of the keys
    (B, G, S, D)."""
    G, scale = k.size(1), q.size(-1) ** -0.5
    q, k, v = expanded_heads(q, k, v)
    q, do, out = q * scale, do.to(q.dtype), out.to(q.dtype)
    delta = (do * out).sum(-1) - (0 if dlse is None else dlse)  # (6), (B, H, T)
    with torch.autocast(q.device.type, enabled=False):  # as in attend_block
        p = torch.exp(q @ k.mT + bias - lse[..., None])  # (B, H, T, S)
        ds = p * (do @ v.mT - delta[..., None])  # (7), (B, H, T, S)
        dq, dk, dv = ds @ k * scale, ds.mT @ q, p.mT @ do  # (8); (9), (10) of each query head
        return dq, *(x.unflatten(1, (G, -1)).sum(2) for x in (dk, dv))


def own_gradients(score, value, out, lse, do, dlse):
    """Return the gradients of own's score and value, which are (7) and (10) for a single key. out
    and lse are those of the whole softmax, as for attend_by_position_backward."""
    p = torch.exp(score.to(lse.dtype) - lse)  # (B, H, T)
    difference = (do.to(lse.dtype) * (value.to(lse.dtype) - out)).sum(-1)  # do . v - do . out
    ds = p * (difference + (0 if dlse is None else dlse))
    return ds.to(score.dtype), (p[..., None] * do).to(value.dtype)


def expanded_heads(q, k, v):
    """Return q, and k and v with a head for each query head, in the dtype of sums."""
    copies = q.size(1) // k.size(1)
    k, v = (x if copies == 1 else x.repeat_interleave(copies, 1) for x in (k, v))
    return [x.to(sum_dtype(q)) for x in (q, k, v)]


def query_blocks(q_pos, k_pos, slopes, window, dtype):
    """Yield blocks of queries that attend to some keys. A block is three things: the slice of its
    queries, the slice of the keys that any of them attends to, and the bias (B or 1, H or 1, T, S)
    to add to the scores, which is -inf where a key is not visible. The keys are a slice because
    positions ascend."""
    q_pos, k_pos = torch.atleast_2d(q_pos), torch.atleast_2d(k_pos)  # (B or 1, T), (B or 1, S)
    # Smaller blocks leave out more keys, and larger blocks make fewer calls. Which is faster was
    # measured on a CPU.
    size = 64 if q_pos.size(1) <= min(k_pos.size(1), 1024) else 256
    for start in range(0, q_pos.size(1), size):
        queries = slice(start, start + size)
        q = q_pos[:, queries]
        # In each row, count the keys that lie before the first query's window, and the keys that
        # are not after the last query. The slice serves all rows, so it begins at the smallest
        # count and ends at the largest.
        first = int((k_pos <= q[:, :1] - window).sum(1).min())
        last = int((k_pos <= q[:, -1:]).sum(1).max())
        if first < last:
            distance = q[:, None, :, None] - k_pos[:, None, None, first:last]
            bias = (torch.zeros((), device=q.device, dtype=dtype) if slopes is None
                    else -slopes.to(dtype)[:, None, None] * distance)
            bias = bias.masked_fill((distance < 0) | (distance >= window), -math.inf)
            yield queries, slice(first, last), bias


# ---- merge ----

def merge(out_a, lse_a, out_b, lse_b):
    """Return out and lse of attention over two disjoint sets of keys, (4) and (5). out_a and out_b
    (B, H, T, D), lse_a and lse_b (B, H, T) are those over each set, as attend_by_position returns
    them. A side without visible keys, whose out is 0 and whose lse is -inf, changes nothing and
    gets no gradient. Two such sides give 0 and -inf."""
    empty = (lse_a == -math.inf) & (lse_b == -math.inf)
    lse_a, lse_b = (x.clamp(min=-1e30) for x in (lse_a, lse_b))  # -inf - (-inf) is NaN.
    weight = torch.sigmoid(lse_b - lse_a)  # e^{lse_b - lse}
    a, b = (x.to(weight.dtype) for x in (out_a, out_b))
    out = torch.lerp(a, b, weight[..., None])  # (1 - weight) a + weight b
    lse = torch.logaddexp(lse_a, lse_b).masked_fill(empty, -math.inf)
    return out.to(out_a.dtype), lse


def merge_naive(out_a, lse_a, out_b, lse_b):
    """Return what merge returns. No query may be empty on both sides."""
    lse = torch.log(torch.exp(lse_a) + torch.exp(lse_b))  # (4)
    weight_a, weight_b = (torch.exp(x - lse)[..., None] for x in (lse_a, lse_b))
    return weight_a * out_a + weight_b * out_b, lse  # (5)


# ---- scan ----

def scan(g, x, chunk, h0=None):
    """Return the states h (B, T, C) of (11) for gates g and inputs x (B, T, C), in x's dtype. The
    tokens are cut into chunks of `chunk` tokens. In the first chunk the state starts from h0
    (B, C), where None stands for zero, and in each further chunk it starts from zero.

    The state is kept in float32 or better and is rounded only where it is written to h. A caller
    that goes on from h and wants no rounding therefore passes float32. h is differentiable in g,
    x and h0, by first derivatives only. Gates are 0 <= g <= 1."""
    if g.shape != x.shape or g.dtype != x.dtype or chunk < 1:
        raise ValueError(f"scan: g {tuple(g.shape)} {g.dtype}, x {tuple(x.shape)} {x.dtype}, "
                         f"chunk={chunk}; the same (B, T, C) twice and 1 or more are needed")
    h0 = x.new_zeros(x.size(0), x.size(2)) if h0 is None else h0
    if h0.shape != (x.size(0), x.size(2)):
        raise ValueError(f"scan: h0 {tuple(h0.shape)} must be {(x.size(0), x.size(2))}")
    # as in attend_by_position
    registered = torch.is_grad_enabled() or torch.compiler.is_compiling()
    return (scan_op if registered else run_scan)(g, x, h0, chunk)


def scan_naive(g, x, chunk, h0=0):
    """Return what scan returns, computed token by token."""
    h = []
    for t in range(x.size(1)):
        before = h0 if t == 0 else 0 if t % chunk == 0 else h[-1]
        h.append(g[:, t] * before + (1 - g[:, t]) * x[:, t])  # (11)
    return torch.stack(h, 1)


def scan_forward(g: Tensor, x: Tensor, h0: Tensor, chunk: int) -> Tensor:
    """Return h (B, T, C). All chunks are scanned at once."""
    g_n, x_n = in_chunks(g, chunk), in_chunks(x, chunk)
    state = torch.zeros_like(x_n[:, :, 0])  # (B, n, C), the state before each chunk
    state[:, 0] = h0
    h = linear_recurrence(g_n, torch.addcmul(x_n, g_n, x_n, value=-1), state)
    return out_of_chunks(h, x)


def scan_gradients(dh: Tensor, g: Tensor, x: Tensor, h: Tensor, h0: Tensor,
                   chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return dg, dx (B, T, C) and dh0 (B, C)."""
    g_n, x_n, h_n, dh_n = (in_chunks(y, chunk) for y in (g, x, h, dh))
    # (12) is linear_recurrence from right to left, so dh and its gates g_{t+1} are flipped. The
    # last token of a chunk has no g_{t+1}. roll puts the chunk's first gate there, which is
    # multiplied by a state of zero.
    g_next = g_n.roll(-1, 2)
    state = torch.zeros_like(dh_n[:, :, 0])
    d = linear_recurrence(g_next.flip(2), dh_n.flip(2), state).flip(2)
    before = F.pad(h_n, (0, 0, 1, -1))  # h_{t-1}
    before[:, 0, 0] = h0
    dg = before.sub_(x_n).mul_(d)  # (14)
    dh0 = g_n[:, 0, 0] * d[:, 0, 0]
    dx = d.addcmul_(g_n, d, value=-1)  # (13). It overwrites d, so it comes last.
    return out_of_chunks(dg, x), out_of_chunks(dx, x), dh0.to(h0.dtype)


def in_chunks(x, chunk):
    """Return x (B, T, C), in float32 or better, as (B, n, K, C), padded with zeros at its end."""
    x, K = x.to(sum_dtype(x)), min(chunk, x.size(1))
    missing = -x.size(1) % K
    x = F.pad(x, (0, 0, 0, missing)) if missing else x
    return x.unflatten(1, (-1, K))


def out_of_chunks(x, like):
    """Return x (B, n, K, C) as (B, T, C) without the padding, in the dtype of `like` (B, T, C)."""
    return x.flatten(1, 2)[:, :like.size(1)].to(like.dtype).contiguous()


def linear_recurrence(g, h, state):
    """Return h (..., K, C) after h_t <- h_t + g_t h_{t-1} for each t in turn, with gates g
    (..., K, C). state (..., C) is the h_{t-1} of the first. The argument h may be overwritten.
    For (11) it holds (1 - g_t) x_t."""
    if h.size(-2) > 64:
        return long_recurrence(g, h, state)
    for g_t, h_t in zip(g.unbind(-2), h.unbind(-2)):
        state = h_t.addcmul_(g_t, state)
    return h


def long_recurrence(g, h, state):
    """Return what linear_recurrence returns, in about 2 sqrt(K) steps, or fewer if K > 4,096,
    where a plain loop takes K. The K positions are cut into pieces of `size` positions, which is
    about sqrt(K). All pieces are scanned at once, from zero. A state that enters a piece decays in
    it by the product of the gates so far. The states at the ends of the pieces are therefore a
    recurrence of the same kind, over the pieces."""
    K = h.size(-2)
    size = math.isqrt(K - 1) + 1
    g, h = (F.pad(y, (0, 0, 0, -K % size)).unflatten(-2, (-1, size)) for y in (g, h))
    h = linear_recurrence(g, h, torch.zeros_like(h[..., 0, :]))  # (..., pieces, size, C)
    decay = g.cumprod(-2)
    ends = linear_recurrence(decay[..., -1, :], h[..., -1, :].clone(), state)  # (..., pieces, C)
    enter = torch.cat([state[..., None, :], ends[..., :-1, :]], -2)
    return torch.addcmul(h, decay, enter[..., None, :]).flatten(-3, -2)[..., :K, :]


# ---- checks ----

def checked_mask(q, k, v, q_pos, k_pos, slopes, window):
    """Return q_pos, k_pos, slopes and window without None for positions and window. The arguments
    are checked because the kernels would read past the end of a tensor that is too small."""
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    if k.shape != (B, G, S, D) or v.shape != k.shape or H % G or D > HEAD_SIZES[-1]:
        raise ValueError(f"attend_by_position: q {tuple(q.shape)}, k {tuple(k.shape)}, v "
                         f"{tuple(v.shape)}; (B, H, T, D), (B, G, S, D) twice are needed, "
                         "D <= 256, H % G = 0")
    if window is not None and window < 1:
        raise ValueError(f"attend_by_position: window={window} must be at least 1")
    if slopes is not None and slopes.shape != (H,):
        raise ValueError(f"attend_by_position: slopes {tuple(slopes.shape)} must be ({H},)")
    pos = []
    for name, given, n in (("q_pos", q_pos, T), ("k_pos", k_pos, S)):
        if given is None:
            given = torch.arange(n, device=q.device, dtype=torch.int32)
        if given.dtype != torch.int32 or given.shape not in ((n,), (B, n)):
            raise ValueError(f"attend_by_position: {name} {tuple(given.shape)} is {given.dtype}: "
                             f"({n},) or ({B}, {n}) in torch.int32 is needed")
        pos.append(given)
    return *pos, slopes, NO_WINDOW if window is None else min(window, NO_WINDOW)


# ---- torch's private attention for CPUs ----

def fused_block(q, k, v, bias):
    """Return what attend_block returns."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=bias)
    return out, lse.masked_fill(bias.amax(-1) == -math.inf, -math.inf)  # torch's is 0 there.


def fused_block_backward(q, k, v, out, lse, do, dlse, bias):
    """Return what attend_block_backward returns. dlse must be None, because torch's function takes
    no gradient of lse."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do, q, k, v, out, lse, 0.0, False, attn_mask=bias, scale=q.size(-1) ** -0.5)


# ---- which of the two implementations runs ----
# In each row of this table a function calls the one to its right. (The plain functions of attention
# also call query_blocks, which cuts the queries into blocks.)
#
#     called by                    run_ function         plain function    its helper
#     attend_by_position           run_attend            attend_forward    fused_block
#     attend_by_position_backward  run_attend_gradients  attend_gradients  fused_block_backward
#     scan                         run_scan              scan_forward      linear_recurrence
#     scan_autograd                run_scan_gradients    scan_gradients    linear_recurrence
#
# Under autograd or torch.compile the call goes through attend_op or scan_op. This is the run_
# function, registered with torch. Autograd calls attend_autograd and scan_autograd, which call the
# backward passes as attend_gradients_op and scan_gradients_op. A run_ function calls the plain
# function, or a launcher of kernels_triton.py in its place.
#
# For a block of queries the plain implementation has two alternatives. On a CPU it calls
# fused_block, which calls torch's own attention in compiled C++. On other devices it calls
# attend_block, which is written out in PyTorch. The backward pass has fused_block_backward and
# attend_block_backward in the same way, but with a dlse it takes attend_block_backward on a CPU,
# too. merge has no launcher, and no model calls merge itself. The plain implementation calls it to
# add own pairs (see the argument own of attend_by_position). The Triton kernel adds them without
# it.

@functools.cache
def announce(text):
    """Print the text once, on one rank."""
    if os.environ.get("RANK", "0") == "0":
        print(f"kernels: {text}", file=sys.stderr)


@functools.cache
def runs_triton(device, dtype):
    """Return whether Triton computes on tensors of this device and dtype, and announce it."""
    installed = importlib.util.find_spec("triton") is not None  # This does not import triton.
    on_gpu = device.type == "cuda"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    triton = installed and dtype != torch.float64 and (on_gpu or interpreted)
    why = ": slow, triton is not installed" if on_gpu and not installed else ""
    announce(f"{'Triton' if triton else 'plain PyTorch'} on {device.type}{why}")
    return triton


def operator(plain, launcher):
    """Return two functions. The first computes what `plain` computes. Where Triton runs, it calls
    `launcher` of kernels_triton.py in its place. The second is the first one, registered with torch
    as a custom_op."""
    @functools.wraps(plain)
    def run(x, *more):
        if not runs_triton(x.device, x.dtype):
            return plain(x, *more)
        import kernels_triton  # only here, because not every machine has triton
        with torch.cuda.device_of(x):  # Triton launches on the current device.
            return getattr(kernels_triton, launcher)(x, *more)
    return run, torch.library.custom_op(f"nanorecur::{plain.__name__}", run, mutates_args=())


# ---- the operators as autograd and torch.compile see them ----

# autograd is given a backward pass for each operator (register_autograd). torch.compile is given a
# function that makes empty outputs of the right shapes, strides and dtypes (register_fake).

def attend_save(ctx, inputs, output):
    *tensors, ctx.window = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)


def attend_autograd(ctx, do, dlse):
    out, lse, q, k, v, *own, q_pos, k_pos, slopes = ctx.saved_tensors
    do = torch.zeros_like(out) if do is None else do
    own = own if own[0] is None else own_gradients(*own, out, lse, do, dlse)
    grads = attend_gradients_op(q, k, v, out.to(q.dtype), lse, do.to(q.dtype), dlse, q_pos,
                                k_pos, slopes, ctx.window)
    return *grads, *own, None, None, None, None


def scan_save(ctx, inputs, output):
    g, x, h0, ctx.chunk = inputs
    ctx.save_for_backward(g, x, output, h0)


def scan_autograd(ctx, dh):
    return *scan_gradients_op(dh, *ctx.saved_tensors, ctx.chunk), None


run_attend, attend_op = operator(attend_forward, "launch_attend")
attend_op.register_fake(lambda q, k, v, own_score, own_value, *more: (
    heads_like(q if own_value is None else own_value, *q.shape),
    q.new_empty(q.shape[:3], dtype=sum_dtype(q))))
run_attend_gradients, attend_gradients_op = operator(attend_gradients, "launch_attend_backward")
attend_gradients_op.register_fake(lambda q, k, v, *more: tuple(
    heads_like(x, *x.shape) for x in (q, k, v)))
attend_op.register_autograd(attend_autograd, setup_context=attend_save)
run_scan, scan_op = operator(scan_forward, "launch_scan")
scan_op.register_fake(lambda g, x, *more: x.new_empty(x.shape))
run_scan_gradients, scan_gradients_op = operator(scan_gradients, "launch_scan_backward")
scan_gradients_op.register_fake(lambda dh, g, x, h, h0, chunk: (
    x.new_empty(x.shape), x.new_empty(x.shape), h0.new_empty(h0.shape)))
scan_op.register_autograd(scan_autograd, setup_context=scan_save)
