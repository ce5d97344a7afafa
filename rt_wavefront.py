"""
The wavefront: the fast schedule of the Recurrent Transformer (read model_rt.py first).

Positions are cut into chunks of C. Layer l can compute chunk c as soon as layer l - 1 has
done so. Step s of the wavefront computes all pairs (l, c = s - l) together: a position's
products are one bmm over the layers' stacked weights. Steps of three layers, four chunks:

              chunk 0 1 2 3
        layer 2     2 3 4 5         step 3 is a diagonal: (2, 1), (1, 2) and (0, 3)
        layer 1     1 2 3 4
        layer 0     0 1 2 3

That is T + (L - 1) C positions one after the other instead of L T. A query attends to the
same pairs as in the naive layer, in three parts that an online softmax merges: its temporary
pair, all earlier chunks in one dense call, and its own chunk, position by position.

Layers at the same time are ours. The rest is the paper's: only each layer's x and y are saved,
and from y the backward pass recomputes all pairs at once, then attention and u = W_up n2(z)
(section 6.1); CUDA graphs (6.2); the loop from the last position to the first has nothing
in it but what dk and dv need, (B1) to (B7), and the rest comes in large products (6.4).

p_ij are attention's weights, ^ marks a temporary pair, J is the Jacobian of n1 or n2. (Before
Wq^T and Wk^T, dq and dk go back through RoPE and the QK-norm, too: heads_backward.)

    g_i   = dL/dy_i + J^T (Wk^T dk_i + Wv^T dv_i)   (B1)  dL/dy_i: from the layer above
    du_i  = gelu'(u_i) W_down^T g_i                 (B2)
    dz_i  = g_i + J^T W_up^T du_i                   (B3)
    da_i  = Wo^T dz_i        delta_i = da_i . a_i   (B4)
    ds_ij = p_ij (da_i . v_j - delta_i) / sqrt(D)   (B5)
    dk_j  = sum_{i > j} ds_ij q_i                   (B6)
    dv_j  = sum_{i > j} p_ij da_i                   (B7)

Once a chunk is done:

    dq_i  = sum_{j < i} ds_ij k_j + ds_i^ k_i^      (B8)
    dk_i^ = ds_i^ q_i        dv_i^ = p_i^ da_i      (B9)
    dx_i  = dz_i + J^T (Wq^T dq_i + Wk^T dk_i^ + Wv^T dv_i^)  (B10)
    dW    = sum_i (gradient of W's output)_i (W's input)_i^T  (B11)
    J^T d = r (d - n mean(d n))  for RMSNorm n = x r  (B12)

p comes from q, k and lse, the logarithm of the softmax's sum. Nothing is T x T.

Shapes: B batch, T positions, L layers, A active layers of a step, C positions of a chunk
(not the width, as in the other files), d width, m MLP width, H query heads, G key/value
heads, R = H / G, D head size.
"""
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

import kernels
from model_gpt import alibi_slopes, apply_rope, attention_bias, compute_dtype, rope_tables


def run_layers(cfg, blocks, x):
    """The layers `blocks` on x (B, T, d) -> (B, T, d), differentiable."""
    return Layers.apply(cfg, x, *stack_weights(cfg, blocks))


def prefill(cfg, blocks, x, past):
    """The same after S cached tokens, of which past has each layer's k, v (B, G, S, D).
    Returns y (B, T, d), and the new persistent pairs k, v (L, B, G, T, D). No gradients."""
    run = Wavefront(cfg, x, S=past[0][0].size(2))
    with torch.autocast(x.device.type, enabled=False):
        states = run.forward(x, stack_weights(cfg, blocks), past)
    k, v = (u[..., run.S:run.S + run.T, :] for u in (run.k, run.v))
    return states[-1, :run.T].transpose(0, 1), k, v


