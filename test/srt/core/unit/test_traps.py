"""One test for each way in which decode-side reuse is known to have gone wrong: rows of a list of traps met by this
engine and its peers. A row that cannot be shown without servers, or is shown better elsewhere, says so in ELSEWHERE.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nixl_world
import numpy as np
import pytest
import torch
from decode_world import World, aborted, kv_of, serve, serve_to_end, tokens
from engine_classes import args_of, engine_class
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.nixl.conn import TransferInfo, TransferStatus
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixCache

ROWS = [*range(1, 22), 26, 27, 30, 31, 32, 33]

SAMPLES = "../../../python/extras/samples/tests/test_samples.py"
HYBRID = "../../../python/extras/hybrid/tests/test_hybrid_traps.py"
# Rows without a test of their own here: why, and the test (file::name) that has them if there is one.
ELSEWHERE = {
    20: "needs both ends of the wire: test_wire.py::test_an_abort_on_prefill_reaches_decode",
    21: "needs the same: ../../../python/extras/staging/tests/test_staged_pieces.py::"
    "test_trap_21_pieces_land_where_they_belong_behind_a_prefix",
    30: f"is both tokenizer managers' affair: {SAMPLES}::test_prefill_that_is_told_later_gives_its_warmup_up, "
    f"{SAMPLES}::test_decode_asks_for_nothing_before_prefill_knows, "
    "extras/samples/tests/e2e/test_parallel_sampling.py::test_samples_are_as_requests_of_their_own_and_kv_comes_once",
    31: "is row 2, and what the engine's kit checks: e2e/test_kits.py::test_cache_hit",
    32: f"is of states: {HYBRID}::test_trap_32_requests_wait_for_a_state_slot",
    33: f"is of windows: {HYBRID}::test_trap_33_what_is_in_the_tree_has_no_window",
}

PAGE = 4


def snapshot(world: World) -> list[tuple]:
    """All that a match changes of the tree: nodes, their keys, access times, locks and counts of hits."""
    return sorted(
        (node.id, tuple(node.key.token_ids), node.last_access_time, node.lock_ref, node.hit_count)
        for node in [*world._nodes(), world.tree.root_node]
    )


def prebuilt_batch(world: World, req: Req) -> ScheduleBatch:
    """The engine's own prebuilt batch of a request that waits."""
    args = world.scheduler.server_args
    args.enable_deterministic_inference = args.enable_custom_logit_processor = False
    batch = ScheduleBatch.init_new(
        [req],
        world.pool,
        world.allocator,
        world.tree,
        SimpleNamespace(vocab_size=256, is_encoder_decoder=False),
        False,
        world.scheduler.spec_algorithm,
    )
    batch.prepare_for_prebuilt()
    return batch


def to_prebuilt(world: World, prompt: list[int], prefill_hit: int = 0) -> tuple[Req, ScheduleBatch]:
    """Bring a request to the engine's prebuilt batch, instead of the stand-in for it in `World.step`."""
    decode_req = world.arrive(prompt)
    world.handshake(decode_req)
    world.step()
    world.complete(decode_req)
    world.meta.cached_tokens[decode_req.kv_receiver.aux_index, 0] = prefill_hit
    world.meta.cached_tokens[decode_req.kv_receiver.aux_index, 1] = prefill_hit
    (req,) = world.transfer.pop_transferred()
    req.init_next_round_input(world.tree)
    return req, prebuilt_batch(world, req)


# ---- core path ----


@pytest.mark.parametrize("page_size", [1, PAGE])
def test_trap_01_the_prebuilt_batch_has_the_slots_of_prefix_and_delta(page_size):
    """With a prefix of its own, decode read the slots of the prompt's start where those of the delta belong.

    The batch itself is never run, so its tokens and slots are left out.
    """
    world, prompt = World(page_size=page_size), tokens(1, 23)
    serve_to_end(world, prompt[:16])
    req, batch = to_prebuilt(world, prompt)
    assert req.decode_prefix_len == 16
    slots = world.pool.req_to_token[req.req_pool_idx, :23].tolist()
    assert len(set(slots)) == 23 and len(req.fill_ids) == 24
    assert batch.seq_lens.tolist() == [23] and batch.prefix_lens == [0] and batch.extend_lens == [1]
    for n, slot in enumerate(slots):
        assert int(world.kv.k_buffer[0][slot]) == kv_of(prompt[: n + 1], world.weights)


