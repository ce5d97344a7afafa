"""
The wavefront, RT's fast schedule. Read model_rt.py first.

A layer of RT is a loop over positions, but a layer need not wait until the layer below has
finished. The positions are cut into chunks of K. Chunk c of layer l needs two things: its input,
which is chunk c of layer l - 1, and the keys and values of chunks 0 to c - 1 of its own layer. All
chunks with l + c = s therefore run together, in step s:

           chunk   0 1 2 3
        layer 2    2 3 4 5      A chunk needs the one below it and those to its left.
        layer 1    1 2 3 4      Step 3 is the diagonal of (layer, chunk): (2, 1), (1, 2), (0, 3).
        layer 0    0 1 2 3

A step is a loop over the K positions of its chunks, so that T + (L - 1) K positions run one after
the other and not L T (T is rounded up to whole chunks). At each position, a product by a matrix
such as Wo is one bmm for all layers that are active in the step, A of them. Attention to earlier
chunks differs in two ways. It runs for all K positions at once, before the loop (`outside`). It
takes one call for each active layer, because layers have different numbers of earlier keys.

A step has two parts, here with the numbers of model_rt.py's equations. The first part takes all
positions of a chunk at once. It computes (1), and attention to the temporary pair and to the pairs
of all earlier chunks. This gives out and lse, the logarithm of the sum of e^score. The second part
goes through the positions. At each it completes (2) with the pairs that earlier positions of the
chunk made. For this, all keys that the first part attended to count as one more pair, of score lse
and value out, as in an online softmax. After (2) come (3) to (5).

The weights of n1 and n2 are folded into the matrices behind these norms. For Wk and Wv this is
right only if (5) applies n1 as (1) does, and so the wavefront needs kv_norm=true. In all that
follows n1 and n2 have no weight, and Wq, Wk, Wv and W_up are the folded matrices. Autograd takes
their gradients back to the model's own matrices and norms (stack_weights).

The first half of this file is the forward pass, which can be read alone. The second half is the
backward pass, written by hand, with its equations. The end has what belongs to no equation: the
autograd function, CUDA graphs, and PLAIN, which lists those functions of this file for which
rt_triton.py has kernels.

The schedule is ours. Three ideas are the paper's: only x and y of each layer are saved for the
backward pass (section 6.1), CUDA graphs (6.2), and a reverse loop with only what depends on later
positions (6.4).

Letters, beside those of model_gpt.py (here S is the number of cached keys alone):

    K  positions of a chunk             Q  query heads that share a key head, H / G
    P  positions, any number            Z  key heads of all sequences and active layers, A B G
    A  layers active in a step          M  width of the MLP

    l  a layer, c a chunk, s = l + c a step
    i  the position of a query, j that of a key. The equations count them in the sequence, and the
       code counts them in the chunk.

T is cut into ceil(T / cfg.chunk) chunks of equal length K, so that K may be less than cfg.chunk.
`length` is T rounded up to whole chunks. A row is a row of a matrix here, and a row of the batch is
called a sequence. A tensor (A, K B, C) has one row for each position and each sequence: row i B + b
is position i of sequence b. A dot in a shape stands for any last dimension.
"""
import math
from collections import namedtuple
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F

import graphs
import kernels
from model_gpt import alibi_slopes, apply_rope, attention_bias, compute_dtype, rope_tables, upcast

# ---- the forward pass ----

@torch.no_grad()  # autograd has no part in this, because backward_pass is written by hand
def forward_pass(wave, x, *weights, pairs=None):
    """Run all layers on x (B, T, C). wave is the Wavefront of the call (below), which has its
    sizes, its tables and the list of its steps. Return [states], a list because graphs.replay wants
    one. states[l] (length, B, C) is the input of layer l and the output of layer l - 1.
    pairs is a buffer whose first S keys and values are given, and this pass writes the new ones
    behind them. Without it (None) the pairs are kept during this pass only, because the backward
    pass computes them again."""
    w = Weights(*weights).to(wave.dtype)
    if pairs is None:
        pairs = x.new_empty(2, wave.L, wave.B, wave.G, wave.length, wave.D, dtype=wave.dtype)
    # The padding of the input is 0, so that all that is computed from it is finite. The backward
    # pass multiplies it by gradients of 0, and 0 * NaN would be NaN.
    states = x.new_zeros(wave.L + 1, wave.length, wave.B, wave.C)
    states[0, :wave.T] = x.transpose(0, 1)
    for step in wave.steps:
        forward_step(wave, states, pairs, w.active(step), step)
    return [states]


