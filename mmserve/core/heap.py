"""Garbage collection in processes that serve."""

import gc


def settle() -> None:
    """Leave all that lives now out of later collections; to be called when a process is ready to serve.

    A full collection looks at every object: 0.2 s with all that torch imports, for which each answer in work
    would wait, at moments that nobody chose.
    """
    gc.collect()
    gc.freeze()
