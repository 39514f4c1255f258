import asyncio
import time
import uuid

import pytest

from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import ChatInput, Message, SamplingParams, TextPart


def chat(text="Hello world", stop=(), **sampling):
    sampling = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **sampling}
    return ChatInput(
        request_id=uuid.uuid4().hex,
        messages=(Message("user", (TextPart(text),)),),
        sampling=SamplingParams(**sampling),
        stop=stop,
    )


async def collect(service, wanted):
    return [output async for output in service.generate(wanted)]


async def idle(service, seconds=5.0):
    """Wait until the engine has nothing left, and say so."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        stats = service.stats()
        unowned = stats["kv_pages_free"] + stats["kv_pages_cached"]
        if not stats["running"] and not stats["waiting"] and unowned == stats["kv_pages"]:
            return True
        await asyncio.sleep(0.01)
    return False


async def test_pieces_join_to_the_answer_and_only_the_last_is_final(service):
    *earlier, last = await collect(service, chat())
    assert all(o.finish_reason is None and o.text for o in earlier)
    assert last.finish_reason == "length"
    ids = [t for o in (*earlier, last) for t in o.token_ids]
    assert "".join(o.text for o in (*earlier, last)) == service.processor.decode(ids)
    assert last.usage.completion_tokens == len(ids) == 8
    assert last.timings.finished >= last.timings.first_token


async def test_leaving_early_frees_everything(service):
    stream = service.generate(chat(max_tokens=900))
    await anext(stream)
    await stream.aclose()
    assert await idle(service)


async def test_closing_the_stream_aborts_before_it_returns(service, monkeypatch):
    aborted, abort = [], service._engine.thread.abort
    monkeypatch.setattr(
        service._engine.thread, "abort", lambda *args: (aborted.append(args[0]), abort(*args))
    )
    wanted = chat(max_tokens=900)
    stream = service.generate(wanted)
    await anext(stream)
    await stream.aclose()
    assert aborted == [wanted.request_id]


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.01, 0.1])
async def test_cancelling_at_any_moment_frees_everything(service, delay):
    task = asyncio.create_task(collect(service, chat(max_tokens=900)))
    await asyncio.sleep(delay)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await idle(service)


async def test_a_stop_string_ends_the_engine_s_work_too(service):
    whole = "".join(o.text for o in await collect(service, chat(max_tokens=50)))
    stop = whole[3:5]
    outputs = await collect(service, chat(max_tokens=900, stop=(stop,)))
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].timings.finished is not None
    assert "".join(o.text for o in outputs) == whole[: whole.find(stop)]
    assert await idle(service)


async def test_an_id_in_use_is_refused_and_its_owner_goes_on(service):
    wanted = chat(max_tokens=200)
    first = service.generate(wanted)
    await anext(first)
    with pytest.raises(InvalidRequest, match="in use"):
        await collect(service, wanted)
    rest = [output async for output in first]
    assert rest[-1].finish_reason == "length"
    assert rest[-1].usage.completion_tokens == 200


async def test_eight_at_once_answer_as_one_at_a_time(service):
    chats = [f"what is {word}" for word in ("red", "blue", "green", "this", "that", "here", "one", "two")]
    together = await asyncio.gather(*(collect(service, chat(c)) for c in chats))
    alone = [await collect(service, chat(c)) for c in chats]
    texts = [["".join(o.text for o in outputs) for outputs in group] for group in (together, alone)]
    assert texts[0] == texts[1]


def test_its_name_is_the_folder_s(service):
    assert service.model_name == service.spec.folder.name
    assert service.ready