class Layers(torch.autograd.Function):
    """All layers as one function of x and the stacked weights."""

    @staticmethod
    def forward(ctx, cfg, x, *weights):
        ctx.run = run = Wavefront(cfg, x)

        def layers_forward(x, *weights):
            states = run.forward(x, Weights(*weights))
            run.k = run.v = None  # backward recomputes them from y
            return [states]
        with torch.autocast(x.device.type, enabled=False):
            states, = replay(run, layers_forward, x, *weights)
        ctx.save_for_backward(states, *weights)
        return states[-1, :run.T].transpose(0, 1).contiguous()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        run, (states, *weights) = ctx.run, ctx.saved_tensors

        def layers_backward(states, dy, *weights):
            dx, grads = run.backward(states, dy, Weights(*weights))
            run.k = run.v = run.dk = run.dv = None
            return [dx, *grads]
        with torch.autocast(dy.device.type, enabled=False):
            dx, *grads = replay(run, layers_backward, states, dy, *weights)
        grads = (g.to(w.dtype) for g, w in zip(grads, weights))
        return None, dx.to(states.dtype), *grads


# ---- weights, norms ----

class Weights(NamedTuple):
    """The layers' matrices, stacked. Norms' weights are folded into the next matrix."""
    qkv: torch.Tensor       # (L, (H + 2 G) D, d)
    out: torch.Tensor       # (L, d, H D)
    up: torch.Tensor        # (L, m, d)
    down: torch.Tensor      # (L, d, m)
    qk_norm: torch.Tensor   # (L, 1, (H + G) D), or (L, 1, 0) without QK-norm

    def of_layers(self, lo, hi):
        return Weights(*(w[lo:hi] for w in self))

    def matrices(self, function):
        """function of each matrix; the QK-norm's weights multiply in float32 and stay."""
        return Weights(*map(function, self[:4]), self.qk_norm)


def stack_weights(cfg, blocks):
    """Differentiable: gradients flow back to each layer's own parameters."""
    full, layers = cfg.qk_norm == "full", []
    for b in blocks:
        qkv = torch.cat([b.wq.weight, b.wk.weight, b.wv.weight]) * b.norm1.weight
        up = b.w_up.weight * b.norm2.weight
        norms = torch.cat([b.q_norm.weight, b.k_norm.weight]) if full else qkv.new_empty(0)
        layers.append((qkv, b.wo.weight, up, b.w_down.weight, norms[None]))
    return Weights(*map(torch.stack, zip(*layers)))


def product(x, w):
    """x (A, n, in) w (A, in, out), in w's dtype, which is that of the operands."""
    return torch.bmm(x.to(w.dtype), w)


def norm_backward(dn, n, r):
    """J^T dn, equation (B12)."""
    dn = dn.to(n.dtype)
    return r * dn.addcmul(n, (dn * n).mean(-1, keepdim=True), value=-1)


# ---- attention inside a chunk ----

