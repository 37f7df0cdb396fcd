"""What a worker says of the requests that it has and of its pools, and which causes failures are counted by."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from code_texts import HOLE, handed
from decode_world import World
from overlapped_loop import LoopEnds
from prometheus_client import multiprocess
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.delta_sender import DeltaSender, SenderState
from sglang.srt.disaggregation.local_prefill import LocalHooks, LocalPrefills, LocalReq
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import scheduler_gauges_mixin
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.observability import worker_gauges
from sglang.srt.observability.failure_causes import CAUSES, ELSEWHERE, OTHER, cause_of
from sglang.srt.observability.kv_transfer_metrics import KvTransferCounters

from sglang_pd_radix.tools import reference

PATCH = Path(__file__).parents[3] / "sglang" / "srt"


@pytest.fixture
def registry(monkeypatch):
    found = prometheus_client.CollectorRegistry()
    for name in ("Counter", "Gauge"):
        monkeypatch.setattr(prometheus_client, name, partial(getattr(prometheus_client, name), registry=found))
    return found


def told(registry, name: str) -> dict[str, float]:
    """The values of a metric, by its label beside those that all have."""
    return {
        "".join(value for key, value in s.labels.items() if key not in ("model_name", "engine_type")): s.value
        for metric in registry.collect()
        for s in metric.samples
        if s.name == f"sglang:{name}"
    }


@pytest.fixture
def scheduler(monkeypatch, registry):
    """A decode worker's scheduler, with the flag and metrics."""
    return worker_of(monkeypatch, World(size=64, page_size=4))


def worker_of(monkeypatch, world):
    """A decode worker's scheduler over the queues and pools of ``world``, with metrics."""
    made = object.__new__(Scheduler)
    made.world = world
    made.token_to_kv_pool_allocator, made.tree_cache = world.allocator, world.tree
    made.req_to_token_pool = world.queue.req_to_token_pool
    made.disagg_decode_prealloc_queue, made.disagg_decode_transfer_queue = world.queue, world.queue.transfer_queue
    made.max_total_num_tokens, made.enable_metrics = 64, True
    made.disaggregation_mode, made.waiting_queue = DisaggregationMode.DECODE, []
    made.running_batch = SimpleNamespace(reqs=[])
    made.server_args = SimpleNamespace(
        served_model_name="of this test", disaggregation_mode="decode", enable_metrics=True
    )
    monkeypatch.setattr(KvTransferCounters, "_made", {})
    monkeypatch.setattr(worker_gauges, "PUBLISH_S", 0.0)
    monkeypatch.setattr(Scheduler, "rests", lambda self: not any(self.state_of_requests()["requests"].values()))
    return made


def begin(world: World, prompt: Iterable[int] = range(1, 13), **options: bool) -> Any:
    """A request that prefill has been asked for."""
    decode_req = world.arrive([*prompt], **options)
    world.handshake(decode_req)
    world.step()
    return decode_req


def test_requests_by_state_through_the_life_of_one(scheduler, registry):
    world, seen = scheduler.world, []

    def look() -> None:
        scheduler.publish_gauges()
        seen.append({state for state, count in scheduler.state_of_requests()["requests"].items() if count})
        by_gauge = {state for state, count in told(registry, "pd_requests").items() if count}
        assert by_gauge == seen[-1]

    decode_req = world.arrive(list(range(1, 13)))
    look()
    world.handshake(decode_req)
    world.step()
    look()
    assert told(registry, "pd_pool_free")["kv"] == 64 - 12
    world.complete(decode_req)
    world.step()
    scheduler.waiting_queue = [decode_req.req]
    look()
    scheduler.waiting_queue, scheduler.running_batch.reqs = [], [decode_req.req]
    look()
    scheduler.running_batch.reqs = []
    world.finish(decode_req.req)
    look()
    assert seen == [{"handshake"}, {"transfer"}, {"received"}, {"running"}, set()]
    assert told(registry, "decode_radix_evictable_tokens") == {"": 12}
    assert told(registry, "pd_pool_size")["kv"] == 64


