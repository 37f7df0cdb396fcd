"""Mooncake on prefill: learns which requests wait on decode, and retries sessions after a failed write.

Upstream: none is known.
"""

from __future__ import annotations

import time

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.mooncake import conn as engine
from sglang.srt.disaggregation.mooncake.failed_sessions import FailedSessions

__all__ = ["MooncakeKVManager", "MooncakeKVSender"]


class MooncakeKVManager(engine.MooncakeKVManager):
    """Replaces the engine's set of failed sessions by `FailedSessions`."""

    def __init__(self, *args, **kwargs):
        """Creates the set before the engine's threads start: they read messages before the engine makes its own."""
        self.sessions = FailedSessions()
        super().__init__(*args, **kwargs)
        self.failed_sessions = self.sessions

    def _check_on_prefill(self, frames: list[bytes]) -> bool:
        """A new registration ends the session's pause."""
        if self.waiting.take(frames):
            return False
        takes = super()._check_on_prefill(frames)
        if takes and frames[0] == b"None":
            self.sessions.remove(frames[3].decode("ascii"))
        return takes

    def add_transfer_request(self, bootstrap_room: int, *args, **kwargs) -> None:
        """Marks decode workers with the flag as retried, before a write of this chunk can fail."""
        for info in list(self.transfer_infos.get(bootstrap_room, {}).values()):
            if info.names_prefix and not info.is_dummy:
                self.sessions.try_again(info.mooncake_session_id)
        super().add_transfer_request(bootstrap_room, *args, **kwargs)


class MooncakeKVSender(engine.MooncakeKVSender):
    """Waits for as long as decode reports that the request waits there."""

    def poll(self) -> KVPoll:
        """Counts the engine's time-out from decode's last report."""
        waiting = self.kv_mgr.waiting
        if self.bootstrap_room in waiting and self.conclude_state is None and self.init_time is not None:
            unheard = waiting.silent_s(self.bootstrap_room, self.made_at)
            self.init_time = max(self.init_time, time.time() - unheard)
        return super().poll()
