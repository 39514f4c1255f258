"""Pixels that are lent: where they lie, and when their memory may be used again."""

import os

import numpy as np
import pytest

from mmserve.core.arena import Arena, ArenaFull, Window
from mmserve.processes.messages import Slot
from mmserve.processes.pixels import Borrowed, Loans

SHAPE = (1, 16, 16, 3)


@pytest.fixture
def arena():
    return Arena(1 << 16)


@pytest.fixture
def loans(arena):
    return Loans(arena)


@pytest.fixture
def borrowed(arena):
    return Borrowed(Window(os.dup(arena.fd), arena.total), lambda: None)


def picture(seed=0, shape=SHAPE):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def standing_in(arena, pixels):
    """A view of a block that nobody else holds."""
    block = arena.allocate(pixels.nbytes)
    arena.write(block, pixels.reshape(-1))
    view = arena.view(block, pixels.shape)
    arena.release(block)
    return view


def test_pixels_that_lie_in_the_arena_are_not_copied(arena, loans, borrowed):
    view = standing_in(arena, picture(1, (3, *SHAPE[1:])))
    used = arena.used
    slots = [loans.lend(view[i : i + 1]) for i in range(3)]
    assert arena.used == used
    for i, slot in enumerate(slots):
        assert (borrowed.array(slot) == view[i : i + 1]).all()


@pytest.mark.parametrize("strided", [False, True])
def test_other_pixels_are_copied_into_it_and_free_when_they_are_given_back(arena, loans, borrowed, strided):
    pixels = picture(2, (1, 16, 32, 3))[:, :, ::2] if strided else picture(2)
    slot = loans.lend(pixels)
    assert (borrowed.array(slot) == pixels).all()
    assert arena.used
    loans.give_back([slot.loan])
    assert (arena.used, len(loans)) == (0, 0)


def test_a_part_of_the_arena_that_is_no_single_piece_is_copied(arena, loans, borrowed):
    view = standing_in(arena, picture(3))
    assert (borrowed.array(loans.lend(view[:, ::2])) == view[:, ::2]).all()


def test_without_room_for_a_copy_nothing_is_lent(arena, loans):
    with pytest.raises(ArenaFull):
        loans.lend(picture(0, (1, 256, 256, 3)))
    assert (arena.used, len(loans)) == (0, 0)


def test_what_is_lent_keeps_its_memory(arena, loans):
    view = standing_in(arena, picture())
    slot = loans.lend(view)
    del view
    assert arena.used
    loans.keep_only([slot.loan])
    assert arena.used
    loans.keep_only([])
    assert arena.used == 0


def test_a_loan_ends_with_the_last_view_of_it(arena, borrowed):
    returned = []
    borrowed.returned = lambda: returned.append(True)
    array = borrowed.array(Slot(5, 64, (2, 4, 4, 3)))
    half = array[1]
    del array
    assert borrowed.take_returned() == ()
    assert borrowed.outstanding == {5}
    assert not returned
    del half
    assert returned
    assert borrowed.take_returned() == (5,)
    assert (borrowed.take_returned(), borrowed.outstanding) == ((), frozenset())


def test_a_tensor_made_of_it_keeps_a_loan(borrowed):
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(borrowed.array(Slot(5, 0, SHAPE)))
    assert borrowed.outstanding == {5}
    del tensor
    assert borrowed.take_returned() == (5,)


def test_borrowed_pixels_cannot_be_written_to(borrowed):
    with pytest.raises(ValueError, match="read-only"):
        borrowed.array(Slot(1, 0, SHAPE))[0] = 1


def test_a_place_outside_of_the_arena_is_refused_and_no_loan(arena, borrowed):
    with pytest.raises(ValueError, match="does not lie within"):
        borrowed.array(Slot(1, arena.total - 1, SHAPE))
    assert borrowed.outstanding == frozenset()
