"""A process that lives but does not go on: how it is told from one that does, and what becomes of it."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import asynccontextmanager

import pytest
import zmq
from helpers.pool_watch import gone, until
from helpers.process_line import TOKENS, ScriptedEngine, connected, request

from mmserve.answering import conversation
from mmserve.core.errors import MMServeError, Overloaded
from mmserve.encoders.pool import EmbeddingPool
from mmserve.engine.loop import EngineThread
from mmserve.processes import detokenizer, messages
from mmserve.processes.child import Child
from mmserve.processes.detokenizer import Answers
from mmserve.processes.messages import Alive, DetokenizerHello, Ready, Step
from mmserve.processes.pulse import LOOK_S, PULSE_S, Patience, Pulse, Vitals, Watch

PATIENCE = Patience(hang_s=30.0, step_s=300.0)


class Bedside:
    """Somebody's vitals under a clock that the test moves."""

    def __init__(self):
        self.now = 1000.0
        self.vitals = Vitals(PATIENCE, self.now)

    def hear(self, busy_s=0.0):
        self.vitals.hear(Alive(busy_s), self.now)

    def wait(self, seconds):
        """Look as often as is meant; the verdict, if there is one by then."""
        end = self.now + seconds
        while self.now < end:
            self.now += LOOK_S
            if verdict := self.vitals.look(self.now):
                return verdict
        return None


@pytest.fixture
def bedside():
    return Bedside()


# ---------------------------------------------------------------- judging


def test_who_is_heard_in_time_is_left_alone(bedside):
    for _ in range(100):
        bedside.hear()
        assert bedside.wait(9.5) is None
        assert bedside.vitals.trouble is None


def test_silence_is_trouble_first_and_then_an_end(bedside):
    bedside.hear()
    assert bedside.wait(10.5) is None
    assert "no sign of life for 10 s; after 30 s it is started again" in bedside.vitals.trouble
    assert bedside.wait(19.5) is None
    assert bedside.wait(0.25) == "it gave no sign of life for 30 s"


def test_who_is_heard_again_is_relied_on_again(bedside):
    bedside.hear()
    assert bedside.wait(29) is None
    bedside.hear()
    assert bedside.vitals.trouble is None
    assert bedside.wait(29) is None


def test_a_looker_who_was_held_up_has_seen_nothing_and_judges_nobody(bedside):
    """The machine slept, or the thread had no turn: what was said meanwhile is not read yet."""
    bedside.hear()
    for _ in range(10):
        bedside.now += 3600
        assert bedside.vitals.look(bedside.now) is None
    assert bedside.vitals.trouble is None
    assert bedside.wait(30), "but one who is silent in front of it still is"


def test_a_step_that_does_not_end_is_an_end_though_it_is_heard_of(bedside):
    for busy_s in range(301):
        bedside.hear(busy_s)
        assert bedside.wait(1) is None
    bedside.hear(300.5)
    assert bedside.vitals.trouble is None, "a long step is no reason to send people away"
    assert bedside.wait(0.25) == "a step of it took longer than 300 s"


# ---------------------------------------------------------------- what a child tells


def test_time_is_counted_by_looking_often():
    watch = Watch(0.5, 100.0)
    assert watch.look(100.5) == 0.5
    assert watch.look(101.5) == 1.5
    assert watch.look(5000.0) == 2.5
    watch.restart(6000.0)
    assert watch.look(6000.25) == 0.25


def test_each_step_has_a_time_of_its_own_and_rest_has_none():
    since = None
    pulse = Pulse(lambda alive: None, lambda: since)
    start = time.monotonic()

    def busy(beat):
        return round(pulse.sign(start + beat * PULSE_S).busy_s, 3)

    assert [busy(beat) for beat in range(3)] == [0, 0, 0]
    since = 1.0
    assert [busy(beat) for beat in range(3, 6)] == [0, 0.5, 1.0]
    since = 2.0
    assert [busy(beat) for beat in range(6, 8)] == [0, 0.5]
    assert busy(1000) == 0.5 + 2 * PULSE_S, "the process had no turn in between"
    since = None
    assert busy(1001) == 0


def test_the_engine_s_loop_tells_since_when_it_is_at_a_step():
    engine = ScriptedEngine(EmbeddingPool(1 << 20))
    thread = EngineThread(engine)
    try:
        wait_for(lambda: thread.busy_since is None)
        engine.gate.clear()
        before = time.monotonic()
        thread.submit(request("r", tokens=2), lambda delivery: None)
        wait_for(lambda: engine.taken and thread.busy_since is not None)
        first = thread.busy_since
        assert before <= first <= time.monotonic()
        assert thread.busy_since == first
        engine.gate.set()
        wait_for(lambda: thread.busy_since is None)
    finally:
        engine.gate.set()
        thread.stop()


