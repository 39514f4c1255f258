"""Client, engine's desk and detokenizer over real sockets, around an engine that says what a script says."""

import asyncio
import uuid
from contextlib import suppress

import numpy as np
import pytest
from helpers.process_line import TOKENIZER, connected, request
from msgspec import structs

from mmserve.answering import carried, conversation
from mmserve.core.arena import ArenaFull
from mmserve.core.errors import EngineRestarting, InvalidRequest, Overloaded
from mmserve.core.messages import CarryOver

SAID = "one red apple on a table"


@pytest.fixture
async def line(tmp_path):
    async with connected(tmp_path) as line:
        yield line


async def until(condition, seconds=10.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def never(wanted):
    raise AssertionError("no pixels were wanted")


async def heard(line, wanted, pixels=never):
    """All that is said to a request."""
    return [said async for said in conversation(line.client, wanted, pixels)]


def text(said):
    return "".join(one.piece.text for one in said if one.piece)


def picture(seed=0):
    return np.random.default_rng(seed).integers(0, 256, (1, 32, 32, 3), np.uint8)


def settled(line):
    """Nothing runs, and nothing is lent."""
    return not line.engine.has_work and not len(line.client.loans) and not line.client._waiters


async def test_an_answer_comes_as_text_and_ends_once(line):
    tokens = len(line.engine.script)
    said = await heard(line, request(tokens=tokens))
    assert text(said) == SAID
    assert [one.last for one in said] == [False] * (tokens - 1) + [True]
    assert said[-1].piece.finish_reason == "length"
    assert said[-1].piece.usage.completion_tokens == sum(one.tokens for one in said) == tokens


async def test_many_at_once_get_their_own(line):
    names = [uuid.uuid4().hex for _ in range(20)]
    wanted = [request(name, tokens=1 + i % 5) for i, name in enumerate(names)]
    for i, said in enumerate(await asyncio.gather(*(heard(line, one) for one in wanted))):
        assert sum(one.tokens for one in said) == 1 + i % 5
        assert said[-1].piece.request_id == names[i]
    await until(lambda: settled(line))


async def test_a_refusal_is_raised_as_what_it_is(line):
    with pytest.raises(Overloaded, match="full"):
        await heard(line, request("refused"))
    assert text(await heard(line, request(tokens=1)))
    await until(lambda: settled(line))


async def test_an_id_in_use_is_refused_and_its_owner_goes_on(line):
    first = conversation(line.client, request("same", tokens=1_000_000), never)
    await anext(first)
    with pytest.raises(InvalidRequest, match="in use"):
        await heard(line, request("same"))
    assert (await anext(first)).tokens == 1
    await first.aclose()
    await until(lambda: settled(line))


async def test_a_stop_string_ends_the_answer_and_the_engine_s_work(line):
    said = await heard_until_early(line, request(tokens=1000, stop=("apple",)))
    assert text(said) == "one red "
    assert said[-1].piece.finish_reason == "stop"
    await until(lambda: settled(line))


async def heard_until_early(line, wanted):
    said = []
    stream = conversation(line.client, wanted, never)
    async for one in stream:
        said.append(one)
        if one.early:
            await stream.aclose()
    return said


async def test_leaving_early_aborts(line):
    stream = conversation(line.client, request(tokens=100_000), never)
    await anext(stream)
    await stream.aclose()
    await until(lambda: settled(line))
    await until(lambda: line.client.stats()["running"] == 0)
    await until(lambda: len(line.answers) == 0)


async def test_figures_read_after_an_answer_are_those_after_it(line):
    for count in range(1, 6):
        await heard(line, request(tokens=1))
        assert line.client.stats() == {"running": 0, "parked": 0, "steps": count}


async def test_what_the_encoder_holds_is_known(line):
    digest, other = bytes(32), bytes([1]) * 32

    class Features:
        nbytes = 8

    line.thread.call(lambda: [line.pool.put(one, Features()) for one in (digest, other)])
    await until(lambda: line.client.holds(digest) and line.client.holds(other))
    line.thread.call(line.pool.clear)
    await until(lambda: not line.client.holds(digest) and not line.client.holds(other))


async def test_pixels_that_are_wanted_are_asked_for_and_the_request_goes_on(line):
    pixels = picture(3)

    async def again(wanted):
        assert wanted == {bytes(32)}
        return {bytes(32): pixels, bytes([1] * 32): picture(4)}

    said = await heard(line, request("bare"), again)
    assert sum(one.tokens for one in said) == 3
    assert line.engine.read == [int(pixels.sum())]
    assert line.client.loans._number == 1, "what was not asked for is not sent"
    await until(lambda: settled(line))


async def test_pixels_that_come_when_the_request_has_ended_are_given_back(line):
    async def too_late(wanted):
        line.desk._asked.clear()
        return {bytes(32): picture()}

    task = asyncio.create_task(heard(line, request("bare"), too_late))
    await until(lambda: line.client.loans._number == 1)
    await until(lambda: not len(line.client.loans))
    assert line.arena.used == 0
    task.cancel()


def order(**fields):
    kept = {"keys": np.arange(9, dtype=np.int64) << 55, "kept": ((0, 2), (5, 9)), "new_salt": "new"}
    return CarryOver(**{**kept, **fields})


async def test_an_order_to_carry_over_arrives_whole_and_its_count_comes_back(line):
    asked = order(salt="old", shift=3, head=1, retire=True)
    assert await carried(line.client, asked) == 6
    [came] = line.engine.orders
    assert came.keys.tolist() == asked.keys.tolist()
    assert structs.replace(came, keys=None) == structs.replace(asked, keys=None)
    assert settled(line)


async def test_a_context_is_warmed_and_carried_over_while_answers_go_on(line):
    stream = conversation(line.client, request("talking", tokens=100_000), never)
    await anext(stream)
    [said] = await heard(line, structs.replace(request("warm"), warm=True))
    assert (said.last, said.tokens, said.piece.text, said.piece.finish_reason) == (True, 0, "", "stop")
    assert await carried(line.client, order()) == 6
    assert (await anext(stream)).tokens == 1
    await stream.aclose()
    await until(lambda: settled(line))


async def test_an_order_that_is_refused_raises_what_it_is_and_leaves_nothing_behind(line):
    with pytest.raises(InvalidRequest, match="no ranges") as error:
        await carried(line.client, order(new_salt="refused"))
    assert error.value.param == "kept"
    with pytest.raises(InvalidRequest, match="beyond what can be"):
        await carried(line.client, order(shift=10**30))
    assert settled(line)


async def test_who_waits_for_an_order_hears_of_the_engine_s_loss(line):
    line.engine.gate.clear()
    stream = conversation(line.client, request("talking", tokens=100_000), never)
    waiting = asyncio.create_task(anext(stream))
    asked = asyncio.create_task(carried(line.client, order()))
    await until(lambda: len(line.client._waiters) == 2)
    line.client.close(EngineRestarting("lost"))
    for task in (waiting, asked):
        with pytest.raises(EngineRestarting, match="lost"):
            await task
    with pytest.raises(EngineRestarting):
        await carried(line.client, order())


async def test_an_order_whose_caller_leaves_is_forgotten_when_it_is_done(line):
    line.engine.gate.clear()
    stream = conversation(line.client, request("talking", tokens=2), never)
    first = asyncio.create_task(anext(stream))
    asked = asyncio.create_task(carried(line.client, order()))
    await until(lambda: len(line.client._waiters) == 2)
    asked.cancel()
    line.engine.gate.set()
    await first
    await stream.aclose()
    await until(lambda: settled(line))


async def test_values_that_cannot_be_sent_are_the_request_s_error(line):
    for wrong in (request(seed=10**30), request("\ud800")):
        with pytest.raises(InvalidRequest, match="beyond what can be"):
            await heard(line, wrong)
    with pytest.raises(InvalidRequest):
        await heard(line, request("r", picture(), seed=10**30))
    assert settled(line)


async def test_more_pixels_than_there_is_memory_are_refused_and_nothing_is_kept(line):
    large = np.zeros((1, 512, 1024, 3), np.uint8)
    with pytest.raises(Overloaded, match="memory for pixels"):
        await heard(line, request("r", picture(), large))
    assert line.arena.used == 0


# ---------------------------------------------------------------- pixels and their memory


async def test_pixels_arrive_and_are_let_go_by_the_first_token(line):
    pixels = [picture(i) for i in range(3)]
    stream = conversation(line.client, request("r", *pixels, tokens=100_000), never)
    await anext(stream)
    assert line.engine.read == [int(own.sum()) for own in pixels]
    await until(lambda: line.arena.used == 0)
    assert line.engine.has_work, "while its answer is still being said"
    await stream.aclose()


async def test_the_memory_of_an_aborted_picture_is_not_used_again_while_it_is_read(line):
    """Else another's pixels would be encoded under its digest, and kept."""
    pixels = picture(1)
    line.engine.gate.clear()
    task = asyncio.create_task(heard(line, request("r", pixels)))
    await until(line.engine.reading.is_set)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0.05)
    assert len(line.client.loans) == 1
    assert line.arena.used
    fill(line.arena)
    line.engine.gate.set()
    await until(lambda: settled(line))
    assert line.engine.read == [int(pixels.sum())]


