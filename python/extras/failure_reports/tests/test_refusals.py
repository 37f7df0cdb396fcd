"""What prefill does with what decode has refused, or it has itself; also with several tokenizer processes."""

from __future__ import annotations

from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from engine_classes import engine_class
from prefill_front import listens
from sglang.srt.disaggregation import peer_calls, refusal, refused_pairs
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.multi_tokenizer_mixin import MultiTokenizerRouter
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_output_processor_mixin import SchedulerOutputProcessorMixin
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.utils import TypeBasedDispatcher
from waiting import until

from sglang_pd_radix.tools.cluster import free_ports

# ---- a prefill with several tokenizer processes ----


@pytest.fixture(scope="module")
def several_tokenizers(tmp_path_factory):
    """A prefill's router between tokenizer processes and the scheduler: its bootstrap server, what the latter gets."""
    (port,) = free_ports(1)
    args = SimpleNamespace(
        host="127.0.0.1",
        disaggregation_mode="prefill",
        disaggregation_transfer_backend="nixl",
        disaggregation_bootstrap_port=port,
        node_rank=0,
    )
    folder = tmp_path_factory.mktemp("router")
    names = ("tokenizer_ipc_name", "scheduler_input_ipc_name", "tokenizer_worker_ipc_name")
    ports = SimpleNamespace(**{name: f"ipc://{folder / name}" for name in names})
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(peer_calls, "_listeners", {})
        router = MultiTokenizerRouter(args, ports)
        scheduler = zmq.Context.instance().socket(zmq.PULL)
        scheduler.setsockopt(zmq.RCVTIMEO, 20000)
        scheduler.connect(ports.scheduler_input_ipc_name)
        until(lambda: listens("127.0.0.1", port), "its bootstrap server", timeout=20)
        yield f"127.0.0.1:{port}", scheduler
    router.disaggregation_bootstrap_server.close()
    router._loop.call_soon_threadsafe(router._loop.stop)
    router._thread.join()
    scheduler.close(linger=0)
    for ours in (router.send_to_scheduler, router.receive_from_worker, router.recv_from_detokenizer):
        ours.close(linger=0)


def test_the_scheduler_of_several_tokenizers_hears_what_decode_refuses(several_tokenizers):
    addr, scheduler = several_tokenizers
    peer_calls.tell(addr, refusal.REFUSED_ROUTE, [5, 6], reason="rid in use").result(20)
    for room in (5, 6):
        assert scheduler.recv_pyobj() == refusal.RefusedReq(room, "rid in use", by_decode=True)


def test_what_decode_has_refused_is_the_clients_error_on_prefill(monkeypatch):
    """The scheduler says it, to whichever tokenizer process the request came."""
    scheduler, told = object.__new__(Scheduler), []
    scheduler.disaggregation_mode, scheduler.refused_rooms = DisaggregationMode.PREFILL, refusal.RefusedRooms()
    engine = engine_class(SchedulerOutputProcessorMixin)
    monkeypatch.setattr(engine, "stream_output_generation", lambda self, reqs, *more: told.extend(reqs))
    scheduler.refused_rooms.note(5, "rid in use")
    reqs = [Req(str(room), "", [1], SamplingParams(), bootstrap_room=room) for room in (5, 6, 5)]
    for req in reqs[:2]:
        req.finished_reason = FINISH_ABORT("transfer failed", HTTPStatus.INTERNAL_SERVER_ERROR)
    scheduler.stream_output_generation(reqs, False)
    said = [req.finished_reason and req.finished_reason.to_json() for req in told]
    assert [one and (one["status_code"], one["message"]) for one in said] == [
        (HTTPStatus.BAD_REQUEST, "rid in use"),
        (HTTPStatus.INTERNAL_SERVER_ERROR, "transfer failed"),
        None,
    ]


# ---- a decode worker without the flag asks for what prefill has refused ----

ROOM = 77


class Ahead:
    """The socket of the rank that receives: the scheduler's own messages come before it, and nothing is in it."""

    def recv_pyobj(self, flags: int = 0) -> Any:
        raise zmq.Again


