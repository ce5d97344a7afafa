"""
RMSNorm and RoPE with hand-written backward passes. On a CPU they make fewer passes over memory than
autograd makes of the same formulas. Calls without gradients, such as a decode step, take the plain
formulas: for one token the overhead of an autograd.Function is more than the work.
"""
import torch
import torch.nn.functional as F


def rms_norm(x, weight, eps):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""
    exact = x.dtype == weight.dtype and x.dtype.itemsize >= 4       # 16 bits are squared in float32
    exact = exact and not torch.is_autocast_enabled("cpu")          # it would round the squares
    if torch.is_grad_enabled() and x.device.type == "cpu" and exact:
        return RMSNormFunction.apply(x, weight, eps)
    # autocast: x may be bfloat16, and some versions of torch then give float32
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps).to(x.dtype)


class RMSNormFunction(torch.autograd.Function):
    """On a CPU torch's own makes about three times as many passes over x, most of them backward."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        r = (torch.linalg.vecdot(x, x) / x.size(-1) + eps).rsqrt_()[..., None]      # (..., 1)
        n = x * r
        ctx.save_for_backward(n, r, weight)
        return n * weight

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        n, r, weight = ctx.saved_tensors
        dweight, dn = (g * n).flatten(0, -2).sum(0), g * weight
        mean = torch.linalg.vecdot(dn, n)[..., None] / n.size(-1)
        return dn.addcmul_(n, mean, value=-1).mul_(r), dweight, None    # dx = r (dn - n mean(dn n))


def apply_rope(x, cos, sin):
    """Rotate the pairs (x_i, x_{i + D/2}) of x (..., T, D); cos, sin (..., T, D) from
    model_gpt.rope_tables, the products in their float32."""
    if torch.is_grad_enabled():
        return RoPEFunction.apply(x, cos, sin)
    return (x * cos + x.roll(x.size(-1) // 2, -1) * sin).to(x.dtype)


class RoPEFunction(torch.autograd.Function):
    """apply_rope in fewer passes over x. The backward pass rotates by minus the angle."""

    @staticmethod
    def rotate(x, cos, sin):
        half = x.size(-1) // 2
        y = x * cos
        y[..., :half].addcmul_(x[..., half:], sin[..., :half])
        y[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return y.to(x.dtype)

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return RoPEFunction.rotate(x, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        cos, sin = ctx.saved_tensors
        return RoPEFunction.rotate(g, cos, -sin), None, None