def test_the_tree_is_told_when_what_is_free_is(scheduler, registry, monkeypatch):
    """Told in between, what comes into the tree would be free too, and PdRadixPoolTwice would fire."""
    world = scheduler.world

    def parts() -> tuple[float, ...]:
        of_tree = (told(registry, f"decode_radix_{part}_tokens")[""] for part in ("evictable", "protected"))
        return (told(registry, "pd_pool_free")["kv"], *of_tree)

    scheduler.publish_gauges()
    monkeypatch.setattr(worker_gauges, "PUBLISH_S", 3600.0)
    decode_req = begin(world)
    world.complete(decode_req)
    for _ in range(2):
        world.step()
        scheduler.publish_gauges()
    assert world.tree.protected_size() == 12 and parts() == (64, 0, 0)
    monkeypatch.setattr(worker_gauges, "PUBLISH_S", 0.0)
    scheduler.publish_gauges()
    assert parts() == (52, 0, 12)
    world.finish(decode_req.req)
    scheduler.publish_gauges()
    assert parts() == (52, 12, 0)
    # A flush leaves neither as it was.
    world.tree.reset()
    world.allocator.clear()
    scheduler.publish_gauges()
    assert parts() == (64, 0, 0)


def test_what_a_decode_worker_without_the_flag_writes(monkeypatch, registry):
    """And nothing else, as docs/reference.md has it: a transfer that fails is the engine's to count."""
    made = worker_of(monkeypatch, World(size=64, page_size=4, tree_type=ChunkCache, watermark=None))
    world, failed, written = made.world, [], set()
    KvTransferCounters._made["m", "decode"] = KvTransferCounters.get(made.server_args)
    world.scheduler.enable_metrics = True
    world.scheduler.metrics_collector = SimpleNamespace(increment_transfer_failed_reqs=lambda: failed.append(1))

    def look() -> None:
        made.publish_gauges()
        names = {s.name.removesuffix("_total") for m in registry.collect() for s in m.samples if s.value}
        written.update(name.removeprefix("sglang:") for name in names if not name.endswith("_created"))

    for end in (world.complete, lambda dr: setattr(dr.kv_receiver, "state", KVPoll.Failed)):
        decode_req = begin(world, peer_takes_prefix=False)
        # Or it has been here for 0 ms.
        time.sleep(0.002)
        look()
        end(decode_req)
        world.step()
        look()
    assert failed and written == {*reference.WITHOUT_FLAG}


def test_how_long_a_transfer_takes_is_counted_from_its_beginning(scheduler, registry):
    """Not from when the request came: it may have waited for memory for long, and nothing is stuck."""
    decode_req = begin(scheduler.world)
    decode_req.req.time_stats.decode_prealloc_queue_entry_time = time.perf_counter() - 1000
    decode_req.req.time_stats.decode_transfer_queue_entry_time = time.perf_counter() - 10
    scheduler.publish_gauges()
    assert 10 <= told(registry, "pd_oldest_request_seconds")["transfer"] < 500
    assert scheduler.state_of_requests()["oldest"][0]["seconds"] >= 1000


def test_one_that_is_held_back_for_the_transfer_of_another(scheduler):
    world = scheduler.world
    leader, follower = world.arrive(list(range(1, 13))), world.arrive(list(range(1, 17)))
    for decode_req in (leader, follower):
        world.handshake(decode_req)
    world.step()
    states = scheduler.state_of_requests()["requests"]
    assert (states["transfer"], states["held_back"], states["waiting"]) == (1, 1, 0)


