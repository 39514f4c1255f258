"""A context that grows and shrinks is at every moment what would have been laid out at once."""

import copy

import numpy as np
import pytest
from helpers.live_host import scene
from helpers.media_files import picture_file
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.core.config import MediaOptions
from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import ChatInput, ImagePart, Message, SamplingParams, TextPart, VideoPart
from mmserve.live.chat_text import ChatText
from mmserve.live.context import Context, told
from mmserve.live.policy import SessionPolicy
from mmserve.live.window import Limits, Window
from mmserve.preprocess.processor import Processor


@pytest.fixture(scope="module")
def processor(spec):
    return Processor(spec, MediaOptions())


def shown(processor, place, at):
    """A frame as (part, medium)."""
    part = VideoPart(pictures=(picture_file(scene(place)),), timestamps=(at,))
    return part, processor.see(part)


def still(processor, place):
    part = ImagePart(data=picture_file(scene(place, (64, 64))))
    return part, processor.see(part)


class Script:
    """A context, and beside it the messages that say the same."""

    def __init__(self, processor, instructions="Look at two pictures"):
        self.processor = processor
        self.context = Context(processor.writer, instructions)
        self.messages = [("system", [TextPart(instructions)])]
        self.media = []
        self.time = 0.0
        self.open = None

    def turn(self, role, parts, media=()):
        if self.messages[-1][0] != role:
            self.messages.append((role, []))
        self.messages[-1][1].extend(parts)
        self.media.extend(media)

    def frame(self, place):
        self.time += 1.0
        part, medium = shown(self.processor, place, self.time)
        self.context.add_frame(part, medium, self.time)
        self.turn("user", [part], [medium])

    def exchange(self, asked, answer):
        self.context.close_turn()
        question = self.context.question((TextPart(asked),))
        self.context.remember(question, self.processor.writer.text.encode_literal(answer))
        self.turn("user", [TextPart(asked)])
        self.messages.append(("assistant", [TextPart(answer)]))

    def tell(self, asked, place=None):
        media = [] if place is None else [still(self.processor, place)]
        parts = [TextPart(asked), *(part for part, _ in media)]
        self.context.tell("user", parts, media)
        self.turn("user", parts, [medium for _, medium in media])

    def at_once(self, question="what"):
        """What ``Writer`` makes of the whole conversation with a question at its end."""
        messages = copy.deepcopy(self.messages)
        if messages[-1][0] != "user":
            messages.append(("user", []))
        messages[-1][1].append(TextPart(question))
        chat = ChatInput(
            request_id="r",
            messages=tuple(Message(role, tuple(parts)) for role, parts in messages),
            sampling=SamplingParams(),
        )
        return self.processor.assemble(chat, self.media).request

    def branch(self, question="what"):
        asked = self.context.question((TextPart(question),))
        return self.context.trunk.request("r", asked.stretch)


def assert_equal(ours, theirs):
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    assert ours.radix_keys.tolist() == theirs.radix_keys.tolist()
    assert ours.positions.tolist() == theirs.positions.tolist()
    assert ours.position_delta == theirs.position_delta
    assert [(i.digest, i.span, i.kind) for i in ours.items] == [
        (i.digest, i.span, i.kind) for i in theirs.items
    ]


# Words that come out as the same tokens wherever a turn is cut: one of a turn's texts never follows another.
WORDS = st.sampled_from(["Hello world", "which one is larger", "describe the picture"])
STEPS = st.lists(
    st.tuples(st.just("frame"), st.integers(0, 8))
    | st.tuples(st.just("exchange"), WORDS, WORDS)
    | st.tuples(st.just("picture"), st.integers(0, 8)),
    max_size=7,
)


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_a_trunk_with_a_question_is_the_conversation_laid_out_at_once(processor, steps):
    script = Script(processor)
    for step in steps:
        match step:
            case ("frame", place):
                script.frame(place)
            case ("exchange", asked, answer):
                script.exchange(asked, answer)
            case ("picture", place):
                media = still(processor, place)
                script.context.tell("user", [media[0]], [media])
                script.turn("user", [media[0]], [media[1]])
    assert_equal(script.branch(), script.at_once())


def test_what_was_told_is_answered_without_a_question(processor):
    script = Script(processor)
    script.frame(1)
    script.tell("what")
    asked = script.context.question(())
    ours = script.context.trunk.request("r", asked.stretch)
    script.messages[-1][1].pop()
    assert_equal(ours, script.at_once("what"))


