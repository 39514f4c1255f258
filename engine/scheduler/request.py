"""One request inside the engine, and what a step does with it."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from mmserve.core.messages import FinishReason, PreparedRequest, PromptLogprobs, Timings, VisionItem
from mmserve.engine.grammar.steering import Steering
from mmserve.engine.kv.page_table import PageTable
from mmserve.engine.kv.radix import Keys, Node, Salt
from mmserve.engine.sampling.prompt_scores import LOGIT_ROWS, PromptScores

PATIENCE_S = 10.0  # a request without a deadline is due so long after it came
ANSWER_WEIGHT = 2  # what a token of an answer counts beside one of a prompt (as in arXiv:2401.00588)


class Status(Enum):
    WAITING = "waiting"  # holds nothing
    RUNNING = "running"  # holds pages, and features of items that are encoded and not yet computed
    PARKED = "parked"  # holds nothing, and lacks pixels of an item whose features were evicted
    FINISHED = "finished"  # holds nothing, and is in no queue


@dataclass(slots=True, eq=False)
class Account:
    """One owner's: ``served`` is the weight of all tokens computed for it, its virtual time. Whoever has less
    goes first (virtual token counter, arXiv:2401.00588)."""

    owner: str = ""
    served: int = 0
    waiting: int = 0  # its requests in the queue


@dataclass(slots=True, eq=False)
class Request:
    """A request's tokens and how far they have come.

        0          computed_len      ready_len        num_tokens     capacity
        |-- in the pool --|-- may be computed --|-- waits for --|-- to be generated --|
                                                   an item

    ``token_ids`` holds the prompt and then what was generated. ``items[items_passed:items_held]`` are
    pinned in the encoder pool: encoded, and not computed whole yet. The last ``unknown`` tokens have their
    places and no values yet: they are being drawn in steps that are in flight (see runner/overlap.py).
    Preemption frees pages and pins and starts again at 0. ``account`` was charged for the tokens before
    ``paid_len``; those computed again are free.

    ``items`` is the only holder of the items: each loses its pixels once they are not needed, so
    ``prepared`` is kept without them.
    """

    prepared: PreparedRequest
    arrival: int
    max_tokens: int
    stop_ids: frozenset[int]
    table: PageTable
    steering: Steering | None = None  # of an answer with a form, or a budget for thoughts, until it is free
    scores: PromptScores | None = field(init=False)  # of the prompt, if asked for, until they are told
    items: list[VisionItem] = field(init=False)
    token_ids: npt.NDArray[np.int32] = field(init=False)
    num_tokens: int = field(init=False)
    prompt_len: int = field(init=False)
    newest: int = -1  # the last token that was generated, as far as is known
    unknown: int = 0
    due: float = field(init=False)
    account: Account = field(default_factory=Account)
    paid_len: int = 0
    seed: int = 0
    computed_len: int = 0
    ready_len: int = 0
    node: Node | None = None  # ends the cached prefix that is locked for this request
    shared_len: int = 0  # length of that prefix
    cached_len: int | None = None  # how much of it was cached when it was first admitted
    awaited: "Request | None" = None  # computes what this one begins with
    items_passed: int = 0
    items_held: int = 0
    full_at: int = 0  # the step in which its pages may be used up (see growth.py)
    preemptions: int = 0
    wanted: frozenset[bytes] = frozenset()  # items whose pixels it was parked for, by digest
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    arrived: float = field(default_factory=time.monotonic)
    scheduled: float | None = None
    encoded: float | None = None
    first_token: float | None = None
    finished: float | None = None

    def __post_init__(self) -> None:
        self.prompt_len = self.num_tokens = self.prepared.num_tokens
        self.token_ids = np.empty(self.prompt_len + self.max_tokens, dtype=np.int32)
        self.token_ids[: self.prompt_len] = self.prepared.token_ids
        count = self.prepared.sampling.prompt_logprobs
        self.scores = None if count is None else PromptScores(self.prepared.token_ids, count)
        self.items = list(self.prepared.items)
        self.prepared = replace(self.prepared, items=())
        deadline = self.prepared.deadline
        self.due = self.arrived + PATIENCE_S if deadline is None else deadline

    @property
    def request_id(self) -> str:
        return self.prepared.request_id

    @property
    def warm(self) -> bool:
        """Whether it ends when its prompt is computed, and nothing is sampled."""
        return self.prepared.warm

    @property
    def rank(self) -> tuple[int, int, float, int]:
        """The order of service at this moment: lower ``priority`` first, then the owner who was served
        least, then who is due first: at its deadline or, without one, ``PATIENCE_S`` after it came."""
        return (self.prepared.priority, self.account.served, self.due, self.arrival)

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.prompt_len

    @property
    def decoding(self) -> bool:
        """Only the newest token is left to compute."""
        return self.computed_len == self.num_tokens - 1 and self.num_tokens > self.prompt_len

    @property
    def sharable_len(self) -> int:
        """How much of a cached prefix is of use: what follows is to be computed, for its logits. All of it is
        to a warm one, which has none."""
        if self.warm:
            return self.num_tokens
        known = self.num_tokens - 1
        return known if self.scores is None else min(self.scores.known, known)

    @property
    def salt(self) -> Salt:
        """Prefixes are shared among requests of one salt only."""
        return (self.prepared.cache_salt, self.prepared.adapter)

    def keys(self, stop: int) -> Keys:
        """What the prefix cache knows the first ``stop`` tokens by."""
        prompt = self.prepared.radix_keys[:stop]
        if stop <= self.prompt_len:
            return prompt
        return np.concatenate((prompt, self.token_ids[self.prompt_len : stop].astype(np.int64)))

    @property
    def owed(self) -> int:
        """The weight of all known tokens that the owner was not charged for."""
        answer = self.num_tokens - max(self.paid_len, self.prompt_len)
        prompt = self.num_tokens - self.paid_len - answer
        return prompt + ANSWER_WEIGHT * answer

    def pay(self) -> None:
        self.account.served += self.owed
        self.paid_len = self.num_tokens

    def begin_at(self, length: int) -> None:
        """The first ``length`` tokens are cached, and computing begins behind them."""
        self.pass_items(length)
        self.computed_len = length
        self.paid_len = max(self.paid_len, length)
        if self.cached_len is None:
            self.cached_len = length

    def pass_items(self, length: int) -> None:
        """Items within the first ``length`` tokens are not needed, as far as is known now."""
        self.items_passed = self.items_held = sum(item.span[1] <= length for item in self.items)

    def drop_pixels(self, index: int) -> None:
        """Item ``index`` is encoded and pinned."""
        if self.items[index].pixels is not None:
            self.items[index] = replace(self.items[index], pixels=None)

    def take_pixels(self, pixels: Mapping[bytes, npt.NDArray[np.uint8]]) -> None:
        """Items without pixels take theirs, by digest."""
        for index, item in enumerate(self.items):
            if item.pixels is None and item.digest in pixels:
                self.items[index] = replace(item, pixels=pixels[item.digest])

    def reach(self) -> None:
        """Make room for a token that is drawn after all there are, which are computed therefore; ``append``
        will tell it."""
        self.computed_len = self.num_tokens
        self.num_tokens += 1
        self.unknown += 1

    def append(self, token: int) -> None:
        """Take a token sampled after all that was known, which is computed therefore: into the first place
        that waits for one, if any does. Afterwards ``finish_reason`` says whether it was the last one; what
        was drawn after that is dropped."""
        ends = token in self.stop_ids and self.may_end
        if not self.unknown:
            self.reach()
        known = self.num_tokens - self.unknown
        self.token_ids[known] = self.newest = token
        self.unknown -= 1
        if self.steering:
            self.steering.accept(token)
            if self.steering.free:
                self.steering = None
        if ends:
            self.finish_reason = "stop"
        elif known + 1 - self.prompt_len >= self.max_tokens:
            self.finish_reason = "length"
        if self.unknown and self.finish_reason:
            self.computed_len = min(self.computed_len, known)
            self.num_tokens, self.unknown = known + 1, 0

    @property
    def may_end(self) -> bool:
        """Whether a stop token may come next. It must when the form of the answer is whole."""
        return self.num_generated - self.unknown >= self.prepared.sampling.min_tokens or (
            self.steering is not None and self.steering.complete
        )

    def take_scores(self) -> PromptLogprobs | None:
        """The prompt's log-probabilities, once."""
        scores, self.scores = self.scores, None
        return None if scores is None else scores.message()

    def generated(self) -> npt.NDArray[np.int32]:
        return self.token_ids[self.prompt_len : self.num_tokens]

    def timings(self) -> Timings:
        return Timings(self.arrived, self.scheduled, self.encoded, self.first_token, self.finished)


