"""How much of pictures and prompts a step computes beside the answers that are being written."""

from math import inf

from mmserve.core.config import NO_BOUND
from mmserve.engine.runner.inputs import PROMPT_ROWS, padded

IDLE_SLICE_S = 0.25  # of the encoder when no answer is being written: aborts and new requests wait for it
REFRESH = 32  # steps in a row with something beside the decodes; then one without, for the yardstick
WORK_S = 5e-11  # of one operation of the encoder, until it has been seen
HICCUP = 3.0  # a measurement counts as at most so many times the usual one
RISE, FALL = 0.5, 0.2  # of a step's cost towards a measurement that is dearer, or cheaper
FADE = 0.997  # of the costs of more rows with each step of fewer, so that they are tried again some day


class Rate:
    """Seconds for a unit of something, smoothed over the last ten or so measurements; ``fall`` is the weight
    of one that is less."""

    def __init__(self, seconds: float | None = None, fall: float = 0.2) -> None:
        self.seconds = seconds
        self._fall = fall

    def observe(self, seconds: float, units: float = 1.0) -> None:
        found = seconds / units
        if not self.seconds:
            self.seconds = found
        else:
            weight = self._fall if found < self.seconds else 0.2
            self.seconds += weight * (min(found, HICCUP * self.seconds) - self.seconds)

    def units(self, seconds: float) -> float:
        """How many take about ``seconds``; 0 if that is not known."""
        return seconds / self.seconds if self.seconds else 0.0


class Costs:
    """What a step with prompts takes by its padded rows, in steps of decodes alone.

    The cost is no straight line: a few rows more hardly count while memory is waited for anyway, and then
    they do. So each number of rows is measured, and the next larger one is tried when the two below it let
    hope that it fits. As a ratio a cost stays true when the whole machine becomes slower for a while.
    """

    def __init__(self) -> None:
        self.of: dict[int, float] = {}

    def observe(self, rows: int, cost: float) -> None:
        known = self.of.get(rows, cost)
        aim = min(cost, HICCUP * known)
        self.of[rows] = known + (RISE if aim > known else FALL) * (aim - known)
        for more in self.of:
            if more > rows:
                self.of[more] *= FADE

    def most_rows(self, least: int, bound: float) -> int:
        """The most rows, from ``least`` on as steps are padded, up to which none costs more than ``bound``;
        ``least`` in any case."""
        rows = least
        while self._expected(larger := padded(rows + 1), rows) <= bound:
            rows = larger
        return rows

    def _expected(self, rows: int, below: int) -> float:
        """Of ``rows``, the next more than ``below``: as measured, or in line with what is below."""
        if rows in self.of:
            return self.of[rows]
        if below not in self.of:
            return inf
        lower = max((r for r in self.of if r < below), default=0)
        before = self.of.get(lower, 1.0)  # of no rows but those of decodes
        slope = max(self.of[below] - before, 0.0) / (below - lower)
        return self.of[below] + slope * (rows - below)


