"""A request without a prefill, and why it has none.

Upstream: none is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.delta_sender import NO_REASON

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest

__all__ = ["ABORTED", "NoPrefill", "PrefillGone", "is_taken_over"]

# As the engine has it.
ABORTED = "Aborted by AbortReq."


class PrefillGone(str):
    """Why a request has failed, where the reason is that its prefill does not answer, or is no longer there."""


class NoPrefill:
    """The receiver of a request that decode has taken over: there is nothing to receive, and nobody to tell."""

    # As far as the schedule asks: the request may use what the tree holds.
    peer_takes_prefix = True
    bootstrap_addr: str | None = None
    conclude_state: KVPoll | None = None
    fenced = False

    def __init__(self, bootstrap_room: int, delta: int):
        """delta: tokens that the tree lacked of it."""
        self.bootstrap_room, self.delta = bootstrap_room, delta

    def init(self, prefill_dp_rank: int) -> None:
        """There is no handshake to begin."""

    def poll(self) -> KVPoll:
        """It can be admitted, unless it has been aborted."""
        return KVPoll.Failed if self.conclude_state == KVPoll.Failed else KVPoll.WaitingForInput

    def abort(self) -> None:
        self.conclude_state = KVPoll.Failed

    def failure_exception(self) -> None:
        """Only an abort ends it here; what else does is known elsewhere."""
        raise RuntimeError(ABORTED if self.conclude_state == KVPoll.Failed else NO_REASON)

    def cancel(self) -> None:
        """There is nobody to tell."""

    def end(self) -> None:
        """No book mentions it."""

    clear = end

    def writers_done(self) -> bool:
        """Nobody writes for it."""
        return True


def is_taken_over(decode_req: DecodeRequest) -> bool:
    """Whether decode computes a request since its prefill is gone or late."""
    return isinstance(decode_req.kv_receiver, NoPrefill)
