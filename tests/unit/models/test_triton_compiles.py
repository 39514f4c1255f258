"""Every Triton kernel becomes machine code for the GPUs it is meant for, without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import compiled

from mmserve.models.ops.triton import runtime

pytest.importorskip("triton")


def not_interpreted(*command):
    """What a script says, in a process of its own."""
    outside = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=outside)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles_and_fits_into_shared_memory(capability):
    told = not_interpreted(compiled.__file__, str(capability))
    assert told["missed"] == []
    assert len(told["compiled"]) == len({e.name for e in runtime.examples()}) > 0
    failed = {name: result["error"] for name, result in told["compiled"].items() if "error" in result}
    assert not failed
    for name, result in told["compiled"].items():
        assert result["cubin"] > 0, name
        assert result["shared"] <= compiled.SHARED_BYTES[capability], name
    for name in ("decode_kernel[*bf16", "prefill_kernel[*bf16", "varlen_kernel[*bf16"):
        ahead = [found["ahead"] for kernel, found in told["compiled"].items() if kernel.startswith(name)]
        assert max(ahead) > 0, f"{name} waits for each load before the next"


def test_launches_of_attention_bind_and_prompts_of_any_length_find_their_kernel_compiled():
    told = not_interpreted(str(Path(compiled.__file__).with_name("launched.py")))
    before, then = ({tuple(launch) for launch in told[when]} for when in ("before", "then"))
    assert {name for name, _ in before} == {"prefill_kernel"}
    prompts = {launch for launch in then if launch[0] == "prefill_kernel"}
    assert prompts == before
    assert {"decode_kernel", "combine_kernel", "store_kernel", "varlen_kernel"} < {name for name, _ in then}
    assert len([name for name, _ in then if name == "store_kernel"]) == 1
