"""What becomes of workers and their memory when the process that owns them is killed."""

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

from helpers.pool_watch import at_work, children, gone, named_memory, until
from helpers.tiny_folder import write_folder

TESTS = Path(__file__).parents[3]
OWNER = """
import asyncio, sys
from helpers.media_files import picture_file
from mmserve.core.config import MediaOptions
from mmserve.core.messages import VideoPart
from mmserve.preprocess.pool.pool import WorkerPool
from mmserve.preprocess.spec import ProcessorSpec
from PIL import Image

async def main():
    pool = WorkerPool(ProcessorSpec.load(sys.argv[1]), MediaOptions())
    pool.wait_ready()
    file = picture_file(Image.new("RGB", (3000, 3000)))
    clips = [asyncio.ensure_future(pool.see(VideoPart(pictures=(file,) * 400))) for _ in range(3)]
    print("ready", flush=True)
    await asyncio.gather(*clips)

asyncio.run(main())
"""


async def test_no_worker_and_no_memory_outlives_an_owner_that_is_killed(tmp_path):
    folder = write_folder(tmp_path / "model")
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )
    with owner:
        assert owner.stdout.readline() == b"ready\n"
        workers = children(owner.pid)
        assert len(workers) == 3
        await at_work(*workers)
        assert [named_memory(pid) for pid in (owner.pid, *workers)] == [[], [], [], []]
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        await until(functools.partial(gone, *workers))
