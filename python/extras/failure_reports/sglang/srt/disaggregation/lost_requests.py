"""Requests that a prefill has lost while no queue polls them, and how all of its ranks end them in the same step.

The engine looks at a transfer while its request waits for decode, and again when its prompt has been computed. What
fails in between waits for its turn and is then computed to its end. To stop that, all ranks must do so in the same
step, and they learn of a failure in different ones. So the rank that receives for all of them says it, as if it had
received it: the engine hands that on to the others in every step anyway, and where nothing is lost not a byte more.

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
    """From the rank that receives to all ranks of a prefill: why requests have failed, by room.

    Two requests may have one rid: a gateway's that has tried again, or two clients'.
    """

    reasons: dict[int, str]


class MessageAhead:
    """The socket from which a scheduler receives, with ``message`` before anything else."""

    def __init__(self, message: Any, socket: Any):
        self._messages, self._socket = [message], socket

    def recv_pyobj(self, flags: int = 0) -> Any:
        """The next message; raises zmq.ZMQError where there is none, as the socket does."""
        return self._messages.pop() if self._messages else self._socket.recv_pyobj(flags)


def maybe_lost(reqs: Iterable[Req], refused: Container[int]) -> list[Req]:
    """Those of ``reqs`` whose senders may have a `failure_reason`, and all that have; of thousands, mostly none.

    refused: the rooms for which decode's request cannot be used, or that it has given up.
    """
    # In each turn, so not a call for each of them.
    now = time.monotonic()
    return [
        req
        for req in reqs
        if isinstance(sender := req.disagg_kv_sender, CommonKVSender)
        and ((state := sender.state).reason is not None or now >= state.due_at or sender.bootstrap_room in refused)
    ]
