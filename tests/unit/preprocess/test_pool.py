import asyncio
import threading

import numpy as np
import pytest
from helpers.media_files import picture_file

from mmserve.core.errors import MediaError, Overloaded
from mmserve.core.messages import ChatInput, ImagePart, Message, SamplingParams, TextPart
from mmserve.preprocess.pool import PreparePool


def chat(*parts):
    return ChatInput(request_id="r", messages=(Message("user", parts),), sampling=SamplingParams())


def picture(seed):
    return picture_file(np.random.default_rng(seed).integers(0, 256, (64, 64, 3), np.uint8))


@pytest.fixture
async def pool(processor):
    pool = PreparePool(processor, workers=2, max_waiting=4)
    yield pool
    await pool.close()


async def test_answers_as_the_processor_does(pool, processor):
    asked = chat(*[ImagePart(data=picture(i)) for i in range(4)], TextPart("x"))
    ours, plain = await pool.prepare(asked), processor.prepare(asked)
    assert ours.request.token_ids.tolist() == plain.request.token_ids.tolist()
    assert [i.digest for i in ours.request.items] == [i.digest for i in plain.request.items]


async def test_items_of_one_request_use_all_workers(pool, monkeypatch):
    both = threading.Barrier(2, timeout=5)
    see = pool.processor.see

    def together(part):
        both.wait()
        return see(part)

    monkeypatch.setattr(pool.processor, "see", together)
    await pool.prepare(chat(ImagePart(data=picture(1)), ImagePart(data=picture(2))))


async def test_one_bad_picture_costs_nobody_else(pool):
    bad = pool.prepare(chat(ImagePart(data=b"junk", param="p"), ImagePart(data=picture(1))))
    good = [pool.prepare(chat(ImagePart(data=picture(i)))) for i in range(3)]
    answers = await asyncio.gather(bad, *good, return_exceptions=True)
    assert isinstance(answers[0], MediaError)
    assert answers[0].param == "p"
    assert all(a.request.items for a in answers[1:])
    assert pool.waiting == 0


async def test_the_queue_is_bounded_and_cancelling_leaves_it(pool, monkeypatch):
    gate = threading.Event()
    see = pool.processor.see

    def slow(part):
        gate.wait(5)
        return see(part)

    monkeypatch.setattr(pool.processor, "see", slow)
    tasks = [asyncio.create_task(pool.prepare(chat(ImagePart(data=picture(i))))) for i in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as caught:
        await pool.prepare(chat(TextPart("x")))
    assert caught.value.status == 503
    for task in tasks[1:]:
        task.cancel()
    await asyncio.gather(*tasks[1:], return_exceptions=True)
    assert pool.waiting == 1
    gate.set()
    assert (await tasks[0]).request.items
    assert pool.waiting == 0
