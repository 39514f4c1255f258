"""Small batches of pictures over static buffers: one captured forward for each bucket of tokens.

The blocks of a vision transformer are some hundred kernels, which for a small picture take longer to launch
than to run. Large batches keep the device busy by themselves, and run as they are.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable

import torch

from mmserve.core.device import ENCODER, Device, Graph
from mmserve.encoders.packed import Packed
from mmserve.encoders.parts import Parts, Resumable
from mmserve.encoders.segments import Tiles
from mmserve.models.config import VisionConfig
from mmserve.models.ops.triton import runtime as triton

BUCKETS = (64, 128, 192, 256, 384, 512, 768, 1024)  # tokens of a batch
MOST_ITEMS = 32  # of a batch in a graph: each may need a tile more than its rows fill

Deep = Callable[[Packed], Parts[torch.Tensor]]


def choose_graphs(device: torch.device, eager: bool) -> tuple[str, str]:
    """(buckets or none, why): whether forwards of pictures are captured on ``device``."""
    if eager:
        return "none", "enforce_eager is on"
    if device.type == "cpu":
        return "none", "pictures are encoded in parts on a CPU, so that others get their turn"
    reason = triton.unusable(device)
    if reason is not None:
        return "none", f"segments in memory that stays are read by Triton, which cannot run: {reason}"
    return "buckets", f"of up to {BUCKETS[-1]} tokens, whose kernels take longer to launch than to run"


class EncoderGraphs:
    """Nothing but these buffers is read by a replay: patches, rotary tables, and for each bucket the tiles of
    attention. Rows beyond the batch are padding: zeros, in no segment. Features are copied out, for the next
    replay of any bucket overwrites them.

    Replays stand in the encoder's stream, one at a time; graphs share memory among themselves, with no step.
    """

    def __init__(self, deep: Deep, config: VisionConfig, device: Device, dtype: torch.dtype) -> None:
        self.deep = deep
        self.device = device
        self.patches = config.merge_size**2
        self.sizes = [tokens * self.patches for tokens in BUCKETS]
        self.window = _window_rows(config)
        self.x = torch.zeros(self.sizes[-1], config.hidden_size, dtype=dtype, device=device.torch_device)
        self.cos, self.sin = (
            torch.zeros(self.sizes[-1], 1, config.head_dim, device=device.torch_device) for _ in range(2)
        )
        self._buckets: dict[int, _Bucket] = {}

    @torch.inference_mode()
    def prepare(self, sizes: Iterable[int] | None = None) -> None:
        """Capture ``sizes`` of patches beforehand (all if not given), the largest first."""
        for rows in sorted(self.sizes if sizes is None else sizes, reverse=True):
            self._bucket(rows)

    def run(self, packed: Packed) -> Parts[torch.Tensor | None]:
        """The features of ``packed``; None where it is too large, or of too many items."""
        rows = packed.x.shape[0]
        if rows > self.sizes[-1]:
            return None
        bucket = self._bucket(self.sizes[bisect_left(self.sizes, rows)])
        if not bucket.fill(packed):
            return None
        _fill(self.x[: bucket.rows], packed.x)
        _fill(self.cos[: bucket.rows], packed.rope[0])
        _fill(self.sin[: bucket.rows], packed.rope[1])
        bucket.graph.replay()
        yield 0.0
        return bucket.features[: rows // self.patches].clone()

    def _bucket(self, rows: int) -> "_Bucket":
        if rows not in self._buckets:
            self._buckets[rows] = _Bucket(self, rows)
        return self._buckets[rows]


class _Bucket:
    """One capture, of batches of up to ``rows`` patches."""

    def __init__(self, owner: EncoderGraphs, rows: int) -> None:
        place = (owner.device.torch_device, owner.x.dtype)
        self.rows = rows
        self.whole = _tiles(rows, rows, MOST_ITEMS, *place)
        self.local = (
            None if owner.window is None else _tiles(rows, owner.window, rows // owner.patches, *place)
        )
        self.features: torch.Tensor

        def forward() -> None:
            packed = Packed(
                owner.x[:rows].clone(), (owner.cos[:rows], owner.sin[:rows]), self.whole, self.local
            )  # the blocks write into their rows
            self.features = Resumable(owner.deep(packed)).finish()

        self.graph: Graph = owner.device.capture(forward, ENCODER)

    def fill(self, packed: Packed) -> bool:
        """Tell attention who sees whom; False if there is no room for that."""
        try:
            for tiles, segments in ((self.whole, packed.whole), (self.local, packed.local)):
                if tiles is not None and segments is not None:
                    assert not isinstance(segments, Tiles)
                    tiles.fill(segments)
        except ValueError:
            return False
        return True


def _tiles(rows: int, longest: int, more: int, device: torch.device, dtype: torch.dtype) -> Tiles:
    """Room for segments of ``rows`` in all, of up to ``longest`` each; ``more`` of them may be cut short."""
    tiles = Tiles(0, longest, device, dtype)
    return Tiles(-(-rows // tiles.rows) + more, longest, device, dtype)


def _window_rows(config: VisionConfig) -> int | None:
    """Patches of a whole window, where there are windows."""
    return None if config.window_size is None else (config.window_size // config.patch_size) ** 2


def _fill(buffer: torch.Tensor, values: torch.Tensor) -> None:
    buffer[: len(values)].copy_(values)
    buffer[len(values) :] = 0
