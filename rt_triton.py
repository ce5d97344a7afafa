"""
Pieces of rt_wavefront.py in Triton, for CUDA and ROCm. TRITON_INTERPRET=1 runs them on CPU tensors,
slowly, for tests. Read rt_wavefront.py first. Its letters are used here, with the exceptions below.

Between the products of a position, rt_wavefront.py has many small operations. Each function here
computes one piece of them with one kernel. The function has the name and the arguments of a
function in rt_wavefront.py, whose docstring says what both compute. There is one program for each
row of the results.

The loops over positions give slices of a chunk's tensors, which are not contiguous. The kernels
read and write them where they lie:

    add_and_norm, add_norm_backward   x, d, n and r are one position of (A, K, B, .). The B rows of
                                      a layer are contiguous, and x_a is the stride of x over A.
    read_pairs                        q, out and lse are one position of (Z, Q, K, .). k and v are
                                      the first i keys of (Z, K, D). bias is the first i numbers of
                                      row i of each head in (H or 1, K, K).
    add_pair_grad                     q and da are the last `rows` rows of (Z, K Q, D), and delta is
                                      the last `rows` numbers of (Z, 1, K Q). v is one key of
                                      (Z, K, D). p is the last `rows` numbers of one key in
                                      (Z, K, K Q).
    store_da_delta                    da_out and a are Q rows of (Z, K Q, D), and delta_out is Q
                                      numbers of (Z, 1, K Q).

All other arguments are contiguous.

These letters have another meaning than in rt_wavefront.py, or are new. c is a channel of C and no
chunk. d is a channel of D, but d_ptr points to a gradient. l is the sum of an online softmax and no
layer. z is a key head. x_a and x_z are the strides of x over A and Z. In add_norm_backward_kernel,
a and b are the numbers of a layer and of a sequence.
"""
import torch
import triton
import triton.language as tl

from kernels_triton import narrow

ROWS = tl.constexpr(32)  # A program reads at most this many keys or queries at once.
# One variant of a kernel serves all values of these arguments, as kernels_triton.py explains.
COUNTS = dict(do_not_specialize=["i", "K", "Q", "B", "HEADS", "rows"],
              do_not_specialize_on_alignment=["bias_ptr", "lse_ptr", "delta_ptr", "p_ptr", "r_ptr"])


