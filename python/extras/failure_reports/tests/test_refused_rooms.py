"""A room that one worker refuses, on the wire: the other one hears of it, and nobody else."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
from mooncake_world import World as MooncakeWorld
from nixl_world import BAD, World
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.refusal import RefusedReq
from sglang.srt.disaggregation.utils import DisaggregationMode, TransferBackend
from sglang.srt.managers.scheduler import Scheduler
from test_mori_sender import mori  # noqa: F401
from waiting import until


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def prefill_scheduler(world) -> Scheduler:
    """What a prefill's scheduler needs to refuse a room."""
    scheduler = object.__new__(Scheduler)
    scheduler.disaggregation_mode, scheduler.transfer_backend = DisaggregationMode.PREFILL, TransferBackend.NIXL
    scheduler.server_args = SimpleNamespace(host="127.0.0.1", disaggregation_bootstrap_port=1)
    scheduler.tp_rank = scheduler.pp_rank = 0
    scheduler.grammar_manager = SimpleNamespace(grammar_queue=[])
    scheduler.disagg_prefill_bootstrap_queue = SimpleNamespace(kv_manager=world.prefill[0].manager)
    return scheduler


@pytest.mark.parametrize("asked_before", [True, False])
def test_decode_hears_of_a_request_that_only_prefill_refuses(world, asked_before):
    refuse = partial(prefill_scheduler(world).handle_refused_request, RefusedReq(BAD, "too long", by_decode=False))
    request = world.request(BAD).start_decode()
    if asked_before:
        request.ask()
        until(lambda: BAD in world.prefill[0].manager.transfer_infos, "the message is read")
        refuse()
    else:
        refuse()
        request.ask()
    request.wait_receivers(KVPoll.Failed)
    with pytest.raises(Exception, match="too long"):
        request.receivers[0].failure_exception()
    world.assert_healthy()


def test_prefill_does_not_wait_for_a_request_that_decode_refuses(world):
    scheduler = prefill_scheduler(world)
    request = world.request(BAD).start_prefill()
    scheduler.handle_refused_request(RefusedReq(BAD, "too long", by_decode=True))
    request.assert_fails("too long", decode_too=False)
    assert scheduler.refused_rooms.reason(BAD) == "too long"
    world.assert_healthy()


def test_a_copy_that_is_refused_ends_no_room_that_is_being_written(world):
    first = world.request(7).bootstrap()
    (prefill,) = world.prefill
    world.wire.held = True
    first.send()
    prefill.manager.refuse_room(7, "its grammar")
    assert not prefill.told("7_fail") and not prefill.manager.rooms.ended.get(7)
    for transfer in world.wire.transfers:
        transfer.finish()
    first.wait_senders(KVPoll.Success)
    first.wait_receivers(KVPoll.Success)


def test_mori_which_keeps_no_books_of_rooms_tells_nobody(monkeypatch, mori):  # noqa: F811
    """A refused request ended the scheduler, for want of somebody to be told."""
    world = MooncakeWorld(monkeypatch)
    manager = world.prefill[0].manager
    manager.ends_rooms = False
    told: list[tuple] = []
    manager.tell_failure = lambda *said: told.append(said)
    mori.MoriKVManager.refuse_room(manager, 8, "its grammar is none")
    assert not told and not manager.rooms.ended
    world.close()
