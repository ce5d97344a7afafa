"""
The wavefront, RT's fast schedule (read model_rt.py first).

Positions are cut into chunks of K. Chunk c of layer l needs chunk c of layer l - 1, its input,
and chunk c - 1 of its own layer, its keys and values. So all with l + c = s run in step s:

           chunk   0 1 2 3
        layer 2    2 3 4 5      a chunk needs the ones below and to its left;
        layer 1    1 2 3 4      step 3 is the diagonal (2, 1), (1, 2), (0, 3)
        layer 0    0 1 2 3

That is T + (L - 1) K positions in a row, not L T, with one bmm for all layers of a
step. This is ours. The paper's are: to save x and y alone (section 6.1); CUDA graphs (6.2); a
reverse loop of (B1) to (B6) alone (6.4).

A forward step, by model_rt's numbers: for all positions of a chunk (1), and attention to the
temporary pair and all earlier chunks; then, position by position, (2) with the chunk's own
pairs so far, as an online softmax, and (3) to (5).

Backward: the persistent pairs again, from y. Then a step, for all positions: (1), the weights
p_ij of attention, a, and u = W_up n2(z). Then from the chunk's last position j to its first,
when later queries i have their da_i and delta_i (M.T is M transposed):

    ds_ij = p_ij (da_i . v_j - delta_i)                    (B1)
    dk_j  = sum_{i > j} ds_ij q_i / sqrt(D)    dv_j = sum_{i > j} p_ij da_i  (B2)
    g_j   = dL/dy_j + J_y.T (Wk.T J_k.T dk_j + Wv.T dv_j)  (B3)  dL/dy_j: from above
    du_j  = gelu'(u_j) W_down.T g_j                        (B4)
    dz_j  = g_j + J_z.T W_up.T du_j                        (B5)
    da_j  = Wo.T dz_j    delta_j = da_j . a_j              (B6)

Later chunks have left their part of (B2) in d_pairs. Then for all positions (^: of the
temporary pair; ds^_i: (B1) with its p and v):

    dq_i  = (sum_{j < i} ds_ij k_j + ds^_i k^_i) / sqrt(D)   (B7)
    dk^_i = ds^_i q_i / sqrt(D)    dv^_i = p^_i da_i         (B8)
    dx_i  = dz_i + J_x.T (Wq.T J_q.T dq_i + Wk.T J_k^.T dk^_i + Wv.T dv^_i)   (B9)
    dW    = sum_i (gradient of W's output)_i (W's input)_i.T   (B10)

J are Jacobians: J_x, J_y of n1 at x and y, J_z of n2 at z; J_q, J_k, J_k^ of nq and nk (then
RoPE) at Wq n1(x), Wk n1(y), Wk n1(x). For a norm n = x r without a weight, with
r = 1 / sqrt(mean(x^2) + eps),

    J.T dn = r (dn - n mean(dn n))                           (B11)

A weight w of nq or nk: with the gradient d of w n, dn = w d and dw = sum_i d_i n_i. The
weights of n1 and n2 are folded into the next matrix.

Shapes: B batch, S cached tokens, T new ones, K positions of a chunk, P of any
number, L layers, A active in a step, C width, M the MLP's, H query heads, G key/value heads,
Q = H / G, D head size, Z = A B G.
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

@torch.no_grad()
def forward_pass(wave, x, *weights, pairs=None):
    """All layers on x (B, T, C): [states], a list for replay. pairs: the first S are given, the
    new are left there; None: of this pass alone (backward makes them again)."""
    w = Weights(*weights).to(wave.dtype)
    if pairs is None:
        pairs = x.new_empty(2, wave.L, wave.B, wave.G, wave.length, wave.D, dtype=wave.dtype)
    states = x.new_zeros(wave.L + 1, wave.length, wave.B, wave.C)  # padding: anything finite
    states[0, :wave.T] = x.transpose(0, 1)
    for step in wave.steps:
        active = Weights(*(weight[step.lo:step.hi] for weight in w))
        forward_step(wave, states, pairs, active, step)
    return [states]


def forward_step(wave, states, pairs, w, step):
    """Each active layer's chunk."""
    eps, pieces, w_kv = wave.cfg.norm_eps, wave.pieces, w.qkv[:, wave.kv]
    rope = [wave.diagonal(table, step, 1) for table in wave.tables]
    x = wave.diagonal(states[:-1], step, 1)                  # (A, K, B, C)
    (q, k, v), _ = wave.temporary(x.flatten(1, 2), w, rope)  # (1)
    out, lse = wave.outside(q, k, v, pairs, step)            # (2) outside the chunk
    attention = ChunkForward(wave, q, out, lse)
    ropes = [*zip(*(table.split(1, 1) for table in rope))] or [()] * wave.K  # by position
    k_outs, v_outs, ys = attention.k.unbind(1), attention.v.unbind(1), []
    for i, x_i in enumerate(x.unbind(1)):                    # (A, B, C)
        a_i = attention.read(i)                              # (2), complete
        z_i, z_n = pieces.add_and_norm(x_i, product(a_i.to(wave.dtype), w.wo), eps)  # (3)
        u_i = product(z_n, w.up)
        y_i, y_n = pieces.add_and_norm(z_i, product(F.gelu(u_i), w.down), eps)  # (4)
        kv_i = product(y_n, w_kv)                            # (5)
        write_pair(k_outs[i], v_outs[i], kv_i, w.nk, ropes[i], eps)
        ys.append(y_i)
    wave.diagonal(states[1:], step, 1).copy_(torch.stack(ys, 1))
    for buffer, new in zip(pairs, (attention.k, attention.v)):
        view = wave.diagonal(buffer[..., wave.S:, :], step, 3)  # (A, B, G, K, D)
        view.copy_(new.view(view.shape))