def forward_step(wave, states, pairs, w, step):
    """Run one chunk of each active layer. The chunk is read from states, and its outputs and
    persistent pairs are written to states and pairs. w has the weights of the active layers."""
    eps, pieces = wave.cfg.norm_eps, wave.pieces
    rope = [wave.diagonal(table, step, 1) for table in wave.tables]
    x = wave.diagonal(states[:-1], step, 1)                                      # (A, K, B, C)
    (q, k_temp, v_temp), _ = wave.temporary(x.flatten(1, 2), w, rope)            # (1)
    out, lse = wave.outside(q, k_temp, v_temp, pairs, step)                      # begins (2)
    # From here on q, out and lse are lists over the K positions, (Z, Q, .) each.
    q, out, lse = (each.unbind(1) for each in wave.by_position(q, out, lse))
    k, v = (out[0].new_empty(len(out[0]), wave.K, wave.D) for _ in range(2))     # the chunk's own
    ropes, ys = each_position(rope, wave.K), []
    for i, x_i in enumerate(x.unbind(1)):                                        # (A, B, C)
        a_i = pieces.read_pairs(q[i], k[:, :i], v[:, :i], wave.bias[:, i, :i], lse[i], out[i])
        a_i = a_i.reshape(*x_i.shape[:2], -1).to(wave.dtype)                     # (2): (A, B, H D)
        z_i, z_n = pieces.add_and_norm(x_i, product(a_i, w.wo), eps)             # (3), n2(z)
        u_i = product(z_n, w.up)
        y_i, y_n = pieces.add_and_norm(z_i, product(F.gelu(u_i), w.down), eps)   # (4), n1(y)
        k_i, v_i, _ = wave.persistent(y_n, w, ropes[i])                          # (5)
        k[:, i], v[:, i] = k_i.reshape(-1, wave.D), v_i.reshape(-1, wave.D)
        ys.append(y_i)
    wave.diagonal(states[1:], step, 1).copy_(torch.stack(ys, 1))
    for buffer, new in zip(pairs, (k, v)):
        view = wave.diagonal(buffer[..., wave.S:, :], step, 3)                   # (A, B, G, K, D)
        view.copy_(new.view(view.shape))


# ---- what a step is made of ----

Step = namedtuple("Step", "s lo hi")  # chunk s - l of layers lo <= l < hi


