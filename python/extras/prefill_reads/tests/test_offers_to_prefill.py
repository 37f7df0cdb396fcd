"""What a decode worker offers its prefills to read: when, what, and that it stays as it is for as long."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from decode_world import aborted
from hypothesis import given, settings
from hypothesis import strategies as st
from nixl_world import bare
from overlapped_loop import LoopEnds
from reading_worlds import OfferLoop, OfferWorld
from sglang.srt import server_args
from sglang.srt.disaggregation.common.bootstrap_routes import RegisteredRanks
from sglang.srt.disaggregation.common.prefill_peers import parse_capabilities
from sglang.srt.disaggregation.common.wire import split_parts
from sglang.srt.disaggregation.local_policy import Policy
from sglang.srt.disaggregation.nixl.conn import NixlKVBootstrapServer, TransferInfo
from sglang.srt.disaggregation.offers import OFFER, Offer, least_read
from test_overlap_guard import Play, scripts
from wire_ends import sent_frames

PAGE = 4
LOCAL = {"disaggregation_decode_local_prefill": "40"}


# ---- whole lives ----


class Chats(Play):
    """Requests go on where another has ended, as soon as one has, and what is asked of prefill mostly comes."""

    def arrive(self, options: dict) -> None:
        said = [req for req in self.loop.told if req.output_ids and not aborted(req)]
        if said:
            history = said[-1].origin_input_ids + said[-1].output_ids
            options = {**options, "prompt": [*history, *options["prompt"]]}
        super().arrive(options)
        self.commit(len(said))


CELLS = [(1, True, True), (4, False, True), (4, True, False)]
REST = sorted({*itertools.product([1, 4], [True, False], [True, False])} - {*CELLS})


@pytest.mark.parametrize(
    ("page_size", "local", "overlap"), [*CELLS, *(pytest.param(*cell, marks=pytest.mark.thorough) for cell in REST)]
)
def test_what_is_offered_is_there_and_stays(page_size: int, local: bool, overlap: bool):
    """After each step of the real loop, through aborts, failures, retraction and weight updates."""
    offers = 0

    @given(script=scripts, size=st.sampled_from([40, 64, 96]))
    @settings(max_examples=40, deadline=None)
    def play(script: list, size: int) -> None:
        nonlocal offers
        sizes: dict[str, Any] = {"size": size, "page_size": page_size, "reserved": 0, "max_reqs": 4}
        loop = OfferLoop(options=LOCAL if local else None, overlap=overlap, **sizes)
        if local:
            loop.transfer.local.policy = Policy(most=6, slice=4, step=8, debt=24)
        loop.reads = page_size
        Chats(loop, script).run()
        offers += loop.offers

    # Some scripts bring none: mostly 15 to 90 of 40 scripts, and 7 or fewer once in twenty times.
    for _ in range(4):
        if offers <= 5:
            play()
    assert offers > 5


# ---- which ----


def chat(world: OfferWorld, **options: Any) -> Any:
    """A second turn: of its prompt decode holds 8 tokens of the first, which prefill has, and 4 of the answer."""
    prompt = [*range(20, 28)]
    first = world.arrive(prompt, max_new=5)
    world.handshake(first)
    world.step()
    world.complete(first)
    world.step()
    for _ in range(4):
        world.decode()
    assert not world.running
    second = world.arrive([*prompt, 7, 5, 5, 5, *range(30, 40)], **options)
    world.handshake(second)
    world.step()
    assert second.kv_receiver.asked
    return second.kv_receiver


def test_the_whole_prefix_is_offered_where_prefill_lacks_enough_of_it():
    world = OfferWorld(page_size=PAGE)
    world.reads = 4
    receiver = chat(world)
    table = world.pool.req_to_token[receiver.req.req_pool_idx]
    assert receiver.prefix_len == 12 and receiver.offered.dtype == np.int32
    assert receiver.offered.tolist() == (table[:12:PAGE] // PAGE).tolist()


@pytest.mark.parametrize("why", ["prefill reads none", "less than that", "another TP size", "no prefix named"])
def test_nothing_is_offered(why: str):
    world = OfferWorld(page_size=PAGE)
    world.reads = {"prefill reads none": 0, "less than that": 5}.get(why, 4)
    world.prefill_tp = 2 if why == "another TP size" else 1
    receiver = chat(world, **({"peer_takes_prefix": False} if why == "no prefix named" else {}))
    assert receiver.offered is None and not world.offers


def test_what_prefill_has_sent_after_all_is_not_offered_again():
    world = OfferWorld(page_size=PAGE)
    world.reads = 4
    receiver = chat(world)
    prompt = receiver.req.origin_input_ids
    for decode_req in world.transfer.queue:
        world.complete(decode_req)
    world.step()
    again = world.arrive([*prompt, 50, 51])
    world.handshake(again)
    world.step()
    assert again.kv_receiver.asked and again.kv_receiver.offered is None and world.offers == 1


# ---- flushes ----


@pytest.mark.parametrize("overlap", [True, False])
def test_a_flush_and_a_weight_update_wait_for_what_may_be_read(overlap: bool):
    """Of a request in quarantine a flush keeps what prefill may write to. Its prefix would go with the tree."""
    loop = OfferLoop(page_size=PAGE, size=64, reserved=0, max_reqs=4, overlap=overlap)
    loop.reads = PAGE

    def life() -> Iterator[None]:
        prompt = [*range(20, 28)]
        first = loop.arrive(prompt, max_new=5)
        loop.handshake(first)
        while not first.kv_receiver.asked:
            yield
        loop.complete(first)
        while not loop.told:
            yield
        second = loop.arrive([*prompt, *first.req.output_ids, *range(30, 40)])
        loop.handshake(second)
        while not second.kv_receiver.asked:
            yield
        assert second.kv_receiver.offered is not None
        second.kv_receiver.abort()
        while second not in loop.transfer.quarantine:
            yield
        scheduler = loop.scheduler
        assert not scheduler.is_fully_idle() and not scheduler.flush_cache()
        # Who asks whether the worker is well need not wait.
        assert scheduler.is_fully_idle(for_health_check=True)
        # With the extra for which it waits.
        asked = [loop.ask_for_update()] if hasattr(scheduler, "update_if_idle") else []
        for _ in range(3):
            yield
            assert not loop.updated
        second.kv_receiver.quiet = True
        while len(loop.updated) < len(asked) or loop.transfer.quarantine:
            yield
        assert loop.updated == asked and not loop.transfer.quarantine

    turns = life()

    def between() -> None:
        try:
            next(turns)
        except StopIteration:
            raise LoopEnds from None

    loop.run(between)
    assert loop.offers == 1 and len(loop.updated) == hasattr(loop.scheduler, "update_if_idle")


# ---- the wire ----


def frames(*tail: bytes) -> list[bytes]:
    """A request for KV, without the guard."""
    pages = np.arange(3, dtype=np.int32).tobytes()
    return [b"7", b"10.0.0.1", b"99", b"agent", pages, b"1", b"1", b"", b"8", b"0", *tail]


def test_an_offer_is_read_as_it_was_written():
    offer = Offer(np.array([5, 9], dtype=np.int32), 3)
    written = offer.frames()
    assert written[0] == b"3" and len(written) == 2
    info = TransferInfo.from_zmq(frames(OFFER, *written))
    read = info.parts[OFFER]
    assert read.pages.tolist() == [5, 9] and read.weights == 3
    assert info.decode_prefix_len == 8 and info.dst_kv_indices.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("dummy", "offered"), [(False, False), (False, True), (True, True)])
def test_the_message_has_an_offer_where_there_is_one(dummy: bool, offered: bool):
    """A dummy rank is offered nothing."""
    receiver, pages = bare(dummy), np.array([7], np.int32)
    plain = sent_frames(receiver, lambda: receiver.send_metadata(pages, 3, None, decode_prefix_len=8))
    receiver.kv_mgr.kv_weights = SimpleNamespace(current=lambda: 3)
    receiver.offered = np.array([5, 9], dtype=np.int32) if offered else None
    ours = sent_frames(receiver, lambda: receiver.send_metadata(pages, 3, None, decode_prefix_len=8))
    more = [OFFER, b"3", np.array([5, 9], dtype="<i4").tobytes()] if offered and not dummy else []
    assert ours == [[*frames, *more] for frames in plain]
    # After an update nothing can be read.
    receiver.kv_mgr.kv_weights = SimpleNamespace(current=lambda: None)
    assert sent_frames(receiver, lambda: receiver.send_metadata(pages, 3, None, decode_prefix_len=8)) == plain


@pytest.mark.parametrize(
    ("tail", "why"),
    [
        ((OFFER, b"0", b"\0\0\0"), "not int32"),
        ((OFFER, b"x", b""), "weights is not a number"),
        ((OFFER, b"-1", b""), "below 0"),
        ((OFFER, b"0", np.array([-1], dtype=np.int32).tobytes()), "below 0"),
        ((b"other", b"0", b""), "10 frames.* has 13"),
        ((OFFER, b"0"), "10 frames.* has 12"),
        ((b"other", OFFER, b"0", b""), "10 frames.* has 11"),
    ],
)
def test_an_offer_that_cannot_be_read_is_refused(tail: tuple[bytes, ...], why: str):
    with pytest.raises(ValueError, match=why):
        TransferInfo.from_zmq(frames(*tail))


def test_a_message_of_the_engine_is_no_offer():
    message = frames()[:8]
    assert split_parts(message) == (message, {})


@pytest.mark.parametrize("least", [None, 64])
def test_prefill_says_that_it_reads_only_with_the_option(monkeypatch: pytest.MonkeyPatch, least: int | None):
    args = SimpleNamespace(disaggregation_prefill_read_decode=least, speculative_algorithm=None)
    monkeypatch.setattr(server_args, "_global_server_args", args)
    server = object.__new__(NixlKVBootstrapServer)
    server.attn_cp_size = server.pp_size = 1
    server.ranks, server._all_have_come = RegisteredRanks(), lambda: True
    answer = asyncio.run(server._capabilities())
    assert answer.get("reads") == least and ("reads" in answer) is (least is not None)
    manager = SimpleNamespace(attn_tp_size=1, has_state=False)
    manager.prefill_info_table = {"p": SimpleNamespace(attn_tp_size=1)}
    receiver = SimpleNamespace(offered=None, bootstrap_addr="p", kv_mgr=manager)

    def reads(answer: dict) -> int:
        manager.prefills = SimpleNamespace(of=lambda addr: parse_capabilities(answer))
        return least_read(receiver)

    assert reads(answer) == (least or 0)
    assert reads(answer | {"version": 0}) == 0
    for what in ("64", [1], -1, 1.5):
        assert reads(answer | {"reads": what}) == 0
    # Its KV alone is not all that such a model's prefix has.
    manager.has_state = True
    assert reads(answer) == 0