def test_one_that_is_computed_here_until_it_decodes(scheduler):
    agreed, polled, launched, done = (SimpleNamespace(finished=lambda n=n: n) for n in (False, False, False, True))
    transfers = scheduler.disagg_decode_transfer_queue
    # One that another rank has no memory for yet is polled; of one that waits, a part may be in the step.
    local = object.__new__(LocalPrefills)
    transfers.hooks = SimpleNamespace(beside=[LocalHooks(local).beside])
    waiting = [LocalReq(SimpleNamespace(req=req), 0, agreed=req is agreed) for req in (agreed, polled)]
    local.waiting, local.launched = waiting, SimpleNamespace(reqs=[agreed, launched, done])
    transfers.queue = [SimpleNamespace(req=polled, phase=SimpleNamespace(name="LOCAL"))]
    found = worker_gauges.in_hand(scheduler)
    assert {each.state for each in found} == {"local"}
    assert sorted(id(each.req) for each in found) == sorted(map(id, (agreed, polled, launched)))


def test_quarantine_is_seen_until_it_is_over(scheduler, registry):
    world = scheduler.world
    decode_req = begin(world)
    decode_req.mark_failed("timed out after 3 s")
    world.step()
    scheduler.publish_gauges()
    assert told(registry, "decode_quarantined_tokens") == {"": 12}
    assert told(registry, "pd_requests")["quarantined"] == 1
    decode_req.kv_receiver.quiet = True
    world.step()
    scheduler.publish_gauges()
    assert told(registry, "decode_quarantined_tokens") == {"": 0}
    assert told(registry, "pd_requests")["quarantined"] == 0


def test_an_idle_worker_audits_itself_once_for_what_it_has_done(scheduler, registry, monkeypatch):
    world, audits = scheduler.world, []
    monkeypatch.setattr(scheduler_gauges_mixin, "AUDIT_S", 0.0)
    monkeypatch.setattr(type(world.tree), "audit", lambda self, holders: audits.append(holders) or ["a fault"])
    decode_req = begin(world)
    scheduler.publish_gauges()
    assert not audits, "it is not idle"
    world.complete(decode_req)
    world.step()
    world.finish(decode_req.req)
    for _ in range(3):
        scheduler.publish_gauges()
        assert scheduler.audit_at_rest() == ["a fault"]
    assert audits == [[]] and told(registry, "decode_audit_faults") == {"": 1}
    # Whatever is done then is looked at, if somebody asks.
    monkeypatch.setattr(scheduler_gauges_mixin, "AUDIT_S", 60.0)
    world.scheduler.req_to_token_pool.free_slots.pop()
    scheduler.publish_gauges()
    assert len(audits) == 1
    for _ in range(2):
        assert len(scheduler.audit_at_rest()) == 2
    assert len(audits) == 2


def test_a_worker_that_was_flushed_is_audited_though_all_is_as_it_was(scheduler, monkeypatch):
    """A flush begins the counts of locks anew: what was told before it was told of what came in between."""
    world = scheduler.world
    found = iter([[], ["a fault"], ["another"]])
    monkeypatch.setattr(type(world.tree), "audit", lambda self, holders: next(found))
    assert scheduler.audit_at_rest() == []
    world.tree.dec_lock_ref(world.tree.lock_prefix(world.tree.peek([1], None))[1])
    assert world.flush() and scheduler.audit_at_rest() == ["a fault"]
    # And without a lock, what came and was evicted.
    slots = world.allocator.alloc(4)
    world.tree.insert(InsertParams(key=RadixKey([1, 2, 3, 4], None), value=slots))
    world.tree.evict_shortfall(world.tree.evictable_size())
    assert scheduler.audit_at_rest() == ["another"] == scheduler.audit_at_rest()


def test_faults_are_logged_where_they_are_found_and_once(scheduler, caplog):
    """Of several TP ranks only the first answers /get_server_info; what another has found is in its log."""
    many = [f"fault {n}" for n in range(30)]
    for faults in (None, [], ["one", "another"], ["one", "another"], [], [], many, None, many):
        scheduler.publish_audit(faults)
    told_of = [record.getMessage() for record in caplog.records if "audit" in record.getMessage()]
    assert told_of[0] == "The audit of tree and pools has found 2 contradictions: one; another"
    assert "30 contradictions: fault 0; " in told_of[1] and told_of[1].endswith("fault 9; and 20 more")
    assert len(told_of) == 2


