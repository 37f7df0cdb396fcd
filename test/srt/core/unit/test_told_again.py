"""What one thread does at the wrong moment, another says or hears all the same; over both backends."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from mooncake_world import World
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.bootstrap_routes import RegisteredRanks, capabilities
from sglang.srt.disaggregation.common.delta_receiver import DeltaReceiver
from sglang.srt.disaggregation.common.outbound import NotTaken
from sglang.srt.disaggregation.common.prefill_peers import Capabilities, parse_capabilities
from sglang.srt.disaggregation.decode import DecodeRequest
from sglang.srt.disaggregation.mooncake import conn
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVReceiver
from sglang.srt.disaggregation.utils import DisaggregationMode
from waiting import until


def shaken_hands(world: Any) -> None:
    """Decode has asked prefill what it can do."""
    manager = world.decode[0].manager
    answer = capabilities(1, 1, RegisteredRanks().timeouts())
    manager.prefills.capabilities |= dict.fromkeys(manager.prefill_info_table, parse_capabilities(answer))


def refuse(peer: dict, frames: list[bytes]) -> None:
    """Instead of a message."""
    raise NotTaken("the way is cut")


def given_up(world: Any, why: str) -> tuple[Any, Any]:
    """A request that decode has asked for and given up, which it could not say; and its receiver."""
    request = world.request(1, 24, 8).start_prefill().start_decode()
    shaken_hands(world)
    request.ask()
    request.wait_senders(KVPoll.WaitingForInput)
    (receiver,) = request.receivers
    receiver.fenced, receiver._send_to = True, refuse
    receiver.fail(why)
    assert receiver.poll() == KVPoll.Failed
    receiver.cancel()
    return request, receiver


def test_pages_are_kept_for_as_long_as_prefill_may_write(monkeypatch: pytest.MonkeyPatch, make_wire):
    """Decode gives up after 30 s and cannot say so: others had its pages at 60 s, and prefill wrote until 300 s."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "30")
    world: Any = make_wire()
    monkeypatch.delenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT")
    request, receiver = given_up(world, "timed out")
    given_up_at = receiver.state.given_up_at
    assert request.senders[0].state.due_at < given_up_at + 300
    for ago, done in ((31, False), (299, False), (301, True)):
        receiver.state.given_up_at = given_up_at - ago
        assert receiver.writers_done() == done


@pytest.mark.parametrize("other", [Capabilities(version=1, waiting_timeout=30), Capabilities()], ids=["30 s", "404"])
def test_pages_are_kept_for_as_long_where_another_prefill_has_its_address(
    monkeypatch: pytest.MonkeyPatch, make_wire, other: Capabilities
):
    """What is said there by then is not said of the one that was asked, which stood still and may go on."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "30")
    world: Any = make_wire()
    monkeypatch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "600")
    _, receiver = given_up(world, "its prefill is lost")
    world.decode[0].manager.prefills.capabilities[receiver.bootstrap_addr] = other
    given_up_at = receiver.state.given_up_at
    for ago, done in ((31, False), (599, False), (601, True)):
        receiver.state.given_up_at = given_up_at - ago
        assert receiver.writers_done() == done


def test_pages_are_kept_for_as_long_where_an_error_hides_whether_prefill_writes(monkeypatch, make_wire):
    monkeypatch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "30")
    world: Any = make_wire()
    monkeypatch.delenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT")
    shaken_hands(world)
    (receiver,) = world.request(1).start_decode().receivers
    monkeypatch.delattr(DeltaReceiver, "writers_done")
    errors: list[Exception] = []
    for ago, done in ((31, False), (299, False), (301, True)):
        entry: Any = SimpleNamespace(kv_receiver=receiver, mark_failed=errors.append, failed_at=time.monotonic() - ago)
        assert DecodeRequest.writers_done(entry) == done
    assert len(errors) == 3


@pytest.mark.parametrize(
    ("where", "name"), [(conn, "FastQueue"), (conn.MooncakeKVManager, "register_buffer_to_engine")]
)
def test_decode_may_register_while_a_prefill_over_mooncake_still_starts(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str
):
    """The engine's thread reads messages before the manager is complete, and decode registers once.

    name: of what the engine does after its thread has started, or before; what has come by then is read at once.
    """
    world = World(monkeypatch)
    decode = world.decode[0].manager
    # Its predecessor at this address is lost.
    decode._handle_node_failure(world.addr)
    go_on, receivers = getattr(where, name), []

    def register(*args: Any) -> Any:
        if not receivers:
            until(lambda: decode.try_ensure_parallel_info(world.addr), "prefill answers")
            receiver = MooncakeKVReceiver(decode, world.addr, 5)
            receivers.append(receiver)
            receiver.init(0)
            until(lambda: receiver.poll() == KVPoll.WaitingForInput, "hands are shaken")
            # Until the thread has read it, if there is one.
            time.sleep(0.3)
        return go_on(*args)

    def start(manager: Any) -> None:
        start_thread(manager)
        time.sleep(0.3)

    start_thread = conn.MooncakeKVManager.start_prefill_thread
    monkeypatch.setattr(conn.MooncakeKVManager, "start_prefill_thread", start)
    monkeypatch.setattr(where, name, register)
    world.prefill = world._ranks(DisaggregationMode.PREFILL, 1, 1, 1, 1)
    world.fill_prefill()
    (prefill,) = world.prefill
    assert receivers
    table = prefill.manager.decode_kv_args_table
    until(lambda: list(table) == [decode.get_session_id()], "the registration is read", lambda: list(table))
    world.request(6, 24, 8).bootstrap().send().finish()
