"""Page digests on the wire: decode requests them, prefill reports its support and sends them, decode compares.

Upstream: sgl-project/sglang#39500 (merged) has a checksum, which #39729 (open) makes safe to enable.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import conn as engine
from sglang.srt.disaggregation.decode_radix import hooks
from sglang.srt.disaggregation.page_digest import DIGESTS, PageDigests, sends_digests

logger = logging.getLogger(__name__)

__all__ = ["CommonKVBootstrapServer", "CommonKVManager", "CommonKVReceiver", "CommonKVSender"]

# Frame behind those of the prefix in decode's request for KV: it requests a digest of the delta.
DIGEST = b"digest"


def _write(receiver: Any, kv_indices: npt.NDArray[np.int32]) -> list[bytes] | None:
    """Request a digest of the delta from prefill, for comparison after its arrival."""
    manager = receiver.kv_mgr
    if getattr(manager, "page_digests", None) is None or not len(kv_indices):
        return None
    if not sends_digests(manager.prefills.of(receiver.bootstrap_addr)):
        return None
    receiver.digest_pages = kv_indices
    return []


def _answer(sender: Any, kv_indices: npt.NDArray[np.int32], first_page: int, is_last: bool) -> str | None:
    """Add a chunk to the digest of the delta; with the last chunk, return the claim."""
    digests: PageDigests | None = getattr(sender.kv_mgr, "page_digests", None)
    if digests is None:
        raise ValueError("decode asks for digests of pages, which this prefill's KV pool does not have")
    part = digests.of(kv_indices, first_page)
    sender.digests = part if sender.digests is None else sender.digests + part
    return digests.claim(sender.digests) if is_last else None


hooks.PARTS.append(hooks.MessagePart(DIGEST, 1, _write, lambda frames: True, answer=_answer))


class CommonKVManager(engine.CommonKVManager):
    """Holds this worker's `PageDigests`, set by the queue that creates it."""

    def met_prefill(self, addr: str) -> None:
        """Warns of a prefill whose KV cannot be verified."""
        super().met_prefill(addr)
        if getattr(self, "page_digests", None) is not None and not sends_digests(self.prefills.of(addr)):
            logger.warning("Prefill %s sends no digests of pages: its KV is used without being verified.", addr)


class CommonKVSender(engine.CommonKVSender):
    """Holds the digest of the chunks sent so far."""

    # None unless decode has requested it.
    digests: torch.Tensor | None = None


class CommonKVReceiver(engine.CommonKVReceiver):
    """Compares pages that have arrived with prefill's digest."""

    # Pages of the delta; None before a digest is requested and after it has matched.
    digest_pages: npt.NDArray[np.int32] | None = None

    def once_metadata_landed(self, state: KVPoll) -> KVPoll:
        """Adds the comparison of the pages."""
        state = super().once_metadata_landed(state)
        if state != KVPoll.Success or self.digest_pages is None:
            return state
        manager = self.kv_mgr
        wrong = manager.page_digests.difference(self.digest_pages, self.answers(DIGEST))
        if wrong is not None:
            manager.digest_counters.mismatched()
            manager.record_failure(self.bootstrap_room, wrong)
            return KVPoll.Failed
        self.digest_pages = None
        return state


class CommonKVBootstrapServer(engine.CommonKVBootstrapServer):
    """Reports whether its prefill can send digests."""

    async def _capabilities(self) -> dict[str, Any]:
        """With pipeline stages under another name: older workers cannot read digests of stages."""
        answer = await super()._capabilities()
        before = {name: answer[name] for name in ("version", "pieces") if name in answer}
        return before | {DIGESTS[self.pp_size > 1]: int(self.decode_prefix_version > 0)} | answer
