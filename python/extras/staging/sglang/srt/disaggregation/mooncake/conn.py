"""Deltas by way of staging buffers, in the classes of Mooncake's workers.

Upstream: sgl-project/sglang#30545 (merged).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.prefill_peers import listen_for
from sglang.srt.disaggregation.mooncake import conn as engine
from sglang.srt.disaggregation.mooncake.staging import SendsPieces, TakesPieces

__all__ = [
    "MooncakeKVBootstrapServer",
    "MooncakeKVManager",
    "MooncakeKVReceiver",
    "MooncakeKVSender",
    "TransferInfo",
]

# What a prefill says that asks for each piece of staging memory.
PIECES = "pieces"
listen_for(PIECES)


@dataclasses.dataclass
class TransferInfo(engine.TransferInfo):
    """Decode's request for KV, with what of it goes through its staging buffer.

    grants: where in that pieces may be written, bytes by first page; written: pieces that have been.
    """

    grants: dict[int, int] = dataclasses.field(default_factory=dict)
    written: set[int] = dataclasses.field(default_factory=set)


class MooncakeKVManager(SendsPieces, TakesPieces, engine.MooncakeKVManager):
    """Mooncake manager that sends deltas by way of staging buffers."""

    @property
    def stages_deltas(self) -> bool:
        """Not with MLA, which has no heads to tell apart."""
        return not self.is_mla_backend

    def _init_staging_allocator(self) -> None:
        """With a radix cache the engine does not offer the staging buffer by itself: see `_register_kv_args`."""
        super()._init_staging_allocator()
        if self.has_radix and self.stages_deltas:
            self.staging_offer, self._staging_ctx.allocator = self._staging_ctx.allocator, None


class MooncakeKVSender(engine.MooncakeKVSender):
    """Mooncake sender that does not wait for a grant for ever."""

    def poll(self) -> KVPoll:
        """A request that will get no staging memory fails."""
        status = super().poll()
        if status in (KVPoll.Success, KVPoll.Failed) or not self.kv_mgr.enable_staging:
            return status
        if self.has_failed():
            return status
        reason = self.kv_mgr.why_ungranted(self.bootstrap_room, self.state.asked.values())
        if reason is None:
            return status
        self.fail(reason)
        return super().poll()


class MooncakeKVReceiver(engine.MooncakeKVReceiver):
    """Mooncake receiver that has what comes by way of staging copied to its pages."""

    @property
    def _offers_staging(self) -> bool:
        """Whether this worker has a staging buffer and this request's prefill asks for pieces of it."""
        return self.kv_mgr.staging is not None and PIECES in self.kv_mgr.prefills.of(self.bootstrap_addr).others

    def _register_kv_args(self) -> None:
        """With a radix cache the staging buffer is offered only to prefills that ask for pieces of it.

        Others fill it by the engine's grid; offered none, they send without.
        """
        if not self._offers_staging:
            super()._register_kv_args()
            return
        manager = self.kv_mgr
        manager._staging_ctx.allocator = manager.staging_offer
        try:
            super()._register_kv_args()
        finally:
            manager._staging_ctx.allocator = None

    def send_metadata(
        self,
        kv_indices: npt.NDArray[np.int32],
        aux_index: int | None = None,
        state_indices: list[int] | None = None,
        decode_prefix_len: int | None = None,
    ) -> None:
        """Expects pieces of what is asked for, with a prefix to name."""
        named = decode_prefix_len is not None and self.bootstrap_infos is not None
        if named and self._offers_staging and self.require_staging:
            prefill_tp = self.prefill_info.attn_tp_size
            # Its DP ranks stand still each by itself.
            prefill = f"{self.bootstrap_addr}, DP rank {self.prefill_dp_rank}"
            self.kv_mgr.staging.open(self.bootstrap_room, kv_indices, prefill_tp, prefill)
        super().send_metadata(kv_indices, aux_index, state_indices, decode_prefix_len)

    def once_metadata_landed(self, state: KVPoll) -> KVPoll:
        """Success waits for what comes by way of staging, too."""
        room, staging = self.bootstrap_room, self.kv_mgr.staging
        # At any state: it is this that makes room in the buffer.
        if staging is not None and not staging.landed(room) and state == KVPoll.Success:
            if not staging.is_missing(room):
                return KVPoll.Transferring
            self.kv_mgr.record_failure(room, "prefill has reported a success before it had written all pieces")
            self.conclude_state = state = KVPoll.Failed
        return super().once_metadata_landed(state)

    def clear(self) -> None:
        """Puts off the engine's while a copy from the staging buffer may still write to its pages, too."""
        staging = self.kv_mgr.staging
        landed = staging is None or staging.landed(self.bootstrap_room)
        if landed or not self.fenced:
            super().clear()

    def _forget_room(self) -> None:
        super()._forget_room()
        if self.kv_mgr.staging is not None:
            self.kv_mgr.staging.drop(self.bootstrap_room)

    def writers_done(self) -> bool:
        """No piece may be in flight from the staging buffer to the pages either."""
        staging = self.kv_mgr.staging
        return (staging is None or staging.close(self.bootstrap_room)) and super().writers_done()


class MooncakeKVBootstrapServer(engine.MooncakeKVBootstrapServer):
    """Says that prefills over Mooncake ask for each piece of staging memory."""

    asks_for_pieces = True
