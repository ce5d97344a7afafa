"""
RMSNorm and RoPE with backward passes of their own: fewer passes over memory than autograd makes of
the same formulas, which counts on a CPU (a training step of the plain Transformer takes 0.85 of the
time). Calls without gradients, such as a decode step, take the plain formulas: for one token the
overhead of an autograd.Function is more than the work.
"""
import torch
import torch.nn.functional as F


def rms_norm(x, weight, eps):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""
    if torch.is_grad_enabled() and x.device.type == "cpu" and x.dtype == weight.dtype:
        return NormForTraining.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)     # autocast: x may be bfloat16


class NormForTraining(torch.autograd.Function):
    """On a CPU, where torch's own makes three times as many passes over x, above all backward."""

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
        return Rotation.apply(x, cos, sin)
    return (x * cos + x.roll(x.size(-1) // 2, -1) * sin).to(x.dtype)


class Rotation(torch.autograd.Function):
    """apply_rope in 0.7 of its passes over x for training; the backward pass rotates by minus the
    angle."""

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
        return Rotation.rotate(x, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        cos, sin = ctx.saved_tensors
        return Rotation.rotate(g, cos, -sin), None, None
