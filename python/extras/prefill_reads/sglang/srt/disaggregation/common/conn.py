"""Offers on the wire: decode names pages, prefill announces that it reads and checks offers.

Upstream: none is known; vLLM lets prefill pull KV from decode (vllm-project/vllm#32553).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt import server_args
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import conn as engine
from sglang.srt.disaggregation.common.delta_sender import Phase
from sglang.srt.disaggregation.decode_radix import hooks
from sglang.srt.disaggregation.offers import OFFER, READS, read_offer, write_offer, wrong_offer

__all__ = ["CommonKVBootstrapServer", "CommonKVManager", "CommonKVReceiver", "CommonKVSender"]

hooks.PARTS.append(hooks.MessagePart(OFFER, 3, write_offer, read_offer, dummies=False))


class CommonKVManager(engine.CommonKVManager):
    """Counts reading requests as live."""

    room_books = (*engine.CommonKVManager.room_books, "reads")


class CommonKVSender(engine.CommonKVSender):
    """Waits until its request's read has ended."""

    # The read before it begins, if any; see decode_reads.py.
    reading: Any = None

    def accept_decode_prefix(self) -> bool:
        """Refuses offers that do not match decode's prefix."""
        accepted = self.state.phase >= Phase.ACCEPTED
        if not super().accept_decode_prefix():
            return False
        wrong = None if accepted else wrong_offer(self.state.asked, self.decode_prefix_len, self.kv_mgr)
        if wrong is not None:
            self.fail(f"refused decode's request for KV: {wrong}")
        return wrong is None

    def poll_asked(self) -> int:
        """The read's progress."""
        if self.reading is None:
            return super().poll_asked()
        polled = self.reading.poll(self.state.asked)
        # Checked after the poll: decode may have failed the request and freed its pages during a stall of this worker.
        return polled if self.failure_reason() is None else KVPoll.Bootstrapping


class CommonKVReceiver(engine.CommonKVReceiver):
    """Keeps its request's offer."""

    # Pages, int32, that prefill may read; locked while the request is live.
    offered: npt.NDArray[np.int32] | None = None


class CommonKVBootstrapServer(engine.CommonKVBootstrapServer):
    """Announces that its prefill reads, with the fewest tokens."""

    async def _capabilities(self) -> dict[str, Any]:
        answer = await super()._capabilities()
        # Arguments of the server's process.
        reads = getattr(server_args._global_server_args, "disaggregation_prefill_read_decode", None)
        return answer if reads is None else answer | {READS: reads}