@pytest.mark.parametrize("prefill_hit", [20, 16, 8, 0])
def test_trap_02_prefills_hit_and_decodes_are_not_added(prefill_hit):
    """The answer said that more tokens came from a cache than the prompt has, or that decode had held none."""
    world, prompt = World(), tokens(1, 23)
    serve_to_end(world, prompt[:16])
    req, _ = to_prebuilt(world, prompt, prefill_hit=prefill_hit)
    assert req.cached_tokens == max(prefill_hit, 16) <= len(prompt)


@pytest.mark.parametrize("lost", ["nothing", "the tail", "everything"])
def test_trap_03_a_retracted_request_comes_back(lost):
    """Retraction forgot the node that the request held, resuming took one for granted, and the scheduler died."""
    world, prompt = World(size=96), tokens(1, 22)
    serve_to_end(world, prompt[:12])
    req = serve(world, prompt, max_new=12).req
    world.decode()
    world.decode()
    world.retract(req)
    assert req.last_node is None
    world.check()
    if lost == "the tail":
        world.tree.evict_shortfall(PAGE)
    elif lost == "everything":
        world.tree.evict(EvictParams(num_tokens=1000))
        assert world.tree.evictable_size() == 0
    held = {"nothing": 20, "the tail": 16, "everything": 0}[lost]
    assert req in world.step()
    assert req.decode_prefix_len == held and req.last_node is not None
    world.check()
    for _ in range(12):
        world.decode()
        world.check()
    assert not world.running and world.tree.protected_size() == 0


def test_trap_04_a_dense_model_waits_for_no_state():
    """Every request of a model without state hung: the test for state was an empty list, and that announced some."""
    world, asked = World(), []
    decode_req = world.arrive(tokens(1, 9))
    send = decode_req.kv_receiver.send_metadata
    decode_req.kv_receiver.send_metadata = lambda pages, aux, states, **rest: (
        asked.append(states) or send(pages, aux, states, **rest)
    )
    world.handshake(decode_req)
    world.step()
    assert asked == [None]


def heard(status: TransferStatus, agent: str, kv: bool = False, aux: bool = False, state: bool = False) -> None:
    if kv:
        status.chunks.setdefault(agent, set()).add(0)
        status.num_chunks[agent] = 1
    if aux:
        status.aux_from.add(agent)
    if state:
        status.state_from.add(agent)


@pytest.mark.parametrize("state_pool", [True, False])
def test_trap_05_models_whose_state_is_not_known_are_refused_at_the_start(monkeypatch, state_pool):
    """Another tree than the engine's for KV alone, or an ordinary one beside a pool that has state to send."""

    class MambaRadixCache(RadixCache):
        pass

    def engines(scheduler: Scheduler) -> None:
        scheduler.tree_cache = object.__new__(RadixCache if state_pool else MambaRadixCache)
        scheduler.tree_cache.disable = False

    class Pool:
        pass

    if state_pool:
        Pool.get_state_buf_infos = lambda self: None
    monkeypatch.setattr(engine_class(Scheduler), "init_cache_with_memory_pool", engines)
    scheduler = object.__new__(Scheduler)
    scheduler.server_args = args_of(disaggregation_decode_enable_radix_cache=True)
    runner = SimpleNamespace(mambaish_config=None, is_hybrid_swa=False, token_to_kv_pool=Pool())
    scheduler.tp_worker = SimpleNamespace(model_runner=runner)
    named = r"state \(Pool\)" if state_pool else "MambaRadixCache "
    with pytest.raises(ValueError, match=f"{named}.*Start this decode worker without the flag"):
        scheduler.init_cache_with_memory_pool()
    scheduler.server_args.disaggregation_decode_enable_radix_cache = False
    scheduler.init_cache_with_memory_pool()


