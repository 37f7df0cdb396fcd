"""A prefill of several pipeline stages: each sends its layers of the delta, and begins what all have agreed on."""

from __future__ import annotations

from types import SimpleNamespace

import mooncake_world as mooncake
import nixl_world as nixl
import numpy as np
import pytest
import requests
import test_failed_sessions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.disaggregation import prefill
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer
from sglang.srt.disaggregation.utils import ReqToMetadataIdxAllocator
from sglang.srt.managers import scheduler_pp_mixin
from test_context_parallel_ranks import PROMPTS, made, over_mooncake
from test_traps import Prefill

# Layers of each stage; of the second, no stage has a number that divides that of the model.
STAGES = [(2, 3), (1, 1, 1)]

__all__ = ["made"]


# ---- what is sent ----


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize(("prompt_len", "prefix_len", "chunks"), PROMPTS)
def test_mooncake_brings_every_layer_of_the_delta_and_nothing_else(
    monkeypatch, made, stages, prompt_len, prefix_len, chunks
):
    world = over_mooncake(monkeypatch, made, stages=stages)
    request = world.request(1, prompt_len, prefix_len).bootstrap()
    request.send(*chunks)
    request.finish()
    request.assert_landed()
    of_page = world.page_size * mooncake.HEADS * mooncake.HEAD_BYTES
    for rank, layers in zip(world.prefill, stages, strict=True):
        counters = rank.manager.events
        assert counters.sent_bytes == 2 * layers * of_page * (request.num_pages - request.first_page)
        assert counters.saved_bytes == 2 * layers * of_page * request.first_page
    world.assert_books_closed()


@pytest.mark.parametrize(("tp", "mla"), [((2, 1), False), ((1, 2), False), ((2, 1), True)])
def test_mooncake_with_stages_of_several_ranks(monkeypatch, made, tp, mla):
    world = over_mooncake(monkeypatch, made, stages=(2, 3), prefill_tp=tp[0], decode_tp=tp[1], mla=mla)
    request = world.request(1, 26, 8).bootstrap()
    request.send(4)
    request.finish()
    request.assert_landed()
    world.assert_books_closed()


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize(("prompt_len", "prefix_len", "chunks"), PROMPTS)
def test_nixl_writes_every_layer_of_the_delta_once(monkeypatch, stages, prompt_len, prefix_len, chunks):
    world = nixl.World(monkeypatch, stages=stages)
    request = world.request(7, prompt_len, prefix_len).bootstrap()
    request.send(*chunks)
    request.wait_senders(KVPoll.Success)
    request.wait_receivers(KVPoll.Success)
    written: list[int] = []
    for transfer in world.wire.transfers:
        if b"_kv_" in transfer.notification:
            for address, length, _ in np.asarray(transfer.targets).tolist():
                written += range(address, address + length, nixl.ITEM)
    pages = range(32 + request.first_page, 32 + request.num_pages)
    expected = [
        nixl.kv_address(kind, layer) + nixl.ITEM * page
        for kind in (0, 1)
        for layer in range(sum(stages))
        for page in pages
    ]
    assert sorted(written) == sorted(expected)


