"""Grammars are compiled beside the engine's loop, once for all the requests that bring the same one."""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from mmserve.core.messages import Grammar
from mmserve.engine.grammar.base import GrammarBackend, Matcher

MakeBackend = Callable[[], GrammarBackend]

COMPILERS = 2  # threads; a grammar that takes seconds must not hold up every other
KEPT = 64  # grammars whose first state is remembered


class GrammarDesk:
    """Compiles grammars on threads of its own and remembers the last ones.

    ``make_backend`` is called on one of them when the first grammar comes: most models never see any.
    """

    def __init__(self, make_backend: MakeBackend, library: str = "") -> None:
        self.library = library  # as the log tells it
        self.compiled = self.reused = 0
        self._make_backend = make_backend
        self._backend: Future[GrammarBackend] | None = None
        self._kept: OrderedDict[tuple[str, str], Future[Matcher]] = OrderedDict()
        self._threads = ThreadPoolExecutor(COMPILERS, thread_name_prefix="grammar")

    def request(self, grammar: Grammar, done: Callable[[Future[Matcher]], None]) -> None:
        """Call ``done`` with a future that holds a matcher to ``copy``, or what is wrong with the grammar.

        On a thread of the desk, or at once if it is known. Only one thread may call this.
        """
        key = (grammar.kind, grammar.source)
        future = self._kept.get(key)
        if future is None or (future.done() and future.exception()):
            future = self._kept[key] = self._compile(grammar)
        else:
            self.reused += 1
        self._kept.move_to_end(key)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        future.add_done_callback(done)

    def _compile(self, grammar: Grammar) -> Future[Matcher]:
        backend = self._backend = self._backend or self._threads.submit(self._make_backend)
        self.compiled += 1
        return self._threads.submit(lambda: backend.result().compile(grammar))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
