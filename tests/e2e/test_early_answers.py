"""The bundled model over what it has seen before: nothing is done twice, and no answer changes for it."""

import asyncio
import uuid
import weakref
from pathlib import Path

import httpx
import pytest
from live_server import serving
from prometheus_client.parser import text_string_to_metric_families

from mmserve.core.config import Config
from mmserve.core.errors import MediaError
from mmserve.core.figures import FIGURES
from mmserve.core.messages import ChatInput, ImagePart, Message, SamplingParams, TextPart
from mmserve.models import tiny
from mmserve.service import Service

PICTURES = sorted((Path(tiny.__file__).parent / "samples").glob("*.jpg"))


@pytest.fixture(scope="module")
def service():
    service = Service.load(Config.of(kv_cache_mib=32))
    yield service
    service.close()


def ask(number=0, tokens=48, **options):
    part = ImagePart(data=PICTURES[number].read_bytes(), param="messages[0]", **options)
    return ChatInput(
        request_id=uuid.uuid4().hex,
        messages=(Message("user", (part, TextPart("Describe this image."))),),
        sampling=SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
        cache_salt=uuid.uuid4().hex,  # so that no prompt is cached, and each needs its picture's features
    )


async def answered(service, chat):
    """Text, token ids and what was seen."""
    outputs = [output async for output in service.generate(chat)]
    assert outputs[-1].finish_reason == "length"
    ids = [token for output in outputs for token in output.token_ids]
    return "".join(output.text for output in outputs), ids, outputs[-1].media[0]


def told(service):
    """{(sample name, label values): value} of the metrics."""
    families = text_string_to_metric_families(service.metrics.render().decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def work(service):
    """What must not move when nothing has to be done."""
    now = told(service)
    stages = {stage: now["mmserve_stage_seconds_count", stage] for stage in ("decode", "resize", "digest")}
    return stages | {"encoded": now["mmserve_encoded_items_total",]}


async def until(condition, seconds=20.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_repeated_picture_moves_no_counter_and_the_answer_is_byte_identical(service):
    text, ids, seen = await answered(service, ask(0))
    before = work(service)
    for _ in range(3):
        again = await answered(service, ask(0))
        assert again[0].encode() == text.encode()
        assert again[1] == ids
        assert again[2].cached
    assert not seen.cached
    assert work(service) == before
    assert told(service)["mmserve_media_total", "image", "cached"] >= 3


async def test_other_options_are_another_picture(service):
    await answered(service, ask(0))
    before = work(service)
    smaller = await answered(service, ask(0, max_pixels=128 * 128))
    assert smaller[2].size != (await answered(service, ask(0)))[2].size
    assert work(service) == {name: count + 1 for name, count in before.items()}


async def test_eight_who_bring_the_same_new_picture_at_once_cause_one_decode(service):
    before = work(service)
    answers = await asyncio.gather(*(answered(service, ask(1)) for _ in range(8)))
    assert work(service) == {name: count + 1 for name, count in before.items()}
    assert len({text for text, _, _ in answers}) == 1
    assert sum(not seen.cached for _, _, seen in answers) == 1


async def test_features_that_were_evicted_are_made_again_and_the_answer_is_the_same(service, monkeypatch):
    whole = await answered(service, ask(0))
    asked = service.stats()["pixel_requests"]
    await evicted(service)
    monkeypatch.setattr(service._desk, "holds", lambda digest: True)  # so it was a moment ago
    again = await answered(service, ask(0))
    assert service.stats()["pixel_requests"] == asked + 1
    assert again[:2] == whole[:2]
    assert service.stats()["parked"] == 0


async def test_who_leaves_while_pixels_are_made_again_leaves_nothing_behind(service, monkeypatch):
    await answered(service, ask(0))
    await evicted(service)
    with monkeypatch.context() as patch:
        patch.setattr(service._desk, "holds", lambda digest: True)
        patch.setattr(service._desk, "pixels", never)
        task = asyncio.create_task(answered(service, ask(0)))
        await until(lambda: service.stats()["parked"] == 1)
        task.cancel()
        await until(lambda: service.stats()["parked"] == 0)
    stats = service.stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert stats["kv_pages_free"] + stats["kv_pages_cached"] == stats["kv_pages"]


async def test_pixels_that_cannot_be_made_again_end_the_request_with_the_reason(service, monkeypatch):
    await answered(service, ask(0))
    await evicted(service)
    monkeypatch.setattr(service._desk, "holds", lambda digest: True)
    monkeypatch.setattr(service._desk.workers, "see", broken)
    with pytest.raises(MediaError, match="lost"):
        await answered(service, ask(0))
    await until(lambda: service.stats()["parked"] == 0)


async def test_pixels_are_let_go_once_they_are_encoded(service, monkeypatch):
    see, alive = service._desk.workers.see, []

    async def watched(part, **options):
        medium = await see(part, **options)
        alive.extend(weakref.ref(pixels) for pixels in medium.pixels)
        return medium

    monkeypatch.setattr(service._desk.workers, "see", watched)
    stream = service.generate(ask(2, tokens=200))
    await anext(stream)
    assert len(alive) == 1
    await until(lambda: alive[0]() is None)
    assert service.stats()["running"] == 1, "while its answer is still being said"
    assert service.stats()["pixel_cache_bytes"] == 0
    await stream.aclose()


async def never(*_):
    await asyncio.Event().wait()


async def broken(part, **options):
    raise MediaError("lost")


async def evicted(service):
    """The encoder has dropped everything."""
    await until(lambda: not service._engine.thread._engine.has_work)
    service._engine.thread._engine.stage.pool.clear()


def test_every_number_of_the_stats_is_told_to_prometheus(service):
    numbers = {name for name, value in service.stats().items() if isinstance(value, int | float)}
    assert numbers - FIGURES.keys() == {"requests", "kv_page_size"}, "give it a line in FIGURES"
    assert FIGURES.keys() - numbers == set(), "a figure that nobody has"


async def one_of_each(service):
    """A request that is answered, again, one that is left, and one that is refused."""
    for _ in range(2):
        await answered(service, ask(3))
    stream = service.generate(ask(3, tokens=200))
    await anext(stream)
    await stream.aclose()
    with pytest.raises(MediaError):
        await answered(service, ask(3, min_pixels=9, max_pixels=4))


def test_metrics_of_a_real_service_tell_what_it_did(service):
    asyncio.run(one_of_each(service))
    with serving(service, service.config) as url:
        now = {
            (s.name, *s.labels.values()): s.value
            for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
            for s in family.samples
        }
    assert now["mmserve_requests_total", "length"] > 0
    assert now["mmserve_requests_total", "abort"] > 0
    assert now["mmserve_requests_total", "refused"] > 0
    assert now["mmserve_prompt_tokens_total", "image"] > 0
    assert now["mmserve_generated_tokens_total",] > now["mmserve_time_to_first_token_seconds_count",] > 0
    assert now["mmserve_cache_hits_total", "early_answers"] > 0