class ChunkAttention:
    """Attention inside a chunk, to its own persistent pairs, position by position.

    q (A, B, H, C, D). out (like q), lse (A, B, H, C): each query's online softmax over all
    else that it attends to. In float32 or better. N = A B G: the R query heads of a key
    head stand together."""

    def __init__(self, run, q, out, lse):
        A, B, H, C, D = self.shape = q.shape
        self.run, self.N = run, A * B * run.G
        self.q = (q.to(out.dtype) * run.scale).view(self.N, -1, C, D)  # (N, R, C, D), scaled
        self.out, self.lse = out.reshape(self.q.shape), lse.reshape(self.N, -1, C, 1)
        self.rows = [u.unbind(2) for u in (self.q, self.out, self.lse)]  # of each position
        self.k, self.v = out.new_zeros(self.N, C, D), out.new_zeros(self.N, D, C)

    def read(self, i):
        """a_i (A, B, H D), once the pairs before i are written."""
        A, B, H, C, D = self.shape
        q, out, lse = (u[i] for u in self.rows)  # (N, R, D), (N, R, 1)
        if i > 0:
            n = min(max(i, 15), C - 1)  # torch's softmax is slow for rows of less than 16
            s = torch.bmm(q, self.k[:, :n].mT)  # (N, R, n)
            s.view(A * B, H, n).add_(self.run.bias[:, i, :n])  # -inf from i on
            p = torch.cat([lse, s], -1).softmax(-1)
            out = torch.baddbmm(p[..., :1] * out, p[..., 1:], self.v[..., :n].mT)
        return out.reshape(A, B, H * D)

    def write(self, i, k, v):
        """The persistent pair of position i: k, v (A, B, G, D)."""
        A, B, _, C, D = self.shape
        self.k.view(A, B, -1, C, D)[..., i, :] = k
        self.v.view(A, B, -1, D, C)[..., i] = v

    # backward

    def recompute(self, k, v, dk, dv):
        """All positions at once, from k, v (A, B, G, C, D): a like q, and the complete lse
        (A, B, H, C). dk, dv: what later chunks add to the gradients."""
        A, B, H, C, D = self.shape
        pairs = (u.to(self.q.dtype).reshape(self.N, C, D) for u in (k, v, dk, dv))
        self.k, self.v, self.dk, self.dv = pairs
        self.q, lse = self.q.flatten(1, 2), self.lse.flatten(1)  # (N, R C, D), (N, R C)
        s = torch.bmm(self.q, self.k[:, :C - 1].mT)  # (N, R C, C - 1)
        s.view(A * B, H, C, C - 1).add_(self.run.bias)
        total = torch.logaddexp(lse, s.logsumexp(-1))
        self.p = torch.exp(s - total[..., None])  # p_ij, 0 for j >= i
        outside = torch.exp(lse - total)[..., None] * self.out.flatten(1, 2)
        self.a = torch.baddbmm(outside, self.p, self.v[:, :C - 1])  # (N, R C, D)
        self.p_of_key = self.p.mT.contiguous()  # (N, C - 1, R C)
        self.da = torch.zeros_like(self.a)
        self.delta = self.a.new_zeros(self.N, 1, self.a.size(1))
        self.rows = self.a.view(self.N, -1, C, D).unbind(2)
        return self.a.view(self.shape), total.view(self.shape[:4])

    def kv_grad(self, i):
        """dk_i, dv_i (A, B, G, D). Queries after i have written theirs; the other da are 0."""
        A, B, _, C, D = self.shape
        dk, dv = self.dk[:, i:i + 1], self.dv[:, i:i + 1]  # (N, 1, D)
        if i < C - 1:
            p = self.p_of_key[:, i:i + 1]  # (N, 1, R C)
            ds = p * (torch.bmm(self.v[:, i:i + 1], self.da.mT) - self.delta)  # (B5)
            dk = torch.baddbmm(dk, ds, self.q)  # (B6), 1 / sqrt(D) is in q
            dv = torch.baddbmm(dv, p, self.da)  # (B7)
        return dk.view(A, B, -1, D), dv.view(A, B, -1, D)

    def write_query_grad(self, i, da):
        """da_i (A, B, H D) from (B4)."""
        C, D = self.shape[3:]
        da = da.reshape(self.N, -1, D)  # (N, R, D)
        self.da.view(self.N, -1, C, D)[:, :, i] = da
        self.delta.view(self.N, -1, C)[:, :, i] = (da * self.rows[i]).sum(-1)

    def query_grad(self):
        """This chunk's keys' part of (B8), and all da, both (A, B, H, C, D)."""
        C = self.shape[3]
        ds = self.p * (torch.bmm(self.da, self.v[:, :C - 1].mT) - self.delta.mT)  # (B5)
        dq = torch.bmm(ds, self.k[:, :C - 1]) * self.run.scale
        return dq.view(self.shape), self.da.view(self.shape)


# ---- the wavefront ----

