"""The detokenizer process: tokens in from the engine, text out to the api.

    python -m mmserve.processes.detokenizer SOCKET_FD PARENT_PID FOLDER

It serves one engine for as long as both live. It never loads torch.
"""

import logging
import sys
import time
from collections.abc import Iterable

import zmq

from mmserve.answer import Answer
from mmserve.core.errors import MMServeError
from mmserve.core.heap import settle
from mmserve.core.wire import Fault
from mmserve.engine.detokenizer import TokenBytes
from mmserve.logs import set_up_logging, tell_stacks_on_signal
from mmserve.processes import messages
from mmserve.processes.messages import (
    Carried,
    Closed,
    DetokenizerHello,
    Event,
    Failed,
    NotReady,
    Opened,
    Output,
    Ready,
    Step,
    Text,
    Told,
    ToldEvent,
    Wanted,
)
from mmserve.processes.parent import Parent

log = logging.getLogger(__name__)


class Answers:
    """All answers in the making, by ticket."""

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._open: dict[int, Answer] = {}

    def __len__(self) -> int:
        return len(self._open)

    def told(self, step: Step) -> Told:
        """What the api is told of ``step``, in its order."""
        return Told(list(self._told(step.events)), step.news)

    def _told(self, events: Iterable[Event]) -> Iterable[ToldEvent]:
        for event in events:
            match event:
                case Opened(ticket=ticket, brief=brief):
                    self._open[ticket] = Answer(brief, self._tokens)
                case Output() if event.ticket in self._open:
                    yield self._said(event)
                case Wanted() | Carried():
                    yield event
                case Failed(ticket=ticket):
                    self._open.pop(ticket, None)
                    yield event
                case Closed(ticket=ticket):
                    self._open.pop(ticket, None)

    def _said(self, event: Output) -> Text | Failed:
        """An answer that has ended, or fails, is forgotten; what the engine still says to it is not heard."""
        answer = self._open[event.ticket]
        try:
            said = answer.add(event.output)
        except Exception as error:
            log.exception("the answer to request %s failed", event.output.request_id)
            del self._open[event.ticket]
            message = f"the answer could not be made text: {type(error).__name__}: {error}"
            return Failed(event.ticket, Fault.of(MMServeError(message)))
        if answer.finish_reason is not None:
            del self._open[event.ticket]
        return Text(event.ticket, said)


def run(answers: Answers, hello: DetokenizerHello, parent: Parent) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener, speaker = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket in (listener, speaker):
        socket.set_hwm(0)
    listener.bind(hello.listen)
    speaker.connect(hello.speak)
    busy_since: float | None = None
    settle()
    parent.ready(Ready(), lambda: busy_since)
    bound = False
    while True:
        busy_since = None
        message = listener.recv()
        busy_since = time.monotonic()
        step = messages.to_step(message)
        if not bound:  # the engine is connected, and the folder of the sockets of no more use
            parent.bind()
            bound = True
        told = answers.told(step)
        if told.events or told.news:
            speaker.send(messages.to_bytes(told))


def main(socket_fd: int, parent_pid: int, folder: str) -> None:
    set_up_logging()
    tell_stacks_on_signal()
    parent = Parent(socket_fd, parent_pid, folder)
    hello = parent.hello()
    assert isinstance(hello, DetokenizerHello)
    try:
        answers = Answers(TokenBytes.from_json(hello.tokenizer_json))
    except MMServeError as error:
        parent.say(NotReady(Fault.of(error)))
        sys.exit(1)
    run(answers, hello, parent)


if __name__ == "__main__":
    _, socket_fd, parent_pid, folder = sys.argv
    main(int(socket_fd), int(parent_pid), folder)
