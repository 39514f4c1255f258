"""Random numbers that belong to a (seed, step), whoever else is in the batch."""

import numpy as np
import numpy.typing as npt

_STEP = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64 (Steele, Lea, Flood: Fast splittable PRNGs, 2014)
_MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST, _DROP = np.uint64(31), np.uint64(11)


def uniforms(seeds: npt.NDArray[np.uint64], steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, step): two rounds of SplitMix64, the second keyed by the first."""
    with np.errstate(over="ignore"):
        bits = _mixed(_mixed(seeds + _STEP) + (steps.astype(np.uint64) + np.uint64(1)) * _STEP)
    return (bits >> _DROP).astype(np.float64) * 2.0**-53


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    for shift, factor in _MIX:
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> _LAST)