class Wavefront:
    """One pass of all layers over x (B, T, d), after S cached tokens.

    Layer l reads states[l] and writes states[l + 1], states (L + 1, T, B, d). T is padded to
    whole chunks; no real position attends to the padding."""

    def __init__(self, cfg, x, S=0):
        self.cfg, self.S = cfg, S
        self.B, self.T, self.d = x.shape
        self.L, self.H = cfg.n_layer, cfg.n_head
        self.G, self.D = cfg.n_kv_head, cfg.head_dim
        self.chunks = math.ceil(self.T / cfg.chunk)
        self.C = math.ceil(self.T / self.chunks)  # even chunks, little padding
        self.length = self.chunks * self.C
        self.dtype = compute_dtype(x)  # of matrix products' operands
        self.wide = torch.promote_types(x.dtype, torch.float32)
        self.scale = self.D ** -0.5
        self.pos = torch.arange(S + self.length, device=x.device, dtype=torch.int32)
        self.slopes, self.tables = None, []
        if cfg.pos == "alibi":
            self.slopes = alibi_slopes(self.H, x.device, self.wide)
        # inside a chunk, ALiBi, and -inf unless the key is earlier: (H or 1, C, C - 1)
        pos, keys = self.pos[None, :self.C], self.pos[:self.C - 1]
        bias = attention_bias(pos, keys, 0, self.slopes, self.wide)[0]
        self.bias = bias.masked_fill(pos[0, :, None] == keys, -math.inf)
        if cfg.pos == "rope":
            tables = rope_tables(self.pos[S:], self.D, cfg.rope_theta, self.wide)
            self.tables = [u[None, :, None, None] for u in tables]  # (1, length, 1, 1, D)

    def steps(self):
        """(s, lo, hi): in step s, layers l = lo .. hi - 1 compute their chunks c = s - l."""
        return [(s, max(0, s - self.chunks + 1), min(self.L, s + 1))
                for s in range(self.chunks + self.L - 1)]

    def diagonal(self, buffer, step, dim):
        """A step's chunks in a buffer of all layers with positions in dimension dim. A view:
        chunks (l, c) and (l + 1, c - 1) are always the same distance apart in memory."""
        s, lo, hi = step
        shape, stride = list(buffer.shape), list(buffer.stride())
        start = buffer.storage_offset() + lo * stride[0] + (s - lo) * self.C * stride[dim]
        stride[0] -= self.C * stride[dim]
        shape[0], shape[dim] = hi - lo, self.C
        return buffer.as_strided(shape, stride, start)

    def rope(self, step):
        """RoPE's tables of a step's chunks, (A, C, 1, 1, D) each; none without RoPE."""
        s, lo, hi = step
        chunks = [slice((s - l) * self.C, (s - l + 1) * self.C) for l in range(lo, hi)]
        return [torch.cat([u[:, c] for c in chunks]) for u in self.tables]

    def norm(self, x):
        """RMSNorm without a weight, in float32 or better."""
        return F.rms_norm(x.to(self.wide), x.shape[-1:], eps=self.cfg.norm_eps)

    def norm_parts(self, x):
        """The same as n = x r, and r (..., 1), which backward needs."""
        x = x.to(self.wide)
        r = (x.square().mean(-1, keepdim=True) + self.cfg.norm_eps).rsqrt()
        return x * r, r

    def heads(self, u, rope, norm_weight):
        """Projected rows (A, n B, heads D) -> (A, n, B, heads, D), normed and rotated; and
        what the norm's backward needs."""
        saved = self.norm_parts(u) if self.cfg.qk_norm == "full" else None
        if saved:
            u = (saved[0] * norm_weight).to(u.dtype)
        u = u.view(u.size(0), -1, self.B, u.size(-1) // self.D, self.D)
        return apply_rope(u, *rope) if rope else u, saved

    def heads_backward(self, du, rope, norm_weight, saved):
        """du (A, n, B, heads, D) -> the gradients of the rows and of the norm's weight."""
        if rope:
            du = apply_rope(du, rope[0], -rope[1])  # rotated back
        du = du.flatten(3).flatten(1, 2)  # (A, n B, heads D)
        if saved is None:
            return du, 0
        d_weight = (du * saved[0]).sum(1, keepdim=True)
        return norm_backward(du * norm_weight, *saved), d_weight

    def inputs(self, x, w, rope):
        """Equation (1) of model_rt for rows x (A, C B, d): q (A, B, H, C, D), temporary k, v
        (A, B, G, C, D); and for the backward pass the parts of n1(x) and of the QK-norm."""
        n, r = self.norm_parts(x)
        H, G, D = self.H, self.G, self.D
        q, k, v = product(n, w.qkv).split([H * D, G * D, G * D], -1)
        q, q_saved = self.heads(q, rope, w.qk_norm[..., :H * D])
        k, k_saved = self.heads(k, rope, w.qk_norm[..., H * D:])
        v = v.unflatten(-1, (G, D)).unflatten(1, (-1, self.B))
        q, k, v = (u.permute(0, 2, 3, 1, 4).contiguous() for u in (q, k, v))
        return (q, k, v), (n, r, q_saved, k_saved)

    def persistent(self, n, w, rope):
        """Equation (5) for n = n1(y) (A, n B, d): k, v (A, n, B, G, D); k-norm's parts."""
        H, G, D = self.H, self.G, self.D
        k, v = product(n, w.qkv[..., H * D:]).split(G * D, -1)  # w.qkv (A, d, out)
        k, saved = self.heads(k, rope, w.qk_norm[..., H * D:])
        return k, v.view(v.size(0), -1, self.B, G, D), saved

    # what a chunk's queries attend to before it starts

    def outside_attention(self, qkv, step):
        """Each query's online softmax over its temporary pair and all chunks before its own:
        out (A, B, H, C, D), lse (A, B, H, C)."""
        s, lo, hi = step
        q, k, out = self.temporary(*qkv)
        lse = (q * k).sum(-1) * self.scale  # a softmax over one pair: out is its value
        if self.S + s - lo > 0:
            parts = [self.earlier(qkv[0][l - lo], l, s - l) for l in range(lo, hi)]
            more, more_lse = (torch.cat(u) for u in zip(*parts))  # (A B, H, C, .)
            own = out.view(more.shape), lse.view(more_lse.shape)
            out, lse = kernels.merge(*own, more.to(self.wide), more_lse)
        return out.reshape(q.shape), lse.reshape(q.shape[:4])

    def temporary(self, q, k, v):
        """q and the temporary pairs, one for each query head, all (A, B, H, C, D)."""
        q, k, v = (u.to(self.wide) for u in (q, k, v))
        return q, *(u.repeat_interleave(self.H // self.G, 2) for u in (k, v))

    def earlier(self, q, layer, c):
        """A layer's queries q (B, H, C, D) of chunk c over all persistent pairs before c."""
        end, pos = self.S + c * self.C, self.pos    # no key before the first chunk: lse is -inf
        k, v = self.k[layer, :, :, :end], self.v[layer, :, :, :end]
        return kernels.attend(q, k, v, pos[end:end + self.C], pos[:end], self.slopes)

    def forward(self, x, w, past=()):
        """All layers on x (B, T, d): states (L + 1, length, B, d). Leaves the persistent pairs,
        cached ones first, in self.k and self.v (L, B, G, S + length, D)."""
        w = w.matrices(lambda u: u.mT.contiguous().to(self.dtype))  # (in, out)
        states = x.new_empty(self.L + 1, self.length, self.B, self.d)
        states[0, :self.T] = x.transpose(0, 1)
        states[0, self.T:] = x[:, -1]  # padding: any finite numbers
        shape = 2, self.L, self.B, self.G, self.S + self.length, self.D
        self.k, self.v = x.new_empty(shape, dtype=self.dtype)
        for l, (k, v) in enumerate(past):
            self.k[l, :, :, :self.S], self.v[l, :, :, :self.S] = k, v
        for step in self.steps():
            self.forward_step(states, w.of_layers(*step[1:]), step)
        return states

    def forward_step(self, states, w, step):
        """Each active layer's chunk: the equations of model_rt, by their numbers."""
        x, rope = self.diagonal(states[:-1], step, 1), self.rope(step)
        qkv, _ = self.inputs(x.flatten(1, 2), w, rope)              # (1)
        attention = ChunkAttention(self, qkv[0], *self.outside_attention(qkv, step))
        y = []
        for i, x_i in enumerate(x.unbind(1)):                       # (A, B, d)
            a = attention.read(i)                                   # (2)
            z = x_i + product(a, w.out)                             # (3)
            u = product(self.norm(z), w.up)
            y.append(z + product(F.gelu(u), w.down))                # (4)
            here = [table[:, i:i + 1] for table in rope]
            k, v, _ = self.persistent(self.norm(y[i]), w, here)     # (5)
            attention.write(i, k[:, 0], v[:, 0])
        self.diagonal(states[1:], step, 1).copy_(torch.stack(y, 1))
        for buffer, new in ((self.k, attention.k), (self.v, attention.v.mT)):
            view = self.diagonal(buffer[..., self.S:, :], step, 3)
            view.copy_(new.reshape(view.shape))

    def backward(self, states, dy, w):
        """dL/dx (B, T, d) and the gradients of w, from forward's states and dy (B, T, d)."""
        w = w.matrices(lambda u: u.to(self.dtype))  # (out, in): backward
        wt = w.matrices(lambda u: u.mT.contiguous())  # (in, out): recomputation
        self.recompute_pairs(states, wt)
        grads = Weights(*(torch.zeros_like(u, dtype=self.wide) for u in w))
        d_states = torch.zeros_like(states, dtype=self.wide)
        d_states[-1, :self.T] = dy.transpose(0, 1)
        for step in reversed(self.steps()):
            dy = self.diagonal(d_states[1:], step, 1)
            active = [u.of_layers(*step[1:]) for u in (w, wt, grads)]
            dx = self.backward_step(states, dy, *active, step)
            self.diagonal(d_states[:-1], step, 1).copy_(dx)
        return d_states[0, :self.T].transpose(0, 1), grads

    def recompute_pairs(self, states, wt):
        """All persistent pairs, from y."""
        shape = 2, self.L, self.B, self.G, self.length, self.D
        self.k, self.v = states.new_empty(shape, dtype=self.dtype)
        self.dk, self.dv = states.new_zeros(shape, dtype=self.wide)
        for l in range(self.L):
            n = self.norm(states[l + 1:l + 2].flatten(1, 2))
            k, v, _ = self.persistent(n, wt.of_layers(l, l + 1), self.tables)
            self.k[l], self.v[l] = k[0].permute(1, 2, 0, 3), v[0].permute(1, 2, 0, 3)

    def backward_step(self, states, dy, w, wt, grads, step):
        """Each active layer's chunk: dy (A, C, B, d) -> dx. Adds to grads, dk and dv."""
        rope, HD = self.rope(step), self.H * self.D
        x, y = (self.diagonal(u, step, 1).flatten(1, 2) for u in (states[:-1], states[1:]))
        # forward again, all positions at once
        qkv, (n1, r1, q_saved, k_saved) = self.inputs(x, wt, rope)
        attention = ChunkAttention(self, qkv[0], *self.outside_attention(qkv, step))
        pairs = (self.diagonal(u, step, 3) for u in (self.k, self.v, self.dk, self.dv))
        a, lse = attention.recompute(*pairs)
        a_rows = a.permute(0, 3, 1, 2, 4).flatten(3).flatten(1, 2)  # (A, C B, H D)
        n2, r2 = self.norm_parts(x + product(a_rows, wt.out))
        u = product(n2, wt.up)
        m, rm = self.norm_parts(y)
        saved = self.persistent(m, wt, rope)[2] if self.cfg.qk_norm == "full" else None
        # position after position
        chunk = [dy, *(v.unflatten(1, (self.C, self.B)) for v in (m, rm, u, n2, r2))]
        (g, du, dz, dkv), dk_norm = self.reverse(attention, w, chunk, saved, rope)
        # the rest, all positions at once
        dq, da = attention.query_grad()
        dk, dv = self.outside_attention_backward(qkv, a, lse, da, dq, step)
        dq, dk, dv = (v.permute(0, 3, 1, 2, 4) for v in (dq, dk, dv))  # (A, C, B, heads, D)
        dq, dq_norm = self.heads_backward(dq, rope, w.qk_norm[..., :HD], q_saved)
        dk, more = self.heads_backward(dk, rope, w.qk_norm[..., HD:], k_saved)
        dqkv = torch.cat([dq, dk, dv.flatten(3).flatten(1, 2)], -1).to(self.dtype)
        for grad, d_out, into in (
                (grads.qkv, dqkv, n1), (grads.qkv[:, HD:], dkv, m),
                (grads.out, dz, a_rows), (grads.up, du, n2), (grads.down, g, F.gelu(u))):
            grad += product(d_out.mT.to(self.dtype), into.to(self.dtype))  # (B11)
        grads.qk_norm[..., :HD] += dq_norm
        grads.qk_norm[..., HD:] += dk_norm + more
        dx = dz + norm_backward(product(dqkv, w.qkv), n1, r1)  # (B10)
        return dx.unflatten(1, (self.C, self.B))

    def reverse(self, attention, w, chunk, saved, rope):
        """(B1) to (B7). chunk: dL/dy, n1(y) and its r, u, n2(z) and its r, (A, C, B, .) each.
        Returns g, du, dz, the gradient of (Wk, Wv) n1(y), and that of the k-norm's weight."""
        HD = self.H * self.D
        w_kv, k_norm = w.qkv[:, HD:], w.qk_norm[..., HD:]
        dk_norm, done = 0, []
        positions = list(zip(*(v.unbind(1) for v in chunk)))
        for i in reversed(range(self.C)):
            dy, m, rm, u, n2, r2 = positions[i]
            dk, dv = attention.kv_grad(i)                               # (B5) to (B7)
            here = [table[:, i:i + 1] for table in rope]
            parts = saved and [v.unflatten(1, (self.C, self.B))[:, i] for v in saved]
            dk, more = self.heads_backward(dk[:, None], here, k_norm, parts)
            dkv = torch.cat([dk, dv.flatten(2)], -1).to(self.dtype)     # (A, B, 2 G D)
            g = dy + norm_backward(product(dkv, w_kv), m, rm)           # (B1)
            du = torch.ops.aten.gelu_backward(product(g, w.down), u)    # (B2)
            dz = g + norm_backward(product(du, w.up), n2, r2)           # (B3)
            attention.write_query_grad(i, product(dz, w.out))           # (B4)
            done.append((g, du, dz, dkv))
            dk_norm = dk_norm + more
        return [torch.stack(v[::-1], 1).flatten(1, 2) for v in zip(*done)], dk_norm

    def outside_attention_backward(self, qkv, a, lse, da, dq, step):
        """Of outside_attention: adds to dq, and to dk and dv of earlier chunks; returns the
        temporary pairs' gradients (A, B, G, C, D)."""
        s, lo, hi = step
        pairs = self.k, self.v, self.dk, self.dv
        for l in range(lo, hi):
            start, end = (s - l) * self.C, (s - l + 1) * self.C
            if start > 0:
                k, v, dk, dv = (u[l, :, :, :start] for u in pairs)
                q, a_l, da_l = (u[l - lo].to(self.dtype) for u in (qkv[0], a, da))
                mask = self.pos[start:end], self.pos[:start], self.slopes
                parts = kernels.attend_backward(q, k, v, a_l, lse[l - lo], da_l, *mask)
                for total, part in zip((dq[l - lo], dk, dv), parts):
                    total += part
        q, k, v = self.temporary(*qkv)
        p = torch.exp((q * k).sum(-1, keepdim=True) * self.scale - lse[..., None])
        ds = p * (da * (v - a)).sum(-1, keepdim=True) * self.scale  # (B5)
        dq += ds * k  # (B8)
        return [u.unflatten(2, (self.G, -1)).sum(3) for u in (ds * q, p * da)]  # (B9)


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
            and kernels.runs_triton(x.device, dtype))  # else attend reads positions on the host


def replay(run, function, *inputs):
    """function(*inputs). On CUDA, a second call with the same shapes is recorded as a graph:
    a position is some twenty small kernels, which take longer to launch than to run."""
    if not (run.cfg.cuda_graphs and recordable(inputs[0], run.dtype)):
        return function(*inputs)
    key = (function.__name__, inputs[0].device, run.dtype, str(run.cfg),
           *((u.shape, u.dtype) for u in inputs))
    graph = key in GRAPHS and (GRAPHS.pop(key) or Graph(run, function, inputs))
    GRAPHS[key] = graph
    if len(GRAPHS) > 8:
        del GRAPHS[next(iter(GRAPHS))]
    return (graph or function)(*inputs)
