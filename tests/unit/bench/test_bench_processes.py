"""Whose memory a benchmark counts."""

import os
import subprocess
import sys

import pytest

from mmserve.bench.processes import PROC, family, peak_mib, private_mib, title

pytestmark = pytest.mark.skipif(not PROC.is_dir(), reason="reads /proc")

TREE = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {inner!r}], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
print(child.pid, child.stdout.readline().decode().strip(), flush=True)
sys.stdin.read()
"""
INNER = """
import subprocess, sys
code = "import sys; held = b'x' * (64 << 20); print(flush=True); sys.stdin.read()"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def tree():
    """Pids of a process, its child and its grandchild, which holds 64 MiB."""
    code = TREE.format(inner=INNER)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    yield process.pid, *map(int, process.stdout.readline().split())
    process.communicate(timeout=60)


def test_grandchildren_are_of_the_family(tree):
    assert family(tree[0]) == list(tree)
    assert set(tree) <= set(family(os.getpid()))


def test_memory_of_all_is_counted(tree):
    assert private_mib(tree[2]) >= 64
    assert private_mib(tree[0]) < 64
    assert peak_mib(tree[0]) > peak_mib(tree[1]) > 64


def test_who_is_gone_has_no_family_and_no_memory():
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked yet
    assert (family(process.pid), private_mib(process.pid)) == ([], None)
    process.wait()
    assert (family(process.pid), private_mib(process.pid), title(process.pid)) == ([], None, "")


def test_a_process_is_called_by_the_module_that_it_runs():
    quiet = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    module = subprocess.Popen([sys.executable, "-m", "code", "-q"], **quiet)
    script = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], **quiet)
    try:
        assert title(module.pid) == "code"
        assert title(script.pid).startswith("python")
    finally:
        module.communicate(timeout=60)
        script.communicate(timeout=60)
