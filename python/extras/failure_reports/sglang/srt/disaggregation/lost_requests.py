"""Requests that fail on prefill while no queue polls them; all ranks end them in the same step.

The engine polls a transfer while its request waits for decode, and again after its prompt is computed. A request that
fails in between is still computed completely. To stop it, all ranks must act in the same step, but they learn of the
failure in different ones. So the receiving rank adds a message to those it receives, which the engine distributes to
the other ranks in every step anyway. Without failures not one byte is added.

Upstream: none is known.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.common.conn import CommonKVSender

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

__all__ = ["LostReqs", "MessageAhead", "maybe_lost"]


@dataclass
class LostReqs:
    """Reasons of failed requests by room, from the receiving rank to all ranks of a prefill.

    By room because two requests may have the same rid: a gateway's retry, or two clients.
    """

    reasons: dict[int, str]


class MessageAhead:
    """The socket from which a scheduler receives, with ``message`` ahead of its messages."""

    def __init__(self, message: Any, socket: Any):
        self._messages, self._socket = [message], socket

    def recv_pyobj(self, flags: int = 0) -> Any:
        """The next message; raises zmq.ZMQError if there is none, as the socket does."""
        return self._messages.pop() if self._messages else self._socket.recv_pyobj(flags)


def maybe_lost(reqs: Iterable[Req], refused: Container[int]) -> list[Req]:
    """Those of ``reqs`` whose senders may have a `failure_reason`, including all that do; usually none.

    refused: rooms for which decode's request is unusable or cancelled.
    """
    # Inline: this runs in each iteration for every request.
    now = time.monotonic()
    return [
        req
        for req in reqs
        if isinstance(sender := req.disagg_kv_sender, CommonKVSender)
        and ((state := sender.state).reason is not None or now >= state.due_at or sender.bootstrap_room in refused)
    ]
