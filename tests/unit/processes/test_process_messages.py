"""Whatever the processes say to each other arrives as it was said."""

import math

import numpy as np
import pytest
from helpers.process_line import request
from helpers.tiny_folder import write_folder
from msgspec import structs

from mmserve.answer import Brief, Said
from mmserve.core.config import Config
from mmserve.core.errors import MediaError
from mmserve.core.messages import (
    CarryOver,
    Grammar,
    PixelsWanted,
    SamplingParams,
    TextLogprob,
    TextOutput,
    Timings,
    TokenLogprob,
    TokenOutput,
    Usage,
)
from mmserve.core.thinking import Thinking
from mmserve.core.wire import Fault
from mmserve.preprocess.spec import ProcessorSpec
from mmserve.processes import messages
from mmserve.processes.messages import (
    Abort,
    Alive,
    Carried,
    Carry,
    Closed,
    DetokenizerHello,
    EngineHello,
    Failed,
    News,
    NotReady,
    Opened,
    Output,
    Ready,
    Slot,
    Speak,
    Step,
    Submit,
    Supply,
    Text,
    Told,
    Wanted,
    to_bytes,
)

DIGEST = bytes(range(32))
FAULT = Fault.of(MediaError("broken", param="messages[0]"))
TOKEN_OUTPUT = TokenOutput(
    request_id="r",
    token_ids=(5, 7),
    logprobs=(TokenLogprob(5, -0.5, ((5, -0.5), (9, -math.inf))), TokenLogprob(7, -1.0)),
    finish_reason="stop",
    error="no",
    prompt_tokens=3,
    cached_tokens=2,
    timings=Timings(1.0, 2.0, None, 3.0),
)
TEXT_OUTPUT = TextOutput(
    request_id="r",
    text="é",
    token_ids=(5,),
    logprobs=(TextLogprob(b"\xc3", -0.5, ((b"\xc3", -0.5),)),),
    finish_reason="length",
    usage=Usage(1, 2, 3),
    timings=Timings(1.0),
)
SAMPLING = SamplingParams(
    logit_bias={3: -1.5}, seed=2**63, stop_token_ids=(4,), grammar=Grammar("regex", "a+", "p"), logprobs=2
)
THINKING = Thinking(1, 2, (3, 2), (4,), True, 9)
NEWS = News(
    {"running": 1, "seconds": 0.5}, (DIGEST,), (bytes(32),), (4, 5), frozenset({DIGEST}), frozenset({4})
)


@pytest.mark.parametrize(
    "message", [Supply(1, ((DIGEST, Slot(2, 64, (1, 2, 2, 3))),)), Abort(3), Speak("ipc://x")]
)
def test_what_the_engine_is_told(message):
    assert messages.to_engine(to_bytes(message)) == message


def test_an_order_to_carry_over_arrives_whole():
    order = CarryOver(keys=np.array([1, 2**62 + 5]), kept=((0, 1),), new_salt="b", salt="a", shift=9, head=1)
    came = messages.to_engine(to_bytes(Carry(3, order)))
    assert (came.ticket, came.order.keys.dtype, came.order.keys.tolist()) == (3, np.int64, [1, 2**62 + 5])
    assert structs.replace(came.order, keys=None) == structs.replace(order, keys=None)


def test_a_request_arrives_whole_but_for_its_pixels_which_stand_in_the_arena():
    pixels = np.ones((1, 2, 2, 3), np.uint8)
    ours = structs.replace(request("r", pixels, None), sampling=SAMPLING, thinking=THINKING, stop=("x",))
    slots = (Slot(1, 0, pixels.shape), None)
    came = messages.to_engine(to_bytes(Submit(7, messages.bare(ours), slots)))
    assert (came.ticket, came.slots) == (7, slots)
    theirs = messages.clothed(came.request, (pixels, None))
    for field in ours.__struct_fields__:
        one, other = getattr(ours, field), getattr(theirs, field)
        if isinstance(one, np.ndarray):
            assert (one.dtype, one.tolist()) == (other.dtype, other.tolist()), field
        elif field == "items":
            assert [structs.replace(i, pixels=None) for i in one] == [
                structs.replace(i, pixels=None) for i in other
            ]
            assert [i.pixels is None for i in other] == [False, True]
        else:
            assert one == other, field


def test_the_kept_cells_of_an_item_arrive():
    kept = np.array([2, 5], np.int32)
    ours = request("r", None)
    ours = structs.replace(ours, items=(structs.replace(ours.items[0], kept=kept),))
    came = messages.to_engine(to_bytes(Submit(7, messages.bare(ours), (None,)))).request
    assert (came.items[0].kept.dtype, came.items[0].kept.tolist()) == (np.int32, [2, 5])


def test_what_the_engine_says():
    events = [
        Opened(1, Brief("r", SAMPLING, ("x", "y"), THINKING)),
        Output(1, TOKEN_OUTPUT),
        Wanted(2, PixelsWanted("q", frozenset({DIGEST}))),
        Failed(3, FAULT),
        Closed(4),
        Carried(5, 7),
        Carried(6, fault=FAULT),
    ]
    for news in (None, NEWS):
        assert messages.to_step(to_bytes(Step(events, news))) == Step(events, news)


def test_what_the_detokenizer_tells():
    events = [
        Text(1, Said(1, Timings(1.0), TEXT_OUTPUT, early=True)),
        Text(1, Said(1)),
        Wanted(2, PixelsWanted("q", frozenset({DIGEST}))),
        Failed(3, FAULT),
        Carried(5, 7),
        Carried(6, fault=FAULT),
    ]
    for news in (None, NEWS):
        assert messages.to_told(to_bytes(Told(events, news))) == Told(events, news)


@pytest.mark.parametrize("message", [Ready(("one", "two")), NotReady(FAULT), Alive(0.5)])
def test_what_a_child_tells_its_parent(message):
    assert messages.from_child(to_bytes(message)) == message


def test_a_child_learns_all_it_needs(tmp_path):
    spec = ProcessorSpec.load(write_folder(tmp_path))
    config = Config.of(kv_cache_mib=7, api_key="k", threads=3)
    for hello in (
        EngineHello(config, spec.eos_ids, spec.tokenizer_json, 1 << 20, "ipc:///tmp/x/engine"),
        DetokenizerHello(spec.tokenizer_json, "ipc:///tmp/x/d", "ipc:///tmp/x/api"),
    ):
        assert messages.to_hello(to_bytes(hello)) == hello


def test_figures_may_be_numbers_of_numpy():
    step = messages.to_step(to_bytes(Step([], News({"a": np.int64(3), "b": np.float32(0.5)}))))
    assert step.news.stats == {"a": 3, "b": 0.5}


def test_the_brief_of_a_request_leaves_out_what_is_large():
    brief = Brief.of(structs.replace(request("r", stop=("x",)), sampling=SAMPLING, thinking=THINKING))
    assert (brief.request_id, brief.stop, brief.thinking) == ("r", ("x",), THINKING)
    assert (brief.sampling.grammar, brief.sampling.logit_bias, brief.sampling.logprobs) == (None, {}, 2)
