"""Compiles the C++ files of this folder for the CPU at hand, each into a library of its own, and loads it.

A library is kept under a name that holds a digest of all that it was made from: sources, compiler, flags and
the CPU's features. So it is compiled once, and never taken for another CPU's or an older source's.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

HERE = Path(__file__).parent
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-fopenmp", "-fvisibility=hidden"),
    # Sums may not be reordered but where the source says so (``omp simd reduction``), and infinities count.
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)
COMPILE_S = 120


class NativeUnavailable(Exception):
    """The kernels cannot be had on this machine; the message tells why."""


@cache
def load(name: str) -> ctypes.CDLL:
    """The library of ``name``.cpp. NativeUnavailable if it cannot be compiled or loaded here.

    OpenMP's threads are torch's own: torch has loaded its runtime under the same name before.
    """
    import torch  # noqa: F401  (its libgomp comes first)

    file, folder = f"{name}-{_digest(name)}.so", _folder()
    if folder is not None:
        return _loaded(HERE / f"{name}.cpp", folder / file)
    with tempfile.TemporaryDirectory(
        prefix="mmserve-native-"
    ) as once:  # what is loaded stays without its file
        return _loaded(HERE / f"{name}.cpp", Path(once) / file)


def _loaded(source: Path, path: Path) -> ctypes.CDLL:
    if not path.is_file():
        _compile(source, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"{path.name} cannot be loaded: {error}") from None


def compiler() -> str:
    """The C++ compiler: ``$CXX``, or g++, or clang++."""
    for wanted in (os.environ.get("CXX"), "g++", "clang++"):
        if wanted and (found := shutil.which(wanted)):
            return found
    raise NativeUnavailable("there is no C++ compiler (g++ or clang++) to build them with")


def _compile(source: Path, target: Path) -> None:
    """Beside its final name first, so that nobody loads half a file."""
    started = time.monotonic()
    log.info("compiling %s for this CPU; what is made is kept for later starts", source.name)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [compiler(), *FLAGS, "-o", str(made), str(source)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NativeUnavailable(f"{source.name} could not be compiled: {error}") from None
        if done.returncode:
            raise NativeUnavailable(f"{source.name} could not be compiled: {done.stderr.strip()[:2000]}")
        made.replace(target)
    log.info("compiled %s for this CPU in %.1f s", source.name, time.monotonic() - started)


def _digest(name: str) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for path in (HERE / f"{name}.cpp", *sorted(HERE.glob("*.h"))):
        digest.update(path.read_bytes() + b"\0")
    digest.update("\0".join((compiler(), _version(), *FLAGS, _cpu())).encode())
    return digest.hexdigest()


@cache
def _version() -> str:
    try:
        return subprocess.run([compiler(), "--version"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"the C++ compiler does not run: {error}") from None


@cache
def _cpu() -> str:
    """What ``-march=native`` goes by."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


@cache
def _folder() -> Path | None:
    """Where compiled libraries are kept for the next start; None, with a warning, if nowhere."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(home) / "mmserve" / "native"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
        why = f"{folder} is not this user's own to write"
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        why = str(error)
    log.warning("kernels are compiled anew at every start, since there is nowhere to keep them: %s", why)
    return None
