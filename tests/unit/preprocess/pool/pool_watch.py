"""Looking at a pool from outside: what its processes are doing, and that nothing is left."""

import asyncio
import gc
import os
import time
from pathlib import Path

PATIENCE_S = 60.0  # on a machine that has other things to do


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
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.01)
    return found


async def at_work(pool):
    """The worker process that is decoding: the one that goes on using the processor."""
    before = {worker.pid: ticks(worker.pid) for worker in pool._eyes.workers}
    return await until(lambda: next((p for p, t in before.items() if state(p) and ticks(p) >= t + 3), None))


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


def shared_memory():
    return set(os.listdir("/dev/shm"))
