"""The plain torch form of every operation, with the rounding of the checkpoints' own code."""

from collections.abc import Callable

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``weight * (x / sqrt(mean(x^2) + eps))`` over the last axis, in float32 up to the product."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm of the sum, the sum). ``residual`` may be overwritten; use the returned one."""
    total = residual + x
    return rms_norm(total, weight, eps), total


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of [..., 2 * width], gate first."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [T, heads, dim] by tables [T, 1, dim] in which the first half of ``sin`` is negated.

    Computed in the tables' dtype, returned in that of ``x``.
    """
    wide = x.to(cos.dtype)
    return (wide * cos + wide.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


def rotate_heads(
    heads: torch.Tensor,
    count: int,
    weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> None:
    """Rotate the first ``count`` of heads [T, n, dim] in place, normed before by ``weight`` [count, dim]."""
    part = heads[:, :count]
    part.copy_(rope(part if weight is None else rms_norm(part, weight, eps), cos, sin))


def rotate_store(
    heads: torch.Tensor,
    split: tuple[int, int, int],
    weight: torch.Tensor | None,
    eps: float,
    tables: tuple[torch.Tensor, torch.Tensor],
    pool: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
) -> None:
    """``rotate_heads`` of the queries and keys of heads [T, sum(split), dim], ``split`` into queries, keys
    and values; then keys and values of row t become slot ``slots[t]`` of ``pool``, two of [kv_heads, slots,
    dim].

    ``slots`` int [T] is negative for rows that are not kept.
    """
    rotate_heads(heads, split[0] + split[1], weight, eps, *tables)
    _, k, v = heads.split(split, 1)
    kept = slots >= 0
    for stored, new in zip(pool, (k, v), strict=True):
        stored[:, slots[kept].long()] = new[kept].transpose(0, 1)


def mrope(
    positions: torch.Tensor, frequencies: torch.Tensor, axes: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) [T, 1, dim] of positions int64 [3, T], as ``rope`` takes them: frequency j of [dim / 2]
    turns by the position on ``axes[j]``."""
    return rope_table(positions.index_select(0, axes).T.float() * frequencies, dtype)


def rope_table(angles: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each [T, 1, 2 * width], of angles [T, width]; the first half of sin is negated."""
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]


def scatter_rows(target: torch.Tensor, rows: torch.Tensor, features: torch.Tensor) -> None:
    """Rows ``rows`` int64 [V] of target [T, width] become those of features [V, width]. No row twice;
    features of row -1 go nowhere, so that there may be as many as a graph has room for."""
    there, brought = _brought(target, rows, features)
    target.copy_(torch.where(there, brought, target))


def scatter_add_rows(target: torch.Tensor, rows: torch.Tensor, features: torch.Tensor) -> None:
    """As ``scatter_rows``, but what is there stays and they are added to it."""
    there, brought = _brought(target, rows, features)
    target.copy_(torch.where(there, target + brought, target))


def _brought(
    target: torch.Tensor, rows: torch.Tensor, features: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(whether something comes to it [T, 1], what [T, width]) of each row, in shapes that do not depend on
    ``rows``."""
    source = rows.new_full((target.shape[0] + 1,), -1)
    source[rows] = torch.arange(len(rows), device=rows.device)  # -1 is the last, which is nobody's
    return source[:-1, None] >= 0, features[source[:-1].clamp(min=0)]


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """``weight * (x - mean) / sqrt(variance + eps) + bias`` over the last axis, rounded once."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "quick_gelu": quick_gelu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "silu": F.silu,
}


class PlainLinear:
    """``act(x @ weight.T + bias)`` by torch, weights as they are."""

    name = "plain"

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, act: str | None = None
    ) -> torch.Tensor:
        y = F.linear(x, weight, bias)
        return y if act is None else ACTIVATIONS[act](y)
