"""Compiles every example of every Triton kernel for one architecture and prints what came of it, as JSON.

``python tests/helpers/compiled.py 90 [part of a kernel's name]``, without TRITON_INTERPRET.
"""

import inspect
import json
import re
import sys

from mmserve.models.ops.triton import runtime

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # that one program may have


def compiled(capability, part=""):
    """{example: {"cubin": bytes of code, "shared": bytes, "ahead": ...} or {"error": text}}."""
    found = {}
    for example in runtime.examples():
        if part not in example.name:
            continue
        try:
            done = runtime.compile_for(example, capability)
            found[example.name] = {
                "cubin": len(done.asm["cubin"]),
                "shared": done.metadata.shared,
                "ahead": ahead(done.asm["ttgir"]),
            }
        except Exception as error:
            found[example.name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
    return found


def ahead(code):
    """How many loads may still be under way where a loop waits for the one it needs."""
    return max(map(int, re.findall(r"async_wait .*num = (\d+)", code)), default=0)


def without_example():
    """Kernels of the package that no example names."""
    named = {id(example.kernel) for example in runtime.examples()}
    modules = {m for n, m in sys.modules.items() if n.startswith("mmserve.models.ops.triton.")}
    kernels = {n: k for m in modules for n, k in inspect.getmembers(m) if n.endswith("_kernel")}
    return sorted(n for n, k in kernels.items() if id(k) not in named)


if __name__ == "__main__":
    print(json.dumps({"compiled": compiled(int(sys.argv[1]), *sys.argv[2:]), "missed": without_example()}))