def test_a_warm_request_is_the_trunk_alone_and_stays_as_it_was(processor):
    script = Script(processor)
    script.frame(1)
    warm = script.context.trunk.request("w")
    before = warm.token_ids.tolist(), warm.positions.tolist()
    assert warm.warm
    assert warm.num_tokens == len(script.context.trunk)
    for place in range(30):
        script.frame(place)
    script.context.trunk.drop({2, 3})
    assert (warm.token_ids.tolist(), warm.positions.tolist()) == before
    with pytest.raises(ValueError, match="read-only"):
        warm.token_ids[0] = 1


OPERATIONS = st.lists(
    st.tuples(st.just("frame"), st.integers(0, 8))
    | st.tuples(st.just("exchange"), WORDS, WORDS)
    | st.tuples(st.just("drop"), st.sets(st.integers(1, 12)))
    | st.tuples(st.just("rebase"), st.none()),
    max_size=16,
)


@settings(max_examples=40, deadline=None)
@given(OPERATIONS)
def test_whatever_is_dropped_arrays_agree_and_positions_rise(processor, operations):
    script = Script(processor)
    trunk = script.context.trunk
    for operation in operations:
        kind, *values = operation
        before = {s.number: _content(trunk, s) for s in trunk.segments}
        keys, positions, salt, epoch = trunk.keys, _positions(trunk), trunk.salt, trunk.epoch
        order = None
        if kind == "frame":
            script.frame(values[0])
        elif kind == "exchange":
            script.exchange(*values)
        else:
            known = {s.number for s in trunk.segments[1:]}
            order = trunk.drop(known & values[0]) if kind == "drop" else trunk.rebase()
        if order is not None:
            _check_order(order, trunk, keys, positions, salt)
            assert trunk.epoch == epoch + 1
        elif kind == "drop":
            assert trunk.salt == salt
        _check(trunk, before)


def _content(trunk, segment):
    warm = trunk.request("x")
    return warm.radix_keys[segment.start : segment.stop].tolist()


def _positions(trunk):
    return trunk.request("x").positions.copy()


def _check(trunk, before):
    warm = trunk.request("x")
    assert [s.start for s in trunk.segments] == [0, *(s.stop for s in trunk.segments[:-1])]
    assert trunk.segments[-1].stop == warm.num_tokens == len(warm.radix_keys) == warm.positions.shape[1]
    for segment in trunk.segments:
        content = _content(trunk, segment)
        earlier = before.get(segment.number)
        assert earlier is None or content[: len(earlier)] == earlier, "a survivor changed"
        assert warm.positions[:, segment.start :].min(initial=segment.position) >= segment.position
    time_axis = warm.positions[0]
    assert np.all(np.diff(time_axis) >= 0), "time runs backwards"
    assert warm.positions.max() < trunk.next_position
    assert warm.position_delta == trunk.next_position - warm.num_tokens
    for item in warm.items:
        assert np.all(warm.token_ids[item.span[0] : item.span[1]] == warm.token_ids[item.span[0]])


def _check_order(order, trunk, keys, positions, salt):
    kept = np.concatenate([np.arange(a, b) for a, b in order.kept])
    assert np.all(np.diff(kept) > 0)
    assert order.keys.tolist() == keys.tolist()
    assert order.keys[kept].tolist() == trunk.keys.tolist()
    assert (order.salt, order.new_salt) == (salt, trunk.salt)
    assert order.new_salt != order.salt
    moved = positions[:, kept].copy()
    head = sum(b - a for a, b in order.kept[: order.head])
    moved[:, head:] -= order.shift if order.shift else 0
    assert moved.tolist() == _positions(trunk).tolist()


def test_a_drop_keeps_positions_and_a_rebase_closes_the_gap(processor):
    script = Script(processor)
    for place in range(4):
        script.frame(place)
    trunk = script.context.trunk
    behind, positions = trunk.segments[1].position, [s.position for s in trunk.segments]
    order = trunk.drop({1, 2})
    assert [s.position for s in trunk.segments] == [positions[0], *positions[3:]]
    assert order.shift == 0
    order = trunk.rebase()
    assert order.shift == positions[3] - behind
    assert order.head == 1
    assert trunk.segments[1].position == behind
    assert trunk.rebase() is None


def test_dropping_the_last_turn_opens_the_users_again(processor):
    script = Script(processor)
    script.frame(1)
    script.exchange("Hello", "world")
    assert script.context.trunk.role == "assistant"
    script.context.trunk.drop({s.number for s in script.context.trunk.segments if s.kind == "exchange"})
    assert script.context.trunk.role == "user"


def test_secrets_differ_so_nobody_finds_another_s_epochs(processor):
    salts = set()
    for _ in range(2):
        script = Script(processor)
        script.frame(1)
        script.frame(2)
        assert script.context.trunk.salt is None
        salts.add(script.context.trunk.drop({1}).new_salt)
    assert len(salts) == 2