@pytest.mark.parametrize("agents", [["p"], ["p", "q"]])
def test_trap_06_a_transfer_is_done_when_every_part_of_every_sender_is_here(agents):
    """Silent corruption: the transfer was called done before all parts of the state had come."""
    parts = [(agent, part) for agent in agents for part in ("kv", "aux", "state")]
    for missing in [None, *parts]:
        status = TransferStatus(num_expected=len(agents), expects_state=True)
        for agent, part in parts:
            if (agent, part) != missing:
                heard(status, agent, **{part: True})
        assert status.is_done() == (missing is None), missing
    # Announced is not arrived.
    status = TransferStatus()
    heard(status, "p", kv=True, aux=True)
    status.num_chunks["p"] = 2
    assert not status.is_done()


def test_trap_07_a_dummy_rank_is_one_that_says_so():
    """Empty page lists meant a dummy rank until there were full hits, which have them too."""

    def info(pages: list[int], *more: bytes) -> TransferInfo:
        indices = np.array(pages, np.int32).tobytes()
        return TransferInfo.from_zmq([b"7", b"ip", b"1", b"agent", indices, b"0", b"1", b"", *more])

    assert not info([], b"8", b"0").is_dummy(), "a full hit"
    assert info([], b"8", b"1").is_dummy()
    assert not info([3], b"4", b"0").is_dummy()
    # As the engine has it, from a decode worker that names no prefix.
    assert info([]).is_dummy() and not info([3]).is_dummy()