class Wavefront:
    """Sizes, tables and what the passes share, for L layers over x (B, T, C) after S cached keys.
    The passes hold states (L + 1, length, B, C) and pairs (2, L, B, G, S + length, D), which are
    k and v. Layer l reads states[l] and writes states[l + 1] and pairs[:, l]. length is T rounded
    up to whole chunks. The padding stands behind all tokens, so that no token attends to it."""

    def __init__(self, cfg, x, L, S=0):
        self.cfg, self.L, self.S = cfg, L, S
        self.B, self.T, self.C = x.shape
        self.H, self.G, self.D = cfg.n_head, cfg.kv_heads, cfg.head_size
        chunks = math.ceil(self.T / cfg.chunk)
        self.K = math.ceil(self.T / chunks)  # chunks of equal length need little padding
        self.length = chunks * self.K
        self.steps = [Step(s, lo=max(0, s + 1 - chunks), hi=min(L, s + 1))
                      for s in range(chunks + L - 1)]
        self.kv_part = slice(self.H * self.D, None)  # the part of qkv that is Wk and Wv
        self.dtype = compute_dtype(x)  # of products: autocast's where it is on
        self.sum_dtype = kernels.sum_dtype(x)  # float32 or better
        # The pieces are small functions that each position calls. They are those of this file
        # (PLAIN), or on a GPU the kernels of rt_triton.py with the same names.
        self.pieces = PLAIN
        if kernels.runs_triton(x.device, self.dtype):
            import rt_triton  # only GPUs need it
            self.pieces = rt_triton
        self.scale = self.D ** -0.5
        self.pos = torch.arange(S + self.length, device=x.device, dtype=torch.int32)
        self.slopes, self.tables = None, []
        if cfg.pos == "alibi":
            self.slopes = alibi_slopes(self.H, x.device, self.sum_dtype)
        # This bias (H or 1, K, K) is for a chunk's queries and its own persistent pairs. It is
        # -inf where the key is later than the query or at the query's own position.
        pos = self.pos[:self.K]
        bias = attention_bias(pos[None], pos, 0, self.slopes, self.sum_dtype)[0]
        self.bias = bias.masked_fill(pos[:, None] == pos, -math.inf)
        if cfg.pos == "rope":
            tables = rope_tables(self.pos[S:], self.D, cfg.rope_theta, self.sum_dtype)
            # The tables become (L, length, 1, 1, D / 2), by repeat and not by expand, because
            # diagonal makes the stride over layers smaller, and an expanded stride is 0.
            self.tables = [table[:, None, None].repeat(L, 1, 1, 1, 1) for table in tables]

    def diagonal(self, buffer, step, dim):
        """Return the chunks of a step, (A, ...), in a buffer (L, ...) that has positions in
        dimension dim. With four chunks a layer, whose places in memory are numbered here, step 3
        has chunks 3, 6 and 9:

                chunk    0   1   2   3
            layer 0      0   1   2  [3]
            layer 1      4   5  [6]  7
            layer 2      8  [9] 10  11

        From each of these to the next it is one layer on and one chunk back, 4 - 1 places. So they
        are a view whose stride over layers is smaller by a chunk, and a pass can write to it."""
        s, lo, hi = step
        shape, stride = list(buffer.shape), list(buffer.stride())
        first = buffer.storage_offset() + lo * stride[0] + (s - lo) * self.K * stride[dim]
        stride[0] -= self.K * stride[dim]
        shape[0], shape[dim] = hi - lo, self.K
        return buffer.as_strided(shape, stride, first)

    def earlier(self, l, step):
        """Return the number of keys before layer l's chunk of a step, and the arguments q_pos,
        k_pos and slopes with which attend_by_position reads these keys."""
        start = self.S + (step.s - l) * self.K
        return start, (self.pos[start:start + self.K], self.pos[:start], self.slopes)

    def temporary(self, x, w, rope):
        """Return q, k^ and v^ (A, B, H, K, D) of rows x (A, K B, C), as in (1), with the pairs
        repeated for each query head. Return also the NormParts of n1, nq and nk, because the
        backward pass needs them. (NormParts are a norm's result n and its factor r, with n = x r.
        See norm_parts.)"""
        x_parts = norm_parts(x, self.cfg.norm_eps)
        H, G, D = self.H, self.G, self.D
        qkv = product(x_parts.n.to(self.dtype), w.qkv)
        q, k, v = qkv.split([H * D, G * D, G * D], -1)
        q, q_parts = heads(self, q, w.nq, rope)
        k, k_parts = heads(self, k, w.nk, rope)
        v = v.unflatten(-1, (G, D)).unflatten(1, (-1, self.B))
        q, k, v = (x.permute(0, 2, 3, 1, 4).contiguous() for x in (q, k, v))
        k, v = (upcast(x).repeat_interleave(H // G, 2) for x in (k, v))
        return (q, k, v), (x_parts, q_parts, k_parts)

    def persistent(self, y_n, w, rope):
        """Return k and v (A, P, B, G, D) of y_n = n1(y) (A, P B, C), as in (5). Return also the
        parts of nk."""
        k, v = product(y_n.to(self.dtype), w.qkv[:, self.kv_part]).chunk(2, -1)  # (A, P B, G D)
        k, k_parts = heads(self, k, w.nk, rope)
        return k, v.view(v.size(0), -1, self.B, self.G, self.D), k_parts

    def outside(self, q, k_temp, v_temp, pairs, step):
        """Return out (A, B, H, K, D) and lse (A, B, H, K) of a chunk's queries after they have
        attended to their temporary pairs and to all earlier chunks."""
        score = (q * k_temp).sum(-1) * self.scale  # of the temporary pair
        found = []
        for at, l in enumerate(range(step.lo, step.hi)):  # l is active layer `at`
            start, positions = self.earlier(l, step)
            keys, values = pairs[:, l, :, :, :start]  # all are visible
            own = score[at], v_temp[at]
            found.append(kernels.attend_by_position(q[at], keys, values, *positions, own=own))
        return [torch.stack(each) for each in zip(*found)]

    def by_position(self, q, out, lse):
        """Return q / sqrt(D), out and lse, which are (A, B, H, K, .), or (A, B, H, K) for lse, as
        (Z, K, Q, .). At each position the Q queries that share a key head form one matrix (Q, D).
        So one bmm over Z takes the queries of all heads, sequences and layers."""
        all_three = q.to(out.dtype) * self.scale, out, lse[..., None]
        shape = (-1, self.H // self.G, self.K)
        return [x.reshape(*shape, x.size(-1)).contiguous().transpose(1, 2) for x in all_three]


class Weights(NamedTuple):
    """The layers' weights, stacked."""
    qkv: torch.Tensor   # (L, (H + 2 G) D, C), times the weight of n1
    wo: torch.Tensor    # (L, C, H D)
    up: torch.Tensor    # (L, M, C), times the weight of n2
    down: torch.Tensor  # (L, C, M)
    nq: torch.Tensor    # (L, 1, H D); (L, 1, 0) without QK-norm
    nk: torch.Tensor    # (L, 1, G D)

    def active(self, step):
        """Return views of the weights of the layers that are active in a step."""
        return Weights(*(x[step.lo:step.hi] for x in self))

    def to(self, dtype):
        """Return the weights with the matrices in dtype. nq and nk keep theirs, because they
        multiply what a norm gives, in float32 or better."""
        *matrices, nq, nk = self
        return Weights(*(matrix.to(dtype) for matrix in matrices), nq, nk)


def stack_weights(cfg, blocks):
    """Return the Weights of blocks. Autograd takes their gradients back to each layer's own
    parameters."""
    layers = []
    for b in blocks:
        qkv = torch.cat([b.wq.weight, b.wk.weight, b.wv.weight]) * b.norm1.weight
        up = b.w_up.weight * b.norm2.weight
        nq = nk = qkv.new_empty(0)
        if cfg.qk_norm == "full":
            nq, nk = b.q_norm.weight, b.k_norm.weight
        layers.append((qkv, b.wo.weight, up, b.w_down.weight, nq[None], nk[None]))
    return Weights(*map(torch.stack, zip(*layers)))


def product(x, w):
    """Return W x for each row of x (A, P B, in), where w (A, out, in) has each layer's W. x and w
    have one dtype. product(d, w.mT) is W.T d."""
    return torch.bmm(x, w.mT)


NormParts = namedtuple("NormParts", "n r")  # of a norm n = x r


def norm_parts(x, eps):
    """Return the RMS norm of x in float32 or better, n = x r, and its r (..., 1)."""
    x = upcast(x)
    if x.device.type == "mps":      # its kernel needs a weight
        r = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        return NormParts(x * r, r)
    return NormParts(*torch.ops.aten._fused_rms_norm(x, [x.size(-1)], None, eps))


def heads(wave, rows, weight, rope):
    """Return rows (A, P B, heads D) as (A, P, B, heads, D), after nq or nk and RoPE. Return also
    the norm's parts, which are () without QK-norm."""
    parts = ()
    if weight.size(-1):
        parts = norm_parts(rows, wave.cfg.norm_eps)
        rows = (parts.n * weight).to(rows.dtype)
    rows = rows.view(rows.size(0), -1, wave.B, rows.size(-1) // wave.D, wave.D)
    return apply_rope(rows, *rope) if rope else rows, parts


def each_position(tensors, K):
    """Return a list over K positions. For each it has the slices (A, n, ...) of the tensors
    (A, K n, ...), in which each position has n rows."""
    parts = [x.split(x.size(1) // K, 1) for x in tensors]
    return [*zip(*parts)] if parts else [()] * K  # without RoPE there are no tables


def read_pairs(q, k, v, bias, lse, out):
    """Return the attention result a (Z, Q, D) of the queries q (Z, Q, D), which are already divided
    by sqrt(D). The queries attend to i pairs k, v (Z, i, D), whose scores get bias (H or 1, i).
    They also attend to one more pair, which has the score lse (Z, Q, 1) and the value out
    (Z, Q, D)."""
    if not k.size(1):
        return out
    scores = torch.bmm(q, k.mT)  # (Z, Q, i)
    scores.view(-1, *bias.shape).add_(bias)
    p = torch.cat([lse, scores], -1).softmax(-1)
    return (p[..., :1] * out).baddbmm_(p[..., 1:], v)


def add_and_norm(x, update, eps):
    """Return x + update, and the RMS norm of this sum in the dtype of update."""
    x = x + update
    return x, F.rms_norm(x, x.shape[-1:], eps=eps).to(update.dtype)


# ---- the backward pass ----
#
#     in the code            in the equations
#     dy                     dL/dy, from the layer above
#     g                      dL/dy, with what y gets through its own pair
#     u, du                  W_up n2(z), and its gradient
#     dkv                    gradients of Wk n1(y) beside Wv n1(y)
#     dqkv                   gradients of Wq n1(x), Wk n1(x) and Wv n1(x) beside each other
#     x_parts, y_parts       n and r of n1 at x (J_x) and at y (J_y)
#     z_parts                n and r of n2 at z (J_z)
#     q_parts                n and r of nq at Wq n1(x) (J_q); () without QK-norm
#     k_parts, k_temp_parts  n and r of nk at Wk n1(y) (J_k) and at Wk n1(x) (J_k^)
#     k_temp, v_temp         k^, v^, (A, B, H, K, D) each
#
# `recompute` returns the attention result `a` as rows (A, K B, H D), and `u` as rows (A, K B, M).
# attention.a holds the numbers of `a` in the shape (A, B, H, K, D).
#
# The forward pass saved the states only, so the persistent pairs of all layers are computed again
# from y. Then the steps run in reverse. The picture has what comes to a chunk, and what it leaves:
#
#                         dy, in d_states, from the layer above
#                          |
#                          v
#     earlier chunks <-- chunk <-- later chunks: in d_pairs they have left their part of (B2)
#                          |
#                          v
#                         dx, in d_states, for the layer below
#
# A step has three parts. `recompute` works on all positions of the chunk at once. It computes again
# (1), the weights p_ij of attention to the chunk's own keys, the attention result `a`, and `u`.
# (outside_backward computes the weights of all other keys again.) ChunkAttention, below, has what
# belongs to attention. `reverse_loop` goes from the chunk's last position j to its first. When it
# comes to j, it has da_i and delta_i of all later positions i of the chunk.
#
#     ds_ij = p_ij (da_i . v_j - delta_i)                                         (B1)
#     dk_j  = sum_{i > j} ds_ij q_i / sqrt(D)    dv_j = sum_{i > j} p_ij da_i     (B2)
#     g_j   = dy_j + J_y.T (Wk.T J_k.T dk_j + Wv.T dv_j)                          (B3)
#     du_j  = gelu'(u_j) * W_down.T g_j                                           (B4)
#     dz_j  = g_j + J_z.T W_up.T du_j                                             (B5)
#     da_j  = Wo.T dz_j    delta_j = da_j . a_j                                   (B6)
#
# `input_gradient` computes (B7) to (B9) for all positions of the chunk at once, and backward_step
# then computes (B10). ^ marks the temporary pair, and ds^_i is (B1) with the p and v of this pair.
# W.T is W transposed, and * multiplies channel by channel.
#
#     dq_i  = (sum_{j < i} ds_ij k_j + ds^_i k^_i) / sqrt(D)                      (B7)
#     dk^_i = ds^_i q_i / sqrt(D)    dv^_i = p^_i da_i                            (B8)
#     dx_i  = dz_i + J_x.T (Wq.T J_q.T dq_i + Wk.T J_k^.T dk^_i + Wv.T dv^_i)     (B9)
#     dW    = sum_i (gradient of W's output)_i (W's input)_i.T                    (B10)
#
# Equations of attention hold in each head. With grouped heads, (B2) and (B8) also sum over the Q
# query heads that share the pair.
#
# J are the Jacobians of norms. J_q, J_k and J_k^ are those of nq or nk and of the RoPE after it, as
# far as the model has them. A norm without a weight is n = x r, where r is
# 1 / sqrt(mean(x^2) + eps). Its Jacobian gives
#
#     J.T dn = r (dn - n mean(dn * n))                                            (B11)
#
# nq and nk have a weight w. If d is the gradient of w * n, then dn = w * d and
# dw = sum_i d_i * n_i.

@torch.no_grad()  # see forward_pass
def backward_pass(wave, states, dy, *weights):
    """Return [dL/dx (B, T, C), *gradients of the weights], from dy (B, T, C)."""
    w = Weights(*weights).to(wave.dtype)
    y_n = F.rms_norm(states[1:].flatten(1, 2), [wave.C], eps=wave.cfg.norm_eps)
    k, v, _ = wave.persistent(y_n, w, wave.tables)  # (L, length, B, G, D)
    pairs = torch.stack([k, v]).permute(0, 1, 3, 4, 2, 5).contiguous()
    del y_n, k, v  # they are as large as the states
    d_pairs = torch.zeros_like(pairs, dtype=wave.sum_dtype)
    d_states = torch.zeros_like(states, dtype=wave.sum_dtype)
    d_states[-1, :wave.T] = dy.transpose(0, 1)  # padding has 0, and so adds nothing
    grads = Weights(*(torch.zeros_like(weight, dtype=wave.sum_dtype) for weight in w))
    for step in reversed(wave.steps):
        backward_step(wave, states, pairs, d_states, d_pairs, w.active(step), grads.active(step),
                      step)
    return [d_states[0, :wave.T].transpose(0, 1), *grads]


def backward_step(wave, states, pairs, d_states, d_pairs, w, grads, step):
    """Go back through one chunk of each active layer. dy is read from d_states[l + 1], and dx is
    written to d_states[l]. This also adds to grads, and to d_pairs of earlier chunks."""
    x, y, dy = (wave.diagonal(each, step, 1).flatten(1, 2)  # (A, K B, C)
                for each in (states[:-1], states[1:], d_states[1:]))
    chunk = recompute(wave, x, y, pairs, d_pairs, w, step)
    g_low, du, dz, dkv = reverse_loop(wave, chunk, dy, w)
    dx, dqkv = input_gradient(wave, chunk, dz, pairs, d_pairs, w, grads, step)
    wave.diagonal(d_states[:-1], step, 1).copy_(dx.unflatten(1, (wave.K, wave.B)))
    for grad, d_out, x_in in (  # (B10)
            (grads.qkv, dqkv, chunk.x_parts.n), (grads.qkv[:, wave.kv_part], dkv, chunk.y_parts.n),
            (grads.wo, dz, chunk.a), (grads.up, du, chunk.z_parts.n),
            (grads.down, g_low, F.gelu(chunk.u))):
        grad += torch.bmm(d_out.mT.to(wave.dtype), x_in.to(wave.dtype))


def recompute(wave, x, y, pairs, d_pairs, w, step):
    """Return what the gradients need of the forward pass, from rows x and y (A, K B, C). With
    a QK-norm, (5) is computed once more to get k_parts, because pairs holds the keys only after nk
    and RoPE."""
    eps, dtype = wave.cfg.norm_eps, wave.dtype
    rope = [wave.diagonal(table, step, 1) for table in wave.tables]
    temp, (x_parts, q_parts, k_temp_parts) = wave.temporary(x, w, rope)  # q, k^, v^
    k, v, dk, dv = (wave.diagonal(buffer, step, 3) for buffer in (*pairs, *d_pairs))
    out, lse = wave.outside(*temp, pairs, step)
    attention = ChunkAttention(wave, temp[0], out, lse, k, v, dk, dv)
    a = attention.a.permute(0, 3, 1, 2, 4).flatten(3).flatten(1, 2)  # (A, K B, H D)
    z_parts = norm_parts(x + product(a.to(dtype), w.wo), eps)
    y_parts = norm_parts(y, eps)
    return SimpleNamespace(
        rope=rope, temp=temp, attention=attention, a=a, u=product(z_parts.n.to(dtype), w.up),
        x_parts=x_parts, y_parts=y_parts, z_parts=z_parts, q_parts=q_parts,
        k_parts=wave.persistent(y_parts.n, w, rope)[2] if q_parts else (),
        k_temp_parts=k_temp_parts)


def reverse_loop(wave, chunk, dy, w):
    """Run (B1) to (B6) from the last position to the first. Return g_low, du, dz and dkv, rows
    (A, K B, .). This also leaves da and delta in chunk.attention. g and dz are in float32 or
    better. g_low and dz_low are copies of them in the dtype of products. du and dkv have this
    dtype, too."""
    pieces, attention, w_kv = wave.pieces, chunk.attention, w.qkv[:, wave.kv_part]
    ropes, y_parts, z_parts, k_parts = (each_position(tensors, wave.K) for tensors in (
        chunk.rope, chunk.y_parts, chunk.z_parts, chunk.k_parts))
    dys, us = dy.split(wave.B, 1), chunk.u.split(wave.B, 1)                      # (A, B, .) each
    done = []
    for j in reversed(range(wave.K)):
        dk, dv = attention.kv_grad(j)                                            # (B1), (B2)
        dk = qk_norm_backward(rotated_back(dk[:, None], ropes[j]), w.nk, k_parts[j])
        dkv = torch.cat([dk, dv.flatten(2)], -1).to(wave.dtype)
        dn = product(dkv, w_kv.mT)
        g, g_low = pieces.add_norm_backward(dys[j], dn, *y_parts[j])             # (B3)
        du = torch.ops.aten.gelu_backward(product(g_low, w.down.mT), us[j])      # (B4)
        dn = product(du, w.up.mT)
        dz, dz_low = pieces.add_norm_backward(g, dn, *z_parts[j])                # (B5)
        attention.write_da(j, product(dz_low, w.wo.mT))                          # (B6)
        done.append((g_low, du, dz, dkv))
    return (torch.cat(of_all[::-1], 1) for of_all in zip(*done))


def input_gradient(wave, chunk, dz, pairs, d_pairs, w, grads, step):
    """Run (B7) to (B9) for all positions. Return dx and dqkv, rows (A, K B, .). This also adds to
    the gradients of nq and nk, and to d_pairs of earlier chunks."""
    attention, rope = chunk.attention, chunk.rope
    dq, *d_temp = outside_backward(wave, *chunk.temp, attention, pairs, d_pairs, step)
    dq = dq + attention.own_dq()  # (B7)
    d_temp = (d.unflatten(2, (wave.G, -1)).sum(3) for d in d_temp)  # over Q heads
    dq, dk_temp, dv_temp = (d.permute(0, 3, 1, 2, 4) for d in (dq, *d_temp))  # (A, K, B, heads, D)
    dq, dk_temp = (rotated_back(d, rope) for d in (dq, dk_temp))
    if chunk.q_parts:  # the gradient of nk needs dk of the persistent pairs, too
        dk = attention.dk.view(wave.K, -1, wave.B, wave.G, wave.D).transpose(0, 1)
        dk = rotated_back(dk, rope)
        for grad, d, (n, _) in ((grads.nq, dq, chunk.q_parts), (grads.nk, dk, chunk.k_parts),
                                (grads.nk, dk_temp, chunk.k_temp_parts)):
            grad += (d * n).sum(1, keepdim=True)
    dq = qk_norm_backward(dq, w.nq, chunk.q_parts)
    dk_temp = qk_norm_backward(dk_temp, w.nk, chunk.k_temp_parts)
    dqkv = torch.cat([dq, dk_temp, dv_temp.flatten(3).flatten(1, 2)], -1).to(wave.dtype)
    return dz + norm_backward(product(dqkv, w.qkv.mT), *chunk.x_parts), dqkv  # (B9)


def outside_backward(wave, q, k_temp, v_temp, attention, pairs, d_pairs, step):
    """Return dq, dk^, dv^ (A, B, H, K, D) of wave.outside, and add to d_pairs. a, lse and da are
    those of attention to all keys, and not of outside alone, because p_ij is a share of the whole
    softmax."""
    a, lse, da = attention.a, attention.lse, attention.by_head(attention.da_rows)
    p = torch.exp((q * k_temp).sum(-1) * wave.scale - lse)[..., None]
    ds = p * (da * (v_temp - a)).sum(-1, keepdim=True)  # (B1), because delta is da . a
    dq, dk_temp, dv_temp = ds * k_temp * wave.scale, ds * q * wave.scale, p * da  # (B7), (B8)
    a, da = a.to(wave.dtype), da.to(wave.dtype)
    # Layer s is at chunk 0, which has no earlier keys, because S is 0 in training.
    for at, l in enumerate(range(step.lo, min(step.hi, step.s))):
        start, positions = wave.earlier(l, step)
        keys, values = pairs[:, l, :, :, :start]
        new = kernels.attend_by_position_backward(
            q[at], keys, values, a[at], lse[at], da[at], *positions)
        dq[at] += new[0]  # (B7)
        d_pairs[0, l, :, :, :start] += new[1]  # (B2)
        d_pairs[1, l, :, :, :start] += new[2]
    return dq, dk_temp, dv_temp


class ChunkAttention:
    """Attention of a chunk's queries q (A, B, H, K, D), for the backward pass.

    __init__ completes wave.outside's out and lse with the chunk's own pairs k, v (A, B, G, K, D),
    for all positions at once. dk and dv, in the same shape, are what later chunks have added to
    the gradients of these pairs. Then kv_grad and write_da are called position by position.

    A bmm over Z has the K Q queries that share a key head as rows. Position i has the rows i Q to
    (i + 1) Q - 1, so that the queries later than a key are the last rows."""

    def __init__(self, wave, q, out, lse, k, v, dk, dv):
        A, B, H, K, D = self.shape = q.shape
        self.scale, self.pieces = wave.scale, wave.pieces
        self.Q, Z = H // wave.G, A * B * wave.G
        self.k, self.v = (x.to(out.dtype).reshape(Z, K, D) for x in (k, v))
        # (K, Z, 1, D): each position is contiguous, so that baddbmm_ is one call.
        self.dk, self.dv = (x.permute(3, 0, 1, 2, 4).reshape(K, Z, 1, D).contiguous()
                            for x in (dk, dv))
        self.q_scaled, out, lse = (x.flatten(1, 2) for x in wave.by_position(q, out, lse))
        scores = torch.bmm(self.q_scaled, self.k.mT)  # (Z, K Q, K)
        bias = wave.bias.expand(H, K, K).unflatten(0, (wave.G, self.Q)).transpose(1, 2)
        scores.view(A * B, wave.G, K, self.Q, K).add_(bias)
        total = torch.logaddexp(lse, scores.logsumexp(-1, keepdim=True))  # (Z, K Q, 1)
        self.p = torch.exp(scores - total)  # p_ij, which is 0 for j >= i
        self.p_of_key = self.p.mT.contiguous().split(1, 1)  # (Z, 1, K Q) for each key
        self.v_of_key = self.v.split(1, 1)  # (Z, 1, D)
        self.a_rows = torch.baddbmm(torch.exp(lse - total) * out, self.p, self.v)
        self.a, self.lse = self.by_head(self.a_rows), self.by_head(total)[..., 0]
        self.da_rows = torch.empty_like(self.a_rows)  # (Z, K Q, D)
        self.delta = torch.empty_like(total.mT)  # (Z, 1, K Q)
        self.of_query = [*zip(self.da_rows.split(self.Q, 1), self.delta.split(self.Q, 2),
                              self.a_rows.split(self.Q, 1))]

    def by_head(self, rows):
        """Return rows (Z, K Q, .) as (A, B, H, K, .)."""
        A, B, H, K, _ = self.shape
        return rows.unflatten(1, (K, self.Q)).transpose(1, 2).reshape(A, B, H, K, -1)

    def kv_grad(self, j):
        """Return dk_j, dv_j (A, B, G, D), once all later queries have written da."""
        A, B, _, _, D = self.shape
        later, dk, dv = (j + 1) * self.Q, self.dk[j], self.dv[j]
        self.pieces.add_pair_grad(
            dk, dv, self.q_scaled[:, later:], self.v_of_key[j], self.p_of_key[j][..., later:],
            self.da_rows[:, later:], self.delta[..., later:])
        return dk.view(A, B, -1, D), dv.view(A, B, -1, D)

    def write_da(self, j, da):
        """Write da_j (A, B, H D), and delta_j, as in (B6)."""
        da_j, delta_j, a_j = self.of_query[j]
        self.pieces.store_da_delta(da_j, delta_j, da.view(a_j.shape), a_j)

    def own_dq(self):
        """Return what the chunk's own keys add to dq (A, B, H, K, D), in (B7)."""
        ds = self.p * (torch.bmm(self.da_rows, self.v.mT) - self.delta.mT)
        return self.by_head(torch.bmm(ds, self.k) * self.scale)


def add_pair_grad(dk, dv, q, v, p, da, delta):
    """Add to dk and dv (Z, 1, D) of one key what the queries after it contribute, as in (B1) and
    (B2). There are n of these queries. q (Z, n, D) is divided by sqrt(D). da is (Z, n, D), v is
    (Z, 1, D), and p and delta are (Z, 1, n)."""
    ds = p * (torch.bmm(v, da.mT) - delta)  # (B1)
    dk.baddbmm_(ds, q)
    dv.baddbmm_(p, da)


def store_da_delta(da_out, delta_out, da, a):
    """Write da (Z, Q, D) to da_out, and da . a to delta_out (Z, 1, Q)."""
    da_out.copy_(da)
    delta_out.copy_((da * a).sum(-1)[:, None])


def rotated_back(d, rope):
    """Return d (A, P, B, heads, D), the gradient of what `heads` returns, rotated back by RoPE. It
    is returned as rows (A, P B, heads D). Without RoPE only the shape changes."""
    if rope:
        d = apply_rope(d, rope[0], -rope[1])
    return d.flatten(3).flatten(1, 2)


def qk_norm_backward(rows, weight, parts):
    """Return the gradient of the input of nq or nk. `rows` is the gradient of its output, as
    rotated_back returns it. Without QK-norm this returns rows."""
    return norm_backward(rows * weight, *parts) if parts else rows


def norm_backward(dn, n, r):
    """Return J.T dn, as in (B11)."""
    dn = dn.to(n.dtype)
    return r * dn.addcmul(n, (dn * n).mean(-1, keepdim=True), value=-1)


def add_norm_backward(d, dn, n, r):
    """Return d + J.T dn, and the same in the dtype of dn."""
    d = d + norm_backward(dn, n, r)
    return d, d.to(dn.dtype)


# ---- all layers as one function ----

@torch.compiler.disable  # it would unroll the loop over positions
def run_layers(cfg, blocks, x):
    """Run the layers `blocks` on x (B, T, C) -> (B, T, C), differentiably."""
    if cfg.pos == "rope" and x.size(1) > cfg.block_size:  # prefill's are checked by the cache
        raise ValueError(f"{x.size(1)} tokens are more than block_size={cfg.block_size}")
    return Layers.apply(cfg, x, *stack_weights(cfg, blocks))


def prefill(cfg, blocks, x, past):
    """Run the layers on x (B, T, C) after S cached keys. Return y (B, T, C) and the new k, v
    (L, B, G, T, D). past is a list of the cached k (B, G, S, D) of all layers, then of their v.
    There are no gradients. There is no CUDA graph, because lengths differ from call to call."""
    S = past[0].size(2)
    wave = Wavefront(cfg, x, len(blocks), S)  # It takes autocast's dtype, before autocast is off.
    with torch.autocast(x.device.type, enabled=False):
        pairs = torch.stack(past).to(wave.dtype).unflatten(0, (2, -1))
        pairs = F.pad(pairs, (0, 0, 0, wave.length))  # the new ones get room
        states, = forward_pass(wave, x, *stack_weights(cfg, blocks), pairs=pairs)
    k, v = pairs[..., S:S + wave.T, :]
    return states[-1, :wave.T].transpose(0, 1), k, v


class Layers(torch.autograd.Function):
    """All layers as one function for autograd, with the two passes above. It saves the states and
    the weights."""

    @staticmethod
    def forward(ctx, cfg, x, *weights):
        ctx.wave = Wavefront(cfg, x, L=len(weights[0]))
        states, = run(ctx.wave, forward_pass, x, *weights)
        ctx.save_for_backward(states, *weights)
        return states[-1, :ctx.wave.T].transpose(0, 1).contiguous()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        states, *weights = ctx.saved_tensors
        dx, *grads = run(ctx.wave, backward_pass, states, dy, *weights)
        grads = (grad.to(weight.dtype) for grad, weight in zip(grads, weights))
        return None, dx.to(states.dtype), *grads


def run(wave, function, *inputs):
    """Return function(wave, *inputs). Autocast is off inside, because the passes cast their inputs
    to wave.dtype themselves, and wave.dtype is autocast's dtype. On CUDA the second call with the
    same `key` (see below) is recorded as a graph, and this call and all later ones replay it. One
    position launches some fifteen kernels, and a kernel takes longer to launch than to run."""
    with torch.autocast(inputs[0].device.type, enabled=False):
        if not (wave.cfg.cuda_graphs and graphs.recordable(inputs[0])):
            return function(wave, *inputs)
        # A graph keeps the wave of the call that recorded it. Later waves with the same key are
        # equal, because cfg, device, dtype and shapes determine a wave.
        key = (function, inputs[0].device, wave.dtype, str(wave.cfg),
               torch.get_float32_matmul_precision(), *((x.shape, x.dtype) for x in inputs))
        return graphs.replay(key, partial(function, wave), *inputs)


# ---- the pieces of a position ----

# rt_triton.py has a kernel for each of these, under the same name.
PLAIN = SimpleNamespace(
    read_pairs=read_pairs, add_and_norm=add_and_norm, add_pair_grad=add_pair_grad,
    add_norm_backward=add_norm_backward, store_da_delta=store_da_delta)
