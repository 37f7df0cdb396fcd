"""What decode workers report to prefill about their waiting requests.

Upstream: none is known.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from sglang.srt.disaggregation.common.rooms import REMEMBERED_ROOMS, Rooms, remember
from sglang.srt.disaggregation.common.wire import wire_int

# Last frame of decode's report that a request waits there for memory.
QUEUED = b"queued"


class WaitingRooms(OrderedDict[int, dict[tuple[str, int], float]]):
    """By room: the decode ranks (host and port) in which it waits, and the time of each one's last report.

    The request itself may reach prefill later. Change it under the lock of ``rooms``. The oldest rooms are removed.
    """

    def __init__(self, rooms: Rooms, met: Callable[[str, int], None]):
        """met: called for each decode rank that says so."""
        super().__init__()
        self._rooms, self._met = rooms, met
        # Last request for KV from a decode worker that does not report: any room may wait there.
        self.silent_peer_at = 0.0

    def take(self, frames: list[bytes]) -> bool:
        """Note a report, given its frames from the room on; False for other messages. Raises ValueError."""
        if frames[4:] != [QUEUED]:
            return False
        self.note(wire_int(frames[0], "room"), frames[1].decode("ascii"), wire_int(frames[2], "port"))
        return True

    def note(self, room: int, host: str, port: int) -> None:
        """``room`` waits in a decode rank."""
        with self._rooms.lock:
            self._met(host, port)
            if room not in self._rooms.ended:
                ranks = self.get(room, {})
                remember(self, room, {**ranks, (host, port): time.monotonic()}, REMEMBERED_ROOMS)

    def silent_s(self, room: int, since: float) -> float:
        """Seconds since ``since``, or since the last report that ``room`` waits, whichever is later.

        A decode worker without the flag never reports; any of its requests for KV counts instead. 0 before the first
        message of a decode worker that reports.
        """
        if not self._rooms.has_met_flag:
            return 0.0
        heard_at = max([since, self.silent_peer_at, *self.get(room, {}).values()])
        return time.monotonic() - heard_at
