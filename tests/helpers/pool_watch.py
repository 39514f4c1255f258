"""Looking at a pool from outside: what its processes are doing, and that nothing is left."""

import asyncio
import gc
import os
import time
from pathlib import Path

PATIENCE_S = 60.0  # on a machine that has other things to do


def children(pid):
    """The processes that a process has started and that still run."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sorted(int(child) for task in tasks for child in (task / "children").read_text().split())


def pids(pool):
    return [worker.pid for worker in (*pool._eyes.workers, *pool._writer.workers)]


def ticks(pid):
    """Processor time that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def state(pid):
    """R, S, D, T, Z, or None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


async def until(condition, seconds=PATIENCE_S):
    """Wait for ``condition()`` to be true and return what it gave."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"it never came true: {found!r}"
        await asyncio.sleep(0.01)
    return found


async def at_work(*processes):
    """The one that goes on using the processor: it is decoding."""
    before = {pid: ticks(pid) for pid in processes}
    return await until(lambda: next((p for p, t in before.items() if state(p) and ticks(p) >= t + 3), None))


def eyes(pool):
    return [worker.pid for worker in pool._eyes.workers]


def settle(pool):
    """Wait until nothing is under way and the arena is empty; its books must balance."""
    end = time.monotonic() + PATIENCE_S
    arena = pool._memory.arena
    while True:
        gc.collect()
        stats = pool.stats()
        full = len(pool._eyes.workers) == pool._eyes.size and pool._writer.workers
        if full and not (stats["preparing"] or stats["jobs_queued"] or arena.used):
            break
        assert time.monotonic() < end, stats
        time.sleep(0.01)
    arena.check_integrity()
    assert arena.largest_hole == arena.total


def gone(*wanted):
    """Whether none of these processes runs any more."""
    return all(state(pid) in (None, "Z") for pid in wanted)


def named_memory(pid):
    """What a process maps or holds open under a name that would outlive it."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    open_files = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    return [name for name in (*maps, *open_files) if "/dev/shm" in name and "(deleted)" not in name]
