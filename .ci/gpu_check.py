"""``make gpu-check``: what a GPU must show, in less than nine minutes, by one command that bounds itself.

It needs no set-up but a Python that has torch for the GPU: that of .venv if it sees one, else the one that
runs this. The packages of this repository are put together as links, and what that Python lacks is unpacked
from wheels in the folder .whl, if they were carried there; nothing is fetched. Parts, each with a limit:

    FlashInfer's kernels are compiled beside everything else, if it is installed
    kernels        unit tests of Triton's kernels, on the GPU instead of in the interpreter
    gpu tests      tests/gpu
    flashinfer     the same, of FlashInfer alone, if its kernels are compiled by then
    bench          mmserve bench gpu, for as long as there is time

``--device cpu`` tries everything out where there is no GPU, by interpreters and at sizes that mean nothing.
Results lie in the folder OUT: gpu-check.md, gpu-check.json, and gpu-check.log of all parts.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = (
    "torch",
    "numpy",
    "msgspec",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
    "PIL",
    "cv2",
    "jinja2",
    "httpx",
    "prometheus_client",
    "tqdm",
    "pytest",
)
WHEELS = {"PIL": "pillow", "cv2": "opencv-python-headless", "prometheus_client": "prometheus-client"}
ON_DEVICE = ("helpers.triton_device", '"cpu" if runtime.INTERPRETED else "cuda"')  # marks of kernels' tests
LIMITS = {"kernels": 110, "gpu tests": 190, "flashinfer": 60}  # seconds; the rest is the benchmark's
LAST = 45  # seconds that the benchmark's last measurement may take beyond its own budget
SPARE = 8  # seconds of the budget that are kept back, to end and to write

# No clip is read here, and PyAV is too large to carry: it may be missing.
AV = '''"""Stands in for PyAV, which is not installed: nothing that runs here reads clips."""


class FFmpegError(Exception):
    pass


class Missing:
    def __call__(self, *args, **kwargs):
        raise RuntimeError("PyAV is not installed")

    def __getattr__(self, name):
        return Missing()


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing()
'''

# What FlashInfer compiles for: decoders with heads of 128, and pictures with heads of 64.
COMPILE = (
    """
import torch
from mmserve.engine.attention.base import Extent
from mmserve.engine.attention.flashinfer import FlashInferAttention
from mmserve.engine.kv.pool import KVPool, KVShape
for heads in (16, 32):
    pool = KVPool(KVShape(1, 8, 128, torch.bfloat16), 4, 16, "cuda")
    FlashInferAttention(pool, Extent(heads, 1, 16))
""",
    """
import torch
from mmserve.models.ops.flashinfer import RaggedAttention
for dim in (64, 128):
    q = torch.zeros(16, 16, dim, dtype=torch.bfloat16, device="cuda")
    RaggedAttention(q.device)(q, q, q, (16,))