def wait_for(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


class Stuck(Answers):
    """Takes as long as the test likes for a step, and then breaks."""

    def __init__(self):
        super().__init__(TOKENS)
        self.taken, self.gate = threading.Event(), threading.Event()

    def told(self, step):
        self.taken.set()
        self.gate.wait(10)
        raise MMServeError("enough")


def test_the_detokenizer_tells_since_when_it_is_at_a_message(tmp_path):
    hello = DetokenizerHello("", f"ipc://{tmp_path}/in", f"ipc://{tmp_path}/out")
    answers, parent = Stuck(), Listening()
    running = threading.Thread(target=until_it_breaks, args=(answers, hello, parent))
    running.start()
    with zmq.Context() as context, context.socket(zmq.PUSH) as speaker:
        speaker.linger = 0
        wait_for(lambda: parent.words == Ready())
        assert parent.busy_since() is None
        before = time.monotonic()
        speaker.connect(hello.listen)
        speaker.send(messages.to_bytes(Step([])))
        assert answers.taken.wait(10)
        assert before <= parent.busy_since() <= time.monotonic()
        answers.gate.set()
        running.join(10)
    assert not running.is_alive()


class Listening:
    """A parent who remembers."""

    words = None

    def ready(self, words, busy_since):
        self.words, self.busy_since = words, busy_since

    def bind(self):
        pass


def until_it_breaks(*args):
    with pytest.raises(MMServeError, match="enough"):
        detokenizer.run(*args)


# ---------------------------------------------------------------- children


# A child whose loop never comes back from a step that began as it started.
STUCK = """
import sys, time
from mmserve.logs import tell_stacks_on_signal
from mmserve.processes.messages import Ready
from mmserve.processes.parent import Parent

def stuck_in_a_step():
    time.sleep(600)

tell_stacks_on_signal()
parent = Parent(int(sys.argv[1]), 0, sys.argv[2])
began = time.monotonic()
parent.ready(Ready(), lambda: began)
stuck_in_a_step()
"""


@asynccontextmanager
async def stuck(folder, patience, stderr):
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", STUCK, str(theirs.fileno()), str(folder)),
            pass_fds=[theirs.fileno()],
            stderr=stderr,
        )
    ours.setblocking(False)
    child = Child("engine", process, *(await asyncio.open_connection(sock=ours)), patience)
    try:
        yield child
    finally:
        await child.end()


async def test_a_step_that_does_not_end_is_told_with_its_stacks_and_is_the_child_s_end(tmp_path):
    with open(tmp_path / "log", "w") as log:
        async with stuck(tmp_path, Patience(hang_s=20, step_s=0.9), log) as child:
            await child.ready()
            async with asyncio.timeout(20):
                death = await child.death()
            assert str(death) == (
                f"the engine process {child.pid} ended (killed, since a step of it took longer than 0.9 s)"
            )
            await until(lambda: gone(child.pid))
    assert "stuck_in_a_step" in (tmp_path / "log").read_text()


async def test_a_stopped_child_is_killed_but_not_one_whose_parent_had_no_turn(tmp_path):
    async with stuck(tmp_path, Patience(hang_s=1.2, step_s=600), subprocess.DEVNULL) as child:
        await child.ready()
        time.sleep(1.6)
        await asyncio.sleep(3 * LOOK_S)
        assert not gone(child.pid)
        os.kill(child.pid, signal.SIGSTOP)
        async with asyncio.timeout(20):
            death = await child.death()
        assert "killed, since it gave no sign of life for 1.2 s" in str(death)
        await until(lambda: gone(child.pid))


async def test_what_waits_for_an_engine_that_does_not_go_on_is_bounded(tmp_path):
    async with connected(tmp_path) as line:
        line.engine.gate.clear()
        line.client.most = 3
        streams = [conversation(line.client, request(uuid.uuid4().hex), never) for _ in range(3)]
        waiting = [asyncio.create_task(anext(stream)) for stream in streams]
        await until(lambda: len(line.client._waiters) == 3)
        with pytest.raises(Overloaded, match="3 requests are with the engine"):
            await anext(conversation(line.client, request("more"), never))
        line.engine.gate.set()
        assert [said.tokens for said in await asyncio.gather(*waiting)] == [1, 1, 1]
        for stream in streams:
            await stream.aclose()
        await until(lambda: not line.client._waiters)
        assert (await anext(conversation(line.client, request("more", tokens=1), never))).last


async def never(wanted):
    raise AssertionError("no pixels were wanted")
