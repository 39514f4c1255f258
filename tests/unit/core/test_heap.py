"""Processes that serve collect what they make, and no more what they loaded."""

import gc
import weakref

from mmserve.core.heap import settle


class Node:
    pass


def loop():
    """Of a cycle, which only a collection finds."""
    node = Node()
    node.itself = node
    return weakref.ref(node)


def test_what_lives_is_left_out_and_what_comes_is_collected():
    try:
        dead = loop()
        settle()
        assert dead() is None, "garbage is not kept for ever"
        assert gc.get_freeze_count() > 10_000
        later = loop()
        gc.collect()
        assert later() is None
    finally:
        gc.unfreeze()
