"""
The wavefront: the fast schedule of the Recurrent Transformer (read model_rt.py first).

Positions are cut into chunks of C. Chunk c of layer l needs chunk c of layer l - 1, its input,
and chunk c - 1 of its own layer, its keys and values. So all chunks (l, c) with l + c = s run
at the same time, in step s. The steps of three layers, four chunks:

           chunk   0 1 2 3
        layer 2    2 3 4 5      a chunk needs the one below it and the one to its left;
        layer 1    1 2 3 4      step 3 is the diagonal (2, 1), (1, 2), (0, 3)
        layer 0    0 1 2 3

That is T + (L - 1) C positions one after the other, not L T, and a position's products are one
bmm over the stacked weights of a step's layers. This is ours. The paper's are: to save x and y
alone (section 6.1); CUDA graphs (6.2); a reverse loop of (B1) to (B6) alone (6.4).

Forward, a step, by the numbers of model_rt. First all positions of a chunk: q, temporary pairs
(1), and attention to the temporary pair and all earlier chunks. Then one position after the
other: (2), where an online softmax adds the chunk's own pairs so far, and (3), (4), (5).

Backward, before the first step: all persistent pairs again, from y. Then a step, first all its
positions, from x and y: q, temporary pairs, the weights p_ij of attention, a, u = W_up n2(z).
Then from the chunk's last position to its first (M.T is M transposed):

    ds_ij = p_ij (da_i . v_j - delta_i)                    (B1)  of later queries i > j
    dk_j  = sum_i ds_ij q_i / sqrt(D)    dv_j = sum_i p_ij da_i  (B2)
    g_j   = dL/dy_j + J_y.T (Wk.T J_k.T dk_j + Wv.T dv_j)  (B3)  dL/dy_j: from above
    du_j  = gelu'(u_j) W_down.T g_j                        (B4)
    dz_j  = g_j + J_z.T W_up.T du_j                        (B5)
    da_j  = Wo.T dz_j    delta_j = da_j . a_j              (B6)

Later chunks are in (B2) already: each, once done, adds its part to dk and dv of all chunks
before it. Then again all positions. ^ marks the temporary pair, ds^_i is (B1) with its p and v:

    dq_i  = (sum_{j < i} ds_ij k_j + ds^_i k^_i) / sqrt(D)   (B7)
    dk^_i = ds^_i q_i / sqrt(D)    dv^_i = p^_i da_i         (B8)
    dx_i  = dz_i + J_x.T (Wq.T J_q.T dq_i + Wk.T J_k^.T dk^_i + Wv.T dv^_i)   (B9)
    dW    = sum_i (gradient of W's output)_i (W's input)_i.T   (B10)

J are Jacobians: J_x, J_y of n1 at x and y, J_z of n2 at z; J_q, J_k, J_k^ of nq and nk (then
RoPE) at q, k, k^. For a norm n = x r without a weight, r = 1 / sqrt(mean(x^2) + eps),

    J.T d = r (d - n mean(d n))                              (B11)

With a weight, y = w n: w d replaces d, and dw = sum_i d_i n_i. Only nq and nk have one here;
those of n1 and n2 are folded into the next matrix.

Shapes: B batch, T positions, L layers, A active layers of a step, C positions of a chunk,
d width, M width of the MLP, H query heads, G key/value heads, R = H / G, D head size.
"""
import math
from collections import namedtuple
from typing import NamedTuple

import torch
import torch.nn.functional as F

import kernels
from model_gpt import (alibi_slopes, apply_rope, attention_bias, compute_dtype, rope_tables,
                       upcast)


# ---- weights and norms ----

NormParts = namedtuple("NormParts", "n r")  # of a norm n = x r, for (B11)


class Weights(NamedTuple):
    """The layers' matrices, stacked."""
    qkv: torch.Tensor       # (L, (H + 2 G) D, d), times the weight of n1
    out: torch.Tensor       # (L, d, H D)
    up: torch.Tensor        # (L, M, d), times the weight of n2
    down: torch.Tensor      # (L, d, M)
    nq: torch.Tensor        # (L, 1, H D), the weight of nq; (L, 1, 0) without QK-norm
    nk: torch.Tensor        # (L, 1, G D), that of nk

    def of_layers(self, lo, hi):
        return Weights(*(u[lo:hi] for u in self))

    def to(self, dtype):
        """The matrices in dtype. nq and nk multiply in float32: they stay."""
        *matrices, nq, nk = self
        return Weights(*(u.to(dtype) for u in matrices), nq, nk)


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
    """W x of rows x (A, n, in), w (A, out, in), in w's dtype. product(d, w.mT) is W.T d."""
    return torch.bmm(x.to(w.dtype), w.mT)