@triton.jit
def load(ptr, at, valid):
    """Return the values at ptr + at in float32, and 0 where valid is false."""
    return tl.load(ptr + at, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def store(ptr, at, x, valid):
    """Write x to ptr + at in the dtype of ptr, where valid is true."""
    tl.store(ptr + at, narrow(x, ptr.dtype.element_ty), mask=valid)


def launch(kernel, programs, *arguments, width):
    """Run `programs` programs of a kernel, each on rows of this width, C or D. The kernel takes the
    width as its last argument before BLOCK. BLOCK is the next power of two."""
    with torch.cuda.device_of(arguments[0]):  # Triton takes the current device
        kernel[programs,](*arguments, width, BLOCK=triton.next_power_of_2(width))


@triton.jit(**COUNTS)
def add_and_norm_kernel(x_ptr, update_ptr, sum_ptr, n_ptr, x_a, B, eps, C, BLOCK: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = load(x_ptr, row // B * x_a + row % B * C + c, c < C)
    # The sum is rounded before it is normed, as in rt_wavefront.py.
    x = narrow(x + load(update_ptr, row * C + c, c < C), sum_ptr.dtype.element_ty)
    store(sum_ptr, row * C + c, x, c < C)
    x = x.to(tl.float32)
    store(n_ptr, row * C + c, x * tl.rsqrt(tl.sum(x * x) / C + eps), c < C)


def add_and_norm(x, update, eps):
    (A, B, C), n = x.shape, torch.empty_like(update)
    total = torch.empty_like(n, dtype=torch.promote_types(x.dtype, n.dtype))
    launch(add_and_norm_kernel, A * B, x, update, total, n, x.stride(0), B, eps, width=C)
    return total, n


@triton.jit(**COUNTS)
def add_norm_backward_kernel(d_ptr, dn_ptr, n_ptr, r_ptr, sum_ptr, low_ptr, d_a, n_a, r_a, B, C,
                             BLOCK: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    a, b = row // B, row % B
    dn, n = load(dn_ptr, row * C + c, c < C), load(n_ptr, a * n_a + b * C + c, c < C)
    dx = tl.load(r_ptr + a * r_a + b) * (dn - n * (tl.sum(dn * n) / C))
    total = load(d_ptr, a * d_a + b * C + c, c < C) + dx
    store(sum_ptr, row * C + c, total, c < C)
    store(low_ptr, row * C + c, total, c < C)


def add_norm_backward(d, dn, n, r):
    (A, B, C), low = d.shape, torch.empty_like(dn)
    total = torch.empty_like(low, dtype=n.dtype)
    launch(add_norm_backward_kernel, A * B, d, dn, n, r, total, low,
           *(x.stride(0) for x in (d, n, r)), B, width=C)
    return total, low


@triton.jit(**COUNTS)
def read_pairs_kernel(q_ptr, k_ptr, v_ptr, bias_ptr, lse_ptr, out_ptr, a_ptr, i, K, Q, HEADS, D,
                      BLOCK: tl.constexpr):
    """This is the online softmax that kernels_triton.py explains. It starts with the pair of score
    lse and value out, so that m = lse, l = 1 and acc = out. HEADS is H, or 1 if the bias is the
    same for all heads. q is already divided by sqrt(D)."""
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    q, acc = load(q_ptr, row * K * D + d, d < D), load(out_ptr, row * K * D + d, d < D)
    m, l = tl.load(lse_ptr + row * K), tl.full((), 1.0, tl.float32)
    for start in range(0, i, ROWS):
        j = start + tl.arange(0, ROWS)
        at, valid = (row // Q * K + j[:, None]) * D + d, (j < i)[:, None] & (d < D)
        k, v = load(k_ptr, at, valid), load(v_ptr, at, valid)
        # A row counts sequences and layers, and then the H heads. So row % H is the head.
        scores = tl.sum(q * k, 1) + load(bias_ptr, row % HEADS * K * K + j, j < i)
        scores = tl.where(j < i, scores, float("-inf"))
        highest = tl.maximum(m, tl.max(scores))
        alpha, p = tl.exp(m - highest), tl.exp(scores - highest)
        l, acc, m = alpha * l + tl.sum(p), alpha * acc + tl.sum(p[:, None] * v, 0), highest
    store(a_ptr, row * D + d, acc / l, d < D)


def read_pairs(q, k, v, bias, lse, out):
    (Z, Q, D), a = q.shape, torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch(read_pairs_kernel, Z * Q, q, k, v, bias, lse, out, a, k.size(1), k.stride(0) // D, Q,
           len(bias), width=D)
    return a


@triton.jit(**COUNTS)
def add_pair_grad_kernel(dk_ptr, dv_ptr, q_ptr, v_ptr, p_ptr, da_ptr, delta_ptr, v_z, p_z, delta_z,
                         rows, D, BLOCK: tl.constexpr):
    z, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    dk, dv = load(dk_ptr, z * D + d, d < D), load(dv_ptr, z * D + d, d < D)
    v = load(v_ptr, z * v_z + d, d < D)
    for start in range(0, rows, ROWS):
        i = start + tl.arange(0, ROWS)
        at, valid = (z * delta_z + i[:, None]) * D + d, (i < rows)[:, None] & (d < D)
        q, da = load(q_ptr, at, valid), load(da_ptr, at, valid)
        p = load(p_ptr, z * p_z + i, i < rows)
        ds = p * (tl.sum(da * v, 1) - load(delta_ptr, z * delta_z + i, i < rows))
        dk += tl.sum(ds[:, None] * q, 0)
        dv += tl.sum(p[:, None] * da, 0)
    store(dk_ptr, z * D + d, dk, d < D)
    store(dv_ptr, z * D + d, dv, d < D)


def add_pair_grad(dk, dv, q, v, p, da, delta):
    Z, rows, D = q.shape
    launch(add_pair_grad_kernel, Z, dk, dv, q, v, p, da, delta,
           *(x.stride(0) for x in (v, p, delta)), rows, width=D)


@triton.jit(**COUNTS)
def store_da_delta_kernel(da_out_ptr, delta_ptr, da_ptr, a_ptr, delta_z, Q, D,
                          BLOCK: tl.constexpr):
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at = row // Q * delta_z + row % Q
    da = load(da_ptr, row * D + d, d < D)
    store(da_out_ptr, at * D + d, da, d < D)
    tl.store(delta_ptr + at, tl.sum(da * load(a_ptr, at * D + d, d < D)))


def store_da_delta(da_out, delta_out, da, a):
    Z, Q, D = a.shape
    launch(store_da_delta_kernel, Z * Q, da_out, delta_out, da, a, delta_out.stride(0), Q,
           width=D)