""",
)


@dataclass
class Part:
    """One command that was run, and how it ended: passed, failed, or why it did not run."""

    name: str
    result: str
    seconds: float
    last: str  # line of its output


class Check:
    def __init__(self, args: argparse.Namespace) -> None:
        self.device, self.out, self.peers = args.device, args.out.resolve(), args.peers
        self._end = time.monotonic() + args.budget
        self.parts: list[Part] = []
        self.python = args.python or _python(self.device)
        self.place = self.out / "packages"
        self._environment = dict(os.environ)
        self._compiling: list[subprocess.Popen[bytes]] = []

    @property
    def left(self) -> float:
        return self._end - time.monotonic() - SPARE

    # ------------------------------------------------------------ what runs where

    def prepare(self) -> str | None:
        """Put the packages together; what is missing, and how to bring it, if something is."""
        for old in {path for kind in ("*.log", "bench.*", "gpu-check.*") for path in self.out.glob(kind)}:
            old.unlink()
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir(parents=True)
        _link_packages(self.place)
        for wheel in sorted((ROOT / ".whl").glob("*.whl")):
            _unpack(wheel, self.place)
        paths = [str(self.place), str(ROOT / "tests"), self._environment.get("PYTHONPATH", "")]
        self._environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self._environment["TRITON_INTERPRET"] = "1" if self.device == "cpu" else "0"
        self._environment["PYTHONUNBUFFERED"] = "1"
        if not self._has("av"):
            (self.place / "av.py").write_text(AV)
        missing = [WHEELS.get(name, name) for name in NEEDED if not self._has(name)]
        if not missing:
            return None
        return (
            f"{self.python} lacks {', '.join(missing)}. Where nothing can be fetched, carry them as wheels in"
            " the folder .whl: pip download --no-deps --only-binary=:all: --python-version 3.12"
            f" --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 -d .whl {' '.join(missing)}"
        )

    def _has(self, module: str) -> bool:
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        return subprocess.run([self.python, "-c", code], env=self._environment, cwd=ROOT).returncode == 0

    # ------------------------------------------------------------ parts

    def run(self, name: str, limit: float, *command: str) -> None:
        """One part, killed with all that it started when its ``limit`` in seconds is over."""
        log = self.out / f"{name.replace(' ', '-')}.log"
        seconds, start = min(limit, self.left), time.monotonic()
        if seconds < 5:
            self.parts.append(Part(name, "not run: no time was left", 0.0, ""))
            return
        _tell(f"{name}, at most {seconds:.0f} s")
        with log.open("wb") as output:
            process = self._start(command, output)
            try:
                ended = process.wait(seconds)
                result = {0: "passed", 5: "passed: no tests"}.get(ended, f"failed ({ended})")
            except subprocess.TimeoutExpired:
                result = f"failed: not done after {seconds:.0f} s"
            finally:
                _kill(process)
        lines = log.read_text(errors="replace").strip().splitlines()
        self.parts.append(Part(name, result, time.monotonic() - start, lines[-1] if lines else ""))
        _tell(f"{name}: {result}: {self.parts[-1].last}")
        if result != "passed":
            _tell("\n".join(lines[-40:]))

    def _start(self, command: tuple[str, ...], output: object) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [self.python, *command],
            env=self._environment,
            cwd=ROOT,
            stdout=output,  # type: ignore[call-overload]
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def tests(self, name: str, *arguments: str) -> None:
        limit = LIMITS[name] if self.device == "cuda" else self.left  # a busy CPU may take its time
        self.run(name, limit, "-m", "pytest", "-rs", "-p", "no:cacheprovider", *arguments)

    def compile(self) -> None:
        """Begin to compile FlashInfer's kernels, which takes minutes of a machine's other cores."""
        if self.device == "cuda" and self._has("flashinfer"):
            for number, code in enumerate(COMPILE):
                log = (self.out / f"compile-{number}.log").open("wb")
                self._compiling.append(self._start(("-c", code), log))

    def compiled(self) -> str | None:
        """None if FlashInfer can be used; else why not."""
        if not self._compiling:
            return "it is not installed" if self.device == "cuda" else "it runs on NVIDIA GPUs"
        ended = [process.poll() for process in self._compiling]
        if any(ended):
            return "its kernels could not be compiled, see the log"
        return "its kernels are still being compiled" if None in ended else None

    def all(self) -> None:
        self.compile()
        kernels = _kernel_tests()
        if self.device == "cpu":
            kernels.append("--collect-only")
        elif self._has("xdist"):
            kernels += ["-n", "4"]  # compilers run side by side
        self.tests("kernels", *kernels)
        where = ("tests/gpu", "-m", "gpu", "--gpu-device", self.device)
        self.tests("gpu tests", *where, "-k", "not flashinfer")
        reason = self.compiled()
        if reason is None:
            self.tests("flashinfer", *where, "-k", "flashinfer")
        else:
            broken = "failed" if "could not" in reason else "not run"
            self.parts.append(Part("flashinfer", f"{broken}: {reason}", 0.0, ""))
        if reason and self._compiling:
            self.hide_flashinfer(reason)
        self._bench()

    def close(self) -> None:
        for process in self._compiling:
            _kill(process)

    def _bench(self) -> None:
        """The benchmark ends by itself a little before it would be killed."""
        command = ["-m", "mmserve.cli", "bench", "gpu", "--device", self.device]
        command += ["--json", str(self.out / "bench.json"), "--markdown", str(self.out / "bench.md")]
        command += ["--budget", f"{max(1.0, self.left - LAST):.0f}"]
        if self.device == "cpu":
            command += ["--trial", "--shapes", "tiny", "--threads", "1"]
        if not self.peers:
            command += ["--no-peers"]
        self.run("bench", 1e9, *command)

    def hide_flashinfer(self, reason: str) -> None:
        """Nobody shall wait for it from here on, and it shall not disturb what is measured."""
        self.close()
        hidden = self.place / "hidden"
        hidden.mkdir(parents=True)
        (hidden / "flashinfer.py").write_text(f"raise ImportError({reason!r})\n")
        self._environment["PYTHONPATH"] = os.pathsep.join((str(hidden), self._environment["PYTHONPATH"]))

    # ------------------------------------------------------------ results

    def report(self) -> bool:
        """Write all there is; whether every part passed."""
        bench = self.out / "bench.md"
        rows = [f"| {p.name} | {p.result} | {p.seconds:.0f} | {p.last} |" for p in self.parts]
        table = "\n".join(["| part | result | seconds | last line |", "|---|---|---|---|", *rows])
        figures = bench.read_text() if bench.exists() else "No figures.\n"
        (self.out / "gpu-check.md").write_text(f"{table}\n\n{figures}")
        found = {"parts": [asdict(part) for part in self.parts]}
        if (self.out / "bench.json").exists():
            found["bench"] = json.loads((self.out / "bench.json").read_text())
        (self.out / "gpu-check.json").write_text(json.dumps(found, indent=1) + "\n")
        self._tidy()
        print(f"{table}\n\n{figures}")
        return all(not part.result.startswith("failed") for part in self.parts)

    def _tidy(self) -> None:
        """Three files are left: all logs are one, and what the benchmark wrote stands in the others."""
        logs = sorted(self.out.glob("*.log"))
        whole = "".join(f"==== {p.stem}\n{p.read_text(errors='replace')}\n" for p in logs)
        for path in {*logs, *self.out.glob("bench.*")}:
            path.unlink()
        (self.out / "gpu-check.log").write_text(whole)
        shutil.rmtree(self.place, ignore_errors=True)


def _python(device: str) -> str:
    """The interpreter whose torch sees a GPU: that of .venv, or the one that runs this."""
    own = ROOT / ".venv" / "bin" / "python"
    sees = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if own.exists():
        code = "import torch" if device == "cpu" else sees
        if subprocess.run([own, "-c", code], stderr=subprocess.DEVNULL).returncode == 0:
            return str(own)
    return sys.executable


def _kernel_tests() -> list[str]:
    """Unit tests that take the GPU for their device where there is one."""
    files = sorted((ROOT / "tests" / "unit").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if any(m in path.read_text() for m in ON_DEVICE)]


def _link_packages(place: Path) -> None:
    """The mapping of folders to packages, as pyproject.toml has it."""
    mapping = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    for package, folder in sorted(mapping.items()):
        if "." not in package:
            (place / package).mkdir()
            for path in (ROOT / folder).iterdir():
                (place / package / path.name).symlink_to(path)
        else:
            (place / package.replace(".", "/")).symlink_to(ROOT / folder)


def _unpack(wheel: Path, place: Path) -> None:
    """A wheel is an archive; what is not in its root belongs there, too, or is for commands."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    for data in place.glob("*.data"):
        for kind in ("purelib", "platlib"):
            if (data / kind).exists():
                shutil.copytree(data / kind, place, dirs_exist_ok=True)
        shutil.rmtree(data)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """It and its children, if any are left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--budget", type=float, default=520.0, metavar="S", help="seconds for everything (520)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-check", metavar="FOLDER")
    parser.add_argument("--python", metavar="PATH", help="the interpreter to use")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(given)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends, too
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    check = Check(args)
    if missing := check.prepare():
        _tell(missing)
        return 2
    try:
        check.all()
    finally:
        check.close()
    return 0 if check.report() else 1


if __name__ == "__main__":
    sys.exit(main())
