"""Deltas through staging buffers, in the classes of Mooncake's workers.

Upstream: sgl-project/sglang#30545 (merged).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.mooncake import conn as engine
from sglang.srt.disaggregation.mooncake.staging import SendsPieces, TakesPieces

__all__ = [
    "MooncakeKVBootstrapServer",
    "MooncakeKVManager",
    "MooncakeKVReceiver",
    "MooncakeKVSender",
    "TransferInfo",
]

# Capability of a prefill that asks for each piece of staging memory.
PIECES = "pieces"


@dataclasses.dataclass
class TransferInfo(engine.TransferInfo):
    """Decode's request for KV, with its staged pieces.

    grants: offset in decode's staging buffer in bytes, by first page; written: first pages of pieces written.
    """

    grants: dict[int, int] = dataclasses.field(default_factory=dict)
    written: set[int] = dataclasses.field(default_factory=set)


class MooncakeKVManager(SendsPieces, TakesPieces, engine.MooncakeKVManager):
    """Mooncake manager that sends deltas through staging buffers."""

    @property
    def stages_deltas(self) -> bool:
        """False for MLA, which has no heads per rank."""
        return not self.is_mla_backend

    def _init_staging_allocator(self) -> None:
        """With a radix cache, withholds the staging buffer from registrations; see `_register_kv_args`."""
        super()._init_staging_allocator()
        if self.has_radix and self.stages_deltas:
            self.staging_offer, self._staging_ctx.allocator = self._staging_ctx.allocator, None


class MooncakeKVSender(engine.MooncakeKVSender):
    """Mooncake sender with a limit on the wait for a grant."""

    def poll(self) -> KVPoll:
        """Fails a request that will get no staging memory."""
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
    """Mooncake receiver that waits for staged KV to be copied to its pages."""

    @property
    def _offers_staging(self) -> bool:
        """Whether this worker has a staging buffer and this request's prefill asks for pieces of it."""
        return self.kv_mgr.staging is not None and PIECES in self.kv_mgr.prefills.of(self.bootstrap_addr).others

    def _register_kv_args(self) -> None:
        """With a radix cache, offers the staging buffer only to prefills that ask for pieces.

        Others would fill it by the engine's grid; without an offer they send directly.
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
        """Expects pieces of the requested pages, if decode names a prefix."""
        named = decode_prefix_len is not None and self.bootstrap_infos is not None
        if named and self._offers_staging and self.require_staging:
            prefill_tp = self.prefill_info.attn_tp_size
            # Each DP rank has its own share, since one may hang alone.
            prefill = f"{self.bootstrap_addr}, DP rank {self.prefill_dp_rank}"
            self.kv_mgr.staging.open(self.bootstrap_room, kv_indices, prefill_tp, prefill)
        super().send_metadata(kv_indices, aux_index, state_indices, decode_prefix_len)

    def once_metadata_landed(self, state: KVPoll) -> KVPoll:
        """Success waits for staged KV too."""
        room, staging = self.bootstrap_room, self.kv_mgr.staging
        # In any state: `landed` also frees memory of the buffer.
        if staging is not None and not staging.landed(room) and state == KVPoll.Success:
            if not staging.is_missing(room):
                return KVPoll.Transferring
            self.kv_mgr.record_failure(room, "prefill reported success before it had written all pieces")
            self.conclude_state = state = KVPoll.Failed
        return super().once_metadata_landed(state)

    def clear(self) -> None:
        """Delays the engine's while a copy from the staging buffer may still write to its pages."""
        staging = self.kv_mgr.staging
        landed = staging is None or staging.landed(self.bootstrap_room)
        if landed or not self.fenced:
            super().clear()

    def _forget_room(self) -> None:
        super()._forget_room()
        if self.kv_mgr.staging is not None:
            self.kv_mgr.staging.drop(self.bootstrap_room)

    def writers_done(self) -> bool:
        """Also waits for copies in flight from the staging buffer."""
        staging = self.kv_mgr.staging
        return (staging is None or staging.close(self.bootstrap_room)) and super().writers_done()


class MooncakeKVBootstrapServer(engine.MooncakeKVBootstrapServer):
    """Reports that prefills over Mooncake ask for each piece of staging memory."""

    asks_for_pieces = True
