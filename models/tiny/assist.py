"""A second process of the trainer: one core each beats two threads on matrices this small.

The net's live weights lie in shared memory. Each step has two gates: at the first every process has
its gradients, at the second the trainer has stepped the weights. Between the second gate and the next
first one a helper only reads the weights and only writes its own gradients.
"""

import pickle
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

GATE_SECONDS = 1200.0  # longer than any compilation: past it a helper has died, and waiting would hang


class Trainee(Protocol):
    """What is trained: a module that compiles itself and knows the loss of a batch."""

    def speed_up(self) -> None: ...
    def batch_loss(self, batch: Any) -> Tensor: ...
    def share_memory(self) -> Any: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...


class Assistants:
    """``count`` helpers that compute gradients of batches from ``queue`` on the shared weights of ``net``."""

    def __init__(self, net: Trainee, queue: mp.Queue, count: int) -> None:
        self.net = net.share_memory()
        self.count = count
        context = mp.get_context("spawn")
        self.gate = context.Barrier(count + 1, timeout=GATE_SECONDS)
        self.gradients: list[list[Tensor]] = [
            [torch.zeros_like(p).share_memory_() for p in net.parameters()] for _ in range(count)
        ]
        self.processes = [
            context.Process(target=help_out, args=(net, grads, queue, self.gate), daemon=True)
            for grads in self.gradients
        ]
        for process in self.processes:
            process.start()

    @torch.no_grad()
    def gather(self) -> None:
        """Wait for the helpers' gradients and average them into those of ``net``."""
        self.gate.wait()
        for i, parameter in enumerate(self.net.parameters()):
            parts = [grads[i] for grads in self.gradients]
            if parameter.grad is not None:
                parts.append(parameter.grad)
            parameter.grad = torch.stack([p.float() for p in parts]).mean(0).to(parameter.dtype)

    def release(self) -> None:
        """The weights are stepped: the helpers may read them."""
        self.gate.wait()

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()


def help_out(net: Trainee, gradients: list[Tensor], queue: mp.Queue, gate: Any) -> None:
    """A helper's life."""
    torch.set_num_threads(1)
    net.speed_up()
    while True:
        net.batch_loss(pickle.loads(queue.get())).backward()
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            if parameter.grad is None:
                gradient.zero_()
            else:
                gradient.copy_(parameter.grad)
            parameter.grad = None
        gate.wait()
        gate.wait()
