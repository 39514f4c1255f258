"""Shared memory: the books always balance, and an array keeps its memory as long as anyone can see it."""

import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mmserve.core.arena import LARGE, PAGE, WARM, Arena, ArenaFull

MIB = 1 << 20


def pattern(block, seed):
    return np.random.default_rng(seed).integers(0, 256, block.nbytes, np.uint8)


def test_blocks_do_not_overlap_and_are_aligned():
    arena = Arena(MIB)
    blocks = [arena.allocate(n) for n in (1, 63, 65, LARGE, 100, LARGE + 1)]
    for i, block in enumerate(blocks):
        assert block.offset % (PAGE if block.nbytes >= LARGE else 64) == 0
        arena.write(block, pattern(block, i))
    for i, block in enumerate(blocks):
        assert (arena.view(block, (block.nbytes,)) == pattern(block, i)).all()
    arena.check_integrity()


def test_the_last_reference_frees_and_neighbours_join():
    arena = Arena(MIB)
    blocks = [arena.allocate(MIB // 4) for _ in range(4)]
    with pytest.raises(ArenaFull):
        arena.allocate(1)
    arena.retain(blocks[1])
    for i in (1, 3, 1, 2):
        arena.release(blocks[i])
        arena.check_integrity()
    assert arena.largest_hole == 3 * MIB // 4
    assert arena.used == MIB // 4


def test_a_block_that_was_given_back_is_refused():
    arena = Arena(MIB)
    block = arena.allocate(100)
    arena.release(block)
    same_place = arena.allocate(100)
    assert same_place.offset == block.offset
    for misuse in (arena.release, arena.retain, lambda b: arena.view(b, (1,)), lambda b: arena.trim(b, 1)):
        with pytest.raises(KeyError):
            misuse(block)
    arena.check_integrity()


def test_a_trimmed_block_gives_its_tail_back():
    arena = Arena(MIB)
    block = arena.trim(arena.allocate(MIB), 1000)
    assert (block.nbytes, arena.used) == (1024, 1024)
    arena.check_integrity()
    arena.retain(block)
    with pytest.raises(ValueError, match="trimmed"):
        arena.trim(block, 10)


def test_what_lies_outside_a_block_cannot_be_seen_or_written():
    arena = Arena(MIB)
    block = arena.allocate(128)
    for shape, at in (((129,), 0), ((1,), 128), ((1,), -1), ((2, 65), 0), ((-1,), 0)):
        with pytest.raises(ValueError, match="within 128 bytes"):
            arena.view(block, shape, at)
    with pytest.raises(ValueError, match="within"):
        arena.write(block, bytes(129))
    with pytest.raises(ValueError, match="within"):
        arena.window.array(MIB, (1,))


# ---------------------------------------------------------------- arrays that hold a reference


def viewed(nbytes=LARGE):
    """An arena of which nothing but an array holds the only block."""
    arena = Arena(MIB)
    block = arena.allocate(nbytes)
    arena.write(block, pattern(block, 0))
    array = arena.view(block, (16, nbytes // 16))
    arena.release(block)
    return arena, array


@pytest.mark.parametrize(
    "derive",
    [
        lambda a: a,
        lambda a: a[3:5],
        lambda a: a[2:][1:3].reshape(-1)[5:9],
        lambda a: np.asarray(a[0]).T,
        lambda a: memoryview(a)[1:2],
        lambda a: np.frombuffer(a, np.uint8)[7:],
        torch.from_numpy,
        lambda a: torch.from_numpy(a[1:])[2:].view(-1)[3:],
        lambda a: torch.from_numpy(a).unbind(0)[3],
    ],
)
def test_whatever_is_made_from_an_array_keeps_its_memory(derive):
    arena, array = viewed()
    kept = derive(array)
    del array
    gc.collect()
    assert arena.used == LARGE
    before = bytes(memoryview(np.ascontiguousarray(np.asarray(kept))).cast("B"))
    with pytest.raises(ArenaFull):
        arena.allocate(MIB)
    assert bytes(memoryview(np.ascontiguousarray(np.asarray(kept))).cast("B")) == before
    del kept
    gc.collect()
    assert arena.used == 0
    arena.check_integrity()


def test_arrays_are_read_only():
    _, array = viewed()
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.setflags(write=True)


def test_an_array_outlives_its_arena():
    _, array = viewed()
    gc.collect()
    assert array.sum() > 0


def test_arrays_that_die_inside_the_arena_s_own_methods_do_no_harm():
    """A cycle of arrays is collected wherever the collector happens to run, also under the lock."""
    arena, array = viewed()
    cycle = [array]
    cycle.append(cycle)
    del array, cycle
    with arena._locked():
        gc.collect()
        assert arena.used == LARGE
    assert arena.used == 0
    arena.check_integrity()


def test_freed_is_told_each_time_memory_comes_back():
    told = []
    arena = Arena(MIB, lambda: told.append(arena.used))
    first, second = arena.allocate(100), arena.allocate(100)
    array = arena.view(second, (5,))
    arena.release(second)
    arena.release(first)
    del array
    assert told == [128, 0]


def test_it_is_safe_from_many_threads():
    arena = Arena(16 * MIB)

    def churn(seed):
        chance = np.random.default_rng(seed)
        kept = []
        for _ in range(300):
            block = arena.allocate(int(chance.integers(1, 100_000)))
            arena.write(block, np.full(block.nbytes, seed, np.uint8))
            kept.append(arena.view(block, (block.nbytes,)))
            arena.release(block)
            if len(kept) > 5:
                assert (kept.pop(int(chance.integers(5))) == seed).all()

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert arena.used == 0
    arena.check_integrity()
    assert arena.largest_hole == arena.total


# ---------------------------------------------------------------- the memory itself


def resident(arena):
    """Bytes of the arena's file that are in memory."""
    return os.fstat(arena.fd).st_blocks * 512


@pytest.mark.skipif(sys.platform != "linux", reason="pages go back to the kernel on Linux")
def test_of_large_blocks_only_the_warm_beginning_stays_in_memory_after_they_are_freed():
    size = WARM + 32 * MIB
    arena = Arena(2 * size)
    for _ in range(3):
        block = arena.allocate(size)
        arena.write(block, np.ones(size, np.uint8))
        assert resident(arena) >= size
        arena.release(block)
        assert resident(arena) <= WARM


def test_another_process_writes_by_offset_and_its_death_takes_nothing_away():
    arena = Arena(MIB)
    block = arena.allocate(1000)
    code = f"""
from mmserve.core.arena import Window
import os, signal
window = Window({arena.fd}, {arena.total})
window.array({block.offset}, (10, 100))[3] = 7
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], pass_fds=[arena.fd], check=False)
    assert arena.view(block, (1000,)).sum() == 700
    arena.check_integrity()


@pytest.mark.skipif(sys.platform != "linux", reason="seals are Linux's")
def test_nobody_who_maps_it_can_cut_it_short():
    arena = Arena(MIB)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, PAGE)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_it_has_no_name_that_could_be_left_behind():
    arena = Arena(MIB)
    assert os.readlink(f"/proc/self/fd/{arena.fd}") == "/memfd:mmserve-arena (deleted)"


# ---------------------------------------------------------------- any order of calls


class Books(RuleBasedStateMachine):
    """Blocks and arrays come and go in any order; what they hold never changes under them."""

    def __init__(self):
        super().__init__()
        self.arena = Arena(MIB)
        self.blocks = {}  # block -> (our references, content)
        self.arrays = []  # (array, content)
        self.count = 0

    @rule(nbytes=st.one_of(st.integers(0, 300), st.integers(0, MIB)))
    def allocate(self, nbytes):
        room = self.arena.largest_hole
        try:
            block = self.arena.allocate(nbytes)
        except ArenaFull:
            assert nbytes + 2 * PAGE > room
            return
        self.count += 1
        self.arena.write(block, pattern(block, self.count))
        self.blocks[block] = [1, pattern(block, self.count)]

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def retain(self, data):
        block = data.draw(st.sampled_from(list(self.blocks)))
        self.arena.retain(block)
        self.blocks[block][0] += 1

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def release(self, data):
        block = data.draw(st.sampled_from(list(self.blocks)))
        self.arena.release(block)
        self.blocks[block][0] -= 1
        if not self.blocks[block][0]:
            del self.blocks[block]

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), at=st.integers(0, 63))
    def view(self, data, at):
        block = data.draw(st.sampled_from(list(self.blocks)))
        array = self.arena.view(block, (block.nbytes - at,), at)
        self.arrays.append((array, self.blocks[block][1][at:]))

    @precondition(lambda self: self.arrays)
    @rule(data=st.data())
    def forget(self, data):
        self.arrays.pop(data.draw(st.integers(0, len(self.arrays) - 1)))

    @rule(data=st.data(), nbytes=st.integers(1, 5000))
    def trim(self, data, nbytes):
        seen = {array.base._block for array, _ in self.arrays}
        sole = [b for b, (references, _) in self.blocks.items() if references == 1 and b not in seen]
        if sole:
            block = data.draw(st.sampled_from(sole))
            kept = self.arena.trim(block, nbytes)
            self.blocks[kept] = [1, self.blocks.pop(block)[1][: kept.nbytes]]

    @invariant()
    def the_books_balance(self):
        self.arena.check_integrity()

    @invariant()
    def nothing_changes_under_its_holder(self):
        for array, content in self.arrays:
            assert (array == content).all()
        for block, (_, content) in self.blocks.items():
            assert (self.arena.window.array(block.offset, (block.nbytes,)) == content).all()

    def teardown(self):
        self.arrays.clear()
        for block, (references, _) in self.blocks.items():
            for _ in range(references):
                self.arena.release(block)
        assert self.arena.used == 0
        assert self.arena.largest_hole == self.arena.total


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
