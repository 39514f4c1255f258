"""Where there is no NVIDIA GPU, Triton's kernels are tested in its interpreter.

Triton reads the variable when it is imported, so it is set before any test module is. Compiling needs it
unset: those tests run in a process of their own (helpers/compiled.py).
"""

import os
from pathlib import Path

if not Path("/proc/driver/nvidia/version").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
