"""What ``mmserve bench gpu`` tells: a table for people, JSON for programs, written anew after each figure."""

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mmserve.bench.figures import Figure
from mmserve.bench.gpu_rates import Rates
from mmserve.bench.peers import BATCHING, GENERATE
from mmserve.bench.table import machine, markdown, write_json

PACKAGES = ("torch", "triton", "flashinfer-python", "transformers")


class Report:
    """``asked``: what was asked for, to stand in the JSON. Files are None where none are wanted."""

    def __init__(
        self,
        device: torch.device,
        rates: Rates,
        asked: dict[str, Any],
        json: Path | None,
        table: Path | None,
        trial: bool = False,
    ) -> None:
        self._device, self._rates, self._asked = device, rates, asked
        self._json, self._table, self._trial = json, table, trial
        self.backends: dict[str, dict[str, str]] = {}  # of each model

    def keep(self, figures: Sequence[Figure]) -> None:
        if self._json:
            write_json(self._json, self._all(figures))
        if self._table:
            self._table.write_text(self.text(figures), encoding="utf-8")

    def text(self, figures: Sequence[Figure]) -> str:
        peers = [name for name in (GENERATE, BATCHING) if any(name in f.peers for f in figures)]
        lines = [self._head(), ""]
        if figures:
            lines += [markdown([figure.row(peers) for figure in figures]), ""]
        lines += [f"{name}: {_pairs(found)}" for name, found in self.backends.items()]
        if self._trial:
            lines.append("A trial of sizes that mean nothing: none of this is a figure.")
        return "\n".join(lines) + "\n"

    def _head(self) -> str:
        rates = self._rates.report()
        return (
            f"{device_name(self._device)}, {machine()['date']}; {_pairs(versions())}. Measured first, as the"
            f" machine's own: {rates['GB/s']:.0f} GB/s, {rates['TFLOP/s']:.1f} TFLOP/s in bf16."
        )

    def _all(self, figures: Sequence[Figure]) -> dict[str, Any]:
        return {
            "bench": "gpu",
            "trial": self._trial,
            "device": device_name(self._device),
            "versions": versions(),
            "asked": self._asked,
            "rates": self._rates.report(),
            "backends": self.backends,
            "figures": [figure.report() for figure in figures],
        }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else machine()["cpu"] or "a CPU"


def versions() -> dict[str, str]:
    """Of what figures depend on, as far as it is installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    return found


def _pairs(values: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
