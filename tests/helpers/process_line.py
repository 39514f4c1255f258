"""The api's client, an engine's desk and a detokenizer over real sockets, as threads of one process."""

import asyncio
import os
import threading
from contextlib import asynccontextmanager, contextmanager

import numpy as np
import zmq
from tokenizers import Tokenizer

from mmserve.core.arena import Arena, Window
from mmserve.core.errors import InvalidRequest, Overloaded
from mmserve.core.messages import PixelsWanted, PreparedRequest, SamplingParams, TokenOutput, VisionItem
from mmserve.encoders.pool import EmbeddingPool
from mmserve.engine.detokenizer import TokenBytes
from mmserve.engine.loop import EngineThread
from mmserve.models.hub import resolve
from mmserve.processes import messages
from mmserve.processes.client import Client
from mmserve.processes.detokenizer import Answers
from mmserve.processes.engine import Desk, Outbox, wake
from mmserve.processes.pixels import Borrowed

TOKENIZER = Tokenizer.from_file(str(resolve("mmserve/tiny-vl") / "tokenizer.json"))
TOKENS = TokenBytes(TOKENIZER)
ARENA_BYTES = 1 << 20


def request(name="r", *pixels, tokens=3, stop=(), **sampling):
    """A request for so many tokens about these pictures."""
    items = tuple(
        VisionItem(digest=bytes([i]) * 32, kind="image", grid=(2, 2), span=(i, i + 1), pixels=own)
        for i, own in enumerate(pixels)
    )
    ids = np.arange(4, dtype=np.int32)
    return PreparedRequest(
        request_id=name,
        token_ids=ids,
        radix_keys=ids.astype(np.int64),
        positions=np.stack([ids] * 3),
        position_delta=0,
        items=items,
        sampling=SamplingParams(max_tokens=tokens, **sampling),
        stop=stop,
    )


class ScriptedEngine:
    """Says the words of ``script`` one a step, when ``gate`` lets it. Pixels are read in a request's first
    step: ``reading`` is set meanwhile, ``read`` has their sums. "refused" is, "bare" wants pixels."""

    def __init__(self, pool):
        self.pool = pool
        self.script = TOKENIZER.encode("one red apple on a table", add_special_tokens=False).ids
        self.grammars = None
        self.gate, self.reading = threading.Event(), threading.Event()
        self.gate.set()
        self.read = []
        self.taken = []
        self.orders = []
        self.fault = None
        self._running, self._parked, self._bare = {}, {}, []
        self._steps = 0

    @property
    def has_work(self):
        return bool(self._running or self._bare)

    def submit(self, prepared, matcher=None):
        self.taken.append(prepared.request_id)
        if prepared.request_id == "refused":
            raise Overloaded("full")
        if prepared.request_id in self._running:
            raise InvalidRequest("in use", param="request_id")
        if prepared.request_id == "bare":
            self._bare.append("bare")
            self._parked["bare"] = [[], prepared.sampling.max_tokens, 0]
        else:
            most = 0 if prepared.warm else prepared.sampling.max_tokens
            self._running[prepared.request_id] = [list(prepared.items), most, 0]

    def supply(self, request_id, pixels):
        if request_id in self._parked:
            self._running[request_id] = self._parked.pop(request_id)
            self.read += [int(own.sum()) for own in pixels.values()]

    def abort(self, request_id):
        if self._running.pop(request_id, None) or self._parked.pop(request_id, None):
            return TokenOutput(request_id=request_id, token_ids=(), finish_reason="abort")
        return None

    def carry_over(self, order):
        if order.new_salt == "refused":
            raise InvalidRequest("these are no ranges", param="kept")
        self.orders.append(order)
        yield
        return sum(stop - start for start, stop in order.kept)

    def holds(self, digest):
        return digest in self.pool

    def step(self):
        self._steps += 1
        if self.fault:
            raise self.fault
        for items, _, _ in self._running.values():
            self._encode(items)
        self.gate.wait(10)
        wanted = [PixelsWanted(name, frozenset({bytes(32)})) for name in self._bare]
        self._bare.clear()
        return [*wanted, *(self._next(name) for name in list(self._running))]

    def _encode(self, items):
        pixels = [item.pixels for item in items if item.pixels is not None]
        if pixels:
            self.reading.set()
            self.gate.wait(10)
            self.read += [int(own.sum()) for own in pixels]
        items.clear()

    def _next(self, name):
        state = self._running[name]
        _, most, said = state
        if most == 0:  # a warm one
            del self._running[name]
            return TokenOutput(request_id=name, token_ids=(), finish_reason="stop", prompt_tokens=4)
        state[2] += 1
        if last := state[2] == most:
            del self._running[name]
        token = self.script[said % len(self.script)]
        reason = "length" if last else None
        return TokenOutput(request_id=name, token_ids=(token,), finish_reason=reason, prompt_tokens=4)

    def stats(self):
        return {"running": len(self._running), "parked": len(self._parked), "steps": self._steps}

    def check_integrity(self):
        pass


