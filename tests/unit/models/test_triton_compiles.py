"""Every Triton kernel becomes machine code for the GPUs it is meant for, without one."""

import json
import os
import subprocess
import sys

import pytest
from helpers import compiled

from mmserve.models.ops.triton import runtime

pytest.importorskip("triton")


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles_and_fits_into_shared_memory(capability):
    outside = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, compiled.__file__, str(capability)], capture_output=True, text=True, env=outside
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["missed"] == []
    assert len(told["compiled"]) == len({e.name for e in runtime.examples()}) > 0
    failed = {name: result["error"] for name, result in told["compiled"].items() if "error" in result}
    assert not failed
    for name, result in told["compiled"].items():
        assert result["cubin"] > 0, name
        assert result["shared"] <= compiled.SHARED_BYTES[capability], name
