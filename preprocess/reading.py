"""Which packets of a stream must be decoded for the frames that are wanted."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# A decoder that starts anew must fill its pipeline again: measured at 720p as long as three to four frames.
RESTART_PACKETS = 4


@dataclass(frozen=True)
class Packets:
    """What the container tells of a stream's packets, in the order they are stored: the decoding order.

    ``times`` int64 [N]: when each is shown, in the stream's clock. ``keys`` bool [N]: the decoder may start
    here.
    """

    times: np.ndarray
    keys: np.ndarray

    def __len__(self) -> int:
        return len(self.times)


def plan_reading(packets: Packets, wanted: Sequence[int]) -> list[range]:
    """Runs of packets that give the frames shown at ``wanted`` as a read of the whole would.

        stored  K . . . w . . . . . . K . . . . . K . w . .
        runs    [-------]                         [---]

    A frame needs all packets from its entry up to its own. Its entry is the last key packet stored before
    it that is not shown after it: frames stored after a key picture and shown before it (an open group of
    pictures) lean on what came earlier. Runs that are nearer than ``RESTART_PACKETS`` are joined, since
    decoding the gap costs less than starting the decoder anew.
    """
    place = {time: at for at, time in reversed(list(enumerate(packets.times.tolist())))}
    needs = sorted((_entry(packets, place[time]), place[time] + 1) for time in set(wanted))
    runs: list[range] = []
    for start, stop in needs:
        if runs and start - runs[-1].stop <= RESTART_PACKETS:
            runs[-1] = range(runs[-1].start, max(runs[-1].stop, stop))
        else:
            runs.append(range(start, stop))
    return runs


def _entry(packets: Packets, at: int) -> int:
    before = np.flatnonzero(packets.keys[: at + 1] & (packets.times[: at + 1] <= packets.times[at]))
    return int(before[-1]) if len(before) else 0