class Line:
    """``client`` at one end, ``engine`` at the other."""

    def __init__(self, folder, arena):
        self.arena = arena
        self.folder = folder
        self.pool = EmbeddingPool(1 << 20)
        self.engine = ScriptedEngine(self.pool)
        borrowed = Borrowed(Window(os.dup(arena.fd), arena.total), lambda: None)
        self.outbox = Outbox(self.engine, self.pool, borrowed)
        self.thread = EngineThread(self.engine, self.outbox.send)
        borrowed.returned = lambda: wake(self.thread)
        self.desk = Desk(self.thread, self.outbox, borrowed, lambda: None)
        self.client = Client(asyncio.get_running_loop(), arena, most=100)
        self.context = zmq.Context()
        self.answers = Answers(TOKENS)
        self._threads = [self._run(self._receive, self._bound("engine"))]

    async def meet(self, number=0):
        """Connect through detokenizer ``number``, which is a new one."""
        speaker = self.context.socket(zmq.PUSH)
        speaker.linger = 0  # whoever listened may be gone when the context ends
        speaker.connect(f"ipc://{self.folder}/api{number}")
        self.answers = Answers(TOKENS)
        listener = self._bound(f"detokenizer{number}")
        self._threads.append(self._run(self._tell, listener, speaker, self.answers))
        await self.client.meet(f"ipc://{self.folder}/detokenizer{number}")
        self.client.open = True

    def close(self):
        self.engine.gate.set()
        self.thread.stop()
        self.context.term()
        for thread in self._threads:
            thread.join(5)
        self.outbox.close()
        self.client.end()

    def _bound(self, name):
        listener = self.context.socket(zmq.PULL)
        listener.bind(f"ipc://{self.folder}/{name}")
        return listener

    def _run(self, work, *args):
        thread = threading.Thread(target=work, args=args, daemon=True)
        thread.start()
        return thread

    def _receive(self, listener):
        with ending(listener):
            while True:
                self.desk.take(messages.to_engine(listener.recv()))

    def _tell(self, listener, speaker, answers):
        with ending(listener, speaker):
            while True:
                speaker.send(messages.to_bytes(answers.told(messages.to_step(listener.recv()))))


@contextmanager
def ending(*sockets):
    """Until the context ends, which waits for its sockets to be closed."""
    try:
        yield
    except zmq.ContextTerminated:
        pass
    finally:
        for socket in sockets:
            socket.close()


@asynccontextmanager
async def connected(folder):
    """A line whose client is open."""
    line = Line(folder, Arena(ARENA_BYTES))
    try:
        line.client.connect(f"ipc://{folder}/engine")
        with line.client.listening(f"ipc://{folder}/api0"):
            await line.meet()
            yield line
    finally:
        line.close()