def test_other_instructions_lay_the_same_turns_out_anew(processor):
    script, other = Script(processor), Script(processor, "Describe the picture in red")
    for one in (script, other):
        one.frame(1)
        one.exchange("Hello", "world")
        one.frame(2)
    script.context.trunk.drop({1})
    other_drop = {s.number for s in other.context.trunk.segments[1:2]}
    rewritten = script.context.rewritten("Describe the picture in red", None)
    assert rewritten.trunk.salt is None
    other.context.trunk.drop(other_drop, rebase=True)
    ours, theirs = rewritten.trunk.request("x"), other.context.trunk.request("x")
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    assert ours.positions.tolist() == theirs.positions.tolist()


def test_pixels_are_held_until_the_engine_has_them_and_can_be_made_again(processor):
    script = Script(processor)
    script.frame(1)
    script.frame(2)
    trunk = script.context.trunk
    assert all(item.pixels is not None for item in trunk.items())
    trunk.forget_pixels(1)
    assert [item.pixels is None for item in trunk.items()] == [True, False]
    parts = [source.part for source in trunk.sources()]
    assert [processor.see(part).digests for part in parts] == [source.digests for source in trunk.sources()]


def test_raw_frames_are_kept_as_what_became_of_them_if_that_is_less(processor):
    context = Context(processor.writer)
    large = np.repeat(np.repeat(scene(1), 8, 0), 8, 1)
    part = VideoPart(frames=large[None], timestamps=(0.0,), max_pixels=64 * 64)
    context.add_frame(part, processor.see(part), 0.0)
    (source,) = context.trunk.sources()
    assert source.part is None
    assert source.nbytes < large.nbytes // 4


def test_context_is_constant_over_many_windows(processor):
    script = Script(processor)
    window = Window(SessionPolicy(window_items=6), Limits(tokens=4000, positions=400))
    sizes, highest, epochs = [], 0, 0
    part, medium = shown(processor, 1, 0.0)
    for i in range(200):
        script.context.add_frame(part, medium, float(i))
        epochs += script.context.fit(window) is not None
        sizes.append(len(script.context.trunk))
        highest = max(highest, script.context.trunk.next_position)
    assert max(sizes[100:]) == max(sizes[:20])
    assert highest <= 400 + 40
    assert epochs > 20


# ---------------------------------------------------------------- how turns are written


def test_turns_are_written_as_the_template_does(processor):
    text = ChatText(processor.writer, "Look")
    decode = processor.writer.text.decode
    assert decode(text.head, skip_special_tokens=False) == (
        "<|im_start|>system\nLook<|im_end|>\n<|im_start|>user\n"
    )
    answer = decode(text.joint("user", None), skip_special_tokens=False)
    assert answer == "<|im_end|>\n<|im_start|>assistant\n"
    assert (
        decode(text.joint("assistant", "user"), skip_special_tokens=False) == "<|im_end|>\n<|im_start|>user\n"
    )
    assert (
        decode(text.joint("assistant", "tool"), skip_special_tokens=False) == "<|im_end|>\n<|im_start|>tool\n"
    )


def test_reserved_tokens_in_words_stay_words(processor):
    text = ChatText(processor.writer, "be <|im_end|> good")
    reserved = processor.writer.text.encode("<|im_end|>")
    assert len(reserved) == 1
    assert text.head.count(reserved[0]) == 1
    assert reserved[0] not in text.literal("say <|im_end|>")


def test_a_tool_s_result_follows_the_call_and_its_answer_that(processor):
    context = Context(processor.writer)
    question = context.question((TextPart("what"),))
    context.remember(question, processor.writer.text.encode_literal("a call"))
    context.tell("tool", (TextPart("12"),))
    assert context.trunk.role == "tool"
    context.remember(context.question(()), processor.writer.text.encode_literal("it is 12"))
    assert [s.kind for s in context.trunk.segments] == ["head", "exchange"]
    text = processor.writer.text.decode(context.trunk.request("x").token_ids, skip_special_tokens=False)
    assert text.endswith(
        "user\nwhat<|im_end|>\n<|im_start|>assistant\na call<|im_end|>\n<|im_start|>tool\n12<|im_end|>\n"
        "<|im_start|>assistant\nit is 12"
    )


def test_what_cannot_stand_in_a_session_is_refused_by_name(processor):
    with pytest.raises(InvalidRequest, match="role must be one of user, assistant, tool"):
        told(Message("system", (TextPart("x"),)))
    with pytest.raises(InvalidRequest, match="clip"):
        told(Message("user", (VideoPart(data=b"x"),)))
    context = Context(processor.writer)
    context.remember(context.question((TextPart("what"),)), [1])
    with pytest.raises(InvalidRequest, match="nothing was asked"):
        context.question(())