@pytest.mark.parametrize("chunk", [3, 4, 8])
def test_what_a_stage_sends_of_a_chunk_has_been_computed(chunk):
    """On a device, the last stage goes on while it computes; a decode worker with a tree would keep what was there."""
    for prefix_len in (0, 8):
        stage = Prefill(22, prefix_len)
        stage.pp_size = 2
        events: list[str] = []
        stage.launch_event = SimpleNamespace(synchronize=lambda events=events: events.append("computed"))
        stage.req.disagg_kv_sender = SimpleNamespace(send=lambda pages, states, events=events: events.append("sent"))
        stage.prefill(chunk)
        # The last chunk is sent when its token is known.
        assert events[-1] == "sent" and len(events) >= 3
        assert events[:-1] == ["computed", "sent"] * (len(events) // 2)


def test_a_write_that_failed_costs_the_requests_of_a_moment(monkeypatch):
    test_failed_sessions.test_a_write_that_failed_costs_the_requests_of_a_moment(monkeypatch, (1, 1), 2, (4, 6))


# ---- the metadata ----


@pytest.mark.parametrize("prefix_len", [None, 0, 8, 24])
def test_mooncake_brings_the_metadata_of_the_last_stage(monkeypatch, made, prefix_len):
    world = over_mooncake(monkeypatch, made, stages=(1, 1))
    first, last = world.prefill
    first.aux[:] = 9
    request = world.request(1, 24, prefix_len).bootstrap()
    # The first stage is the last to write.
    for sender in reversed(request.senders):
        sender.send(np.arange(request.first_page, request.num_pages, dtype=np.int32))
        mooncake.until(lambda s=sender: s.poll() == KVPoll.Success, "it is sent")
    request.finish()
    # Without the flag on decode it is the engine's, of which each stage writes it.
    assert (world.decode[0].aux[request.aux] == (9 if prefix_len is None else 7)).all()


@pytest.mark.parametrize("prefix_len", [None, 0, 8, 24])
def test_nixl_brings_the_metadata_of_the_last_stage(monkeypatch, prefix_len):
    world = nixl.World(monkeypatch, stages=(1, 1))
    request = world.request(7, 24, prefix_len).bootstrap()
    request.send()
    request.wait_senders(KVPoll.Success)
    request.wait_receivers(KVPoll.Success)
    writers = [t.sender for t in world.wire.transfers if t.notification == b"7_aux"]
    assert writers == [rank.agent.name for rank in world.prefill[0 if prefix_len is None else 1 :]]


# ---- every stage counts ----


@pytest.mark.parametrize("late", [0, 1])
def test_nixl_waits_for_every_stage(monkeypatch, late):
    world = nixl.World(monkeypatch, stages=(2, 3))
    world.wire.held = True
    request = world.request(7).bootstrap()
    request.send(4)
    name = world.prefill[late].agent.name
    mine = [transfer for transfer in world.wire.transfers if transfer.sender == name]
    for transfer in world.wire.transfers:
        if transfer not in mine:
            transfer.finish()
    for transfer in mine:
        assert request.receivers[0].poll() not in (KVPoll.Success, KVPoll.Failed)
        transfer.finish()
    request.wait_receivers(KVPoll.Success)


@pytest.mark.parametrize("writing", [0, 1])
def test_nixl_keeps_the_pages_until_every_stage_writes_no_more(monkeypatch, writing):
    world = nixl.World(monkeypatch, stages=(2, 3))
    world.wire.held = True
    request = world.request(7).bootstrap()
    request.receivers[0].fenced = True
    # Of the other stage nothing has been posted.
    request.senders[writing].send(np.arange(2, 4, dtype=np.int32))
    request.receivers[0].fail("a client has left")
    request.receivers[0].cancel()
    other = request.senders[1 - writing]
    nixl.until(lambda: other.poll() == KVPoll.Failed, "the other stage has answered")
    assert request.senders[writing].poll() == KVPoll.WaitingForInput
    assert not request.receivers[0].writers_done()
    for transfer in world.wire.transfers:
        transfer.finish()
    request.wait_senders(KVPoll.Failed)
    nixl.until(request.receivers[0].writers_done, "all stages have answered")
    assert not any(rank.manager.transfer_infos for rank in world.prefill)


@pytest.mark.parametrize("writing", [0, 1])
def test_mooncake_keeps_the_pages_until_every_stage_writes_no_more(monkeypatch, made, writing):
    world = over_mooncake(monkeypatch, made, stages=(2, 3))
    library = world.prefill[writing].library
    library.gate.clear()
    request = world.request(1, 26, 8).bootstrap(fenced=True)
    request.senders[writing].send(np.arange(2, 4, dtype=np.int32))
    assert library.writing.wait(30)
    request.receivers[0].fail("a client has left")
    request.receivers[0].cancel()
    other = request.senders[1 - writing]
    mooncake.until(lambda: other.poll() == KVPoll.Failed, "the other stage has answered")
    assert request.senders[writing].poll() == KVPoll.WaitingForInput
    assert not request.receivers[0].writers_done()
    library.gate.set()
    request.wait_senders(KVPoll.Failed)
    mooncake.until(request.receivers[0].writers_done, "all stages have answered")
    mooncake.reasons(request.senders)
    world.assert_books_closed()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_of_one_stage_is_the_requests(monkeypatch, made, failing):
    world = over_mooncake(monkeypatch, made, stages=(2, 3))
    request = world.request(1, 26, 8).bootstrap(fenced=True)
    request.senders[failing].fail("this stage has lost it")
    request.wait_receivers(KVPoll.Failed)
    assert "this stage has lost it" in mooncake.reasons(request.receivers)[0]
    assert not request.receivers[0].writers_done(), "the other has not answered"
    request.receivers[0].cancel()
    request.wait_senders(KVPoll.Failed)
    mooncake.until(request.receivers[0].writers_done, "the other has answered")
    mooncake.reasons(request.senders)
    world.assert_books_closed()


def test_the_bootstrap_server_says_what_stages_can(monkeypatch, made):
    world = over_mooncake(monkeypatch, made, stages=(2, 3))
    answer = requests.get(f"http://{world.addr}/decode_prefix", timeout=30).json()
    assert [answer.pop(named) for named in ("waiting_timeout", "bootstrap_timeout")] == [300, 300]
    # Of extras there may be more.
    assert answer.items() >= {"version": 1, "state": 1, "prompts": 2}.items()
    assert world.decode[0].manager.prefills.of(world.addr).takes_prefix


def test_without_it_a_prefill_of_stages_understands_no_prefix(monkeypatch, made):
    monkeypatch.setattr(CommonKVBootstrapServer, "takes_stages", False)
    for stages, version in ((2, 3), 0), ((3,), 1):
        world = over_mooncake(monkeypatch, made, stages=stages)
        assert requests.get(f"http://{world.addr}/decode_prefix", timeout=30).json()["version"] == version


# ---- what all have agreed on ----


class Stage(scheduler_pp_mixin.SchedulerPPMixin):
    """What a stage's loop has for bootstrapping."""

    enable_metrics = enable_hicache_storage = False
    # Of the extra `failure_reports`.
    tell_once = getattr(prefill.SchedulerDisaggregationPrefillMixin, "tell_once", None)
    attn_cp_cpu_group = attn_tp_cpu_group = None
    server_args = SimpleNamespace(served_model_name="stages", disaggregation_mode="prefill", enable_metrics=False)

    def __init__(self, first: bool, senders: list) -> None:
        self.pp_group = SimpleNamespace(is_first_rank=first)
        self.waiting_queue: list = []
        self.aborted: list[str] = []
        queue = self.disagg_prefill_bootstrap_queue = object.__new__(prefill.PrefillBootstrapQueue)
        queue.scheduler, queue.tp_rank = self, 0
        queue.token_to_kv_pool = SimpleNamespace(page_size=nixl.PAGE)
        queue.req_to_metadata_buffer_idx_allocator = ReqToMetadataIdxAllocator(8)
        queue.queue = [request(f"r{i}", sender) for i, sender in enumerate(senders)]

    def stream_output(self, reqs, return_logprob) -> None:
        self.aborted += [req.rid for req in reqs]

    def begun(self) -> list[tuple[str, int]]:
        return [(req.rid, req.start_send_idx) for req in self.waiting_queue]


def request(rid: str, sender) -> SimpleNamespace:
    stats = SimpleNamespace(
        trace_ctx=SimpleNamespace(abort=lambda **info: None),
        set_bootstrap_done_time=lambda: None,
        set_wait_queue_entry_time=lambda: None,
    )
    return SimpleNamespace(
        rid=rid,
        disagg_kv_sender=sender,
        bootstrap_room=sender.bootstrap_room,
        origin_input_ids=list(range(26)),
        time_stats=stats,
        return_logprob=False,
    )


MOMENTS = ["before they vote", "between the votes", "when all have voted", "when the first has begun"]


@pytest.fixture
def two_stages(monkeypatch) -> nixl.World:
    for module in (prefill, scheduler_pp_mixin):
        polls = lambda senders, *groups: [int(sender.poll()) for sender in senders]  # noqa: E731
        monkeypatch.setattr(module, "poll_and_all_reduce_attn_cp_tp_group", polls)
    return nixl.World(monkeypatch, stages=(1, 1))


def bootstrap(world: nixl.World, rooms: list[int], failures: list[tuple[int, int, str]]) -> list[Stage]:
    """One turn of both stages' loops, in which ``failures`` come: the stage, the request, the moment."""
    asked = [world.request(room).start_prefill().start_decode().ask() for room in rooms]
    for one in asked:
        one.wait_senders(KVPoll.WaitingForInput)
    stages = [Stage(i == 0, [one.senders[i] for one in asked]) for i in range(2)]

    def happen(moment: str) -> None:
        for stage, number, when in failures:
            if when == moment:
                asked[number].senders[stage].fail("something of this stage's")

    happen(MOMENTS[0])
    votes = stages[0]._pp_pd_get_bootstrapped_ids()
    happen(MOMENTS[1])
    stages[1]._pp_recv_pyobj_from_prev_stage = lambda: votes
    agreed = stages[1]._pp_pd_get_bootstrapped_ids()
    happen(MOMENTS[2])
    passed_on = stages[0].process_bootstrapped_queue(agreed)
    happen(MOMENTS[3])
    stages[1].process_bootstrapped_queue(passed_on)
    return stages


rooms = iter(range(1000, 1 << 30))


@given(
    failures=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 2), st.sampled_from(MOMENTS)), max_size=3, unique_by=lambda f: f[:2]
    )
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_stages_begin_the_same_requests_whatever_fails_when(two_stages, failures):
    stages = bootstrap(two_stages, [next(rooms) for _ in range(3)], failures)
    first, second = stages
    assert first.begun() == second.begun() and first.aborted == second.aborted
    # Nothing stays behind in either queue, and nobody who has not failed is failed.
    assert not first.disagg_prefill_bootstrap_queue.queue and not second.disagg_prefill_bootstrap_queue.queue
    lost = {f"r{number}" for _, number, _ in failures}
    assert set(first.aborted) <= lost and {rid for rid, _ in first.begun()} | lost == {"r0", "r1", "r2"}
    assert all(prefix == 8 for _, prefix in first.begun())
    for stage in stages:
        for req in stage.waiting_queue:
            # What failed after the votes has begun, and ends as a transfer that fails.
            failed = req.disagg_kv_sender.has_failed()
            assert (req.disagg_kv_sender.poll() == KVPoll.Failed) == failed
