"""Offers on the wire: decode says which pages prefill may read, prefill that it reads and what it makes of offers.

Upstream: none is known; vLLM lets prefill pull KV from decode (vllm-project/vllm#32553).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt import server_args
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import conn as engine
from sglang.srt.disaggregation.common import prefill_peers
from sglang.srt.disaggregation.common.delta_sender import Phase
from sglang.srt.disaggregation.decode_radix import hooks
from sglang.srt.disaggregation.offers import OFFER, READS, read_offer, write_offer, wrong_offer

__all__ = ["CommonKVBootstrapServer", "CommonKVManager", "CommonKVReceiver", "CommonKVSender"]

hooks.add_part(hooks.MessagePart(OFFER, 3, write_offer, read_offer, dummies=False))
prefill_peers.listen_for(READS)


class CommonKVManager(engine.CommonKVManager):
    """Counts requests that read among those that are here."""

    room_books = (*engine.CommonKVManager.room_books, "reads")


class CommonKVSender(engine.CommonKVSender):
    """Begins when what its request may read from decode has been read."""

    # What is read from decode before it begins, if that may be; see decode_reads.py.
    reading: Any = None

    def accept_decode_prefix(self) -> bool:
        """Adds that what decode offers must be its prefix."""
        accepted = self.state.phase >= Phase.ACCEPTED
        if not super().accept_decode_prefix():
            return False
        wrong = None if accepted else wrong_offer(self.state.asked, self.decode_prefix_len, self.kv_mgr)
        if wrong is not None:
            self.fail(f"refused decode's request for KV: {wrong}")
        return wrong is None

    def poll_asked(self) -> int:
        """How far what is read for it is."""
        if self.reading is None:
            return super().poll_asked()
        polled = self.reading.poll(self.state.asked)
        # Asked after it: this worker may have stood still meanwhile, and decode have given its pages away.
        return polled if self.failure_reason() is None else KVPoll.Bootstrapping


class CommonKVReceiver(engine.CommonKVReceiver):
    """Knows what its request offers."""

    # Pages, int32, of the prefix that prefill may read; they stay locked while the request is here.
    offered: npt.NDArray[np.int32] | None = None


class CommonKVBootstrapServer(engine.CommonKVBootstrapServer):
    """Says whether its prefill reads."""

    async def _capabilities(self) -> dict[str, Any]:
        """Adds from how many tokens on it does."""
        answer = await super()._capabilities()
        # Of the process that the server is part of.
        reads = getattr(server_args._global_server_args, "disaggregation_prefill_read_decode", None)
        return answer if reads is None else answer | {READS: reads}
