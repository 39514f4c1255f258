"""How often the fused kernels are compiled while serving: a compiler's seconds must not fall on a request."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[2] / "helpers" / "launched_ops.py"


@pytest.fixture(scope="module")
def compiled():
    """{way of launching: {(kernel, code)}}: arguments were bound as on a GPU, and nothing ran."""
    outside = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env=outside)
    assert done.returncode == 0, done.stderr
    return {way: {tuple(one) for one in found} for way, found in json.loads(done.stdout).items()}


def test_draws_find_their_kernels_compiled_beforehand(compiled):
    assert {name for name, _ in compiled["prepared"]} == {"edit_kernel", "words_kernel", "choose_kernel"}
    assert compiled["draws"] == compiled["prepared"]


def test_one_kernel_serves_pictures_of_all_sizes(compiled):
    assert len(compiled["pictures of patch 16"]) == 1
    assert len(compiled["pictures of patch 14"]) == 2, "lines that begin at multiples of 16 bytes, and others"


def test_one_kernel_serves_steps_of_all_sizes(compiled):
    names = sorted(name for name, _ in compiled["steps"])
    scatters = ["scatter_kernel", "scatter_kernel"]  # one puts, one adds
    assert names == ["mrope_kernel", "rms_norm_kernel", "rotate_kernel", *scatters, "silu_and_mul_kernel"]
