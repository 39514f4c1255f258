"""Muon for the hidden matrices and AdamW for the rest, over float32 masters of a bf16 net.

Muon (K. Jordan, 2024): momentum, orthogonalised by a quintic Newton-Schulz iteration. Matrices of like
shape are orthogonalised as one batch, and wide fused ones by part (q, k and v; the four patches that a
merger reads), which is both the better direction and the cheaper product.
"""

from collections import defaultdict

import torch
from torch import Tensor, nn

SETTLE_STEPS = 120
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(x: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrices, roughly (singular values 0.7 to 1.2), of [N, A, B], A <= B."""
    a, b, c = COEFFICIENTS
    x = x.bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = a * x + torch.baddbmm(gram, gram, gram, beta=b, alpha=c) @ x
    return x


def parts(name: str, matrix: Tensor) -> list[Tensor]:
    """Views of ``matrix`` that are orthogonalised each on its own."""
    matrix = matrix.flatten(1)
    if ".qkv." in name:
        return list(matrix.chunk(3, dim=0))
    if "merger" in name and matrix.shape[0] == matrix.shape[1]:
        return list(matrix.chunk(4, dim=1))
    return [matrix]


def is_hidden(name: str, parameter: Tensor) -> bool:
    """Whether Muon steps it. The patch embedding belongs here: its inputs share one strong direction, the
    mean brightness, which under AdamW drowns the edges that shapes are made of."""
    return (
        parameter.ndim == 2 and "embed" not in name and "head" not in name
    ) or "patch_embed.proj.weight" in name


def is_trunk(name: str) -> bool:
    """Whether the parameter is of the vision transformer's trunk, which the first stage trains."""
    return name.startswith("model.visual.") and "deepstack" not in name


class Optimizer:
    """Steps a bf16 ``net`` through its float32 ``masters``, and keeps their moving average ``average``."""

    def __init__(
        self, net: nn.Module, muon_rate: float = 0.02, adam_rate: float = 2e-3, decay: float = 0.01
    ) -> None:
        self.net = net
        self.names = [name for name, _ in net.named_parameters()]
        self.live: list[Tensor] = [p for _, p in net.named_parameters()]
        self.masters = [p.detach().float().clone() for p in self.live]
        self.average = [m.clone() for m in self.masters]
        self.momentum = {n: torch.zeros_like(m) for n, m in self._named() if is_hidden(n, m)}
        self.muon_rate, self.adam_rate, self.decay = muon_rate, adam_rate, decay
        rest = [m for n, m in self._named() if not is_hidden(n, m)]
        self.adam = torch.optim.AdamW(rest, lr=adam_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        self.steps = 0
        self.trunk_from = 0  # the step from which the trunk learns on
        self.average_from = 0  # the step at which the moving average began anew

    def _named(self) -> list[tuple[str, Tensor]]:
        return list(zip(self.names, self.masters, strict=True))

    def _learns(self, name: str) -> bool:
        return self.steps >= self.trunk_from or not is_trunk(name)

    @torch.no_grad()
    def step(self, scale: float) -> float:
        """One update with both rates times ``scale``; returns the gradient's norm."""
        grads = [p.grad.float() if p.grad is not None else torch.zeros_like(p).float() for p in self.live]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads))).item()
        if norm == norm:  # a batch with a NaN gradient is dropped
            self._adam(grads, scale, min(1.0, 1.0 / (norm + 1e-6)))
            self._muon(grads, scale)
            self.steps += 1
            counted = self.steps - self.average_from
            keep = min(0.998, (1 + counted) / (20 + counted))
            torch._foreach_lerp_(self.average, self.masters, 1 - keep)
            torch._foreach_copy_(self.live, self.masters)
        for parameter in self.live:
            parameter.grad = None
        return norm

    def _adam(self, grads: list[Tensor], scale: float, clip: float) -> None:
        for (name, master), grad in zip(self._named(), grads, strict=True):
            if not is_hidden(name, master):
                master.grad = grad * clip if self._learns(name) else None
        self.adam.param_groups[0]["lr"] = self.adam_rate * scale
        self.adam.step()

    def _muon(self, grads: list[Tensor], scale: float) -> None:
        groups: dict[tuple[torch.Size, bool], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for (name, master), grad in zip(self._named(), grads, strict=True):
            if not is_hidden(name, master) or not self._learns(name):
                continue
            momentum = self.momentum[name].lerp_(grad, 0.05)
            update = grad.lerp(momentum, 0.95)
            for piece, part in zip(parts(name, update), parts(name, master), strict=True):
                tall = piece.shape[0] > piece.shape[1]
                piece, part = (piece.T, part.T) if tall else (piece, part)
                groups[piece.shape, tall].append((piece, part))
        for (shape, tall), pieces in groups.items():
            spread = (shape[1] / shape[0]) ** 0.5 if tall else 1.0
            direction = orthogonalise(torch.stack([piece for piece, _ in pieces])).float()
            for (_, part), d in zip(pieces, direction, strict=True):
                rate = self.muon_rate * scale
                part.mul_(1 - rate * self.decay).sub_(d, alpha=rate * spread)

    def state(self) -> dict:
        return {
            "masters": dict(self._named()),
            "average": dict(zip(self.names, self.average, strict=True)),
            "momentum": self.momentum,
            "adam": self.adam.state_dict(),
            "steps": self.steps,
            "trunk_from": self.trunk_from,
            "average_from": self.average_from,
        }

    @torch.no_grad()
    def adopt(self, weights: dict[str, Tensor], settle: int) -> None:
        """Start the trunk from another training's ``weights``, and keep it still for ``settle`` steps, in
        which the language model learns to listen; its gradients mean nothing before."""
        self.trunk_from = self.steps + settle
        self.average_from = self.steps
        for name, master, average in zip(self.names, self.masters, self.average, strict=True):
            if name in weights:
                master.copy_(weights[name])
                average.copy_(weights[name])
                if name in self.momentum:
                    self.momentum[name].zero_()
        torch._foreach_copy_(self.live, self.masters)

    @torch.no_grad()
    def load(self, state: dict) -> None:
        for name, master, average in zip(self.names, self.masters, self.average, strict=True):
            if name in state["masters"] and state["masters"][name].shape == master.shape:
                master.copy_(state["masters"][name])
                average.copy_(state["average"][name])
        for name, momentum in self.momentum.items():
            momentum.copy_(state["momentum"][name])
        self.steps = state["steps"]
        self.trunk_from = state.get("trunk_from", 0)
        self.average_from = state.get("average_from", 0)
        shapes = {name: master.shape for name, master in self._named()}
        if shapes == {name: master.shape for name, master in state["masters"].items()}:
            self.adam.load_state_dict(state["adam"])
        else:  # new heads must learn before they may teach
            self.trunk_from = self.steps + SETTLE_STEPS
        torch._foreach_copy_(self.live, self.masters)