def test_what_one_of_several_tp_ranks_shows(monkeypatch, tmp_path):
    """They write the same series: of a fault, and of what is held, the worst counts and not the last to write."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    transfer = worker_gauges.InHand(
        SimpleNamespace(
            time_stats=SimpleNamespace(
                decode_prealloc_queue_entry_time=time.perf_counter() - 100, decode_transfer_queue_entry_time=0.0
            )
        ),
        "transfer",
    )
    # The second has ended in the meantime what the first has not.
    for rank, (faults, held, free, found) in enumerate(((3, 96, 10, [transfer]), (0, 0, 106, []))):
        one = prometheus_client.values.MultiProcessValue(lambda rank=rank: rank)
        monkeypatch.setattr(prometheus_client.values, "ValueClass", one)
        own = prometheus_client.CollectorRegistry()
        with monkeypatch.context() as patched:
            patched.setattr(prometheus_client, "Gauge", partial(prometheus_client.Gauge, registry=own))
            gauges = worker_gauges.WorkerGauges({"model_name": "m", "engine_type": "decode"})
        gauges.write_faults(faults)
        gauges.write_quarantine(held)
        gauges.write_pools({"kv": (128, free)})
        gauges.write_requests(found)
    seen = prometheus_client.CollectorRegistry()
    multiprocess.MultiProcessCollector(seen, path=str(tmp_path))
    assert told(seen, "decode_audit_faults") == {"": 3}
    assert told(seen, "decode_quarantined_tokens") == {"": 96}
    assert told(seen, "pd_pool_free") == {"kv": 10} and told(seen, "pd_pool_size") == {"kv": 128}
    assert told(seen, "pd_oldest_request_seconds")["transfer"] >= 100
    # A count, of which each rank has the same but for a moment.
    assert told(seen, "pd_requests")["transfer"] == 0


def written_by(monkeypatch, folder: Path, pid: int, faults: int) -> None:
    """What a decode worker's process with this PID has written when its audit has found so many contradictions."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
    monkeypatch.setattr(prometheus_client.values, "ValueClass", prometheus_client.values.MultiProcessValue(lambda: pid))
    gauge = partial(prometheus_client.Gauge, registry=prometheus_client.CollectorRegistry())
    monkeypatch.setattr(prometheus_client, "Gauge", gauge)
    gauges = worker_gauges.WorkerGauges({"model_name": "m", "engine_type": "decode"})
    gauges.write_faults(faults)
    gauges.write_pools({"kv": (128, 128 - faults)})


def test_what_an_earlier_start_has_left_is_not_shown(monkeypatch, tmp_path):
    """Nobody tells the exporter of a scheduler's death, and a directory that the operator gives outlives it."""
    began = {os.getpid(): 1000.0, 20: 500.0, 21: 900.0}
    monkeypatch.setattr(worker_gauges, "_began", began.get)
    left = {
        20: 600,  # of another worker, which began before this one and lives
        21: 800,  # of an earlier start: another process has this PID now
        22: 999,  # of an earlier start: nobody has this PID any more
        os.getpid(): 999,  # the same, and this process has it
        23: 1001,  # of one with PIDs of its own, which has begun since
    }
    for faults, pid in enumerate(left, 1):
        written_by(monkeypatch, tmp_path, pid, faults)
        # So that making the others removes none.
        for file in tmp_path.glob(f"gauge_*_{pid}.db"):
            os.utime(file, (2000, 2000))
    for pid, seconds in left.items():
        for file in tmp_path.glob(f"gauge_*_{pid}.db"):
            os.utime(file, (seconds, seconds))
    (tmp_path / "gauge_livemax_other.db").write_bytes((tmp_path / "gauge_livemax_20.db").read_bytes())
    written_by(monkeypatch, tmp_path, 24, 0)
    for shown in ("livemax", "livemin", "mostrecent"):
        kept = {file.stem.rpartition("_")[2] for file in tmp_path.glob(f"gauge_{shown}_*.db")}
        assert kept - {"other"} == {"20", "23", "24"}
    assert (tmp_path / "gauge_livemax_other.db").exists()