def fill(arena, size=1024):
    """Write over all memory that is to be had."""
    blocks = []
    with suppress(ArenaFull):
        while True:
            blocks.append(arena.allocate(size))
            arena.write(blocks[-1], np.full(size, 255, np.uint8))
    for block in blocks:
        arena.release(block)


async def test_pixels_of_a_request_that_was_aborted_before_it_began_are_let_go(line):
    line.engine.gate.clear()
    first = asyncio.create_task(heard(line, request("first", picture(0))))
    await until(line.engine.reading.is_set)
    second = asyncio.create_task(heard(line, request("second", picture(1))))
    await until(lambda: len(line.client.loans) == 2)
    second.cancel()
    line.engine.gate.set()
    await first
    await until(lambda: settled(line))


async def test_a_refused_request_s_pixels_are_let_go(line):
    with pytest.raises(Overloaded):
        await heard(line, request("refused", picture()))
    await until(lambda: settled(line))
    assert line.arena.used == 0


# ---------------------------------------------------------------- ends


async def test_a_lost_detokenizer_costs_what_runs_and_another_knows_all_there_is(line):
    """The loans are not lost, nor what the encoder holds: whatever the one before was told last."""
    line.engine.gate.clear()
    task = asyncio.create_task(heard(line, request("r", picture())))
    await until(line.engine.reading.is_set)
    line.client.close(EngineRestarting("the detokenizer ended"))
    with pytest.raises(EngineRestarting, match="detokenizer"):
        await task
    with pytest.raises(EngineRestarting):
        await heard(line, request("late"))
    line.outbox._noted[bytes(32)] = True  # told to nobody who is left
    line.engine.gate.set()
    await until(lambda: not line.engine.has_work)
    with line.client.listening(f"ipc://{line.folder}/api1"):
        await line.meet(1)
        await until(lambda: settled(line))
        assert line.arena.used == 0
        assert not line.client.holds(bytes(32)), "what the pool has is told anew"
        assert text(await heard(line, request(tokens=len(line.engine.script)))) == SAID


async def test_a_lost_engine_holds_no_pixels(line):
    line.engine.gate.clear()
    task = asyncio.create_task(heard(line, request("r", picture())))
    await until(line.engine.reading.is_set)
    line.client.close(EngineRestarting("the engine ended"))
    line.client.forget_engine()
    assert line.arena.used == 0
    assert set(line.client.stats().values()) == {0}
    with pytest.raises(EngineRestarting):
        await task


async def test_an_engine_that_breaks_says_so_before_it_ends(line):
    line.engine.gate.clear()
    task = asyncio.create_task(heard(line, request(tokens=100)))
    await until(lambda: line.engine.taken)
    line.engine.fault = RuntimeError("lost the pool")
    line.engine.gate.set()
    with pytest.raises(Exception, match="lost the pool") as caught:
        await task
    assert caught.value.code == "engine_dead"


def test_the_script_is_what_it_says():
    assert TOKENIZER.decode(TOKENIZER.encode(SAID).ids) == SAID
