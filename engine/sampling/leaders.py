"""The best few of each row, without sorting the vocabulary: torch goes over all of it, on whatever device;
what is left is little, and numpy's."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

MOST_BLOCK = 512
BLOCKS = 256  # at least so many, or every number is a block of its own

Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.int64]


def block_of(vocab: int) -> int:
    """Numbers in a block: a power of two, so that a block is a few vectors."""
    size = 1
    while size < MOST_BLOCK and vocab >= 2 * size * BLOCKS:
        size *= 2
    return size


def block_maxima(x: torch.Tensor) -> Floats:
    """The largest of each block of ``x`` [S, V]; the rest of a row is a block too."""
    whole, rest = _blocks(x)
    maxima = whole.amax(-1)
    return host(maxima if rest is None else torch.cat((maxima, rest.amax(-1, keepdim=True)), -1))


def block_sums(x: torch.Tensor) -> Floats:
    """As ``block_maxima``: the sum of each block, in float64."""
    whole, rest = _blocks(x)
    sums = whole.sum(-1)
    return host(sums if rest is None else torch.cat((sums, rest.sum(-1, keepdim=True)), -1)).astype(
        np.float64
    )


def _blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``x`` as whole blocks [S, N, block], and what is left over of each row, if that is any."""
    block = block_of(x.shape[1])
    whole = x.shape[1] // block * block
    return x[:, :whole].unflatten(1, (-1, block)), x[:, whole:] if whole < x.shape[1] else None


def at_least(x: torch.Tensor, bound: Floats) -> tuple[Floats, Ints]:
    """What is not below ``bound`` [S] in each row of ``x`` [S, V], and where: both [S, most].

    In the order of the row; -inf at place 0 stands where a row has fewer than others, and is never found
    itself.
    """
    lowest = np.maximum(bound, np.finfo(np.float32).min).astype(np.float32)
    flat, found = _found(x, torch.from_numpy(lowest).to(x.device))
    rows, columns = np.divmod(flat, x.shape[1])
    counts = np.bincount(rows, minlength=x.shape[0])
    places = np.arange(len(flat)) - (counts.cumsum() - counts)[rows]
    values = np.full((x.shape[0], max(int(counts.max()), 1)), -np.inf, np.float32)
    ids = np.zeros(values.shape, np.int64)
    values[rows, places], ids[rows, places] = found, columns
    return values, ids


def _found(x: torch.Tensor, bound: torch.Tensor) -> tuple[Ints, Floats]:
    """Flat places of what is not below, and the numbers there. Of few among many, numpy's search is 10 times
    as fast as torch's."""
    mask = x >= bound[:, None]
    if x.device.type == "cpu":
        flat = np.flatnonzero(mask.numpy())
        return flat, x.numpy().reshape(-1)[flat]
    places = mask.view(-1).nonzero()[:, 0]
    return host(places), host(x.view(-1)[places])


def leaders(x: torch.Tensor, count: int) -> tuple[Floats, Ints]:
    """The ``count`` largest of each row of ``x`` [S, V], largest first, and where they are; of equal ones the
    first in the row. Where a row has fewer above -inf, the rest is -inf at place 0."""
    count = min(count, x.shape[1])
    values = np.full((x.shape[0], count), -np.inf, np.float32)
    places = np.zeros(values.shape, np.int64)
    if count:
        found, ids = at_least(x, nth_bound(x, block_maxima(x), count))
        order = np.argsort(-found, axis=-1, kind="stable")[:, :count]
        values[:, : order.shape[1]] = np.take_along_axis(found, order, -1)
        places[:, : order.shape[1]] = np.take_along_axis(ids, order, -1)
    return values, places


def nth_bound(x: torch.Tensor, maxima: Floats, count: int) -> Floats:
    """[S]: at least ``count`` numbers of each row of ``x`` are not below it, or all are. ``maxima`` are those
    of its blocks: the count-th largest of them cannot be above the count-th largest number."""
    if count >= x.shape[1]:
        return np.full(x.shape[0], -np.inf, np.float32)
    if count > maxima.shape[1] and x.device.type != "cpu":
        return host(x.topk(count).values[:, -1])
    source = maxima if count <= maxima.shape[1] else x.numpy()
    return np.partition(source, source.shape[1] - count, axis=-1)[:, -count]


def host(x: torch.Tensor) -> npt.NDArray[Any]:
    return x.cpu().numpy()