def test_processes_are_told_apart_by_when_they_began(monkeypatch, tmp_path):
    """The scheduler that an engine starts after the death of another one shows what it finds itself."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    written_by(monkeypatch, tmp_path, gone.pid, 3)
    written_by(monkeypatch, tmp_path, os.getpid(), 2)
    for file in tmp_path.iterdir():
        os.utime(file, (1, 1))
    written_by(monkeypatch, tmp_path, os.getpid(), 0)
    seen = prometheus_client.CollectorRegistry()
    multiprocess.MultiProcessCollector(seen, path=str(tmp_path))
    assert told(seen, "decode_audit_faults") == {"": 0} and told(seen, "pd_pool_free") == {"kv": 128}
    before = time.time()
    with subprocess.Popen(["sleep", "60"]) as lives:
        began = worker_gauges._began(lives.pid)
        lives.kill()
    # The kernel counts in ticks.
    assert began is not None and before - 0.05 < began < time.time() + 0.05


def test_what_cannot_be_removed_stays_and_is_told_of(monkeypatch, tmp_path, caplog):
    """Of another user, for example; the worker goes on."""
    written_by(monkeypatch, tmp_path, 0, 3)
    os.utime(tmp_path / "gauge_livemax_0.db", (1, 1))
    monkeypatch.setattr(Path, "unlink", lambda self: (_ for _ in ()).throw(PermissionError(13, "not permitted")))
    written_by(monkeypatch, tmp_path, os.getpid(), 0)
    assert f"Gauges of an earlier start remain in {tmp_path}: " in caplog.text


def test_what_copies_keep_of_the_pool_is_told_apart_from_what_nobody_gives_back(scheduler, registry, monkeypatch):
    """A save locks its node and all above it, whoever else holds them."""
    world = scheduler.world
    tree, saving = world.tree, []
    monkeypatch.setattr(type(tree.tier), "nodes_in_use", lambda self: saving)
    for prompt in (list(range(1, 13)), [*range(1, 9), *range(50, 58)]):
        decode_req = begin(world, prompt)
        world.complete(decode_req)
        world.step()
        world.finish(decode_req.req)
    scheduler.publish_gauges()
    assert told(registry, "decode_copying_tokens") == {"": 0}
    saving += [node for node in tree.root_node.children.values() for node in node.children.values()]
    assert sorted(len(node.key) for node in saving) == [4, 8]
    scheduler.publish_gauges()
    assert told(registry, "decode_copying_tokens") == {"": 20}


def test_the_oldest_come_first(scheduler):
    now = time.perf_counter()
    reqs = [scheduler.world.arrive(list(range(n, n + 8))).req for n in range(1, 8)]
    for seconds, req in zip((1, 9, 3, 7, 5, 2, 4), reqs, strict=True):
        req.time_stats = SimpleNamespace(
            decode_prealloc_queue_entry_time=now - seconds, prefill_bootstrap_queue_entry_time=0.0
        )
    told_of = scheduler.state_of_requests()["oldest"]
    assert [round(each["seconds"]) for each in told_of] == [9, 7, 5, 4, 3]
    assert told_of[0]["rid"] == reqs[1].rid and told_of[0]["state"] == "handshake"


def test_without_disaggregation_nothing_is_said(scheduler):
    scheduler.disaggregation_mode = DisaggregationMode.NULL
    assert scheduler.state_of_requests() == {}
    scheduler.publish_gauges()
    assert scheduler._gauges is None


def test_without_metrics_nothing_is_written(scheduler):
    scheduler.enable_metrics = False
    scheduler.publish_gauges()
    assert scheduler._gauges is None


def test_prefill_has_each_request_once():
    def req(finished: bool = False) -> SimpleNamespace:
        return SimpleNamespace(finished=lambda: finished)

    boots, waits, chunked, done, sends = req(), req(), req(), req(True), req()
    found = worker_gauges.in_hand(
        SimpleNamespace(
            disaggregation_mode=DisaggregationMode.PREFILL,
            disagg_prefill_bootstrap_queue=SimpleNamespace(queue=[boots]),
            waiting_queue=[waits],
            chunked_req=chunked,
            last_batch=SimpleNamespace(reqs=[chunked, done, sends]),
            disagg_prefill_inflight_queue=[sends],
        )
    )
    assert {(id(each.req), each.state) for each in found} == {
        (id(boots), "bootstrap"), (id(waits), "waiting"), (id(chunked), "running"), (id(sends), "sending"),
    }  # fmt: skip


class Stage(Scheduler):
    """One of two stages of a prefill, in the engine's own loop, that looks at what it has at the start of each turn."""

    def __init__(self, batches: list[SimpleNamespace], depth: int):
        self.batches, self.seen, self.in_flight = batches, list[tuple[list, list]](), list[SimpleNamespace]()
        self.pp_size, self.pp_rank = 2, 0
        self.server_args = SimpleNamespace(pp_async_batch_depth=depth, enable_nsa_prefill_context_parallel=False)
        self.pp_group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
        self.disaggregation_mode, self.waiting_queue, self.chunked_req = DisaggregationMode.PREFILL, [], None
        self.disagg_prefill_bootstrap_queue, self.disagg_prefill_inflight_queue = SimpleNamespace(queue=[]), []
        self.send_req_work = self.send_proxy_work = []

    def process_input_requests(self, recv_reqs: list) -> None:
        self.seen.append(([req for batch in self.in_flight for req in batch.reqs], worker_gauges.in_hand(self)))

    def get_new_batch_prefill(self) -> SimpleNamespace | None:
        return self.batches.pop(0) if self.batches else None

    def _pp_launch_batch(self, *args: object) -> tuple[None, None]:
        self.in_flight.append(self.cur_batch)
        return None, None

    def _pp_process_batch_result(self, batch: SimpleNamespace, result: None) -> None:
        assert batch is self.in_flight.pop(0)
        self.disagg_prefill_inflight_queue += batch.reqs

    def process_disagg_prefill_inflight_queue(self, rids: list) -> None:
        # One is still being sent.
        left = self.disagg_prefill_inflight_queue[-1:] if self.in_flight else []
        for req in self.disagg_prefill_inflight_queue:
            req.done = req not in left
        self.disagg_prefill_inflight_queue = left

    def self_check_during_idle(self) -> None:
        raise LoopEnds

    recv_requests = _pp_pd_get_bootstrapped_ids = _pp_pd_get_prefill_transferred_ids = lambda self: []
    _pp_recv_pyobj_from_prev_stage = lambda self: []  # noqa: E731
    _pp_commit_comm_work = process_bootstrapped_queue = lambda self, work: work
    process_prefill_chunk = _pp_recv_proxy_tensors = lambda self: None
    maybe_prepare_mlp_sync_batch = lambda self, batch: batch  # noqa: E731
    _pp_pd_send_consensus_bootstrapped_ids = _pp_pd_send_consensus_release_ids = lambda self, *args: ([], [])

    def _pp_commit_send_output_work_and_preprocess_output_tensors(self, *args: object) -> tuple:
        return None, None, SimpleNamespace(synchronize=lambda: None)


