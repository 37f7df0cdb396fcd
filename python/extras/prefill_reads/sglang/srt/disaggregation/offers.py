"""What a decode worker offers to be read: which requests' prefixes, and the part of their message that says so.

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

# What a prefill that reads says.
READS = "reads"
# First frame of the part; what prefill may read follows in two more.
OFFER = b"offer"


@dataclass(frozen=True)
class Offer:
    """Pages of decode's that a prefill may read while the request is not over. See docs/protocol.md.

    pages: of the whole prefix, int32, in prompt order. weights: `KvWeights.current` of the rank that has them.
    """

    pages: npt.NDArray[np.int32]
    weights: int

    def frames(self) -> list[bytes]:
        return [b"%d" % self.weights, self.pages.astype(np.int32).tobytes()]


def write_offer(receiver: Any, kv_indices: npt.NDArray[np.int32]) -> list[bytes] | None:
    """What follows the tag of a request's offer, if it makes one."""
    # None after an update: nothing can be read then.
    weights = None if receiver.offered is None else weights_of(receiver.kv_mgr).current()
    return None if weights is None else Offer(receiver.offered, weights).frames()


def read_offer(frames: list[bytes]) -> Offer:
    """What such frames say. Raises ValueError."""
    if len(frames[1]) % 4:
        raise ValueError(f"the pages that it offers are no int32: {len(frames[1])} bytes")
    offer = Offer(np.frombuffer(frames[1], dtype=np.int32), wire_int(frames[0], "weights"))
    if offer.weights < 0 or (offer.pages < 0).any():
        raise ValueError("it offers pages, or a number of its weights, below 0")
    return offer


def wrong_offer(asked: Mapping[str, Any], prefix_len: int, manager: Any) -> str | None:
    """What is wrong with what decode ranks offer of a prefix of so many tokens. asked: their requests."""
    for offer in [info.parts[OFFER] for info in asked.values() if OFFER in getattr(info, "parts", ())]:
        if len(offer.pages) * manager.kv_args.page_size != prefix_len:
            return f"it offers {len(offer.pages)} pages of a prefix of {prefix_len} tokens"
    return None


def unknown_above(node: TreeNode | None) -> int:
    """Tokens of the prefix that ends with ``node`` that no prefill has. Cost: the nodes that hold them."""
    tokens = 0
    while node is not None and node.parent is not None and not is_known(node):
        tokens += len(node.key.token_ids)
        node = node.parent
    return tokens


def least_read(receiver: Any) -> int:
    """Tokens that a receiver's prefill must lack for it to read them from here; 0 where it reads none.

    It reads whole pages: with another TP size they would have other heads.
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
    """Offers, with the request for a delta, the prefix that is held."""

    def _targets(self, decode_req: DecodeRequest) -> list[torch.Tensor]:
        """Adds the first slots of the prefix's pages, if these are offered."""
        req, page = decode_req.req, self._tree.page_size
        table = self._rows.req_to_token[req.req_pool_idx]
        return [*super()._targets(decode_req), table[: req.held_len if self._offers(decode_req) else 0 : page]]

    def _name(self, decode_req: DecodeRequest, guard: OverlapGuard, *slots: npt.NDArray[np.integer]) -> bool:
        """Notes what is offered. Waits while a step in flight, or another source, may write to it."""
        *ours, offered = slots
        waits = super()._name(decode_req, guard, *ours)
        offers = (offered // self._tree.page_size).astype(np.int32)
        if not len(offers):
            return waits
        decode_req.kv_receiver.offered = offers
        source = self._queue.source
        return waits or (source is not None and source.writes()) or guard.covers(offers, None)

    def _offers(self, decode_req: DecodeRequest) -> bool:
        """Whether the pages of the request's prefix are offered: its prefill reads what it lacks, and lacks enough.

        They are locked for as long as the request is here. Not while some of them are being copied from host memory.
        """
        req, least = decode_req.req, least_read(decode_req.kv_receiver)
        if not least or decode_req.load is not None or not takes_prefix(decode_req):
            return False
        return unknown_above(req.last_node) >= least
