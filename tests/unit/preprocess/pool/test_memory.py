"""Who may take memory: whoever waits holds nothing, so nobody waits for ever."""

import pytest

from mmserve.core.arena import Arena
from mmserve.core.errors import MediaError, Overloaded
from mmserve.preprocess.pool.memory import NoRoom, PixelMemory

MIB = 1 << 20


@pytest.fixture
def memory():
    return PixelMemory(Arena(16 * MIB))


def test_beginners_wait_from_three_quarters_on_and_holders_go_on(memory):
    block = memory.take("a", 12 * MIB)
    memory.hold("a", 12 * MIB)
    assert memory.may_begin("b", MIB)
    more = memory.take("a", MIB)
    assert not memory.may_begin("b", MIB)
    assert memory.may_begin("a", MIB)
    memory.arena.release(more)
    assert memory.may_begin("b", MIB)
    memory.forget("a")
    memory.take("c", 2 * MIB)
    assert not memory.may_begin("a", MIB)
    memory.arena.release(block)


def test_what_is_known_not_to_fit_does_not_begin(memory):
    memory.take("a", 8 * MIB)
    assert memory.may_begin("b", 8 * MIB)
    assert not memory.may_begin("b", 9 * MIB)
    assert memory.may_begin("b", 17 * MIB), "it must not wait for what can never be"


def test_without_room_a_beginner_may_wait_and_a_holder_is_refused(memory):
    memory.take("a", 2 * MIB)
    memory.hold("a", 2 * MIB)
    memory.take("other", 8 * MIB)
    with pytest.raises(NoRoom):
        memory.take("b", 7 * MIB)
    with pytest.raises(Overloaded, match="10 of 16 MiB"):
        memory.take("a", 7 * MIB)


def test_what_can_never_fit_is_the_item_s_own_fault(memory):
    for beside in (0, 10 * MIB):
        with pytest.raises(MediaError, match=r"17 MiB .* at most 16 .*arena_mib"):
            memory.take("a", 17 * MIB - beside, beside)


def test_a_request_that_can_never_fit_as_a_whole_is_told_so(memory):
    memory.take("a", 10 * MIB)
    memory.hold("a", 10 * MIB)
    with pytest.raises(MediaError, match=r"7 MiB .* beside 10 MiB .* at most 16 .*arena_mib"):
        memory.take("a", 7 * MIB)
