"""Where Triton's kernels can run, and how they are compiled where nothing runs them.

The only module of the package that may be imported without Triton: whoever wants a kernel asks ``unusable``
first and then imports the kernel's module. A kernel module imports triton, has kernels (names end in
``_kernel``), launchers over them, and ``EXAMPLES`` that name every kernel.

With ``TRITON_INTERPRET=1``, set before triton is imported, kernels run on CPU tensors by Triton's
interpreter: slow, for tests. It multiplies bf16 wrongly in ``tl.dot``; ``parts.dot`` goes round that.
"""

import importlib
import os
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OLDEST = (8, 0)  # compute capability: bf16 in the matrix units


def unusable(device: torch.device) -> str | None:
    """Why kernels cannot run on tensors of ``device``; None when they can."""
    if device.type == "cpu":
        reason = None if INTERPRETED else "its kernels run on a GPU; on a CPU in Triton's interpreter alone"
    elif device.type != "cuda":
        reason = f"its kernels do not run on {device.type}"
    elif INTERPRETED:
        reason = "TRITON_INTERPRET is set, which has its kernels interpreted on the CPU"
    else:
        reason = _too_old(device)
    return reason or _missing()


@cache
def _missing() -> str | None:
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    return None


def _too_old(device: torch.device) -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    found = torch.cuda.get_device_capability(device)
    if found < OLDEST:
        return f"the GPU's compute capability is {found[0]}.{found[1]}, below {OLDEST[0]}.{OLDEST[1]}"
    return None


@dataclass(frozen=True)
class Example:
    """One way to compile ``kernel``: types of its run-time arguments ("*bf16", "i32", "fp32"), values of its
    constexpr ones, and options of the launch. Arguments that ``aligned`` names count as multiples of 16,
    as a launch finds them to be; all pointers do."""

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...] = ()
    options: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        kinds = dict.fromkeys(kind for kind in self.signature.values() if kind.startswith("*"))
        given = (f"{k}={v}" for k, v in self.constants.items())
        return f"{self.kernel.__name__}[{','.join((*kinds, *given))}]"


def compile_for(example: Example, capability: int) -> Any:
    """``example`` as machine code (``asm["cubin"]``) and ``metadata`` for a GPU of ``capability``, 80 or
    90 or 100. Not in an interpreted process."""
    triton = importlib.import_module("triton")
    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    names = [p.name for p in example.kernel.params]
    types = {name: example.signature.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in example.constants.items()}
    pointers = [name for name, kind in types.items() if kind.startswith("*")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in (*pointers, *example.aligned)}
    source = compiler.ASTSource(example.kernel, types, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=dict(example.options))


def examples() -> Iterator[Example]:
    """Those of all kernel modules of this package."""
    package = importlib.import_module(__name__.rpartition(".")[0])
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        yield from getattr(importlib.import_module(module.name), "EXAMPLES", ())
