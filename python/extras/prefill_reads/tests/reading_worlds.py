"""Worlds of the unit tests whose decode workers offer their pages, and whose prefills read them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import nixl_world as nixl_wire
import numpy as np
import pytest
from decode_world import Receiver, World
from overlapped_loop import Loop
from prefill_loop import PAGE, PrefillLoop
from sglang.srt.disaggregation.decode_reads import make_reads
from sglang.srt.disaggregation.kv_weights import KvWeights
from sglang.srt.managers.schedule_batch import Req

__all__ = ["OfferLoop", "OfferWorld", "ReadLoop"]


class OfferedReceiver(Receiver):
    """Of a request whose prefill may read: its pages, and the weights that they were computed with."""

    offered: Any = None
    offered_weights = 0

    def send_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().send_metadata(*args, **kwargs)
        if self.offered is not None:
            self.world.begin_offer(self)

    @property
    def kv_mgr(self) -> SimpleNamespace:
        manager = super().kv_mgr
        manager.prefills.of(self.bootstrap_addr).others = {"reads": self.world.reads}
        manager.attn_tp_size, manager.has_state = 1, False
        manager.prefill_info_table = {self.bootstrap_addr: SimpleNamespace(attn_tp_size=self.world.prefill_tp)}
        return manager


Base: Any = World if TYPE_CHECKING else object


class Offers(Base):
    """Knows what prefills were offered, and looks at it after each step."""

    receiver = OfferedReceiver
    # Tokens that prefills lack when they read them, 0 for none, and the TP size of these.
    reads = 0
    prefill_tp = 1
    # How often prefills were offered something to read, and what was wrong with it.
    offers = 0

    def __init__(self, *args: Any, **kwargs: Any):
        self.wrong_offers: set[str] = set()
        super().__init__(*args, **kwargs)

    def begin_offer(self, receiver: OfferedReceiver) -> None:
        """Prefill may read from now on. `check` tells what is wrong: an error here would fail the request alone."""
        self.offers += 1
        receiver.offered_weights = self.weights
        offered = receiver.offered.tolist()
        if not len(offered) * self.page_size == receiver.prefix_len >= self.reads > 0:
            self.wrong_offers.add("not the pages of a prefix that is long enough")
        if {slot // self.page_size for slot in self.still_written()} & {*offered}:
            self.wrong_offers.add("a page that a step in flight writes to")

    def still_written(self) -> set[int]:
        """Slots that a step in flight writes to."""
        step = getattr(self, "in_flight", None)
        return {slot for slot, _ in step.written} if step else set()

    def check(self) -> None:
        """What prefills may read is the KV of their prompts, for as long as their requests are here."""
        assert not self.wrong_offers, self.wrong_offers
        for decode_req in self.transfer.queue + self.transfer.quarantine:
            receiver = decode_req.kv_receiver
            if getattr(receiver, "offered", None) is not None and receiver.asked:
                page, tokens = self.page_size, receiver.req.origin_input_ids
                slots = [index * page + offset for index in receiver.offered.tolist() for offset in range(page)]
                self._check_kv(slots, tokens[: receiver.prefix_len], receiver.offered_weights)
        super().check()


class OfferWorld(Offers, World):
    """One decode rank."""


class OfferLoop(Offers, Loop):
    """The loop of one, with a step in flight."""


class ReadLoop(PrefillLoop):
    """A prefill worker that reads. reads: tokens, of which so many or more are read from decode."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int = 1, overlap: bool = True, reads: int | None = None):
        self.pages: dict[int, np.ndarray] = {}
        super().__init__(monkeypatch, ranks, overlap)
        for rank in (*self.wire.prefill, *self.wire.decode):
            rank.manager.kv_weights = KvWeights("model")
        self.server_args.disaggregation_prefill_read_decode = reads
        for scheduler in self.schedulers:
            queue = scheduler.disagg_prefill_bootstrap_queue
            queue.reads = make_reads(scheduler, queue.kv_manager)

    def arrive(self, prompt_len: int, room: int, *args: Any, first_page: int = 200, **options: Any) -> list[Req]:
        """first_page: of decode's, from which on it has what it holds, and offers it to be read."""
        if held := options.get("held", 0):
            self.pages[room] = np.arange(first_page, first_page + held // PAGE, dtype=np.int32)
        return super().arrive(prompt_len, room, *args, **options)

    def asking(self, wire: nixl_wire.Request) -> None:
        for receiver in wire.receivers:
            receiver.offered = self.pages.get(wire.room)
