"""Offers: decode's pages that prefill may read, and the message part that carries them.

Upstream: none is known; vLLM lets prefill pull KV from decode (vllm-project/vllm#32553).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.disaggregation.common.wire import wire_int
from sglang.srt.disaggregation.decode_radix.delta_request import PrefillDeltas
from sglang.srt.disaggregation.decode_radix.schedule import takes_prefix
from sglang.srt.disaggregation.kv_weights import weights_of
from sglang.srt.mem_cache.known_prefixes import is_known

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.disaggregation.decode_radix.overlap_guard import OverlapGuard
    from sglang.srt.mem_cache.radix_cache import TreeNode

__all__ = ["OFFER", "READS", "Offer", "OfferingDeltas", "read_offer", "unknown_above", "write_offer", "wrong_offer"]

# Capability of a prefill that reads.
READS = "reads"
# Tag of the part; two more frames follow.
OFFER = b"offer"


@dataclass(frozen=True)
class Offer:
    """Decode's pages that a prefill may read while the request is live. See docs/protocol.md.

    pages: of the whole prefix, int32, in prompt order. weights: `KvWeights.current` of the rank that has them.
    """

    pages: npt.NDArray[np.int32]
    weights: int

    def frames(self) -> list[bytes]:
        return [b"%d" % self.weights, self.pages.astype(np.int32).tobytes()]


def write_offer(receiver: Any, kv_indices: npt.NDArray[np.int32]) -> list[bytes] | None:
    """The frames after the tag of a request's offer; None without one."""
    # Nothing can be read after a weight update.
    weights = None if receiver.offered is None else weights_of(receiver.kv_mgr).current()
    return None if weights is None else Offer(receiver.offered, weights).frames()


def read_offer(frames: list[bytes]) -> Offer:
    """Parses an offer. Raises ValueError."""
    if len(frames[1]) % 4:
        raise ValueError(f"its offered pages are not int32: {len(frames[1])} bytes")
    offer = Offer(np.frombuffer(frames[1], dtype=np.int32), wire_int(frames[0], "weights"))
    if offer.weights < 0 or (offer.pages < 0).any():
        raise ValueError("it offers pages, or a number of its weights, below 0")
    return offer


def wrong_offer(asked: Mapping[str, Any], prefix_len: int, manager: Any) -> str | None:
    """Why decode's offers for a prefix of ``prefix_len`` tokens are invalid; None if they are valid."""
    for offer in [info.parts[OFFER] for info in asked.values() if OFFER in getattr(info, "parts", ())]:
        if len(offer.pages) * manager.kv_args.page_size != prefix_len:
            return f"it offers {len(offer.pages)} pages of a prefix of {prefix_len} tokens"
    return None


def unknown_above(node: TreeNode | None) -> int:
    """Tokens of the prefix ending at ``node`` that no prefill has. Cost: their nodes."""
    tokens = 0
    while node is not None and node.parent is not None and not is_known(node):
        tokens += len(node.key.token_ids)
        node = node.parent
    return tokens


def least_read(receiver: Any) -> int:
    """Fewest tokens that a receiver's prefill reads from here; 0 if it reads none.

    Whole pages are read, so TP sizes have to match.
    """
    if not hasattr(receiver, "offered"):
        return 0
    manager, addr = receiver.kv_mgr, receiver.bootstrap_addr
    info = manager.prefill_info_table.get(addr)
    if info is None or info.attn_tp_size != manager.attn_tp_size or manager.has_state:
        return 0
    reads = manager.prefills.of(addr).others.get(READS)
    return reads if type(reads) is int and reads > 0 else 0


class OfferingDeltas(PrefillDeltas):
    """Offers, with the request for a delta, the prefix that decode holds."""

    def _targets(self, decode_req: DecodeRequest) -> list[torch.Tensor]:
        """Adds the first slots of the offered prefix's pages; none without an offer."""
        req, page = decode_req.req, self._tree.page_size
        table = self._rows.req_to_token[req.req_pool_idx]
        return [*super()._targets(decode_req), table[: req.held_len if self._offers(decode_req) else 0 : page]]

    def _name(self, decode_req: DecodeRequest, guard: OverlapGuard, *slots: npt.NDArray[np.integer]) -> bool:
        """Notes the offer. Waits also while a batch in flight, or another source, may write to its pages."""
        *ours, offered = slots
        waits = super()._name(decode_req, guard, *ours)
        offers = (offered // self._tree.page_size).astype(np.int32)
        if not len(offers):
            return waits
        decode_req.kv_receiver.offered = offers
        source = self._queue.source
        return waits or (source is not None and source.writes()) or guard.covers(offers, None)

    def _offers(self, decode_req: DecodeRequest) -> bool:
        """Whether to offer the request's prefix: prefill reads, and lacks enough tokens of it.

        The prefix stays locked while the request is here. No offer while a part is loaded from host memory.
        """
        req, least = decode_req.req, least_read(decode_req.kv_receiver)
        if not least or decode_req.load is not None or not takes_prefix(decode_req):
            return False
        return unknown_above(req.last_node) >= least
