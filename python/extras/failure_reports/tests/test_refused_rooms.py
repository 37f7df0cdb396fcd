"""A room that one worker refuses, on the wire: the other one hears of it, and nobody else."""

from __future__ import annotations

from types import SimpleNamespace

from mooncake_world import World as MooncakeWorld
from nixl_world import BAD
from sglang.srt.disaggregation.refusal import RefusedReq
from sglang.srt.disaggregation.utils import DisaggregationMode, TransferBackend
from sglang.srt.managers.scheduler import Scheduler
from test_mori_sender import mori  # noqa: F401


def prefill_scheduler(world) -> Scheduler:
    """What a prefill's scheduler needs to refuse a room."""
    scheduler = object.__new__(Scheduler)
    scheduler.disaggregation_mode, scheduler.transfer_backend = DisaggregationMode.PREFILL, TransferBackend.NIXL
    scheduler.server_args = SimpleNamespace(host="127.0.0.1", disaggregation_bootstrap_port=1)
    scheduler.tp_rank = scheduler.pp_rank = 0
    scheduler.grammar_manager = SimpleNamespace(grammar_queue=[])
    scheduler.disagg_prefill_bootstrap_queue = SimpleNamespace(kv_manager=world.prefill[0].manager)
    return scheduler


def test_prefill_does_not_wait_for_a_request_that_decode_refuses(wire):
    scheduler = prefill_scheduler(wire)
    request = wire.request(BAD).start_prefill()
    scheduler.handle_refused_request(RefusedReq(BAD, "too long", by_decode=True))
    request.assert_fails("too long", decode_too=False)
    assert scheduler.refused_rooms.reason(BAD) == "too long"
    wire.assert_healthy()


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