def norm(x, eps):
    """RMSNorm without a weight, in float32 or better."""
    x = upcast(x)
    return F.rms_norm(x, x.shape[-1:], eps=eps)


def norm_parts(x, eps):
    """The same n = x r, and r (..., 1)."""
    x = upcast(x)
    r = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return NormParts(x * r, r)


# ---- what both passes share ----

Step = namedtuple("Step", "s lo hi")  # layers l = lo .. hi - 1 compute their chunks c = s - l


class Wavefront:
    """L layers over x (B, T, d): sizes, order, tables. Layer l reads states[l] and writes
    states[l + 1], states (L + 1, length, B, d), where the B rows of a position are a product's
    rows. length is T in whole chunks: the padding is behind all tokens."""

    def __init__(self, cfg, x, L):
        self.cfg, self.L = cfg, L
        self.B, self.T, self.d = x.shape
        self.H, self.G, self.D = cfg.n_head, cfg.n_kv_head, cfg.head_dim
        self.chunks = math.ceil(self.T / cfg.chunk)
        self.C = math.ceil(self.T / self.chunks)  # even chunks, little padding
        self.length = self.chunks * self.C
        self.dtype = compute_dtype(x)  # of products' operands: autocast's, where it is on
        self.wide = torch.promote_types(x.dtype, torch.float32)  # of sums and gradients
        self.scale = self.D ** -0.5
        self.pos = torch.arange(self.length, device=x.device, dtype=torch.int32)
        self.slopes, self.tables = None, []
        if cfg.pos == "alibi":
            self.slopes = alibi_slopes(self.H, x.device, self.wide)
        # inside a chunk: ALiBi, and -inf unless the key is earlier, (H or 1, C, C)
        pos = self.pos[:self.C]
        bias = attention_bias(pos[None], pos, 0, self.slopes, self.wide)[0]
        self.bias = bias.masked_fill(pos[:, None] == pos, -math.inf)
        if cfg.pos == "rope":
            if self.T > cfg.block_size:
                raise ValueError(f"{self.T} tokens are more than block_size={cfg.block_size}")
            tables = rope_tables(self.pos, self.D, cfg.rope_theta, self.wide)
            # (L, length, 1, 1, D / 2); no expand: diagonal needs a stride from layer to layer
            self.tables = [u[:, None, None].repeat(L, 1, 1, 1, 1) for u in tables]

    def steps(self):
        last = self.chunks - 1
        return [Step(s, max(0, s - last), min(self.L, s + 1)) for s in range(last + self.L)]

    def diagonal(self, buffer, step, dim):
        """A step's chunks, (A, ...), in a buffer of layers with positions in dimension dim.
        A view: the stride from each chunk to the next is the same, a layer up, a chunk back."""
        s, lo, hi = step
        shape, stride = list(buffer.shape), list(buffer.stride())
        first = buffer.storage_offset() + lo * stride[0] + (s - lo) * self.C * stride[dim]
        stride[0] -= self.C * stride[dim]
        shape[0], shape[dim] = hi - lo, self.C
        return buffer.as_strided(shape, stride, first)

    # queries, keys and values

    def temporary(self, x, w, rope):
        """(1) for rows x (A, C B, d): q and the temporary k, v, one for each query head and in
        float32 or better, all (A, B, H, C, D); and the parts of n1, nq and nk for backward."""
        x_norm = norm_parts(x, self.cfg.norm_eps)
        H, G, D = self.H, self.G, self.D
        q, k, v = product(x_norm.n, w.qkv).split([H * D, G * D, G * D], -1)
        q, q_norm = self.heads(q, w.nq, rope)
        k, k_norm = self.heads(k, w.nk, rope)
        v = v.unflatten(-1, (G, D)).unflatten(1, (-1, self.B))
        q, k, v = (u.permute(0, 2, 3, 1, 4).contiguous() for u in (q, k, v))
        k, v = (upcast(u).repeat_interleave(H // G, 2) for u in (k, v))
        return (q, k, v), (x_norm, q_norm, k_norm)

    def persistent(self, n, w, rope):
        """(5) for n = n1(y) (A, n B, d): k, v (A, n, B, G, D), and the parts of nk."""
        first = self.H * self.D
        k, v = product(n, w.qkv[:, first:]).chunk(2, -1)  # (A, n B, G D) each
        k, k_norm = self.heads(k, w.nk, rope)
        return k, v.view(v.size(0), -1, self.B, self.G, self.D), k_norm

    def heads(self, rows, weight, rope):
        """Projected rows (A, n B, heads D) -> (A, n, B, heads, D), normed by nq or nk and
        rotated; and the norm's parts, none without QK-norm."""
        parts = ()
        if self.cfg.qk_norm == "full":
            parts = norm_parts(rows, self.cfg.norm_eps)
            rows = (parts.n * weight).to(rows.dtype)
        u = rows.view(rows.size(0), -1, self.B, rows.size(-1) // self.D, self.D)
        return apply_rope(u, *rope) if rope else u, parts

    # attention to what is there before a chunk starts

    def outside(self, q, k, v, pairs, step):
        """Attention of a chunk's queries to their temporary pairs k, v and to all chunks before:
        out (A, B, H, C, D), and lse (A, B, H, C), the logarithm of the sum of e^score."""
        lse = (q * k).sum(-1) * self.scale  # of the temporary pair; its out is its value v
        earlier = []
        for q_l, l in zip(q, range(step.lo, step.hi)):  # each layer has another number of keys
            n, mask = self.earlier(l, step)
            keys, values = pairs[:, l, :, :, :n]
            earlier.append(kernels.attend(q_l, keys, values, *mask))
        # (A B, H, C, .); in a first chunk, without keys, more is 0 and more_lse -inf
        more, more_lse = map(torch.cat, zip(*earlier))
        out, lse = v.view(more.shape), lse.view(more_lse.shape)
        out, lse = kernels.merge(out, lse, more, more_lse)
        return out.reshape(q.shape), lse.reshape(q.shape[:4])

    def earlier(self, l, step):
        """How many keys come before layer l's chunk; positions and slopes for attend."""
        n = (step.s - l) * self.C
        return n, (self.pos[n:n + self.C], self.pos[:n], self.slopes)


# ---- the forward pass ----

def forward(run, x, w):
    """All layers on x (B, T, d): states (L + 1, length, B, d), and the persistent pairs, k and v
    in one tensor (2, L, B, G, length, D)."""
    w = w.to(run.dtype)
    states = x.new_empty(run.L + 1, run.length, run.B, run.d)
    states[0, :run.T] = x.transpose(0, 1)
    states[0, run.T:] = x[:, -1]  # padding: any finite numbers
    pairs = x.new_empty(2, run.L, run.B, run.G, run.length, run.D, dtype=run.dtype)
    for step in run.steps():
        forward_step(run, states, pairs, w.of_layers(step.lo, step.hi), step)
    return states, pairs


def forward_step(run, states, pairs, w, step):
    """Each active layer's chunk: the equations of model_rt, by their numbers."""
    eps, rope = run.cfg.norm_eps, [run.diagonal(u, step, 1) for u in run.tables]
    x = run.diagonal(states[:-1], step, 1)                       # (A, C, B, d)
    (q, k, v), _ = run.temporary(x.flatten(1, 2), w, rope)       # (1)
    out, lse = run.outside(q, k, v, pairs, step)                 # (2) but for the chunk's pairs
    attention = ChunkForward(run, q, out, lse)
    ys = []
    for i, x_i in enumerate(x.unbind(1)):                        # (A, B, d)
        a_i = attention.read(i)                                  # (2), complete
        z_i = x_i + product(a_i, w.out)                          # (3)
        u_i = product(norm(z_i, eps), w.up)
        y_i = z_i + product(F.gelu(u_i), w.down)                 # (4)
        rope_i = [table[:, i:i + 1] for table in rope]
        k_i, v_i, _ = run.persistent(norm(y_i, eps), w, rope_i)  # (5)
        attention.k[:, i], attention.v[:, i] = k_i.flatten(0, 3), v_i.flatten(0, 3)
        ys.append(y_i)
    run.diagonal(states[1:], step, 1).copy_(torch.stack(ys, 1))
    for buffer, new in zip(pairs, (attention.k, attention.v)):
        view = run.diagonal(buffer, step, 3)     # (A, B, G, C, D)
        view.copy_(new.view(view.shape))


class ChunkForward:
    """Attention of a chunk's queries q (A, B, H, C, D), completed position by position with
    the chunk's own pairs k, v. out, lse: attention outside it. N = A B G: the R query heads of
    a key head stand together."""

    def __init__(self, run, q, out, lse):
        A, B, H, C, D = self.shape = q.shape
        self.bias, N = run.bias, A * B * run.G
        q_scaled = q.to(out.dtype) * run.scale
        self.q_scaled = q_scaled.view(N, -1, C, D).unbind(2)  # of each position, as the next two
        self.out = out.reshape(N, -1, C, D).unbind(2)
        self.lse = lse.reshape(N, -1, C, 1).unbind(2)
        self.k, self.v = out.new_empty(2, N, C, D)

    def read(self, i):
        """a_i (A, B, H D), once the pairs before i are written."""
        A, B, H, C, D = self.shape
        out, lse = self.out[i], self.lse[i]  # (N, R, D), (N, R, 1)
        if i > 0:
            s = torch.bmm(self.q_scaled[i], self.k[:, :i].mT)  # (N, R, i)
            s.view(A * B, H, i).add_(self.bias[:, i, :i])
            p = torch.cat([lse, s], -1).softmax(-1)  # outside is one more pair
            out = torch.baddbmm(p[..., :1] * out, p[..., 1:], self.v[:, :i])
        return out.reshape(A, B, H * D)


# ---- the backward pass ----

def norm_backward(dn, n, r):
    """J.T dn (B11)."""
    dn = dn.to(n.dtype)
    return r * dn.addcmul(n, (dn * n).mean(-1, keepdim=True), value=-1)


def heads_backward(d, weight, rope, parts):
    """J_q.T or J_k.T of d (A, n, B, heads, D), the gradient of what Wavefront.heads returned:
    the gradients of its rows and of the norm's weight."""
    if rope:
        d = apply_rope(d, rope[0], -rope[1])  # rotated back
    d = d.flatten(3).flatten(1, 2)  # (A, n B, heads D)
    if not parts:
        return d, 0
    d_weight = (d * parts[0]).sum(1, keepdim=True)
    return norm_backward(d * weight, *parts), d_weight


def backward(run, states, dy, w):
    """dL/dx (B, T, d) and the gradients of w, from forward's states and dy (B, T, d)."""
    w = w.to(run.dtype)
    pairs = recompute_pairs(run, states, w)
    d_pairs = torch.zeros_like(pairs, dtype=run.wide)  # what later chunks have added
    d_states = torch.zeros_like(states, dtype=run.wide)  # of y: what comes from above
    d_states[-1, :run.T] = dy.transpose(0, 1)  # 0 in the padding, which so adds nothing
    grads = Weights(*(torch.zeros_like(u, dtype=run.wide) for u in w))
    for step in reversed(run.steps()):
        active = [u.of_layers(step.lo, step.hi) for u in (w, grads)]
        chunks = BackwardStep(run, step, states, pairs, d_pairs, *active)
        dx = chunks.backward(run.diagonal(d_states[1:], step, 1))
        run.diagonal(d_states[:-1], step, 1).copy_(dx)
    return d_states[0, :run.T].transpose(0, 1), grads


def recompute_pairs(run, states, w):
    """All persistent pairs, from y: (2, L, B, G, length, D)."""
    pairs = states.new_empty(2, run.L, run.B, run.G, run.length, run.D, dtype=run.dtype)
    for l in range(run.L):
        n = norm(states[l + 1:l + 2].flatten(1, 2), run.cfg.norm_eps)
        rope = [table[l:l + 1] for table in run.tables]
        k, v, _ = run.persistent(n, w.of_layers(l, l + 1), rope)  # (1, length, B, G, D)
        pairs[0, l], pairs[1, l] = k[0].permute(1, 2, 0, 3), v[0].permute(1, 2, 0, 3)
    return pairs


class BackwardStep:
    """A step of the backward pass: each active layer's chunk. x_norm, y_norm and z_norm are the
    parts n, r of n1(x), n1(y) and n2(z); q_norm, k_norm and persistent_norm of nq and nk."""

    def __init__(self, run, step, states, pairs, d_pairs, w, grads):
        """Forward again, all positions at once."""
        self.run, self.step, self.w, self.grads = run, step, w, grads
        self.pairs, self.d_pairs, eps = pairs, d_pairs, run.cfg.norm_eps
        self.rope = [run.diagonal(u, step, 1) for u in run.tables]
        x, y = (run.diagonal(u, step, 1).flatten(1, 2) for u in (states[:-1], states[1:]))
        self.qkv, (self.x_norm, self.q_norm, self.k_norm) = run.temporary(x, w, self.rope)
        outside = run.outside(*self.qkv, pairs, step)
        own = [run.diagonal(u, step, 3) for u in (*pairs, *d_pairs)]
        self.attention = ChunkBackward(run, self.qkv[0], *outside, *own)
        self.a = self.attention.a.permute(0, 3, 1, 2, 4).flatten(3).flatten(1, 2)
        self.z_norm = norm_parts(x + product(self.a, w.out), eps)
        self.u = product(self.z_norm.n, w.up)
        self.y_norm = norm_parts(y, eps)
        self.persistent_norm = ()
        if run.cfg.qk_norm == "full":  # a product again: recompute_pairs keeps no parts
            self.persistent_norm = run.persistent(self.y_norm.n, w, self.rope)[2]

    def backward(self, dy):
        """dy (A, C, B, d) -> dx. Adds to grads, and to d_pairs of earlier chunks."""
        run, w, grads, HD = self.run, self.w, self.grads, self.run.H * self.run.D
        (g, du, dz, dkv), d_nk = self.reverse(dy)
        # the rest needs every da, which reverse has written
        dq, dk, dv = self.outside_backward()  # (B7), (B8)
        dq = dq + self.attention.query_grad()  # (B7)
        dk, dv = (u.unflatten(2, (run.G, -1)).sum(3) for u in (dk, dv))  # of a key's R queries
        dq, dk, dv = (u.permute(0, 3, 1, 2, 4) for u in (dq, dk, dv))  # (A, C, B, heads, D)
        dq, d_nq = heads_backward(dq, w.nq, self.rope, self.q_norm)
        dk, more = heads_backward(dk, w.nk, self.rope, self.k_norm)
        dqkv = torch.cat([dq, dk, dv.flatten(3).flatten(1, 2)], -1).to(run.dtype)
        for grad, d_out, x in (  # (B10)
                (grads.qkv, dqkv, self.x_norm.n), (grads.qkv[:, HD:], dkv, self.y_norm.n),
                (grads.out, dz, self.a), (grads.up, du, self.z_norm.n),
                (grads.down, g, F.gelu(self.u))):
            grad += torch.bmm(d_out.mT.to(run.dtype), x.to(run.dtype))
        grads.nq.add_(d_nq)
        grads.nk.add_(d_nk + more)
        dx = dz + norm_backward(product(dqkv, w.qkv.mT), *self.x_norm)  # (B9)
        return dx.unflatten(1, (run.C, run.B))

    def reverse(self, dy):
        """(B1) to (B6) from the last position to the first. Returns all positions' g, du, dz and
        dkv, the gradient of the products Wk n1(y), Wv n1(y); and that of nk's weight."""
        run, w, HD = self.run, self.w, self.run.H * self.run.D
        split = lambda rows: rows.unflatten(1, (run.C, run.B)).unbind(1)  # to C of (A, B, .)
        (n_y, r_y), (n_z, r_z) = map(split, self.y_norm), map(split, self.z_norm)
        k_norm = list(zip(*map(split, self.persistent_norm))) or [()] * run.C
        us, dys = split(self.u), dy.unbind(1)
        done, d_nk = [], 0
        for i in reversed(range(run.C)):
            dk, dv = self.attention.kv_grad(i)  # (B1), (B2)
            rope_i = [table[:, i:i + 1] for table in self.rope]
            dk, more = heads_backward(dk[:, None], w.nk, rope_i, k_norm[i])
            dkv = torch.cat([dk, dv.flatten(2)], -1).to(run.dtype)  # (A, B, 2 G D)
            g = dys[i] + norm_backward(product(dkv, w.qkv[:, HD:].mT), n_y[i], r_y[i])  # (B3)
            du = torch.ops.aten.gelu_backward(product(g, w.down.mT), us[i])  # (B4)
            dz = g + norm_backward(product(du, w.up.mT), n_z[i], r_z[i])  # (B5)
            self.attention.write_query_grad(i, product(dz, w.out.mT))  # (B6)
            done.append((g, du, dz, dkv))
            d_nk = d_nk + more
        return [torch.stack(u[::-1], 1).flatten(1, 2) for u in zip(*done)], d_nk

    def outside_backward(self):
        """Of Wavefront.outside: dq, and the temporary pairs' dk, dv, all (A, B, H, C, D). Adds
        to d_pairs of all chunks before."""
        run, step, (q, k, v) = self.run, self.step, self.qkv
        a, lse, da = self.attention.a, self.attention.lse, self.attention.da
        p = torch.exp((q * k).sum(-1) * run.scale - lse)[..., None]
        ds = p * (da * (v - a)).sum(-1, keepdim=True)  # (B1), delta is da . a
        dq, dk, dv = ds * k * run.scale, ds * q * run.scale, p * da  # (B7), (B8)
        a, da = a.to(run.dtype), da.to(run.dtype)
        for l in range(step.lo, step.hi):
            n, mask = run.earlier(l, step)
            if n > 0:  # a and lse are the whole softmax's, so p_ij and delta_i are, too
                keys, values = self.pairs[:, l, :, :, :n]
                q_l, a_l, lse_l, da_l, dq_l = (u[l - step.lo] for u in (q, a, lse, da, dq))
                grads = kernels.attend_backward(q_l, keys, values, a_l, lse_l, da_l, *mask)
                for total, grad in zip((dq_l, *self.d_pairs[:, l, :, :, :n]), grads):
                    total += grad  # (B7), (B2)
        return dq, dk, dv


class ChunkBackward:
    """The attention of ChunkForward again, from the chunk's own pairs k, v (A, B, G, C, D) all
    positions at once: a (A, B, H, C, D) and the complete lse (A, B, H, C). Then its gradients,
    from dk, dv (A, B, G, C, D), the part of later chunks, position by position."""

    def __init__(self, run, q, out, lse, k, v, dk, dv):
        A, B, H, C, D = self.shape = q.shape
        self.scale, N = run.scale, A * B * run.G
        self.q_scaled = (q.to(out.dtype) * run.scale).view(N, -1, D)  # (N, R C, D)
        pairs = (u.to(out.dtype).reshape(N, C, D) for u in (k, v, dk, dv))
        self.k, self.v, self.dk, self.dv = pairs
        s = torch.bmm(self.q_scaled, self.k.mT)  # (N, R C, C)
        s.view(A * B, H, C, C).add_(run.bias)
        total = torch.logaddexp(lse.reshape(N, -1), s.logsumexp(-1))  # (N, R C)
        self.p = torch.exp(s - total[..., None])  # p_ij, 0 for j >= i
        self.p_of_key = self.p.mT.contiguous()  # (N, C, R C)
        outside = torch.exp(lse.reshape(N, -1) - total)[..., None] * out.reshape(N, -1, D)
        a = torch.baddbmm(outside, self.p, self.v)
        self.a, self.lse = a.view(q.shape), total.view(q.shape[:4])
        # until a query's are written they only have to be finite: its p is 0 for later keys
        self.da, self.delta = torch.zeros_like(self.a), torch.zeros_like(total)

    def kv_grad(self, i):
        """dk_i, dv_i (A, B, G, D), once the queries after i have written theirs."""
        A, B, _, C, D = self.shape
        da, p = self.da.view(self.q_scaled.shape), self.p_of_key[:, i:i + 1]  # p (N, 1, R C)
        ds = p * (torch.bmm(self.v[:, i:i + 1], da.mT) - self.delta[:, None])  # (B1)
        dk = torch.baddbmm(self.dk[:, i:i + 1], ds, self.q_scaled)  # (B2): (N, 1, D)
        dv = torch.baddbmm(self.dv[:, i:i + 1], p, da)
        return dk.view(A, B, -1, D), dv.view(A, B, -1, D)

    def write_query_grad(self, i, da):
        """da_i (A, B, H D), and delta_i (B6)."""
        A, B, H, C, D = self.shape
        da = da.reshape(A, B, H, D)
        self.da[:, :, :, i] = da
        self.delta.view(A, B, H, C)[..., i] = (da * self.a[:, :, :, i]).sum(-1)

    def query_grad(self):
        """What the chunk's own keys add to dq (A, B, H, C, D) (B7)."""
        da = self.da.view(self.q_scaled.shape)
        ds = self.p * (torch.bmm(da, self.v.mT) - self.delta[..., None])
        return (torch.bmm(ds, self.k) * self.scale).view(self.shape)


# ---- all layers as one function ----

@torch.compiler.disable  # it would unroll the loop over positions
def run_layers(cfg, blocks, x):
    """The layers `blocks` on x (B, T, d) -> (B, T, d), differentiable."""
    return Layers.apply(cfg, x, *stack_weights(cfg, blocks))


def prefill(cfg, blocks, x):
    """The same, and the persistent pairs k, v (L, B, G, T, D). No gradients; no CUDA graph, as
    the next prompt has another length."""
    run = Wavefront(cfg, x, len(blocks))
    with torch.autocast(x.device.type, enabled=False):
        states, pairs = forward(run, x, stack_weights(cfg, blocks))
    return states[-1, :run.T].transpose(0, 1), *pairs[..., :run.T, :]


class Layers(torch.autograd.Function):
    """All layers as one function of x and the stacked weights."""

    @staticmethod
    def forward(ctx, cfg, x, *weights):
        ctx.run = run = Wavefront(cfg, x, len(weights[0]))

        def layers_forward(x, *weights):
            return [forward(run, x, Weights(*weights))[0]]  # backward makes the pairs again
        with torch.autocast(x.device.type, enabled=False):
            states, = replay(run, layers_forward, x, *weights)
        ctx.save_for_backward(states, *weights)
        return states[-1, :run.T].transpose(0, 1).contiguous()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        run, (states, *weights) = ctx.run, ctx.saved_tensors

        def layers_backward(states, dy, *weights):
            dx, grads = backward(run, states, dy, Weights(*weights))
            return [dx, *grads]
        with torch.autocast(dy.device.type, enabled=False):
            dx, *grads = replay(run, layers_backward, states, dy, *weights)
        grads = (g.to(w.dtype) for g, w in zip(grads, weights))
        return None, dx.to(states.dtype), *grads


# ---- CUDA graphs ----

GRAPHS = {}  # what runs, on which shapes -> Graph, or False if it ran once; last used last


class Graph:
    """function(*inputs), tensors -> a list of tensors, as a CUDA graph."""

    def __init__(self, run, function, inputs):
        self.run = run  # the graph reads its tables: they must live as long
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(inputs[0].device):
            self.inputs = [u.clone() for u in inputs]
            side, self.graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                function(*self.inputs)  # compiles kernels
            torch.cuda.current_stream().wait_stream(side)
            # thread_local: during a backward pass other threads may go on calling CUDA
            with torch.cuda.graph(self.graph, stream=torch.cuda.Stream(),
                                  capture_error_mode="thread_local"):
                self.outputs = function(*self.inputs)

    def __call__(self, *inputs):
        for mine, given in zip(self.inputs, inputs):
            mine.copy_(given)
        self.graph.replay()
        return [u.clone() for u in self.outputs]  # the next replay overwrites them


def recordable(x, dtype):
    return (x.is_cuda and not torch.cuda.is_current_stream_capturing()
            and kernels.runs_triton(x.device, dtype))  # plain attend asks the host for positions


def replay(run, function, *inputs):
    """function(*inputs). On CUDA, a second call with the same shapes is recorded as a graph:
    a position is some twenty small kernels, which take longer to launch than to run."""
    if not (run.cfg.cuda_graphs and recordable(inputs[0], run.dtype)):
        return function(*inputs)
    # all that the recorded function reads, beside its inputs, must follow from the key
    key = (function.__name__, inputs[0].device, run.dtype, str(run.cfg),
           *((u.shape, u.dtype) for u in inputs))
    graph = GRAPHS.pop(key, None)  # None: the first call, False: the second
    if graph is False:
        graph = Graph(run, function, inputs)
    GRAPHS[key] = graph or False
    if len(GRAPHS) > 8:  # each holds memory: the one used longest ago goes
        del GRAPHS[next(iter(GRAPHS))]
    return graph(*inputs) if graph else function(*inputs)