class Prefill(SchedulerDisaggregationPrefillMixin):
    """A prefill scheduler as far as sending chunks goes; ``sent`` has (pages, last) as its sender got them."""

    pp_size = 1

    def __init__(self, prompt_len: int, prefix_len: int) -> None:
        self.sent: list[tuple[list[int], bool]] = []
        self.states: list[tuple[list[int], Any]] = []
        self.metadata_set = 0
        self.token_to_kv_pool_allocator = SimpleNamespace(page_size=PAGE, get_kvcache=lambda: None)
        table = torch.arange(0, 64, dtype=torch.int32).reshape(1, -1)
        self.req_to_token_pool = SimpleNamespace(req_to_token=table)
        self.disagg_metadata_buffers = SimpleNamespace(set_buf=self._set_buf)
        self.left = -(-prompt_len // PAGE) - prefix_len // PAGE
        self.req = SimpleNamespace(
            origin_input_ids=list(range(prompt_len)),
            fill_ids=[],
            start_send_idx=prefix_len,
            req_pool_idx=0,
            mamba_pool_idx=None,
            rid="r",
            bootstrap_room=7,
            disagg_kv_sender=SimpleNamespace(send=self._send),
        )

    def _set_buf(self, req: Any) -> None:
        self.metadata_set += 1

    def _send(self, pages: np.ndarray, states: Any) -> None:
        # So does the engine's sender tell the last chunk.
        self.left -= len(pages)
        self.sent.append((pages.tolist(), self.left == 0))
        self.states.append((pages.tolist(), None if states is None else [int(state) for state in states]))

    def prefill(self, chunk: int) -> None:
        prompt_len = len(self.req.origin_input_ids)
        for end in [*range(chunk, prompt_len, chunk), prompt_len]:
            self.req.fill_ids = list(range(end))
            self.send_kv_chunk(self.req, last_chunk=end == prompt_len)


@pytest.mark.parametrize("chunk", [3, 4, 8, 64])
@pytest.mark.parametrize("prompt_len", [1, 16, 22])
def test_trap_08_only_the_last_chunk_ends_a_transfer(chunk, prompt_len):
    """A chunk of no pages ended the transfer early: as many as were to come, none, had been sent."""
    for prefix_len in range(0, prompt_len + 1, PAGE):
        prefill = Prefill(prompt_len, prefix_len)
        prefill.prefill(chunk)
        pages_sent = [page for pages, _ in prefill.sent for page in pages]
        assert pages_sent == list(range(prefix_len // PAGE, -(-prompt_len // PAGE))), prefix_len
        assert [last for _, last in prefill.sent] == [False] * (len(prefill.sent) - 1) + [True], prefix_len
        assert prefill.metadata_set == 1
        assert all(pages for pages, last in prefill.sent if not last)


def test_trap_09_an_admitted_request_is_not_matched_again():
    """A longer match at the prebuilt batch moved the border of what the tree holds, and finish freed wrong slots."""
    # By prefix, the second would wait for the first.
    world, prompt = World(size=128, options={"disaggregation_decode_admission": "fcfs"}), tokens(1, 24)
    serve_to_end(world, prompt[:8])
    first = world.arrive(prompt)
    world.handshake(first)
    world.step()
    assert first.req.decode_prefix_len == 8
    # Meanwhile the same prompt comes into the tree by another request, which had a copy of its own.
    serve_to_end(world, prompt)
    world.complete(first)
    (req,) = world.transfer.pop_transferred()
    before = (req.last_node, req.cache_protected_len, snapshot(world))
    req.init_next_round_input(world.tree)
    assert (req.last_node, req.cache_protected_len, snapshot(world)) == before
    assert len(req.prefix_indices) == 0
    world.tree.cache_unfinished_req(req)
    world.running.append(req)
    world.check()
    world.decode()
    world.finish(req)
    world.check()


@pytest.mark.parametrize("page_size", [1, PAGE])
def test_trap_10_a_blocked_head_leaves_the_tree_alone(page_size):
    """Each poll matched the head of the queue: what it would use stayed young, and nodes were split for nothing."""
    world, prompt = World(size=64, page_size=page_size), tokens(1, 40)
    serve_to_end(world, prompt[:24])
    running = serve(world, tokens(2, 24), max_new=8).req
    asked: list[int] = []
    descend = world.tree.reader.descend
    world.tree.reader.descend = lambda *args: asked.append(1) or descend(*args)
    # It would match in the middle of the node.
    head = world.arrive(prompt[:18] + tokens(3, 30))
    world.handshake(head)
    before = snapshot(world)
    for _ in range(100):
        world.step()
        assert snapshot(world) == before
    assert not head.kv_receiver.asked
    assert len(asked) == 1, "the prompt was compared on every poll"
    world.finish(running)
    world.step()
    assert head.kv_receiver.asked and head.req.decode_prefix_len == 18 // page_size * page_size
    world.check()


@pytest.mark.parametrize("page_size", [1, PAGE])
def test_trap_11_only_what_is_short_is_evicted(page_size):
    """One request emptied a full cache."""
    world = World(size=64, page_size=page_size)
    serve_to_end(world, tokens(1, 60))
    free, held = world.allocator.available_size(), world.tree.evictable_size()
    assert free + held == 64 and free < 16
    decode_req = world.arrive(tokens(2, 15))
    world.handshake(decode_req)
    world.step()
    assert decode_req.kv_receiver.asked
    needed = -(-15 // page_size) * page_size
    assert world.tree.evictable_size() == held - (needed - free)
    assert world.tree.peek(tokens(1, 60), None).length == held - (needed - free), "the start of the prompt is kept"
    world.check()


def test_trap_12_a_request_without_a_match_has_a_lock_to_release():
    """A lock was taken only where something matched, and released always: the count fell below zero."""
    world = World(size=128)
    for n, (end, length) in enumerate([("finish", 3), ("finish", 9), ("retract", 9), ("fail", 9)]):
        decode_req = world.arrive(tokens(10 + n, length))
        world.handshake(decode_req)
        world.step()
        assert decode_req.req.decode_prefix_len == 0 and decode_req.req.last_node is world.tree.root_node
        assert world.tree.locks_taken - world.tree.locks_released == 1
        if end == "fail":
            decode_req.kv_receiver.abort()
            decode_req.kv_receiver.quiet = True
            world.step()
            world.step()
            assert aborted(decode_req.req)
        else:
            world.complete(decode_req)
            world.step()
            world.check()
            getattr(world, end)(decode_req.req)
        assert world.tree.root_node.lock_ref == 1
        assert all(node.lock_ref == 0 for node in world._nodes()) and world.tree.protected_size() == 0
        world.check()
        world.queue.retracted_queue.clear()


@pytest.mark.parametrize("page_size", [1, PAGE])
def test_trap_13_a_warm_up_leaves_nothing_in_the_tree(page_size):
    """Warm-up and health-check requests left KV in the tree that nobody ever computed."""
    world, prompt = World(page_size=page_size), tokens(1, 16)
    req = serve(world, prompt, warmup=True).req
    assert not list(world._nodes())
    world.decode()
    world.finish(req)
    assert not list(world._nodes()) and world.allocator.available_size() == world.size
    world.check()
    # Nor is it served from what others left.
    serve_to_end(world, prompt)
    warm_up = serve(world, prompt, warmup=True).req
    assert warm_up.decode_prefix_len == 0
    world.finish(warm_up)
    world.check()


def test_trap_14_requests_of_different_keys_share_nothing():
    """Two adapters, or two salts, were served from each other's KV: the key was not part of the match."""
    world, prompt = World(size=128), tokens(1, 16)
    for key in (None, "a", "b"):
        assert serve_to_end(world, prompt, extra_key=key).decode_prefix_len == 0
    for key in (None, "a", "b"):
        assert serve_to_end(world, prompt, extra_key=key).decode_prefix_len == 16
    assert len(list(world._nodes())) == 3


def idle_check(world: World) -> int:
    """Let the engine's idle scheduler look for leaks; how often it came to looking. Fails where it would report one."""
    looked: list[int] = []
    scheduler = object.__new__(Scheduler)

    def look() -> None:
        looked.append(1)
        tree = world.tree.evictable_size() + world.tree.protected_size()
        assert world.allocator.available_size() + tree == world.size, "the idle check reports a leak"

    scheduler.__dict__.update(
        enable_hisparse=False,
        disaggregation_mode=DisaggregationMode.DECODE,
        waiting_queue=world.waiting,
        disagg_decode_transfer_queue=world.transfer,
        disagg_decode_prealloc_queue=world.queue,
        server_args=SimpleNamespace(disaggregation_decode_enable_offload_kvcache=False),
        tree_cache=world.tree,
        recv_from_tokenizer=None,
        enable_kv_cache_events=False,
        check_memory=look,
        check_tree_cache=lambda: None,
        init_new_token_ratio=0,
        maybe_sleep_on_idle=lambda: None,
    )
    scheduler.self_check_during_idle()
    return len(looked)


def test_trap_15_nothing_is_called_lost_while_transfers_are_under_way():
    """The idle check reported a leak of pages that a transfer was being made to."""
    world = World(size=128)
    assert idle_check(world) == 1
    decode_req = world.arrive(tokens(1, 9))
    assert idle_check(world) == 0, "in the queue"
    world.handshake(decode_req)
    world.step()
    assert idle_check(world) == 0, "in transfer"
    decode_req.kv_receiver.abort()
    world.step()
    assert aborted(decode_req.req) and world.transfer.quarantine
    assert idle_check(world) == 0, "failed, and prefill may still write"
    decode_req.kv_receiver.quiet = True
    world.step()
    assert idle_check(world) == 1
    # A retracted request has its KV on the host and holds nothing.
    world.retract(serve(world, tokens(2, 9)).req)
    assert idle_check(world) == 1


@pytest.mark.parametrize("room", [7, 99])
def test_trap_17_no_rank_reports_success_before_the_metadata(monkeypatch, room):
    """The same as of ranks, of the real receiver. Another room's, of a late writer, is an error at once."""
    world, landed = nixl_world.World(monkeypatch), [0]
    request = world.request(7).start_prefill().start_decode()
    (receiver,) = request.receivers
    receiver.metadata_room = lambda: landed[0]
    request.ask().begin().send().wait_senders(KVPoll.Success)
    assert receiver.poll() == receiver.poll() == KVPoll.Transferring
    landed[0] = room
    if room == 7:
        assert receiver.poll() == receiver.poll() == KVPoll.Success
    else:
        assert receiver.poll() == KVPoll.Failed
        assert "room 99" in receiver.kv_mgr.failure_records[7]
        assert receiver.writers_done(), "all that was to come for this room has come"


# ---- lifetime ----


@pytest.mark.parametrize("page_size", [1, PAGE])
def test_trap_26_kv_of_old_weights_does_not_survive_an_update(page_size):
    """Prefixes that were locked, or set aside, during a weight update were served from afterwards."""
    world, prompt = World(size=128, page_size=page_size), tokens(1, 22)
    req = serve(world, prompt, max_new=6).req
    assert not world.flush(), "a request that runs has its prefix locked"
    world.decode()
    world.retract(req)
    assert world.flush() and not list(world._nodes())
    # The new weights' KV of the same prompt, then the retracted request with what it brought from before.
    fresh = world.arrive(prompt)
    world.handshake(fresh)
    world.step()
    world.check()
    assert req in world.running and req.decode_prefix_len == 0
    for _ in range(8):
        if fresh.kv_receiver is not None and fresh.kv_receiver.asked:
            world.complete(fresh)
        world.step()
        world.decode()
        # Compares every slot in the tree with the KV of the weights of now.
        world.check()
    assert fresh.req.decode_prefix_len == 0 and not world.running
    assert world.tree.evictable_size() > 0


def test_trap_26_a_flush_with_a_request_whose_admission_has_failed():
    """It is in quarantine."""
    world = World(size=128)
    serve_to_end(world, tokens(1, 20))
    bad = world.arrive(tokens(2, 22))
    bad.kv_receiver.send_metadata = lambda *args, **more: 1 // 0
    world.handshake(bad)
    world.step()
    del bad.kv_receiver.send_metadata
    world.step()
    assert aborted(bad.req) and [dr.req for dr in world.transfer.quarantine] == [bad.req]
    assert world.flush()
    world.check()
    bad.kv_receiver.quiet = True
    world.step()
    assert world.idle() and world.allocator.available_size() == 128
    world.check()
    serve_to_end(world, tokens(1, 20))


@pytest.mark.parametrize("page_size", [1, PAGE])
def test_trap_27_a_promised_prefix_is_there_when_the_delta_lands(page_size):
    """Decode had named a prefix without locking it, and it was evicted before the rest of the prompt came."""
    world, prompt = World(size=96, page_size=page_size), tokens(1, 30)
    serve_to_end(world, prompt[:20])
    promised = world.arrive(prompt)
    world.handshake(promised)
    world.step()
    assert promised.kv_receiver.prefix_len == 20
    # Others want all there is.
    for n in range(4):
        other = world.arrive(tokens(5 + n, 24), max_new=2)
        world.handshake(other)
        world.step()
        world.tree.evict_shortfall(1000)
        world.tree.evict(EvictParams(num_tokens=1000))
        if other.kv_receiver.asked:
            world.complete(other)
            world.step()
            world.decode()
        world.check()
    world.complete(promised)
    world.step()
    world.check()
    slots = world.pool.req_to_token[promised.req.req_pool_idx, :30].tolist()
    world._check_kv(slots, prompt, world.weights)


# ---- the list ----


def test_every_row_has_its_test():
    here = Path(__file__)
    text = here.read_text() + here.with_name("test_traps_of_ranks.py").read_text()
    tested = {int(row) for row in re.findall(r"^def test_trap_(\d\d)_", text, re.MULTILINE)}
    assert tested | set(ELSEWHERE) == set(ROWS)
    assert not tested & set(ELSEWHERE)
    for row, why in ELSEWHERE.items():
        for file, name in re.findall(r"(\S+\.py)::(\w+)", why):
            path = here.parent / file
            # Without an extra there is no test of it either.
            assert not path.parent.is_dir() or f"def {name}(" in path.read_text(), f"row {row}: {file} has no {name}"
