"""Linear layers in int8, in plain torch: the oracle of the kernels, and what runs where there is no compiler.

Weights [out, in] are quantised once, each output channel n on its own; activations in every call, each row m
and each group g of GROUP inputs on its own. With q(v) = round(v * (127 / max|v|)), ties to even, and the
scale s = max|v| / 127,

    y[m, n] = act(w_s[n] * sum_g x_s[m, g] * (x_q[m, g] . w_q[n, g]) + b[n])

The dot products are of integers, hence exact; all else is float32, rounded once to the dtype of ``x``. A
row's result depends on that row alone, however many stand beside it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mmserve.models.ops.reference import ACTIVATIONS

LEVELS = 127
GROUP = 256  # an outlier among the inputs costs its own group precision, not the whole row; a multiple of 16
EXACT = 1024  # products of two codes whose sum float32 holds exactly: 1024 * 127 * 127 < 2 ** 24


def quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes int8 like ``values``, scales float32 [..., 1]) over the last axis.

    Codes are 0 where float32 does not hold 127 / max|v|: for zeros, whose scale is 0, and in a row with an
    infinity or a NaN, whose scale is NaN, so that its results are too.
    """
    wide = values.float()
    most = wide.abs().amax(-1, keepdim=True)
    levels = torch.full_like(most, LEVELS)  # a number over a tensor would be its reciprocal, rounded twice
    inverse = levels / most
    usable = most.isfinite() & inverse.isfinite()
    codes = torch.where(usable, wide * inverse, 0.0).round().to(torch.int8)
    scales = torch.where(usable, most / levels, torch.where(most.isfinite(), 0.0, torch.nan))
    return codes, scales


@dataclass(frozen=True)
class QuantizedRows:
    """A weight as it is: ``codes`` int8 [out, in], ``scales`` float32 [out, 1]."""

    codes: torch.Tensor
    scales: torch.Tensor


class PlainInt8Linear:
    """The formula above, group by group."""

    name = "int8 (plain)"

    def pack(self, weight: torch.Tensor) -> QuantizedRows:
        return QuantizedRows(*quantize(weight))

    def __call__(
        self, x: torch.Tensor, weight: QuantizedRows, bias: torch.Tensor | None, act: str | None = None
    ) -> torch.Tensor:
        total = torch.zeros(*x.shape[:-1], len(weight.codes), dtype=torch.float32, device=x.device)
        for part, codes in zip(x.split(GROUP, -1), weight.codes.split(GROUP, -1), strict=True):
            found, scales = quantize(part)
            total += F.linear(found.float(), codes.float()) * scales
        total *= weight.scales[:, 0]
        if bias is not None:
            total += bias.float()
        return (total if act is None else ACTIVATIONS[act](total)).to(x.dtype)

    def rows(self, weight: QuantizedRows, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The rows ``ids`` of the weight in ``dtype``, as their codes tell them."""
        return (weight.codes[ids].float() * weight.scales[ids]).to(dtype)


assert GROUP <= EXACT
