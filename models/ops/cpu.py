"""Forms for the CPU: fewer passes over memory, and weights packed once for oneDNN."""

from pathlib import Path

import torch

from mmserve.models.ops.reference import ACTIVATIONS

# Activations that oneDNN applies before it rounds the product: (its name, its algorithm).
_FUSED: dict[str | None, tuple[str, str]] = {
    "gelu": ("gelu", "none"),
    "gelu_pytorch_tanh": ("gelu", "tanh"),
}

# What Linux calls the instructions that multiply bf16: on Intel and AMD, and on ARM.
BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")


def bf16_instructions() -> str | None:
    """The flag of the instructions with which this CPU multiplies bf16; None if it shows none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    found = {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split()}
    return next((flag for flag in BF16_FLAGS if flag in found), None)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As the reference, bit for bit, in fewer new tensors."""
    wide = x.to(torch.float32, copy=True)
    scale = (wide * wide).mean(-1, keepdim=True).add_(eps).rsqrt_()
    return wide.mul_(scale).to(x.dtype).mul_(weight)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual.add_(x)
    return rms_norm(total, weight, eps), total


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As the reference, the last sum rounded once instead of twice."""
    wide = x.to(cos.dtype)
    rolled = wide.roll(x.shape[-1] // 2, -1)
    if wide is x:
        return torch.addcmul(x * cos, rolled, sin)
    return wide.mul_(cos).add_(rolled.mul_(sin)).to(x.dtype)


def rotate_heads(
    heads: torch.Tensor,
    count: int,
    weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> None:
    part = heads[:, :count]
    part.copy_(rope(part if weight is None else rms_norm(part, weight, eps), cos, sin))


class OneDNNLinear:
    """Linear over weights in oneDNN's blocked layout: reads memory about three times as fast at batch 1.

    The operators are private to torch, so ``unusable`` tries them before anybody relies on them.
    """

    name = "onednn"

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight, 1)

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, act: str | None = None
    ) -> torch.Tensor:
        fused, algorithm = _FUSED.get(act, ("none", ""))
        y = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, fused, [], algorithm)
        return y if act is None or act in _FUSED else ACTIVATIONS[act](y)

    def unusable(self, dtype: torch.dtype) -> str | None:
        """Why this form cannot run here in ``dtype``; None when it can."""
        if dtype not in (torch.bfloat16, torch.float32):
            return f"it does not pack {dtype}"
        generator = torch.Generator().manual_seed(0)
        weight, x = (torch.randn(32, 64, generator=generator).to(dtype) for _ in range(2))
        try:
            found = self(x, self.pack(weight), weight[:, 0].contiguous())
        except (AttributeError, RuntimeError) as error:
            return f"this torch refuses it: {str(error).splitlines()[0]}"
        wanted = torch.nn.functional.linear(x, weight, weight[:, 0])
        close = torch.allclose(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)
        return None if close else "its result differs from the plain form"