class RefusingPrefill:
    """The schedulers of a prefill's TP ranks, and what they have queued."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: list[Any]) -> None:
        self.queued: list[list[Req]] = [[] for _ in ranks]
        self.answered: list[Req] = []
        base = engine_class(Scheduler)
        monkeypatch.setattr(base, "_add_request_to_queue", lambda scheduler, req, _: scheduler.queued.append(req))
        monkeypatch.setattr(base, "recv_requests", self._received)
        none = lambda scheduler: setattr(scheduler, "_request_dispatcher", TypeBasedDispatcher([]))  # noqa: E731
        monkeypatch.setattr(base, "init_request_dispatcher", none)
        self.schedulers = [
            self._scheduler(rank.manager, queued) for rank, queued in zip(ranks, self.queued, strict=True)
        ]

    def _scheduler(self, manager: Any, queued: list[Req]) -> Scheduler:
        scheduler = object.__new__(Scheduler)
        scheduler.disaggregation_mode, scheduler.tree_cache = DisaggregationMode.PREFILL, None
        scheduler.refused_rooms, scheduler.enable_priority_scheduling = refusal.RefusedRooms(), False
        if hasattr(scheduler, "refused_pairs"):
            scheduler.refused_pairs = type(scheduler.refused_pairs)()
        scheduler.grammar_manager = SimpleNamespace(grammar_queue=[])
        scheduler.disagg_prefill_bootstrap_queue = SimpleNamespace(kv_manager=manager)
        scheduler.lost_requests = dict
        scheduler.recv_from_tokenizer, scheduler.pp_size, scheduler.longest_queue_step = Ahead(), 1, 0.0
        scheduler.queued, scheduler.stream_output = queued, lambda reqs, *rest: self.answered.extend(reqs)
        scheduler.init_request_dispatcher()
        return scheduler

    @staticmethod
    def _received(scheduler: Scheduler) -> list:
        found = []
        while True:
            try:
                found.append(scheduler.recv_from_tokenizer.recv_pyobj())
            except zmq.Again:
                return found

    def refuse(self, room: int = ROOM, **fields: Any) -> None:
        """A request comes whose grammar is none. fields: what else it asks for."""
        for scheduler in self.schedulers:
            req = Req("r", "", [1] * 26, SamplingParams(), bootstrap_room=room, bootstrap_host="10.0.0.9", **fields)
            # As the engine has it.
            req.origin_input_ids, req.to_finish = [0], FINISH_ABORT("its grammar is none", HTTPStatus.BAD_REQUEST)
            scheduler._add_request_to_queue(req)
            assert req.finished() and self.answered.pop() is req, "its client is answered at once"

    def step(self) -> bool:
        """All ranks handle what the first receives. Whether they have queued something, which all do or none."""
        for message in self.schedulers[0].recv_requests():
            for scheduler in self.schedulers:
                scheduler._request_dispatcher(message)
        assert isinstance(self.schedulers[0].recv_from_tokenizer, Ahead)
        assert len({len(queued) for queued in self.queued}) == 1
        return bool(self.queued[0])


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("asked_before", [True, False])
def test_a_bare_decode_worker_gets_the_one_token_of_what_prefill_refuses(
    monkeypatch, make_wire, asked_before, prefill_tp, decode_tp
):
    """It waited for 300 s, with a row and pages, for a transfer that the engine's prefill would have made."""
    world = make_wire(prefill_tp=prefill_tp, decode_tp=decode_tp)
    prefill = RefusingPrefill(monkeypatch, world.prefill)
    pair = world.request(ROOM, prompt_len=1, prefix_len=None).start_decode()
    if not asked_before:
        prefill.refuse()
        assert not prefill.step()
    pair.ask()
    for rank in world.prefill:
        until(lambda m=rank.manager: len(m.transfer_infos.get(ROOM, ())) == max(decode_tp // prefill_tp, 1), "asked")
    if asked_before:
        prefill.refuse()
    assert prefill.step(), "all ranks queue it, in one step"
    assert all(len(queued) == 1 and not queued[0].finished() for queued in prefill.queued)
    assert not prefill.schedulers[0].recv_requests(), "once"
    pair.start_prefill().wait_senders(KVPoll.WaitingForInput)
    for sender in pair.senders:
        sender.init(1, 1)
    pair.send()
    pair.wait_senders(KVPoll.Success)
    pair.wait_receivers(KVPoll.Success)
    for sender in pair.senders:
        # As the engine's scheduler does.
        getattr(sender, "clear", lambda: None)()
    # Mooncake's threads have the last word.
    until(lambda: not any(any(rank.manager.rooms_held().values()) for rank in world.prefill), "nothing is held")


@pytest.mark.parametrize("asked_before", [True, False])
def test_a_decode_worker_with_the_flag_is_told_and_given_nothing(monkeypatch, make_wire, asked_before):
    world = make_wire()
    prefill = RefusingPrefill(monkeypatch, world.prefill)
    pair = world.request(ROOM, prompt_len=26, prefix_len=8).start_decode()
    if asked_before:
        pair.ask()
        until(lambda: ROOM in world.prefill[0].manager.transfer_infos, "asked")
        prefill.refuse()
    else:
        prefill.refuse()
        pair.ask()
    pair.wait_receivers(KVPoll.Failed)
    assert not prefill.step() and not any(world.prefill[0].manager.rooms_held().values())


@pytest.mark.parametrize("held", ["refused by decode", "another request"])
def test_what_was_refused_is_not_gone_through_with_for_another_request(monkeypatch, make_wire, held):
    """Of its room, or when decode, which has refused it too, asks for nothing."""
    world = make_wire()
    prefill = RefusingPrefill(monkeypatch, world.prefill)
    prefill.refuse()
    (scheduler,) = prefill.schedulers
    if held == "refused by decode":
        scheduler.handle_refused_request(refusal.RefusedReq(ROOM, "its grammar is none", by_decode=True))
    else:
        scheduler._add_request_to_queue(Req("s", "", [1], SamplingParams(), bootstrap_room=ROOM))
        assert prefill.queued[0].pop().rid == "s"
    world.request(ROOM, prompt_len=1, prefix_len=None).start_decode().ask()
    until(lambda: ROOM in world.prefill[0].manager.transfer_infos, "asked")
    assert not prefill.step()


def test_a_copy_that_is_refused_waits_for_the_first_to_end(monkeypatch, make_wire):
    """They would be sent to the same pages."""
    world = make_wire()
    prefill = RefusingPrefill(monkeypatch, world.prefill)
    pair = world.request(ROOM, prompt_len=26, prefix_len=None).bootstrap()
    prefill.refuse()
    assert not prefill.step()
    pair.send()
    pair.wait_senders(KVPoll.Success)
    pair.wait_receivers(KVPoll.Success)
    assert not prefill.step()


def test_what_prefill_goes_through_with_needs_nothing_but_its_one_token():
    """The adapter may have been unloaded, since its client had been answered: that ended the scheduler."""
    asked = {
        "lora_id": "an adapter",
        "extra_key": "salt",
        "custom_logit_processor": "a processor",
        "token_type_ids": [0] * 26,
        "return_hidden_states": True,
        "return_routed_experts": True,
        "top_logprobs_num": 5,
        "token_ids_logprob": [10**9],
    }
    plain, req = (
        Req("r", "", [1] * 26, SamplingParams(), bootstrap_room=ROOM, **fields)  # type: ignore[arg-type]
        for fields in ({}, asked)
    )
    refused_pairs.RefusedPairs().keep(req)
    assert {name: getattr(req, name) for name in asked} == {name: getattr(plain, name) for name in asked}


@pytest.mark.parametrize("fields", [{"input_embeds": [[0.0]]}, None], ids=["embeddings", "no request"])
def test_what_a_bare_decode_worker_asks_for_is_forgotten_at_once_if_nothing_will_come(monkeypatch, make_wire, fields):
    """It stayed for as long as decode waits."""
    world = make_wire()
    manager, prefill = world.prefill[0].manager, RefusingPrefill(monkeypatch, world.prefill)
    world.request(ROOM, prompt_len=1, prefix_len=None).start_decode().ask()
    until(lambda: ROOM in manager.transfer_infos, "asked")
    if fields is None:
        # Of one that the tokenizer manager has refused.
        prefill.schedulers[0].handle_refused_request(refusal.RefusedReq(ROOM, "too long", by_decode=False))
    else:
        prefill.refuse(**fields)
    assert ROOM not in manager.transfer_infos and not prefill.step()