class ChunkForward:
    """Attention of a chunk's queries q (A, B, H, K, D), position by position: out and lse
    from outside it, completed with its own pairs k, v (Z, K, D)."""

    def __init__(self, wave, q, out, lse):
        A, B, H, K, D = self.shape = q.shape
        self.bias, self.pieces, Z = wave.bias, wave.pieces, A * B * wave.G
        # by position (Z, Q, .): the queries that share a key are rows of one bmm
        rows = (q.to(out.dtype) * wave.scale, out, lse[..., None])
        rows = (x.reshape(Z, H // wave.G, K, -1).contiguous().unbind(2) for x in rows)
        self.q_scaled, self.out, self.lse = rows
        self.k, self.v = out.new_empty(Z, K, D), out.new_empty(Z, K, D)

    def read(self, i):
        """a_i (A, B, H D), once the pairs before i are written."""
        A, B, H, K, D = self.shape
        a_i = self.pieces.read_pairs(self.q_scaled[i], self.k[:, :i], self.v[:, :i],
                                     self.bias[:, i, :i], self.lse[i], self.out[i])
        return a_i.reshape(A, B, H * D)


# ---- what a step is made of ----

Step = namedtuple("Step", "s lo hi")  # chunk s - l of layers lo <= l < hi


class Wavefront:
    """Sizes, tables and the steps' common operations, for L layers over x (B, T, C) after S
    cached tokens. The callers hold states (L + 1, length, B, C) and pairs
    (2, L, B, G, S + length, D): layer l reads states[l], writes states[l + 1] and pairs[:, l],
    k and v. length: T in whole chunks, padding behind all tokens."""

    def __init__(self, cfg, x, L, S=0):
        self.cfg, self.L, self.S = cfg, L, S
        self.B, self.T, self.C = x.shape
        self.H, self.G, self.D = cfg.n_head, cfg.kv_heads, cfg.head_size
        chunks = math.ceil(self.T / cfg.chunk)
        self.K = math.ceil(self.T / chunks)  # even chunks, little padding
        self.length = chunks * self.K
        self.steps = [Step(s, lo=max(0, s + 1 - chunks), hi=min(L, s + 1))
                      for s in range(chunks + L - 1)]
        self.kv = slice(self.H * self.D, None)  # Wk and Wv in the rows of qkv
        self.dtype = compute_dtype(x)  # of products: autocast's, where it is on
        self.wide = torch.promote_types(x.dtype, torch.float32)  # of sums
        self.pieces = PLAIN
        if kernels.runs_triton(x.device, self.dtype):
            import rt_triton  # not before a GPU needs it
            self.pieces = rt_triton
        self.scale = self.D ** -0.5
        self.pos = torch.arange(S + self.length, device=x.device, dtype=torch.int32)
        self.slopes, self.tables = None, []
        if cfg.pos == "alibi":
            self.slopes = alibi_slopes(self.H, x.device, self.wide)
        # where each chunk starts, and its q_pos, k_pos and slopes for attend_by_position
        self.starts = [(start, (self.pos[start:start + self.K], self.pos[:start], self.slopes))
                       for start in range(S, S + self.length, self.K)]
        # in a chunk, (H or 1, K, K): ALiBi, and -inf unless the key is earlier
        pos = self.pos[:self.K]
        bias = attention_bias(pos[None], pos, 0, self.slopes, self.wide)[0]
        self.bias = bias.masked_fill(pos[:, None] == pos, -math.inf)
        if cfg.pos == "rope":
            tables = rope_tables(self.pos[S:], self.D, cfg.rope_theta, self.wide)
            # (L, length, 1, 1, D / 2); no expand: diagonal needs a stride
            self.tables = [table[:, None, None].repeat(L, 1, 1, 1, 1) for table in tables]

    def diagonal(self, buffer, step, dim):
        """A step's chunks, (A, ...), of a buffer (L, ...) with positions in dimension dim: a
        view, as from one to the next it is a layer up, a chunk back."""
        s, lo, hi = step
        shape, stride = list(buffer.shape), list(buffer.stride())
        first = buffer.storage_offset() + lo * stride[0] + (s - lo) * self.K * stride[dim]
        stride[0] -= self.K * stride[dim]
        shape[0], shape[dim] = hi - lo, self.K
        return buffer.as_strided(shape, stride, first)

    def temporary(self, x, w, rope):
        """(1) for rows x (A, K B, C): q, k^ and v^ (A, B, H, K, D), the pairs repeated for
        each query head; and the parts of n1, nq and nk for backward."""
        x_norm = norm_parts(x, self.cfg.norm_eps)
        H, G, D = self.H, self.G, self.D
        q, k, v = product(x_norm.n.to(self.dtype), w.qkv).split([H * D, G * D, G * D], -1)
        q, q_norm = heads(q, w.nq, rope, self.cfg.norm_eps, self.B, D)
        k, k_norm = heads(k, w.nk, rope, self.cfg.norm_eps, self.B, D)
        v = v.unflatten(-1, (G, D)).unflatten(1, (-1, self.B))
        q, k, v = (rows.permute(0, 2, 3, 1, 4).contiguous() for rows in (q, k, v))
        k, v = (upcast(rows).repeat_interleave(H // G, 2) for rows in (k, v))
        return (q, k, v), (x_norm, q_norm, k_norm)

    def persistent(self, y_n, w, rope):
        """(5) for y_n = n1(y) (A, P B, C): k, v (A, P, B, G, D), and the parts of nk."""
        k, v = product(y_n.to(self.dtype), w.qkv[:, self.kv]).chunk(2, -1)  # (A, P B, G D) each
        k, k_norm = heads(k, w.nk, rope, self.cfg.norm_eps, self.B, self.D)
        return k, v.view(v.size(0), -1, self.B, self.G, self.D), k_norm

    def outside(self, q, k_temp, v_temp, pairs, step):
        """Attention of a chunk's queries to their temporary pairs and all earlier chunks:
        out (A, B, H, K, D), and lse (A, B, H, K), the logarithm of the sum of e^score."""
        lse = (q * k_temp).sum(-1) * self.scale  # of the temporary pair: out is v^
        found = []
        for q_l, l in zip(q, range(step.lo, step.hi)):
            start, mask = self.starts[step.s - l]
            keys, values = pairs[:, l, :, :, :start]  # all visible
            found.append(kernels.attend_by_position(q_l, keys, values, *mask))
        # (A B, H, K, .); without any keys more is 0 and more_lse -inf
        more, more_lse = map(torch.cat, zip(*found))
        out, lse = v_temp.view(more.shape), lse.view(more_lse.shape)
        out, lse = kernels.merge(out, lse, more, more_lse)
        return out.reshape(q.shape), lse.reshape(q.shape[:4])

    def outside_backward(self, inputs, attention, pairs, d_pairs, step):
        """dq, dk^, dv^ (A, B, H, K, D). Adds to d_pairs. inputs: q, k^, v^ of outside;
        attention: the chunk's, whose a, lse and da are of all keys."""
        q, k_temp, v_temp = inputs
        a, lse, da = attention.a, attention.lse, attention.by_head(attention.da_rows)
        p = torch.exp((q * k_temp).sum(-1) * self.scale - lse)[..., None]
        ds = p * (da * (v_temp - a)).sum(-1, keepdim=True)  # (B1), delta is da . a
        dq, dk_temp, dv_temp = ds * k_temp * self.scale, ds * q * self.scale, p * da  # (B7), (B8)
        a, da = a.to(self.dtype), da.to(self.dtype)
        for n, l in enumerate(range(step.lo, min(step.hi, step.s))):  # chunk 0 has none
            start, mask = self.starts[step.s - l]
            keys, values = pairs[:, l, :, :, :start]
            new = kernels.attend_by_position_backward(
                q[n], keys, values, a[n], lse[n], da[n], *mask)
            dq[n] += new[0]  # (B7)
            d_pairs[0, l, :, :, :start] += new[1]  # (B2)
            d_pairs[1, l, :, :, :start] += new[2]
        return dq, dk_temp, dv_temp


class Weights(NamedTuple):
    """The layers' weights, stacked."""
    qkv: torch.Tensor   # (L, (H + 2 G) D, C), times the weight of n1
    wo: torch.Tensor    # (L, C, H D)
    up: torch.Tensor    # (L, M, C), times the weight of n2
    down: torch.Tensor  # (L, C, M)
    nq: torch.Tensor    # (L, 1, H D); (L, 1, 0) without QK-norm
    nk: torch.Tensor    # (L, 1, G D)

    def to(self, dtype):
        """The matrices in dtype. nq and nk multiply in float32."""
        *matrices, nq, nk = self
        return Weights(*(matrix.to(dtype) for matrix in matrices), nq, nk)


def stack_weights(cfg, blocks):
    """Differentiable: gradients flow back to each layer's own parameters."""
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
    """W x of rows x (A, n, in), w (A, out, in) of one dtype; product(d, w.mT): W.T d."""
    return torch.bmm(x, w.mT)


NormParts = namedtuple("NormParts", "n r")  # of a norm n = x r, for (B11)


def norm_parts(x, eps):
    """F.rms_norm in float32 or better, n = x r, and its r (..., 1)."""
    return NormParts(*torch.ops.aten._fused_rms_norm(upcast(x), [x.size(-1)], None, eps))


def heads(rows, weight, rope, eps, B, D):
    """Rows (A, P B, heads D) -> (A, P, B, heads, D) after nq or nk and RoPE; and the
    norm's parts."""
    parts = ()  # without QK-norm
    if weight.size(-1):
        parts = norm_parts(rows, eps)
        rows = (parts.n * weight).to(rows.dtype)
    rows = rows.view(rows.size(0), -1, B, rows.size(-1) // D, D)
    return apply_rope(rows, *rope) if rope else rows, parts


def add_and_norm(x, update, eps):
    """x + update; and its RMS norm in update's dtype."""
    x = x + update
    return x, F.rms_norm(x, x.shape[-1:], eps=eps).to(update.dtype)


def read_pairs(q, k, v, bias, lse, out):
    """Attention a (Z, Q, D) of scaled queries q (Z, Q, D) to i pairs k, v (Z, i, D), with bias
    (H or 1, i), and to one more pair of score lse (Z, Q, 1) and value out (Z, Q, D)."""
    if not k.size(1):
        return out
    scores = torch.bmm(q, k.mT)  # (Z, Q, i)
    scores.view(-1, *bias.shape).add_(bias)
    p = torch.cat([lse, scores], -1).softmax(-1)
    return (p[..., :1] * out).baddbmm_(p[..., 1:], v)


def write_pair(k_out, v_out, rows, weight, rope, eps):
    """(5) for rows (A, B, 2 G D), Wk n1(y) beside Wv n1(y), into k_out, v_out (A B G, D)."""
    k, v = rows.chunk(2, -1)
    B, D = rows.size(1), k_out.size(1)
    k, _ = heads(k, weight, rope, eps, B, D)
    for new, out in ((k, k_out), (v, v_out)):
        out = out.view(rows.size(0), B, -1, D)
        out.copy_(new.view(out.shape))


# ---- the backward pass ----

@torch.no_grad()
def backward_pass(wave, states, dy, *weights):
    """[dL/dx (B, T, C), *gradients of the weights], from dy (B, T, C)."""
    w = Weights(*weights).to(wave.dtype)
    y_n = F.rms_norm(states[1:].flatten(1, 2), [wave.C], eps=wave.cfg.norm_eps)
    k, v, _ = wave.persistent(y_n, w, wave.tables)  # (L, length, B, G, D)
    pairs = torch.stack([k, v]).permute(0, 1, 3, 4, 2, 5).contiguous()
    del y_n, k, v  # as large as the states
    d_pairs = torch.zeros_like(pairs, dtype=wave.wide)  # what later chunks add
    d_states = torch.zeros_like(states, dtype=wave.wide)  # what comes from above
    d_states[-1, :wave.T] = dy.transpose(0, 1)  # padding has 0 and adds nothing
    grads = Weights(*(torch.zeros_like(weight, dtype=wave.wide) for weight in w))
    for step in reversed(wave.steps):
        active = [Weights(*(x[step.lo:step.hi] for x in each)) for each in (w, grads)]
        backward_step(wave, states, pairs, d_states, d_pairs, *active, step)
    return [d_states[0, :wave.T].transpose(0, 1), *grads]


def backward_step(wave, states, pairs, d_states, d_pairs, w, grads, step):
    """Each active layer's chunk: dy, in d_states[l + 1], gives dx, in d_states[l]. Adds to
    grads, and to d_pairs of earlier chunks."""
    eps, pieces = wave.cfg.norm_eps, wave.pieces
    rope = [wave.diagonal(table, step, 1) for table in wave.tables]
    x = wave.diagonal(states[:-1], step, 1).flatten(1, 2)  # rows (A, K B, C)
    y = wave.diagonal(states[1:], step, 1).flatten(1, 2)
    dy = wave.diagonal(d_states[1:], step, 1)              # (A, K, B, C)

    # forward again; parts of norms: x_norm, y_norm of n1, z_norm of n2, q_norm of nq, k_norm and
    # k_temp_norm of nk, at k and at k^
    inputs, (x_norm, q_norm, k_temp_norm) = wave.temporary(x, w, rope)  # q, k^ and v^
    outside = wave.outside(*inputs, pairs, step)
    own = (wave.diagonal(buffer, step, 3) for buffer in (*pairs, *d_pairs))
    attention = ChunkBackward(wave, inputs[0], *outside, *own)
    a_rows = attention.a.permute(0, 3, 1, 2, 4).flatten(3).flatten(1, 2)
    z_norm = norm_parts(x + product(a_rows.to(wave.dtype), w.wo), eps)
    u = product(z_norm.n.to(wave.dtype), w.up)
    y_norm = norm_parts(y, eps)
    # (5) once more: pairs has no parts. () without QK-norm
    k_norm = q_norm and wave.persistent(y_norm.n, w, rope)[2]

    # position by position, (B1) to (B6); dkv: of the products Wk n1(y), Wv n1(y)
    ropes = [*zip(*(table.split(1, 1) for table in rope))] or [()] * wave.K  # by position
    y_parts, z_parts, k_parts = (
        [*zip(*(rows.split(wave.B, 1) for rows in parts))] for parts in (y_norm, z_norm, k_norm))
    us, w_kv, done = u.split(wave.B, 1), w.qkv[:, wave.kv], []
    for j in reversed(range(wave.K)):
        dk, dv = attention.kv_grad(j)                                # (B1), (B2)
        k_norm_j = k_parts[j] if k_parts else ()
        dkv = pair_backward(dk, dv, w.nk, ropes[j], k_norm_j, wave.dtype)
        dn = product(dkv, w_kv.mT)                                   # (A, B, C)
        g, g_low = pieces.add_norm_backward(dy[:, j], dn, *y_parts[j])  # (B3)
        du = torch.ops.aten.gelu_backward(product(g_low, w.down.mT), us[j])  # (B4)
        dz, dz_low = pieces.add_norm_backward(g, product(du, w.up.mT), *z_parts[j])  # (B5)
        attention.write_query_grad(j, product(dz_low, w.wo.mT))      # (B6)
        done.append((g_low, du, dz, dkv))
    g, du, dz, dkv = (torch.stack(d[::-1], 1).flatten(1, 2) for d in zip(*done))

    # all positions, (B7) to (B10); dqkv: of the product W_qkv n1(x)
    dq, *d_temp = wave.outside_backward(inputs, attention, pairs, d_pairs, step)
    dq = dq + attention.query_grad()  # (B7)
    d_temp = (d.unflatten(2, (wave.G, -1)).sum(3) for d in d_temp)  # Q queries share a pair
    dq, dk_temp, dv = (d.permute(0, 3, 1, 2, 4) for d in (dq, *d_temp))
    dk = attention.dk.view(wave.K, -1, wave.B, wave.G, wave.D).transpose(0, 1)
    dq, dk, dk_temp = (rotated_back(d, rope) for d in (dq, dk, dk_temp))
    if q_norm:
        for grad, d, parts in (
                (grads.nq, dq, q_norm), (grads.nk, dk, k_norm), (grads.nk, dk_temp, k_temp_norm)):
            grad += (d * parts.n).sum(1, keepdim=True)
    dq, dk = heads_backward(dq, w.nq, q_norm), heads_backward(dk_temp, w.nk, k_temp_norm)
    dqkv = torch.cat([dq, dk, dv.flatten(3).flatten(1, 2)], -1).to(wave.dtype)
    dx = dz + norm_backward(product(dqkv, w.qkv.mT), *x_norm)  # (B9)
    wave.diagonal(d_states[:-1], step, 1).copy_(dx.unflatten(1, (wave.K, wave.B)))
    for grad, d_out, x_in in (  # (B10)
            (grads.qkv, dqkv, x_norm.n), (grads.qkv[:, wave.kv], dkv, y_norm.n),
            (grads.wo, dz, a_rows), (grads.up, du, z_norm.n), (grads.down, g, F.gelu(u))):
        grad += torch.bmm(d_out.mT.to(wave.dtype), x_in.to(wave.dtype))


def by_position(x, G):
    """x (A, B, H, K, .) -> (Z, K, Q, .): the Q queries that share a key are rows of one bmm."""
    A, B, H, K, last = x.shape
    return x.reshape(A * B * G, H // G, K, last).transpose(1, 2)


class ChunkBackward:
    """ChunkForward for all positions: a (A, B, H, K, D), the whole lse. Then
    gradients, position by position. k, v (A, B, G, K, D) are the chunk's own pairs, dk, dv
    what later chunks have added."""

    def __init__(self, wave, q, out, lse, k, v, dk, dv):
        A, B, H, K, D = self.shape = q.shape
        self.scale, self.Q, Z = wave.scale, H // wave.G, A * B * wave.G
        self.pieces = wave.pieces
        self.k, self.v = (x.to(out.dtype).reshape(Z, K, D) for x in (k, v))
        # (K, Z, 1, D): a position's are contiguous, so that baddbmm_ is one call
        by_key = (x.permute(3, 0, 1, 2, 4).reshape(K, Z, 1, D) for x in (dk, dv))
        self.dk, self.dv = map(torch.Tensor.contiguous, by_key)
        # (Z, K Q, .): the queries of position i are rows i Q to (i + 1) Q
        rows = (q.to(out.dtype) * wave.scale, out, lse[..., None])
        self.q_scaled, out, lse = (by_position(x, wave.G).flatten(1, 2) for x in rows)
        scores = torch.bmm(self.q_scaled, self.k.mT)  # (Z, K Q, K)
        bias = by_position(wave.bias.expand(1, 1, H, K, K), wave.G)  # (G, K, Q, K)
        scores.view(A * B, wave.G, K, self.Q, K).add_(bias)
        total = torch.logaddexp(lse, scores.logsumexp(-1, keepdim=True))  # (Z, K Q, 1)
        self.p = torch.exp(scores - total)  # p_ij, 0 for j >= i
        self.p_of_key = self.p.mT.contiguous()  # (Z, K, K Q)
        self.a_rows = torch.baddbmm(torch.exp(lse - total) * out, self.p, self.v)
        self.a, self.lse = self.by_head(self.a_rows), self.by_head(total)[..., 0]
        self.da_rows = torch.empty_like(self.a_rows)
        self.delta = torch.empty_like(total.mT)  # (Z, 1, K Q)
        # by position: keys (Z, 1, .) and queries (Z, Q, .)
        self.vs, self.ps = self.v.split(1, 1), self.p_of_key.split(1, 1)
        self.written = [*zip(self.da_rows.split(self.Q, 1), self.delta.split(self.Q, 2),
                             self.a_rows.split(self.Q, 1))]

    def by_head(self, rows):
        """Rows (Z, K Q, .) -> (A, B, H, K, .)."""
        A, B, H, K, _ = self.shape
        return rows.unflatten(1, (K, self.Q)).transpose(1, 2).reshape(A, B, H, K, -1)

    def kv_grad(self, j):
        """dk_j, dv_j (A, B, G, D), once later queries have written da."""
        A, B, _, _, D = self.shape
        later = (j + 1) * self.Q
        self.pieces.add_pair_grad(
            self.dk[j], self.dv[j], self.q_scaled[:, later:], self.vs[j], self.ps[j][..., later:],
            self.da_rows[:, later:], self.delta[..., later:])
        return self.dk[j].view(A, B, -1, D), self.dv[j].view(A, B, -1, D)

    def write_query_grad(self, j, da):
        """da_j (A, B, H D), and delta_j (B6)."""
        da_j, delta_j, a_j = self.written[j]
        self.pieces.write_query_grad(da_j, delta_j, da.view(a_j.shape), a_j)

    def query_grad(self):
        """What the chunk's own keys add to dq (A, B, H, K, D) (B7)."""
        ds = self.p * (torch.bmm(self.da_rows, self.v.mT) - self.delta.mT)
        return self.by_head(torch.bmm(ds, self.k) * self.scale)


def add_pair_grad(dk, dv, q, v, p, da, delta):
    """Adds (B2) of n queries to dk, dv (Z, 1, D) of one key: scaled q and da (Z, n, D), v
    (Z, 1, D), p and delta (Z, 1, n)."""
    ds = p * (torch.bmm(v, da.mT) - delta)  # (B1)
    dk.baddbmm_(ds, q)
    dv.baddbmm_(p, da)


def pair_backward(dk, dv, weight, rope, parts, dtype):
    """The gradient of write_pair's rows in dtype, from dk, dv (A, B, G, D)."""
    dk = heads_backward(rotated_back(dk[:, None], rope), weight, parts)
    return torch.cat([dk, dv.flatten(2)], -1).to(dtype)


def add_norm_backward(d, dn, n, r):
    """d + norm_backward, and the same in dn's dtype."""
    d = d + norm_backward(dn, n, r)
    return d, d.to(dn.dtype)


def write_query_grad(da_out, delta_out, da, a):
    """(B6): da_out <- da (Z, Q, D), delta_out (Z, 1, Q) <- da . a."""
    da_out.copy_(da)
    delta_out.copy_((da * a).sum(-1)[:, None])


def norm_backward(dn, n, r):
    """J.T dn (B11)."""
    dn = dn.to(n.dtype)
    return r * dn.addcmul(n, (dn * n).mean(-1, keepdim=True), value=-1)


def rotated_back(d, rope):
    """d (A, P, B, heads, D), of what heads gave -> rows (A, P B, heads D) before RoPE."""
    if rope:
        d = apply_rope(d, rope[0], -rope[1])
    return d.flatten(3).flatten(1, 2)


def heads_backward(rows, weight, parts):
    """J_q.T or J_k.T of rotated_back's rows."""
    return norm_backward(rows * weight, *parts) if parts else rows


# ---- all layers as one function ----

@torch.compiler.disable  # it would unroll the loop over positions
def run_layers(cfg, blocks, x):
    """The layers `blocks` on x (B, T, C) -> (B, T, C), differentiable."""
    if cfg.pos == "rope" and x.size(1) > cfg.block_size:    # (a cache counts its tokens itself)
        raise ValueError(f"{x.size(1)} tokens are more than block_size={cfg.block_size}")
    return Layers.apply(cfg, x, *stack_weights(cfg, blocks))


def prefill(cfg, blocks, x, past):
    """The same after S cached tokens; and the new k, v (L, B, G, T, D). past: the cached k
    (B, G, S, D) of each layer, then v. No gradients; no CUDA graph, as lengths differ."""
    S = past[0].size(2)
    wave = Wavefront(cfg, x, len(blocks), S)  # has autocast's dtype
    with torch.autocast(x.device.type, enabled=False):
        pairs = torch.stack(past).to(wave.dtype).unflatten(0, (2, -1))
        pairs = F.pad(pairs, (0, 0, 0, wave.length))  # room for the new
        states, = forward_pass(wave, x, *stack_weights(cfg, blocks), pairs=pairs)
    k, v = pairs[..., S:S + wave.T, :]
    return states[-1, :wave.T].transpose(0, 1), k, v


class Layers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, cfg, x, *weights):
        ctx.wave = Wavefront(cfg, x, len(weights[0]))
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
    """function(wave, *inputs), without autocast (wave.dtype has it). On CUDA it is replayed as a
    graph: a position is some twenty kernels, slower to launch than to run."""
    with torch.autocast(inputs[0].device.type, enabled=False):
        if not (wave.cfg.cuda_graphs and graphs.recordable(inputs[0])):
            return function(wave, *inputs)
        # a graph keeps its first call's wave, which cfg, dtype and shapes determine
        key = (function, inputs[0].device, wave.dtype, str(wave.cfg),
               torch.get_float32_matmul_precision(), *((x.shape, x.dtype) for x in inputs))
        return graphs.replay(key, partial(function, wave), *inputs)


# ---- the pieces of a position ----

PLAIN = SimpleNamespace(  # rt_triton.py has these as one kernel each
    add_and_norm=add_and_norm, read_pairs=read_pairs, add_pair_grad=add_pair_grad,
    add_norm_backward=add_norm_backward, write_query_grad=write_query_grad)
