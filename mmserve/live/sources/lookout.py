"""In a camera's process: which of the frames that are decoded go to the api."""

import threading
import time
from functools import partial
from typing import Any

import numpy as np
from av.video.reformatter import Interpolation, VideoReformatter
from msgspec import structs
from PIL import Image

from mmserve.core.config import CameraOptions, MediaOptions
from mmserve.core.errors import MediaError
from mmserve.live.frame import Fate
from mmserve.live.gate import Gate
from mmserve.live.policy import SessionPolicy
from mmserve.live.sources.messages import Drop, Tally
from mmserve.live.sources.post import Post, Shown
from mmserve.preprocess.container import FAULTS
from mmserve.preprocess.frame import upright
from mmserve.preprocess.image import background_color
from mmserve.preprocess.luma import thumbnail_size

TALLY_S = 0.25  # between two tallies
TAIL_S = 1.0  # for which frames still pass when a scene has come to rest, beside the policy's ``still_s``
LONGEST_PAUSE_S = 0.25  # between two frames that pass: a flash is told by the next one
ROOM = 2.0  # so many times the pixels of the policy are sent at most: the last resize is the model's own
PLANAR = ("yuv420p", "yuvj420p", "yuv422p", "yuvj422p", "yuv444p", "yuvj444p", "nv12", "nv21", "gray")


class Sluice:
    """Says of each thumbnail whether its frame may be of use to a session's gate, which decides.

    It is open while anything moves and some time after, and shut while nothing does, but for a frame now and
    then: so a scene at rest costs no pixels, and the gate behind it misses nothing that it looks for. It is a
    gate itself, a more sensitive one.
    """

    def __init__(self, policy: SessionPolicy) -> None:
        finer = 1.0 - (1.0 - policy.sensitivity) / 2
        self._gate = Gate(
            structs.replace(policy, sensitivity=finer, heartbeat_s=max(0.1, policy.heartbeat_s / 4), fps=60.0)
        )
        self._pause = min(LONGEST_PAUSE_S, 1 / (2 * policy.fps))
        self._tail = policy.still_s + TAIL_S
        self._open_until = float("-inf")
        self._looked = float("-inf")

    def due(self, at: float) -> bool:
        """Whether a frame captured ``at`` is worth a look. Times of a source that jump back begin anew."""
        return not self._looked <= at < self._looked + self._pause

    def passes(self, luma: np.ndarray, at: float) -> bool:
        self._looked = at
        verdict = self._gate.look(luma, at)
        if verdict.action != "drop":
            self._gate.sent(luma, at)
            if verdict.cause != "heartbeat":
                self._open_until = at + self._tail
            return True
        return at <= self._open_until


class Lookout:
    """Looks at the frames of one camera as they are decoded, and posts those that pass the sluice.

    ``see`` and ``lose`` are called on one thread; ``watch`` on any.
    """

    def __init__(
        self, policy: SessionPolicy, options: CameraOptions, media: MediaOptions, post: Post
    ) -> None:
        self._options = options
        self._background = background_color(media)
        self._post = post
        self._policy = policy
        self._sluice = Sluice(policy)
        self._reformatter = VideoReformatter()  # used by the post's thread alone
        self._seq = 0
        self._received = 0
        self._dropped: dict[Fate, Drop] = {}
        self._lock = threading.Lock()  # of the counts
        threading.Thread(target=self._tell, name="tally", daemon=True).start()

    def watch(self, policy: SessionPolicy) -> None:
        """By another policy from now on."""
        self._policy, self._sluice = policy, Sluice(policy)

    def see(self, frame: Any, captured: float, received: float) -> None:
        """A PyAV video frame, captured and received at these monotonic seconds."""
        self._count()
        luma = None
        fate = self._fate(frame, captured)
        if fate is None:
            luma = luma_of(frame)
            fate = None if self._sluice.passes(luma, captured) else "unchanged"
        if fate is not None:
            return self._drop(fate, self._seq, captured)
        assert luma is not None
        rgb = partial(self._rgb, frame, self._seq, captured)
        if older := self._post.show(Shown(self._seq, captured, received, luma, rgb)):
            self._drop("superseded", older.seq, older.captured)

    def lose(self) -> None:
        """What came cannot be decoded."""
        self._count()
        self._drop("decode_error", self._seq, time.monotonic())

    def _fate(self, frame: Any, captured: float) -> Fate | None:
        """Why a frame is dropped unseen; None if it is not."""
        if frame.width * frame.height > self._options.camera_max_pixels:
            return "too_big"
        if time.monotonic() - captured > self._policy.max_frame_age_ms / 1000:
            return "late"
        return None if self._sluice.due(captured) else "rate"

    def _rgb(self, frame: Any, seq: int, captured: float) -> np.ndarray | None:
        """uint8 [h, w, 3], upright, and not much larger than the model will see it."""
        try:
            return np.asarray(upright(self._shrunk(frame), self._background))
        except (MediaError, *FAULTS):
            self._drop("decode_error", seq, captured)
            return None

    def _shrunk(self, frame: Any) -> Any:
        """No more pixels than are sent, before colours are made of them: that takes a tenth of the time."""
        scale = (self._policy.max_pixels * ROOM / (frame.width * frame.height)) ** 0.5
        if scale >= 1:
            return frame
        width, height = max(1, int(frame.width * scale)), max(1, int(frame.height * scale))
        return self._reformatter.reformat(
            frame, width=width, height=height, interpolation=Interpolation.AREA, threads=1
        )

    def _count(self) -> None:
        with self._lock:
            self._received += 1
            self._seq += 1

    def _drop(self, fate: Fate, seq: int, captured: float) -> None:
        with self._lock:
            before = self._dropped.get(fate)
            self._dropped[fate] = Drop(before.count + 1 if before else 1, seq, captured)

    def _tell(self) -> None:
        while True:
            time.sleep(TALLY_S)
            with self._lock:
                tally = Tally(self._received, self._dropped)
                self._received, self._dropped = 0, {}
            if tally.received or tally.dropped:
                self._post.say(tally)


def luma_of(frame: Any) -> np.ndarray:
    """The thumbnail of a PyAV frame, uint8 [h, w], from its luma alone where that stands by itself."""
    if frame.format.name not in PLANAR:
        frame = frame.reformat(format="gray")
    plane = frame.planes[0]
    luma = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)[: frame.height, : frame.width]
    height, width = thumbnail_size(frame.height, frame.width)
    step = max(1, min(frame.height // (4 * height), frame.width // (4 * width)))
    coarse = Image.fromarray(np.ascontiguousarray(luma[::step, ::step]))
    return np.asarray(coarse.resize((width, height), Image.Resampling.BOX))