class Mixing:
    """The policy, in the seconds that this machine was seen to take.

    Nobody decodes: a slice of the encoder, then as many prompt tokens as a step may have.

    Somebody decodes: a step takes at most ``stall_factor`` times what its decodes take alone. What is left
    beside them goes in turns to one slice of the encoder and to one chunk of prompts, each of which has the
    step for itself if the other has nothing to do. The least of each is one part of the encoder's
    (``encoders/parts.py``) and ``PROMPT_ROWS`` rows, so both always go on.

    ``stall_factor`` None: no bound; a step encodes a whole batch and computes all that fits.
    """

    def __init__(self, stall_factor: float | None) -> None:
        self.stall_factor = stall_factor
        self.decode = Rate(fall=0.5)  # one step of decodes alone; the first of all is none to go by
        self.work = Rate(WORK_S)  # one operation of the encoder when nobody waits
        self.work_beside = Rate()  # and between decodes, which leave it cold caches
        self.costs = Costs()  # of steps with prompts beside decodes
        self.waits = 0  # steps in which decodes waited for something else, and how long they did
        self.wait_seconds = 0.0
        self.longest_wait_seconds = 0.0
        self._encoders_turn = True
        self._since_alone = REFRESH  # nothing is known yet
        self._encoded_beside = False  # since the last step of the language model

    # ------------------------------------------------------------ what a step may do

    @property
    def encoders_turn(self) -> bool:
        """Whether the encoder is asked before the prompts."""
        return self.stall_factor is None or self._encoders_turn

    def slice_work(self, decodes: int) -> float:
        """Operations of the encoder in a step beside ``decodes`` rows; 0: none at all."""
        if self.stall_factor is None:
            return inf
        if not decodes:
            return max(self.work.units(IDLE_SLICE_S), 1.0)
        rate = self.work_beside if self.work_beside.seconds else self.work
        return max(rate.units(self._spare), 1.0) if self._mixes else 0.0

    def prompt_tokens(self, decodes: int, encoded: bool) -> int | None:
        """Prompt tokens of a step beside ``decodes`` rows, in which the encoder had a slice or not; None:
        as many as it has room for. With the decodes they fill whole ``PROMPT_ROWS``, as a step is padded
        to them anyway."""
        if self.stall_factor is None or not decodes:
            return None
        if encoded or not self._mixes:
            return 0
        if self.stall_factor >= NO_BOUND:
            return None  # nobody waits for a token: larger steps need not be tried one size after the other
        return self.costs.most_rows(padded(decodes + PROMPT_ROWS // 2), self.stall_factor) - decodes

    def beside_s(self, decodes: int) -> float:
        """Seconds that anything else may take between two steps of ``decodes`` rows."""
        if self.stall_factor is None:
            return inf
        return self._spare if decodes else IDLE_SLICE_S

    @property
    def _mixes(self) -> bool:
        return self._since_alone < REFRESH

    @property
    def _spare(self) -> float:
        """Seconds beside the decodes of a step."""
        assert self.stall_factor is not None
        return (self.stall_factor - 1) * (self.decode.seconds or 0.0)

    # ------------------------------------------------------------ what steps took

    def encoded(self, work: float, decodes: int, seconds: float) -> None:
        """A slice of the encoder took ``seconds``, for which ``decodes`` rows waited."""
        self._encoders_turn = False
        if work:
            (self.work_beside if decodes else self.work).observe(seconds, work)
        if decodes:
            self._encoded_beside = True
            self._waited(seconds)

    def encoded_apart(self, work: float, decodes: int, seconds: float) -> None:
        """A slice of the encoder took ``seconds`` of a device that went on with ``decodes`` rows."""
        self._encoders_turn = False
        if work:
            (self.work_beside if decodes else self.work).observe(seconds, work)

    def stood(self, decodes: int, seconds: float) -> None:
        """Something else took ``seconds`` between two steps, for which ``decodes`` rows waited."""
        if decodes:
            self._waited(seconds)

    def computed(self, prompt_tokens: int, decodes: int, seconds: float, typical: bool = True) -> None:
        """A step of the language model took ``seconds``, which are a measure if they are ``typical``. Behind
        a slice of the encoder one of decodes takes longer than alone, so it is no yardstick."""
        encoded, self._encoded_beside = self._encoded_beside, False
        if not prompt_tokens:
            if encoded or not typical:
                self._since_alone += 1
            else:
                self.decode.observe(seconds)
                self._since_alone = 0
            return
        self._encoders_turn = True
        if decodes:
            beside = max(seconds - (self.decode.seconds or 0.0), 0.0)
            if self.decode.seconds and typical:
                self.costs.observe(padded(decodes + prompt_tokens), seconds / self.decode.seconds)
            self._since_alone += 1
            self._waited(beside)

    def _waited(self, seconds: float) -> None:
        self.waits += 1
        self.wait_seconds += seconds
        self.longest_wait_seconds = max(self.longest_wait_seconds, seconds)
