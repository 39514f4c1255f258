"""``make gpu-check``, tried out where there is no GPU, with no more packages than a lent machine has."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
# The packages of ours that a machine with torch for its GPU usually lacks, but for msgspec, which is carried.
ABSENT = (
    "av zmq llguidance fastapi uvicorn websockets multipart segno openai trustme aiortc pillow_heif xgrammar"
)
WITHOUT = f"""
import sys
from importlib.machinery import PathFinder


class Without:
    def find_spec(self, name, path=None, target=None):
        if path is None and name in {ABSENT.split()!r}:
            spec = PathFinder.find_spec(name, [p for p in sys.path if "site-packages" not in p])
            if spec is None:
                raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
            return spec


sys.meta_path.insert(0, Without())
"""


def check(tmp_path, *arguments, **environment):
    command = [sys.executable, str(ROOT / ".ci" / "gpu_check.py"), "--out", str(tmp_path / "out"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=640)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to check")
def test_all_parts_run_on_a_cpu_with_what_a_lent_machine_has(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    run = check(tmp_path, "--device", "cpu", "--no-peers", "--budget", "600")
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "out" / "gpu-check.json").read_text())
    results = {part["name"]: part["result"] for part in found["parts"]}
    assert results.pop("flashinfer") == "not run: it runs on NVIDIA GPUs"
    assert results == dict.fromkeys(("kernels", "gpu tests", "bench"), "passed")
    assert found["bench"]["trial"]
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".md", ".json", ".log"}
    assert "passed" in next(part["last"] for part in found["parts"] if part["name"] == "gpu tests")
    assert "| decode, batch 1 |" in (tmp_path / "out" / "gpu-check.md").read_text().replace("tiny | ", "")


def test_what_is_missing_is_named_with_the_command_that_brings_it(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT.replace("'av'", "'msgspec', 'av'"))
    run = check(tmp_path, "--device", "cpu")
    assert run.returncode == 2
    assert "lacks msgspec." in run.stderr
    assert "-d .whl msgspec" in run.stderr


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    import gpu_check

    return gpu_check


def test_kernels_tests_are_found(gpu_check):
    found = {Path(path).name for path in gpu_check._kernel_tests()}
    assert {"test_triton_ops.py", "test_patch_kernel.py", "test_fused_sampling.py"} < found
    assert Path(__file__).name not in found


def test_a_part_that_does_not_end_is_killed_and_told(tmp_path, gpu_check):
    asked = gpu_check.arguments(["--device", "cpu", "--out", str(tmp_path), "--budget", "60"])
    found = gpu_check.Check(asked)
    found.run("endless", 5.5, "-c", "import time; print('begun', flush=True); time.sleep(600)")
    found.run("wrong", 10, "-c", "raise SystemExit(3)")
    assert [part.result for part in found.parts] == ["failed: not done after 6 s", "failed (3)"]
    assert found.parts[0].last == "begun"
    assert found.parts[0].seconds < 30
    assert not found.report()
    assert "not done after" in (tmp_path / "gpu-check.md").read_text()
    assert "==== endless\nbegun" in (tmp_path / "gpu-check.log").read_text()


def test_nobody_waits_for_kernels_that_are_still_being_compiled(tmp_path, gpu_check):
    found = gpu_check.Check(gpu_check.arguments(["--device", "cpu", "--out", str(tmp_path)]))
    found._environment["PYTHONPATH"] = ""
    found._compiling = [found._start(("-c", "import time; time.sleep(600)"), subprocess.DEVNULL)]
    assert found.compiled() == "its kernels are still being compiled"
    found.hide_flashinfer(found.compiled())
    assert found._compiling[0].poll() is not None
    found.run("import", 20, "-c", "import flashinfer")
    assert "still being compiled" in found.parts[0].last


def test_wheels_are_unpacked_to_where_packages_are_found(tmp_path, gpu_check):
    wheel, place = tmp_path / "some-1-py3-none-any.whl", tmp_path / "place"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some/__init__.py", "")
        archive.writestr("some-1.data/platlib/some/fast.so", "")
        archive.writestr("some-1.data/scripts/some", "")
    gpu_check._unpack(wheel, place)
    assert sorted(p.relative_to(place).as_posix() for p in place.rglob("*") if p.is_file()) == [
        "some/__init__.py",
        "some/fast.so",
    ]
