"""FlashInfer, a library of attention kernels for NVIDIA GPUs: where it runs, and what all its users need.

It is an extra, imported when it is first asked for. Its kernels are compiled when they are first planned,
which takes minutes, once for a machine and a head size, unless ``flashinfer-jit-cache`` brings them.

Y. Ye et al., "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving",
arXiv:2501.01005.
"""

import importlib
import importlib.util
import os
import shutil
from collections import OrderedDict
from functools import cache
from itertools import accumulate
from typing import Any

import torch

OLDEST = (8, 0)  # compute capability: bf16 in the matrix units
HEAD_DIMS = (64, 128, 256)  # its kernels read shared memory in pieces of 64 elements
DTYPES = (torch.bfloat16, torch.float16)
FLOAT_WORKSPACE = 128 << 20  # bytes for partial results of split contexts, as the library recommends
INT_WORKSPACE = 2 << 20  # bytes for one plan; the library's own 8 MiB would be taken for each size of batch


def unusable(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why its attention cannot run on ``device`` for heads of ``head_dim``; None when it can."""
    if device.type != "cuda":
        return "it runs on NVIDIA GPUs"
    if dtype not in DTYPES:
        return f"it has no kernels for {str(dtype).removeprefix('torch.')}"
    if head_dim not in HEAD_DIMS:
        return f"it has kernels for heads of {', '.join(map(str, HEAD_DIMS))}, not of {head_dim}"
    return _missing() or _too_old(device)


@cache
def _missing() -> str | None:
    try:
        library()
    except ImportError as error:
        return f"flashinfer-python cannot be imported ({error}); pip install 'mmserve[gpu]' brings it"
    if importlib.util.find_spec("flashinfer_jit_cache"):
        return None
    lacking = [name for name, found in (("nvcc", _nvcc()), ("ninja", shutil.which("ninja"))) if not found]
    if lacking:
        return f"it compiles its kernels when they are first used, and there is no {' and no '.join(lacking)}"
    return None


def _nvcc() -> bool:
    homes = (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH"))
    folders = [os.path.join(home, "bin") for home in (*homes, "/usr/local/cuda") if home]
    return any(shutil.which("nvcc", path=path) for path in (None, os.pathsep.join(folders)))


def _too_old(device: torch.device) -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    found = torch.cuda.get_device_capability(device)
    if found < OLDEST:
        return f"the GPU's compute capability is {found[0]}.{found[1]}, below {OLDEST[0]}.{OLDEST[1]}"
    return None


def library() -> Any:
    """The package; ImportError where it is not installed."""
    return importlib.import_module("flashinfer")


def workspace(device: torch.device) -> torch.Tensor:
    """Memory for partial results, for all that one stream runs one after another. Zeros, as it should be."""
    return torch.zeros(FLOAT_WORKSPACE, dtype=torch.uint8, device=device)


class Planner:
    """A wrapper of the library, with ``floats`` to share and memory of its own for plans.

    The library writes a plan into pinned memory, which the device copies when its stream comes to it: before
    the next plan is written, ``plan`` waits until that has happened. (What kernels read of a plan is
    rewritten in the order of the stream.)
    """

    def __init__(self, wrapper: Any, floats: torch.Tensor, levels: int | None = None) -> None:
        """``levels``: of a wrapper that is made of so many."""
        ints = [
            torch.empty(INT_WORKSPACE, dtype=torch.uint8, device=floats.device) for _ in range(levels or 1)
        ]
        wrapper.reset_workspace_buffer(floats, ints if levels else ints[0])
        self._wrapper = wrapper
        self._copied = Copied(floats.device)

    def plan(self, *args: Any, **options: Any) -> None:
        self._copied.wait()
        self._wrapper.plan(*args, **options)
        self._copied.mark()

    def run(self, *args: Any, **options: Any) -> Any:
        return self._wrapper.run(*args, **options)


class Copied:
    """The moment at which the device has copied what it was told to copy from a piece of pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._marked = False

    def mark(self) -> None:
        """The copies have just been given to the current stream."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))
            self._marked = True

    def wait(self) -> None:
        """Block the host until the copies marked last are done."""
        if self._event is not None and self._marked:
            self._event.synchronize()


class RaggedAttention:
    """Attention within the segments of a packed batch, both ways: for vision transformers.

    Plans of the last few ways to cut a batch are kept: every layer cuts it alike, or in one of two ways.
    A plan is made on the host, so a call may be part of no CUDA graph. For one stream: calls share memory for
    partial results.
    """

    KEPT = 4

    def __init__(self, device: torch.device, package: Any = None) -> None:
        self._package = package or library()
        self._floats = workspace(device)
        self._plans: OrderedDict[tuple[Any, ...], Planner] = OrderedDict()

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...]
    ) -> torch.Tensor:
        """softmax(q k^T / sqrt(dim)) v within each of the segments, of ``lengths`` rows, one after another;
        all [T, heads, dim] with the last two dimensions dense, T their sum."""
        result: torch.Tensor = self._planned(lengths, q).run(q, k, v)
        return result

    def _planned(self, lengths: tuple[int, ...], q: torch.Tensor) -> Planner:
        key = (lengths, q.shape[1:], q.dtype)
        if key not in self._plans:
            self._plans[key] = self._plan(lengths, q)
        self._plans.move_to_end(key)
        return self._plans[key]

    def _plan(self, lengths: tuple[int, ...], q: torch.Tensor) -> Planner:
        planner = self._spare()
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        heads, dim = q.shape[1:]
        planner.plan(ends, ends, heads, heads, dim, causal=False, q_data_type=q.dtype, kv_data_type=q.dtype)
        return planner

    def _spare(self) -> Planner:
        """A new planner, or the one that was used least lately."""
        if len(self._plans) < self.KEPT:
            wrapper = self._package.BatchPrefillWithRaggedKVCacheWrapper(self._floats, "NHD")
            return Planner(wrapper, self._floats)
        return self._plans.popitem(last=False)[1]
