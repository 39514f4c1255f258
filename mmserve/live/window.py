"""What a session forgets, and when: in bulk, so that it is seldom."""

from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile
from math import floor

from msgspec import Struct

from mmserve.live.policy import SessionPolicy
from mmserve.live.trunk import Segment

MOST_TOLD = 64  # turns that were told


class Limits(Struct, frozen=True):
    """What the model and the engine can hold: ``tokens`` of a prompt, and ``positions`` in it. Room for a
    question and its answer is not counted."""

    tokens: int
    positions: int


class Plan(Struct, frozen=True):
    """Segments to drop, by number, and whether to move the survivors back."""

    drop: frozenset[int] = frozenset()
    rebase: bool = False

    def __bool__(self) -> bool:
        return bool(self.drop) or self.rebase


class Window:
    """Keeps the head, the last frames, and the last of what was said, each within its bound.

        frames kept  ^        /|    /|    /|   window_items (or window_s)
                     |   ____/ |___/ |___/     retention of that
                     +-------------------> frames seen

    When a bound is passed, its oldest go until ``retention`` of it is left; at least the newest stays. An
    answer goes together with what was asked and told before it. Tokens and positions are bounded alike, over
    segments of all kinds: near the last position, survivors are moved back to where the head ends, and what
    stands so far before the others that this does not help, goes.

    Of pruned frames each goes on from those before it, back to a *key frame*, which is whole:

        K p p p p K p p p p K p p        a drop cuts before a K, where the bounds allow that, and takes the
                 ^                       rest of the p otherwise; the newest stays

    The bounds do allow it if a frame is whole whenever ``wants_key`` says so.
    """

    def __init__(self, policy: SessionPolicy, limits: Limits) -> None:
        self.policy = policy
        self.limits = limits

    def plan(self, segments: Sequence[Segment], next_position: int) -> Plan:
        """What to do about ``segments``, the head first, behind which position ``next_position`` is next."""
        head, *rest = segments
        drop = {s.number for s in self._out_of_time(rest)} | {s.number for s in self._too_many(rest)}
        rest = [s for s in rest if s.number not in drop]
        gone = self._over(rest, [len(s) for s in rest], self.limits.tokens - len(head))
        drop |= {s.number for s in gone}
        drop = self._chains(segments[1:], drop, self.limits.tokens - len(head))
        if next_position <= self.limits.positions:
            return Plan(frozenset(drop))
        rest = _without(segments[1:], drop)
        ends = [*(s.position for s in rest[1:]), next_position]
        spans = [end - s.position for s, end in zip(rest, ends, strict=False)]
        gone = self._over(rest, spans, self.limits.positions - len(head))
        drop |= {s.number for s in (*gone, *_keyless(rest[len(gone) :]))}
        return Plan(frozenset(drop), rebase=True)

    def wants_key(self, segments: Sequence[Segment], at: float) -> bool:
        """Whether the next frame, of second ``at``, is to be whole: there is none to go on from, or as much
        has come since the last that was as a drop takes."""
        head, *rest = segments
        frames = [s for s in rest if s.kind == "frame"]
        key = next((i for i in reversed(range(len(frames))) if frames[i].key), None)
        if key is None:
            return True
        policy, share = self.policy, 1.0 - self.policy.retention
        taken = policy.window_items + 1 - self._left(policy.window_items)
        too_long = policy.window_s is not None and at - _time(frames[key]) > policy.window_s * share
        tokens = segments[-1].stop - frames[key].start
        return len(frames) - key >= taken or too_long or tokens > (self.limits.tokens - len(head)) * share

    def _chains(self, rest: Sequence[Segment], drop: set[int], tokens: int) -> set[int]:
        """``drop``, less the frames from which the oldest that is left goes on, if they fit; else more the
        frames that have none to go on from."""
        frames = [s for s in rest if s.kind == "frame"]
        first = next((i for i, s in enumerate(frames) if s.number not in drop), None)
        if first is None or frames[first].key:
            return drop
        key = next((i for i in reversed(range(first)) if frames[i].key), None)
        if key is not None:
            less = drop - {s.number for s in frames[key:first]}
            if self._fits(_without(rest, less), tokens):
                return less
        return drop | {s.number for s in _keyless(_without(rest, drop))}

    def _fits(self, rest: Sequence[Segment], tokens: int) -> bool:
        beyond = [*self._out_of_time(rest), *self._too_many(rest)]
        return not beyond and sum(map(len, rest)) <= tokens

    def _out_of_time(self, rest: Sequence[Segment]) -> Iterable[Segment]:
        """Frames beyond ``window_s``, counted from the newest."""
        frames = [s for s in rest if s.kind == "frame"]
        window = self.policy.window_s
        if window is None or not frames or _time(frames[-1]) - _time(frames[0]) <= window:
            return ()
        oldest = _time(frames[-1]) - window * self.policy.retention
        return [s for s in frames[:-1] if _time(s) < oldest]

    def _too_many(self, rest: Sequence[Segment]) -> Iterable[Segment]:
        for kind, bound in (("frame", self.policy.window_items), ("told", MOST_TOLD)):
            found = [s for s in rest if s.kind == kind]
            if len(found) > bound:
                yield from found[: len(found) - self._left(bound)]
        turns = sorted({s.turn for s in rest if s.turn is not None})
        if len(turns) > self.policy.memory:
            gone = set(turns[: len(turns) - self._left(self.policy.memory)])
            yield from (s for s in rest if s.turn in gone)

    def _over(self, rest: Sequence[Segment], sizes: Sequence[int], bound: int) -> Sequence[Segment]:
        """The oldest of ``rest``, if all are more than ``bound`` together."""
        total = sum(sizes)
        if total <= bound:
            return ()
        count = 0
        while count < len(rest) - 1 and total > bound * self.policy.retention:
            total -= sizes[count]
            count += 1
        return rest[:count]

    def _left(self, bound: int) -> int:
        return min(bound, max(1, floor(bound * self.policy.retention)))


def _without(segments: Sequence[Segment], numbers: Collection[int]) -> list[Segment]:
    return [s for s in segments if s.number not in numbers]


def _keyless(segments: Sequence[Segment]) -> list[Segment]:
    """Frames before the first key frame; where there is none, all but the newest."""
    frames = [s for s in segments if s.kind == "frame"]
    before = list(takewhile(lambda s: not s.key, frames))
    return before[:-1] if len(before) == len(frames) else before


def _time(segment: Segment) -> float:
    return segment.at or 0.0