@dataclass(slots=True)
class Chunk:
    """Tokens [start, stop) of ``request``, computed in one step; pages for them are held."""

    request: Request
    start: int
    stop: int
    samples: bool  # the last of all known tokens is among them, and the next one is wanted

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def wanted(self) -> range:
        """The tokens whose logits the prompt's own log-probabilities need."""
        scores = self.request.scores
        return range(0) if scores is None else scores.wanted(self.start, self.stop)


class Batch:
    """One step: ``decodes``, requests whose newest token is computed, before ``prompts``, chunks of others;
    ``room``, the tokens that could still be added; and ``logit_room``, those of them whose logits prompts may
    want for themselves."""

    def __init__(self, budget: int) -> None:
        self.decodes: list[Request] = []
        self.prompts: list[Chunk] = []
        self.num_tokens = 0
        self.room = budget
        self.logit_room = LOGIT_ROWS

    def __len__(self) -> int:
        return len(self.decodes) + len(self.prompts)

    def __iter__(self) -> Iterator[Chunk]:
        """Decodes as chunks too, made for whoever asks: a thousand of them cost as much as all the rest."""
        for request in self.decodes:
            yield Chunk(request, request.num_tokens - 1, request.num_tokens, True)
        yield from self.prompts

    @property
    def sampling(self) -> list[Request]:
        """The requests for which a token is sampled, in the order of their rows."""
        return self.decodes + [chunk.request for chunk in self.prompts if chunk.samples]

    def leave_room(self, tokens: int) -> None:
        """Room for ``tokens`` more at most."""
        self.room = min(self.room, tokens)

    def add_decodes(self, requests: list[Request]) -> None:
        """The newest tokens of ``requests``, as many as there is room for."""
        self.decodes = requests[: self.room]
        self.num_tokens += len(self.decodes)
        self.room -= len(self.decodes)

    def add_prompt(self, request: Request, stop: int) -> None:
        """Tokens from where ``request`` stands up to ``stop``, if that is any; fewer where there is no room
        for their logits."""
        start = request.computed_len
        if request.scores is not None:
            wanted = request.scores.wanted(start, stop)
            stop = min(stop, wanted.start + self.logit_room) if len(wanted) > self.logit_room else stop
            self.logit_room -= min(len(wanted), self.logit_room)
        if start < stop:
            samples = stop == request.num_tokens and not request.warm
            self.prompts.append(Chunk(request, start, stop, samples))
            self.num_tokens += stop - start
            self.room -= stop - start


def common_len(one: Request, other: Request) -> int:
    """How many tokens of their prompts two requests have in common, from the first on."""
    if one.salt != other.salt:
        return 0
    a, b = one.prepared.radix_keys, other.prepared.radix_keys
    count = min(len(a), len(b))
    different = np.flatnonzero(a[:count] != b[:count])
    return int(different[0]) if len(different) else count
