"""Prefill workers over Mooncake that hear of what waits in decode workers, and try those again to which a write failed.

Upstream: none is known.
"""

from __future__ import annotations

import time

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.mooncake import conn as engine
from sglang.srt.disaggregation.mooncake.failed_sessions import FailedSessions

__all__ = ["MooncakeKVManager", "MooncakeKVSender"]


class MooncakeKVManager(engine.MooncakeKVManager):
    """Has `FailedSessions` in the place of the engine's set."""

    def __init__(self, *args, **kwargs):
        """Before the engine's, which starts the threads; it makes its set when these already read messages."""
        self.sessions = FailedSessions()
        super().__init__(*args, **kwargs)
        self.failed_sessions = self.sessions

    def _check_on_prefill(self, frames: list[bytes]) -> bool:
        """One that registers anew has had no failures."""
        if self.waiting.take(frames):
            return False
        takes = super()._check_on_prefill(frames)
        if takes and frames[0] == b"None":
            self.sessions.remove(frames[3].decode("ascii"))
        return takes

    def add_transfer_request(self, bootstrap_room: int, *args, **kwargs) -> None:
        """Decode workers with the flag are tried again from here on, before a write of this chunk may fail."""
        for info in list(self.transfer_infos.get(bootstrap_room, {}).values()):
            if info.names_prefix and not info.is_dummy:
                self.sessions.try_again(info.mooncake_session_id)
        super().add_transfer_request(bootstrap_room, *args, **kwargs)


class MooncakeKVSender(engine.MooncakeKVSender):
    """Mooncake sender that waits for as long as decode says that its request waits there."""

    def poll(self) -> KVPoll:
        """The engine's time-out counts from when decode last said so."""
        waiting = self.kv_mgr.waiting
        if self.bootstrap_room in waiting and self.conclude_state is None and self.init_time is not None:
            unheard = waiting.silent_s(self.bootstrap_room, self.made_at)
            self.init_time = max(self.init_time, time.time() - unheard)
        return super().poll()
