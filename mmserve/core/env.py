"""Process settings that only count before torch is imported."""

import os
import sys

SETTINGS = {
    # Idle OpenMP threads sleep instead of spin: with another busy thread (the event loop, a worker), spinning
    # makes a 0.4 ms linear layer take 4 to 8 ms.
    "OMP_WAIT_POLICY": "passive",
    # Kernels that are kept, in the caches of oneDNN and of torch over it: one for each shape, 0.3 MiB each
    # and in each. With the default of 1,024 a server grows for thousands of requests; 64 are no slower.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
}


def prepare_environment() -> bool:
    """Set what is not set already; False if torch was imported before and it is too late."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    return "torch" not in sys.modules
