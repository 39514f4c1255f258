"""A device on which nothing happens before somebody waits for it, and which remembers who did.

Copies stand in the queue of their stream until an event behind them is waited for, so whoever reads too early
finds what was there before, and whoever writes too early spoils what is copied.
"""

from contextlib import contextmanager

import torch

from mmserve.engine.runner.devices import CPUDevice, EagerGraph

POISON = 0x55


class LateStream:
    def __init__(self, device, name):
        self.device, self.name = device, name
        self.queue = []
        self.done = 0

    def enqueue(self, work):
        self.queue.append(work)

    @torch.inference_mode()
    def run(self, until=None):
        """What stands in the queue, up to place ``until``."""
        until = len(self.queue) if until is None else until
        while self.done < until:
            work, self.queue[self.done] = self.queue[self.done], None
            self.done += 1
            work()

    @contextmanager
    def use(self):
        before, self.device.here = self.device.here, self
        try:
            yield
        finally:
            self.device.here = before


class LateEvent:
    def __init__(self, device, name):
        self.device, self.name = device, name
        self.stream, self.at = None, 0

    def record(self, stream):
        self.stream, self.at = stream, len(stream.queue)
        self.device.log.append(("record", self.name, stream.name))

    def wait(self, stream):
        place = self.stream, self.at
        if self.stream is not None:
            stream.enqueue(lambda: place[0].run(place[1]))
        self.device.log.append(("wait", self.name, stream.name))

    def synchronize(self):
        self.device.log.append(("synchronize", self.name))
        if self.stream is not None:
            self.stream.run(self.at)

    def done(self):
        return self.stream is None or self.stream.done >= self.at


class LateDevice(CPUDevice):
    synchronous = False

    def __init__(self):
        super().__init__()
        self.log = []
        self.kept = []  # (address of a tensor, name of a stream that reads it, too)
        self.streams = []
        self.here = self.stream()
        self._events = 0

    def stream(self, priority=0):
        self.streams.append(LateStream(self, f"stream {len(self.streams)} of priority {priority}"))
        return self.streams[-1]

    def current(self):
        return self.here

    def event(self):
        self._events += 1
        return LateEvent(self, self._events - 1)

    def pinned(self, shape, dtype):
        memory = torch.empty(shape, dtype=dtype)
        memory.view(torch.uint8).fill_(POISON)
        return memory

    def copy(self, target, source):
        self.here.enqueue(lambda: target.copy_(source))

    def keep_for(self, tensor, stream):
        self.kept.append((tensor.data_ptr(), stream.name))

    def capture(self, forward, family="steps"):
        self.log.append(("capture", family))
        forward()
        return EagerGraph(forward)
