"""Preprocessing on threads of this process: the plain form."""

import asyncio
import threading

import pytest
from helpers.preparing import chat_of, picture, prepared

from mmserve.core.errors import MediaError, Overloaded
from mmserve.core.messages import ImagePart, TextPart
from mmserve.preprocess.threads import ThreadWorkers


def pictures(*seeds, name="r"):
    return chat_of(*map(picture, seeds), name=name)


@pytest.fixture
async def workers(processor):
    workers = ThreadWorkers(processor, max_preparing=4)
    yield workers
    await workers.close()


async def test_answers_as_the_processor_does(workers, processor):
    asked = chat_of(*map(picture, range(4)), TextPart("x"))
    ours, plain = await prepared(workers, asked), processor.prepare(asked)
    assert ours.request.token_ids.tolist() == plain.request.token_ids.tolist()
    assert [i.digest for i in ours.request.items] == [i.digest for i in plain.request.items]


async def test_items_of_one_request_use_all_threads(workers, processor, monkeypatch):
    both = threading.Barrier(2, timeout=30)
    see = processor.see

    def together(part):
        both.wait()
        return see(part)

    monkeypatch.setattr(processor, "see", together)
    await prepared(workers, pictures(1, 2))


async def test_one_bad_picture_costs_nobody_else(workers):
    bad = prepared(workers, chat_of(ImagePart(data=b"junk", param="p"), picture(1), name="bad"))
    good = [prepared(workers, pictures(i, name=f"good {i}")) for i in range(3)]
    answers = await asyncio.gather(bad, *good, return_exceptions=True)
    assert isinstance(answers[0], MediaError)
    assert answers[0].param == "p"
    assert all(a.request.items for a in answers[1:])
    assert workers.stats()["preparing"] == 0


async def test_requests_are_bounded_and_cancelling_gives_the_place_back(workers, processor, monkeypatch):
    gate = threading.Event()
    see = processor.see

    def slow(part):
        gate.wait(30)
        return see(part)

    monkeypatch.setattr(processor, "see", slow)
    tasks = [asyncio.create_task(prepared(workers, pictures(i, i, name=f"{i}"))) for i in range(4)]
    while workers.stats()["preparing"] < 4:
        await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="4 requests") as caught:
        await prepared(workers, chat_of(TextPart("x"), name="one more"))
    assert caught.value.status == 503
    for task in tasks[1:]:
        task.cancel()
    await asyncio.gather(*tasks[1:], return_exceptions=True)
    assert workers.stats()["preparing"] == 1
    gate.set()
    assert (await tasks[0]).request.items
    assert workers.stats()["preparing"] == 0
