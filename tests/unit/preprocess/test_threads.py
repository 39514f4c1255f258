"""Preprocessing on threads of this process, and the rules that every form of workers keeps."""

import asyncio
import threading

import numpy as np
import pytest
from helpers.media_files import picture_file

from mmserve.core.errors import MediaError, Overloaded
from mmserve.core.messages import ChatInput, ImagePart, Message, SamplingParams, TextPart
from mmserve.preprocess.threads import ThreadWorkers
from mmserve.preprocess.workers import prepare


def chat(*parts, name="r"):
    return ChatInput(request_id=name, messages=(Message("user", parts),), sampling=SamplingParams())


def picture(seed):
    return picture_file(np.random.default_rng(seed).integers(0, 256, (64, 64, 3), np.uint8))


def pictures(*seeds, name="r"):
    return chat(*[ImagePart(data=picture(seed)) for seed in seeds], name=name)


@pytest.fixture
async def workers(processor):
    workers = ThreadWorkers(processor, max_preparing=4)
    yield workers
    await workers.close()


@pytest.fixture
def ask(workers, processor):
    return lambda asked: prepare(workers, asked, processor.parts(asked))


async def test_answers_as_the_processor_does(ask, processor):
    asked = chat(*[ImagePart(data=picture(i)) for i in range(4)], TextPart("x"))
    ours, plain = await ask(asked), processor.prepare(asked)
    assert ours.request.token_ids.tolist() == plain.request.token_ids.tolist()
    assert [i.digest for i in ours.request.items] == [i.digest for i in plain.request.items]


async def test_items_of_one_request_use_all_threads(ask, processor, monkeypatch):
    both = threading.Barrier(2, timeout=5)
    see = processor.see

    def together(part):
        both.wait()
        return see(part)

    monkeypatch.setattr(processor, "see", together)
    await ask(pictures(1, 2))


async def test_one_bad_picture_costs_nobody_else(ask, workers):
    bad = ask(chat(ImagePart(data=b"junk", param="p"), ImagePart(data=picture(1)), name="bad"))
    good = [ask(pictures(i, name=f"good {i}")) for i in range(3)]
    answers = await asyncio.gather(bad, *good, return_exceptions=True)
    assert isinstance(answers[0], MediaError)
    assert answers[0].param == "p"
    assert all(a.request.items for a in answers[1:])
    assert workers.stats()["preparing"] == 0


async def test_requests_are_bounded_and_cancelling_gives_the_place_back(ask, workers, processor, monkeypatch):
    gate = threading.Event()
    see = processor.see

    def slow(part):
        gate.wait(5)
        return see(part)

    monkeypatch.setattr(processor, "see", slow)
    tasks = [asyncio.create_task(ask(pictures(i, i, name=f"{i}"))) for i in range(4)]
    while workers.stats()["preparing"] < 4:
        await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="4 requests") as caught:
        await ask(chat(TextPart("x"), name="one more"))
    assert caught.value.status == 503
    for task in tasks[1:]:
        task.cancel()
    await asyncio.gather(*tasks[1:], return_exceptions=True)
    assert workers.stats()["preparing"] == 1
    gate.set()
    assert (await tasks[0]).request.items
    assert workers.stats()["preparing"] == 0
