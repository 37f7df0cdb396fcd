"""Digests between real managers of both backends: they are asked for, sent, waited for and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import mooncake_world as mooncake
import nixl_world as nixl
import numpy as np
import pytest
import requests
import torch
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.prefill_peers import Capabilities, parse_capabilities
from sglang.srt.disaggregation.mooncake.conn import TransferInfo
from sglang.srt.disaggregation.page_digest import PageDigests, sends_digests
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from wire_ends import sent_frames

DIGESTS = parse_capabilities({"version": 1, "digests": 1})


class Mismatches:
    """Counts them."""

    def __init__(self) -> None:
        self.number = 0

    def mismatched(self) -> None:
        self.number += 1


@pytest.fixture
def over_mooncake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., mooncake.World]]:
    made: list[mooncake.World] = []

    def make(**options: Any) -> mooncake.World:
        made.append(mooncake.World(monkeypatch, **options))
        return made[-1]

    yield make
    for world in made:
        world.close()


# ---- the message ----


def test_nixl_the_message_has_one_frame_more():
    receiver, pages_asked = nixl.bare(), np.array([7], np.int32)
    plain = sent_frames(receiver, lambda: receiver.send_metadata(pages_asked, 3, None, decode_prefix_len=128))
    receiver.kv_mgr.page_digests, receiver.kv_mgr.prefills = object(), SimpleNamespace(of=lambda addr: DIGESTS)
    receiver.bootstrap_addr = nixl.ADDR
    ours = sent_frames(receiver, lambda: receiver.send_metadata(pages_asked, 3, None, decode_prefix_len=128))
    assert ours == [[*frames, b"digest"] for frames in plain]
    none = np.array([], np.int32)
    full_hit = sent_frames(receiver, lambda: receiver.send_metadata(none, 3, None, decode_prefix_len=128))
    assert len(full_hit[0]) == 11, "of nothing there is no digest"


def test_mooncake_the_message_has_one_frame_more():
    receiver, indices = mooncake.bare(), np.array([5, 6, 9], np.int32)
    plain = sent_frames(receiver, lambda: receiver.send_metadata(indices, 3, None, decode_prefix_len=128))
    assert b"digest" not in TransferInfo.from_zmq(plain[0]).parts
    receiver.kv_mgr.page_digests, receiver.kv_mgr.prefills = object(), SimpleNamespace(of=lambda addr: DIGESTS)
    receiver.bootstrap_addr = nixl.ADDR
    ours = sent_frames(receiver, lambda: receiver.send_metadata(indices, 3, None, decode_prefix_len=128))
    assert ours == [plain[0] + [b"digest"]]
    assert b"digest" in TransferInfo.from_zmq(ours[0]).parts
    with pytest.raises(ValueError, match="10 frames"):
        TransferInfo.from_zmq([*ours[0], b""])


# ---- who can ----


@pytest.mark.parametrize("can", ["digests", "stage_digests"])
def test_either_kind_of_digest_will_do(can):
    assert sends_digests(parse_capabilities({"version": 1, can: True}))
    assert not sends_digests(parse_capabilities({"version": 0, can: True}))
    assert not sends_digests(Capabilities(version=1))


@pytest.mark.parametrize(("options", "said"), [({}, "digests"), ({"stages": (2, 3)}, "stage_digests")])
def test_the_bootstrap_server_says_so(over_mooncake, options, said):
    """A worker that knows no stages would not read their digests."""
    world = over_mooncake(**options)
    answer = requests.get(f"http://{world.addr}/decode_prefix", timeout=30).json()
    assert [name for name in answer if "digests" in name] == [said] and answer[said] == 1
    assert sends_digests(world.decode[0].manager.prefills.of(world.addr))


# ---- NIXL ----


def with_digests(world: nixl.World) -> nixl.World:
    """Pools whose heads are those of the whole on every rank; decode's page 32 + n holds what prefill's page n does."""
    heads = torch.randint(-128, 127, (32 * nixl.PAGE, 8, 4), dtype=torch.int8)
    for rank in (*world.prefill, *world.decode):
        mine = slice(rank.rank * 8 // rank.tp, (rank.rank + 1) * 8 // rank.tp)
        pool = object.__new__(MHATokenToKVPool)
        pool.page_size, pool.start_layer = nixl.PAGE, rank.layers.start
        pool.k_buffer, pool.v_buffer = ([heads[:, mine].repeat(2, 1, 1) for _ in rank.layers] for _ in "kv")
        num_layers = rank.manager.num_layers if rank.manager.pp_size > 1 else None
        rank.manager.digest_counters = Mismatches()
        rank.manager.page_digests = PageDigests.of_rank(pool, rank.rank, rank.tp, 8, num_layers)
        rank.manager.prefills.capabilities[nixl.ADDR] = DIGESTS
    return world


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1)])
def test_success_waits_for_the_digests_and_for_pages_that_agree(monkeypatch, prefill_tp, decode_tp):
    world = with_digests(nixl.World(monkeypatch, prefill_tp, decode_tp))
    good, bad = world.request(nixl.GOOD).bootstrap(), world.request(nixl.BAD).bootstrap()
    sent = world.prefill[0].agent.send_notif
    late: list = []
    world.prefill[0].agent.send_notif = lambda *notif: late.append(notif)
    good.send(4)
    good.wait_senders(KVPoll.Success)
    assert good.receivers[0].poll() not in (KVPoll.Success, KVPoll.Failed), "not without its digest"
    assert late and all(text.startswith(b"%d_digest_0:" % nixl.GOOD) for _, text in late)
    for notif in late:
        sent(*notif)
    good.wait_receivers(KVPoll.Success)
    world.prefill[0].agent.send_notif = sent
    bad.send(3, 5)
    last = world.decode[-1].manager.page_digests
    last._layers[-1][1][(32 + 4) * nixl.PAGE, 1, 0] += 1
    bad.wait_senders(KVPoll.Success)
    nixl.until(lambda: bad.receivers[-1].poll() == KVPoll.Failed, "the difference is seen")
    with pytest.raises(Exception, match=f"of KV head {last.first_head + 1} is not what prefill sent"):
        bad.receivers[-1].failure_exception()
    for receiver in bad.receivers[:-1]:
        nixl.until(lambda receiver=receiver: receiver.poll() == KVPoll.Success, "the other rank has good pages")
    assert not any(rank.manager.transfer_statuses for rank in world.decode)


def test_a_prefill_whose_pool_has_no_digests_fails_the_request(monkeypatch):
    world = nixl.World(monkeypatch)
    with_digests(world).prefill[0].manager.page_digests = None
    request = world.request(nixl.BAD).bootstrap().send()
    request.assert_fails("digests of pages, which this prefill's KV pool does not have")
    world.decode[0].manager.page_digests = None
    world.assert_healthy()


# ---- Mooncake ----


def verified(world: mooncake.World) -> mooncake.World:
    """Every rank computes digests of its pages, and decode asks for them."""
    for rank in (*world.prefill, *world.decode):
        slots = [torch.from_numpy(pool).view(-1, *pool.shape[2:]) for pool in rank.kv]
        pool = object.__new__(MHATokenToKVPool)
        half = len(slots) // 2
        pool.k_buffer, pool.v_buffer, pool.page_size = slots[:half], slots[half:], world.page_size
        pool.start_layer = rank.manager.kv_args.prefill_start_layer
        num_layers = rank.manager.num_layers if rank.manager.pp_size > 1 else None
        rank.manager.digest_counters = Mismatches()
        rank.manager.page_digests = PageDigests.of_rank(pool, rank.rank, rank.tp, mooncake.HEADS, num_layers)
    return world


@pytest.mark.parametrize("more", [{}, {"stages": (2, 3)}], ids=["one stage", "stages"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1)])
def test_pages_that_have_arrived_are_verified(over_mooncake, prefill_tp: int, decode_tp: int, more: dict) -> None:
    world = verified(over_mooncake(prefill_tp=prefill_tp, decode_tp=decode_tp, **more))
    good, bad = world.request(1, 22, 4), world.request(2, 22, 4, aux=1)
    good.bootstrap().send(3, 4)
    good.finish()
    good.assert_landed()
    bad.bootstrap().send(3)
    bad.wait_senders(KVPoll.Success)
    mooncake.until(lambda: all(room_ended(rank, 2) for rank in world.decode), "all ranks of prefill have said so")
    last = world.decode[-1]
    # V of the last layer.
    last.kv[-1][bad.decode_pages[2], 3, 0, 5] ^= 1
    assert bad.receivers[-1].poll() == KVPoll.Failed
    assert [receiver.poll() for receiver in bad.receivers[:-1]] == [KVPoll.Success] * (decode_tp - 1)
    head = (decode_tp - 1) * mooncake.HEADS // decode_tp
    (reason,) = mooncake.reasons(bad.receivers[-1:])
    assert f"KV head {head} is not what prefill sent" in reason
    assert last.manager.digest_counters.number == 1
    for end in (*bad.senders, *bad.receivers):
        end.clear()
    for receiver in bad.receivers:
        receiver.end()
    for rank in world.prefill:
        mooncake.until(lambda rank=rank: not rank.manager.queued, "no digest stays behind")
    assert not any(rank.manager.awaited_rooms for rank in world.decode)
    world.assert_books_closed()


def room_ended(rank: mooncake.Rank, room: int) -> bool:
    return rank.manager.request_status.get(room) == KVPoll.Success


def test_a_success_without_the_digest_that_was_asked_for_fails(over_mooncake) -> None:
    world = verified(over_mooncake())
    for rank in world.prefill:
        monkey = rank.manager.page_digests
        monkey.claim = lambda digests: None
    request = world.request(1, 8, 0)
    request.bootstrap().send()
    request.wait_receivers(KVPoll.Failed)
    assert "prefill sent no digest of KV head 0" in mooncake.reasons(request.receivers)[0]


# ---- pipeline stages ----


def test_nixl_waits_for_the_digest_of_every_stage(monkeypatch):
    world = with_digests(nixl.World(monkeypatch, stages=(2, 3)))
    request = world.request(7).bootstrap()
    late: list = []
    sent = world.prefill[1].agent.send_notif
    world.prefill[1].agent.send_notif = lambda *notif: late.append(notif) if b"digest" in notif[1] else sent(*notif)
    request.send(4)
    request.wait_senders(KVPoll.Success)
    assert request.receivers[0].poll() not in (KVPoll.Success, KVPoll.Failed) and len(late) == 1
    sent(*late[0])
    request.wait_receivers(KVPoll.Success)
