"""What ``mmserve eval --live`` shows, in which windows it asks, and how it judges."""

import numpy as np
import pytest
from helpers.live_host import FakeHost

from mmserve.cli import main
from mmserve.commands.evaluate_live import (
    ALONE,
    DROPPED,
    PRUNED,
    REBASED,
    SIZES,
    UNDROPPED,
    WHOLE,
    WINDOWS,
    evaluate,
    judged,
    watch,
)
from mmserve.core.errors import MMServeError
from mmserve.core.messages import TextOutput, Usage, VideoPart
from mmserve.live.context import Context
from mmserve.live.session import LiveSession
from mmserve.live.window import Limits
from mmserve.models.tiny.reel import FPS, KINDS, SIDE, reel

CONDITIONS = {*WINDOWS, *PRUNED}


class FakeDesk:
    def __init__(self, spec, words, limits=None):
        self.spec, self.words = spec, words
        self.host = FakeHost(spec, limits=limits)
        self.host.words = words

    def with_positions(self, most):
        return FakeDesk(self.spec, self.words, Limits(tokens=4096, positions=most - most // 4))

    async def open(self, policy, *, sampling):
        seat = self.host.capacity.admit(policy)
        return LiveSession(self.host, policy, Context(self.host.writer), seat, sampling=sampling)


class FakeService:
    """Says ``words`` to whatever is asked, and takes note of what is sent."""

    def __init__(self, spec, words):
        self.words, self.chats = words, []
        self.live = FakeDesk(spec, words)

    async def generate(self, chat):
        self.chats.append(chat)
        yield TextOutput(
            request_id=chat.request_id, text="".join(self.words), finish_reason="stop", usage=Usage()
        )


@pytest.mark.parametrize("kind", KINDS)
def test_reels_are_the_same_for_the_same_seed(kind):
    one, again, other = (reel(kind, 3, seed) for seed in (1, 1, 2))
    for a, b in zip(one, again, strict=True):
        assert np.array_equal(a.frames, b.frames)
        assert a.turns == b.turns
        assert (a.fps, a.turns[0].task) == (FPS, kind)
        assert a.frames.shape[1:] == (SIDE, SIDE, 3)
        assert len({frame.tobytes() for frame in a.frames}) == len(a.frames), "no two frames are alike"
    assert not np.array_equal(one[0].frames[0], other[0].frames[0])


def test_what_was_before_cannot_be_told_from_the_last_frame():
    for shot in reel("before", 20, 0):
        (turn,) = shot.turns
        first, last = shot.frames[0].astype(int), shot.frames[-1].astype(int)
        assert np.abs(first - last).max() > 30
        assert turn.answer.startswith("It changes from") or not _shows_something(last), turn.answer


def _shows_something(frame):
    """Whether the middle of a picture differs from its corners by more than a pattern and noise."""
    middle, corner = frame[48:80, 48:80].mean((0, 1)), frame[:24, :24].mean((0, 1))
    return np.abs(middle - corner).max() > 45


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_is_right_word_for_word_in_every_condition_or_wrong(spec, kind):
    (turn,) = reel(kind, SIZES[kind].shots, 3)[-1].turns
    for said, right in ((turn.answer, True), ("A violet cube.", False)):
        results = await judged(FakeService(spec, [said]), kind, 3, {})
        assert [result.condition for result in results if result.condition in WINDOWS] == list(WINDOWS)
        assert {result.condition for result in results} == CONDITIONS
        assert {(r.right, r.task, r.said, r.wanted) for r in results} == {(right, kind, said, turn.answer)}


@pytest.mark.parametrize("kind", KINDS)
async def test_windows_are_whole_dropped_and_moved_back_as_they_are_called(spec, kind):
    figures = {}
    service = FakeService(spec, ["It moves up."])
    shots = reel(kind, SIZES[kind].shots, 5)
    await judged(service, kind, 5, figures)
    spent = {name: sessions[0] for name, sessions in figures.items()}
    assert spent[UNDROPPED]["drops"] == spent[ALONE]["drops"] == 0
    assert spent[UNDROPPED]["context_frames"] == sum(len(shot.frames) for shot in shots)
    assert spent[DROPPED]["drops"] >= 3
    assert spent[DROPPED]["rebases"] == 0
    assert spent[REBASED]["rebases"] >= 1
    for name in (DROPPED, REBASED):
        assert len(shots[-1].frames) <= spent[name]["context_frames"] <= SIZES[kind].window, "it is all there"


async def test_as_many_reels_of_each_kind_are_asked_about_as_are_wanted(spec):
    results, rows = await evaluate(FakeService(spec, ["Two."]), 2, 7)
    assert {(r.task, r.condition) for r in results} == {(kind, row) for kind in KINDS for row in CONDITIONS}
    assert len(results) == 2 * len(KINDS) * len(CONDITIONS)
    again, _ = await evaluate(FakeService(spec, ["Two."]), 2, 7)
    other, _ = await evaluate(FakeService(spec, ["Two."]), 2, 8)
    assert [r.wanted for r in again] == [r.wanted for r in results] != [r.wanted for r in other]
    assert {row["condition"] for row in rows} == CONDITIONS
    assert {row["asked"] for row in rows} == {2 * len(KINDS)}


def test_how_many_questions_is_said_in_one_way(capsys):
    assert main(["eval", "--live", "1", "--limit", "3"]) == 2
    assert "limit" in capsys.readouterr().err


async def test_the_window_is_sent_again_as_it_stands(spec):
    service = FakeService(spec, ["Two."])
    shots = reel("count", 8, 5)
    watched = await watch(service.live, shots, {"window_items": 4, "memory": 1})
    *before, last = watched.window
    assert [turn.role for turn in before] == ["user", "assistant"] * (len(before) // 2)
    assert before[-1].content[0].text == "Two."
    assert last.content[-1].text == shots[-1].turns[0].question
    clips = [part for turn in watched.window for part in turn.content if isinstance(part, VideoPart)]
    assert len(clips) == watched.stats["context_frames"]
    seen = [frame for shot in shots for frame in shot.frames][-len(clips) :]
    for clip, frame in zip(clips, seen, strict=True):
        assert np.array_equal(clip.frames[0], frame)
    times = [clip.timestamps[0] for clip in clips]
    assert np.diff(times) == pytest.approx(1 / FPS)


async def test_what_was_there_before_is_left_out_of_sessions_and_clips(spec):
    """As far as each of them allows; of stills that hardly change, most."""
    figures = {}
    service = FakeService(spec, ["Two."])
    await judged(service, "name", 5, figures)
    left_out = [figures[f"session, {rate}"][0]["pruned_tokens"] for rate in ("0", "0.5", "0.9")]
    assert left_out[0] == 0 < left_out[1] < left_out[2]
    rates = [part.video_pruning_rate for chat in service.chats[-3:] for part in chat.messages[0].content[:1]]
    assert rates == [0.0, 0.5, 0.9]


async def test_a_frame_that_is_not_kept_ends_the_evaluation(spec, monkeypatch):
    desk = FakeDesk(spec, ["Two."])

    async def see(part):
        raise MMServeError("there is no room")

    monkeypatch.setattr(desk.host, "see", see)
    with pytest.raises(MMServeError, match="not kept"):
        await watch(desk, reel("count", 1, 0), WHOLE)
