"""Prefill workers over Mooncake that try decode workers again to which a write has failed.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.disaggregation.mooncake import conn as engine
from sglang.srt.disaggregation.mooncake.failed_sessions import FailedSessions

__all__ = ["MooncakeKVManager"]


class MooncakeKVManager(engine.MooncakeKVManager):
    """Has `FailedSessions` in the place of the engine's set."""

    def __init__(self, *args, **kwargs):
        """Before the engine's, which starts the threads; it makes its set when these already read messages."""
        self.sessions = FailedSessions()
        super().__init__(*args, **kwargs)
        self.failed_sessions = self.sessions

    def _check_on_prefill(self, frames: list[bytes]) -> bool:
        """One that registers anew has had no failures."""
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