@pytest.mark.parametrize("depth", [0, 2])
def test_stages_of_prefill_run_what_they_have_in_flight(depth):
    """The last batch that the engine knows of then is one that has been processed."""

    def req() -> SimpleNamespace:
        made = SimpleNamespace(done=False)
        made.finished = lambda: made.done
        return made

    stage = Stage([SimpleNamespace(reqs=[req(), req()]) for _ in range(9)], depth)
    with pytest.raises(LoopEnds):
        stage.event_loop_pp_disagg_prefill()
    assert max(len(flies) for flies, _ in stage.seen) >= 2
    for flies, found in stage.seen:
        known = [id(each.req) for each in found]
        assert len(set(known)) == len(known), "a request counts once"
        assert {id(each.req) for each in found if each.state == "running"} == set(map(id, flies))


# ---- causes ----

WINDOWS = "there are 3 pages of its state or window, and decode expects 4"
CUT = "prefill has cut the prompt to the longest that it takes (--allow-auto-truncate)"


LATE = SimpleNamespace(state=SenderState(due_at=0.0), kv_mgr=SimpleNamespace(transfer_timeout=300))


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("Losing connection with prefill instance (bootstrap_addr: 10.0.0.1:1)", "peer_lost"),
        ("timed out after 300 s, in which prefill 10.0.0.1:1 has not known of it", "timeout"),
        # Whatever the names of hosts.
        ("the handshake with prefill chatroom-0:1 failed: 1: 1", OTHER),
        ("prefill mooncake-0.svc:8998 is gone: it refuses connections", "peer_lost"),
        ("prefill reported: transfer over NIXL failed: ERR", "backend"),
        # The two workers do not fit each other, whoever finds it.
        (f"transfer over Mooncake failed: RuntimeError: {WINDOWS}", "mismatch"),
        (f"prefill reported: refused decode's request for KV: {CUT}", "mismatch"),
        ("transfer over Mooncake failed: RuntimeError: its state could not be written to 10.0.0.1:1", "backend"),
        ("refused decode's request for KV: decode gave the request up", "gave_up"),
        ("no reason was recorded", ELSEWHERE),
        ("failed on another rank of decode", ELSEWHERE),
        (DeltaSender.overdue(LATE), "timeout"),
        ("its metadata has not come", "timeout"),
        ("a piece could not be written to decode at 10.0.0.1:1", "backend"),
        ("TypeError: 'int' object is not iterable", OTHER),
    ],
)
def test_the_cause_that_a_message_names(reason, cause):
    assert cause_of(reason) == cause
    for beginning in (
        "Decode transfer failed for request a (bootstrap_room=7): ",
        "Decode handshake failed for request a (bootstrap_room=7): ",
        "Prefill transfer failed for request a, room 7: ",
        # As Mooncake's errors begin.
        "Decode transfer failed for request a (bootstrap_room=7): KVTransferError(bootstrap_room=7): ",
        "KVTransferError(bootstrap_room=7): ",
        # As the engine tells of them on prefill.
        "Prefill bootstrap failed for request rank=0 req.rid='a' req.bootstrap_room=7 with exception ",
    ):
        assert cause_of(beginning + reason) == cause
    assert cause in CAUSES


def test_every_reason_that_this_package_gives_has_a_cause():
    """By the names of what notes them, as in test_troubleshooting."""
    reasons = handed(("fail", "mark_failed", "record_failure", "fail_room"), PATCH)
    assert len(reasons) > 10
    unnamed = {
        reason.text.replace(HOLE, "1") for reason in reasons if cause_of(reason.text.replace(HOLE, "1")) == OTHER
    }
    # What follows names it, or goes before, which may be anything.
    assert unnamed <= {"prefill reported: 1", "the handshake with prefill 1 failed: 1: 1"}


def test_a_failure_is_counted_by_its_cause_and_a_refusal_is_not(registry, monkeypatch):
    monkeypatch.setattr(KvTransferCounters, "_made", {})
    counters = KvTransferCounters("m", "decode", enabled=True)
    for status, message in ((500, "timed out after 3 s"), (500, "timed out after 4 s"), (400, "n must be 1")):
        counters.ended(SimpleNamespace(status_code=status, message=message))
    counters.ended(None)
    counters.lost_peer()
    assert told(registry, "kv_transfer_failures_total") == dict.fromkeys(CAUSES, 0) | {"timeout": 2}
    assert told(registry, "kv_transfer_peers_lost_total") == {"": 1}
