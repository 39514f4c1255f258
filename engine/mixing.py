"""How much of pictures and prompts a step computes beside the answers that are being written."""

from math import inf

from mmserve.engine.runner.inputs import PROMPT_ROWS, padded, unpadded

IDLE_SLICE_S = 0.25  # of the encoder when no answer is being written: aborts and new requests wait for it
REFRESH = 32  # steps in a row with something beside the decodes; then one without, for the yardstick
WORK_S = 5e-11  # of one operation of the encoder, until it has been seen
HICCUP = 3.0  # a measurement counts as at most so many times the usual one


class Rate:
    """Seconds for a unit of something, smoothed over the last ten or so measurements."""

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds

    def observe(self, seconds: float, units: float = 1.0) -> None:
        found = seconds / units
        if not self.seconds:
            self.seconds = found
        else:
            self.seconds += 0.2 * (min(found, HICCUP * self.seconds) - self.seconds)

    def units(self, seconds: float) -> float:
        """How many take about ``seconds``; 0 if that is not known."""
        return seconds / self.seconds if self.seconds else 0.0


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
        self.decode = Rate()  # one step of decodes alone
        self.work = Rate(WORK_S)  # one operation of the encoder
        self.token = Rate()  # one prompt token beside decodes
        self.waits = 0  # steps in which decodes waited for something else, and how long they did
        self.wait_seconds = 0.0
        self.longest_wait_seconds = 0.0
        self._encoders_turn = True
        self._since_alone = REFRESH  # nothing is known yet

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
        return max(self.work.units(self._spare), 1.0) if self._mixes else 0.0

    def prompt_tokens(self, decodes: int, encoded: bool) -> int | None:
        """Prompt tokens of a step beside ``decodes`` rows, in which the encoder had a slice or not; None:
        as many as it has room for. With the decodes they fill whole ``PROMPT_ROWS``, as a step is padded
        to them anyway."""
        if self.stall_factor is None or not decodes:
            return None
        if encoded or not self._mixes:
            return 0
        rows = decodes + int(self.token.units(self._spare))
        return max(unpadded(rows), padded(decodes + PROMPT_ROWS // 2)) - decodes

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
            self.work.observe(seconds, work)
        if decodes:
            self._waited(seconds)

    def stood(self, decodes: int, seconds: float) -> None:
        """Something else took ``seconds`` between two steps, for which ``decodes`` rows waited."""
        if decodes:
            self._waited(seconds)

    def computed(self, prompt_tokens: int, decodes: int, seconds: float) -> None:
        """A step of the language model took ``seconds``."""
        if not prompt_tokens:
            self.decode.observe(seconds)
            self._since_alone = 0
            return
        self._encoders_turn = True
        if decodes:
            beside = max(seconds - (self.decode.seconds or 0.0), 0.0)
            self.token.observe(beside, prompt_tokens)
            self._since_alone += 1
            self._waited(beside)

    def _waited(self, seconds: float) -> None:
        self.waits += 1
        self.wait_seconds += seconds
        self.longest_wait_seconds = max(self.longest_wait_seconds, seconds)
