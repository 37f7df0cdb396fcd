"""What a prefill worker has heard of requests that wait in decode workers.

Upstream: none is known.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from sglang.srt.disaggregation.common.rooms import REMEMBERED_ROOMS, Rooms, remember
from sglang.srt.disaggregation.common.wire import wire_int

# Last frame of decode's message that a request waits there for memory.
QUEUED = b"queued"


class WaitingRooms(OrderedDict[int, dict[tuple[str, int], float]]):
    """Decode ranks, host and port, in which a room waits, and when each last said so, by room.

    The request may come here only later. To be changed under the lock of ``rooms``. The oldest are forgotten.
    """

    def __init__(self, rooms: Rooms, met: Callable[[str, int], None]):
        """met: called for each decode rank that says so."""
        super().__init__()
        self._rooms, self._met = rooms, met
        # When a decode worker last asked for KV that does not say so: any room may wait there.
        self.silent_peer_at = 0.0

    def take(self, frames: list[bytes]) -> bool:
        """Note what a message says, in its frames from the room on; whether it is of this kind. Raises ValueError."""
        if frames[4:] != [QUEUED]:
            return False
        self.note(wire_int(frames[0], "room"), frames[1].decode("ascii"), wire_int(frames[2], "port"))
        return True

    def note(self, room: int, host: str, port: int) -> None:
        """``room`` waits in a decode rank, which will ask for it."""
        with self._rooms.lock:
            self._met(host, port)
            if room not in self._rooms.ended:
                ranks = self.get(room, {})
                remember(self, room, {**ranks, (host, port): time.monotonic()}, REMEMBERED_ROOMS)

    def silent_s(self, room: int, since: float) -> float:
        """Seconds since a decode rank last said that ``room`` waits in it, or may have it wait unsaid, or ``since``.

        A decode worker without the flag never says so: it counts when it asks for anything. 0 where no decode worker
        that would say so has sent a message.
        """
        if not self._rooms.has_met_flag:
            return 0.0
        heard_at = max([since, self.silent_peer_at, *self.get(room, {}).values()])
        return time.monotonic() - heard_at
