"""Sliding windows with the decode tree: what is shared, what is asked of prefill, what is saved, and two budgets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decode_world import World, queue
from engine_classes import args_of, engine_class
from hypothesis import given, settings
from hypothesis import strategies as st
from overlapped_loop import Loop, LoopEnds
from sglang.srt.disaggregation.decode_radix import retraction
from sglang.srt.disaggregation.decode_radix.budget import AdmissionPlan, Budget, Memory
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin
from sglang.srt.managers import tp_worker
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.utils import validate_input_length
from sglang.srt.mem_cache import swa_radix_cache
from sglang.srt.mem_cache.chunk_cache import SWAChunkCache
from sglang.srt.mem_cache.decode_windows import Windows, WindowsKept
from sglang.srt.mem_cache.prefix_reader import NOTHING
from sglang.srt.mem_cache.state_kind import Need
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from test_decode_budget import Use, budget
from test_traps import PAGE, serve, serve_to_end, tokens

from sglang_pd_radix.patching import loader

WINDOW = 12


def world_of(page_size: int = PAGE, size: int = 256, pool: int = 96, **options) -> World:
    return World(size=size, page_size=page_size, windows=(WINDOW, pool), **options)


# ---- arithmetic ----


@given(size=st.integers(1, 40), page=st.sampled_from([1, 4, 16]), length=st.integers(1, 200), left=st.integers(0, 200))
def test_no_request_ever_takes_more_than_is_said(size, page, length, left):
    """Played token by token, with what is behind the window freed as late as the engine's overlapped steps allow."""
    rule = Windows(size, page)
    need = rule.need(length, left, reserved=8)
    first = rule.start(length)
    assert first % page == 0 and max(0, length - size) - page < first <= max(0, length - size)
    assert need.now == rule.held(length) == -(-length // page) * page - first
    assert need.now <= need.soon <= need.at_length <= rule.most
    for position in range(length, length + left):
        # The step of this token; that of the token before is in flight and attends to the one before its window.
        start = max(first, rule.start(position - 1))
        assert -(-(position + 1) // page) * page - start <= rule.most
        assert position < length + min(left, 8) or need.soon <= need.at_length


def test_each_pool_has_its_budget():
    window = Windows(12, 4).need(40, 20, reserved=4)
    plan = AdmissionPlan(NOTHING, 40, 44, 60, window)
    assert plan.needed == Memory(44, window.soon)
    # What others give back when they are retracted is at hand for both.
    assert budget(Memory(100, 100), beside=WindowsKept()).needs(plan) == Memory(60, window.at_length)
    others = budget(Memory(100, 100), [Use(100, 0, 100)], beside=WindowsKept(retractable=100))
    assert others.needs(plan) == Memory(44, window.soon)
    for short in (Memory(44, window.soon - 1), Memory(43, window.soon)):
        assert not short.covers(plan.needed)
        others.free = short
        assert not others.covers(plan, Memory(0))


def test_windows_are_kept_figure_by_figure():
    """30 at its end, of which a retraction of those that run brings 10; and what is kept for those that come back."""
    kept, need = WindowsKept(resumes=5, retractable=10), Need(8, 12, 30)
    assert kept.with_need(need) == 30 - 10 + 5
    assert kept.with_need(Need(8, 25, 30)) == 25 + 5
    assert kept.plus(need) == WindowsKept(growth=12 - 8, lacks=30 - 8, resumes=5, retractable=10)


# ---- the window pool ----


def test_a_request_waits_for_windows_as_for_kv():
    # Each of the two may take one page more than it does, and a third has room for what is left but for that.
    world = world_of(pool=48, max_reqs=8, reserved=4)
    reqs = [serve(world, tokens(n, 30), max_new=40).req for n in (1, 2)]
    third = world.arrive(tokens(3, 30), max_new=40)
    world.handshake(third)
    world.step()
    assert not third.kv_receiver.asked and world.tree.pool.available_size() > 100
    for _ in range(50):
        # Steps of a blocked queue cost one comparison, and do not miss that there is room.
        world.step()
    assert not third.kv_receiver.asked
    world.finish(reqs[0])
    world.step()
    assert third.kv_receiver.asked
    world.check()


def test_room_is_kept_for_windows_that_grow():
    """Short prompts take little of the pool, and a whole window each before long."""
    world = world_of(pool=48, reserved=20)
    decode_reqs = [world.arrive(tokens(n, 4), max_new=40) for n in range(3)]
    for decode_req in decode_reqs:
        world.handshake(decode_req)
    for decode_req in decode_reqs[:2]:
        world.step()
        world.complete(decode_req)
        world.step()
    assert not decode_reqs[2].kv_receiver.asked and world.tree.windows.available_size() == 40
    while world.running:
        world.decode()
        assert not world.queue.retracted_queue
        world.check()
    world.step()
    assert decode_reqs[2].kv_receiver.asked


def test_a_request_in_transfer_will_be_able_to_finish():
    """Where what it needs is held by transfers, nothing can be retracted for it, and the engine ends its answer."""
    world = world_of(pool=32, reserved=0)
    short, other = world.arrive(tokens(1, 4), max_new=60), world.arrive(tokens(2, 40), max_new=60)
    for decode_req in (short, other):
        world.handshake(decode_req)
    world.step()
    assert short.kv_receiver.asked and not other.kv_receiver.asked
    world.complete(short)
    world.step()
    while world.running:
        world.decode()
        world.step()
        world.check()
        assert not world.queue.retracted_queue
    # The other comes when what is left of this one's window will do, and stays in transfer.
    assert len(short.req.output_ids) == 60 and other.kv_receiver.asked


def test_what_lies_behind_windows_is_freed_before_anybody_waits():
    """The engine does it once in a window's length of steps."""
    world = world_of(page_size=1, pool=3 * (WINDOW + 3))
    req = serve(world, tokens(1, 30), max_new=100).req
    for _ in range(WINDOW):
        world.decode()
    behind = world.tree.windows.behind(req)
    assert behind >= WINDOW - 2
    free = world.tree.windows.available_size()
    other = world.arrive(tokens(2, 30), max_new=2)
    # What is free is not enough.
    taken = world.tree.windows.pool.alloc(free - 8)
    world.handshake(other)
    world.step()
    assert other.kv_receiver.asked and world.tree.windows.behind(req) == 0
    world.tree.windows.pool.free(taken)
    world.check()


def test_steps_free_what_lies_behind_windows_before_they_retract():
    """Both requests go on to the end though the pool has no room for two windows and what is behind them."""
    loop = Loop(size=256, page_size=1, windows=(WINDOW, 2 * (WINDOW + 3)), reserved=0)
    made = []

    def between() -> None:
        while len(made) < 2:
            made.append(loop.arrive([1, 2, 1, 1 + len(made)] * 5, max_new=40))
            loop.handshake(made[-1])
        for decode_req in loop.asked:
            loop.complete(decode_req)
        assert not loop.queue.retracted_queue
        if len(loop.told) == 2 and loop.in_flight is None:
            raise LoopEnds
        assert loop.iterations < 200

    loop.run(between)
    loop.check_answers()
    assert [len(dr.req.output_ids) for dr in made] == [40, 40] and not loop.wrong


def test_a_prompt_may_be_longer_than_the_window_pool():
    """Without the flag it is refused: the engine takes a slot of it for every token."""
    world = world_of(size=256, pool=32)
    assert world.queue.max_total_num_tokens == 256
    req = serve(world, tokens(1, 200), max_new=30).req
    while req in world.running:
        world.decode()
        world.check()
    assert len(req.output_ids) == 30


@pytest.mark.parametrize(("flag", "pool"), [(True, 2000), (False, 600)])
def test_the_engine_s_limits_of_a_request_are_those_of_the_pool_that_bounds_it(monkeypatch, flag, pool):
    """With the flag it refused prompts as long as the window pool, and cut answers off there without a word."""

    class Runner(ModelRunner):
        def __init__(self):
            self.is_hybrid_swa, self.max_total_num_tokens, self.swa_max_total_num_tokens = True, 2000, 600
            self.max_running_requests, self.device, self.server_args = 8, "cpu", args

    class Worker(tp_worker.TpModelWorker):
        def _init_model_config(self):
            self.model_config = SimpleNamespace(context_len=4096, is_multimodal=False)

        def _init_model_runner(self):
            self._model_runner = Runner()

        def _init_dllm_algorithm(self):
            pass

    args = ServerArgs.__new__(ServerArgs)
    vars(args).update(disaggregation_decode_enable_radix_cache=flag, skip_tokenizer_init=True)
    monkeypatch.setattr(tp_worker, "get_pp_group", lambda: None)
    monkeypatch.setattr(tp_worker, "get_world_group", lambda: SimpleNamespace(cpu_group=None, ranks=[0]))
    monkeypatch.setattr(tp_worker, "broadcast_pyobj", lambda seeds, *more, **options: seeds)
    monkeypatch.setattr(tp_worker, "set_random_seed", lambda seed: None)
    worker = Worker(args, 0, 0, 0, 0, 0, 0, None, 0)
    req = Req("r", "", tokens(1, 500), SamplingParams(max_new_tokens=4000))
    Scheduler.init_req_max_new_tokens(worker, req)
    assert (worker.max_req_len, 500 + req.sampling_params.max_new_tokens) == (pool - 1, pool - 2)
    long = Req("r", "", tokens(1, 600), SamplingParams())
    assert (validate_input_length(long, worker.max_req_input_len, False) is None) == flag


def test_a_pool_too_small_for_one_request_is_refused_at_the_start():
    rule = Windows(WINDOW, PAGE)
    world_of(pool=rule.most)
    with pytest.raises(ValueError, match=f"has {rule.most - PAGE} tokens.*may take {rule.most}.*--swa-full-tokens"):
        world_of(pool=rule.most - PAGE)


def test_an_overlapped_step_beyond_the_last_token_has_its_window():
    """It is launched before the result that ends the answer is known, and a transfer beside it gives nothing back.

    Without its page the engine ends the request, whose last token is on its way.
    """
    # The first has two whole pages with the step of its last token, and is given a third for the one after. The second
    # is asked for when the first has come and not begun; its own last token is in the last page of its prompt.
    loop = Loop(size=256, page_size=PAGE, windows=(8, 20), reserved=0)
    made = [loop.arrive([1, 2, 1, 2], max_new=5)]
    loop.handshake(made[0])

    def between() -> None:
        if len(made) == 1 and made[0] in loop.asked:
            made.append(loop.arrive([1, 2] * 19, max_new=1))
            loop.handshake(made[1])
            loop.complete(made[0])
        if loop.told and made[1] in loop.asked:
            raise LoopEnds
        assert loop.iterations < 60, "the second waits for ever"

    loop.run(between)
    assert made[0].req.to_finish is None and len(made[0].req.output_ids) == 5
    loop.check_answers()


# ---- what a step of admission costs ----


def kept_by_asking_all(world: World, admitted: list[Req]) -> int:
    """What must be left of windows, with every live request asked anew."""
    rule, reserved, live = world.tree.windows.rule, world.queue.num_reserved_decode_tokens, world.queue.live()

    def need(req: Req, num_tokens: int) -> Need:
        at_length = len(req.origin_input_ids) + req.sampling_params.max_new_tokens
        return rule.need(num_tokens, max(0, at_length - num_tokens), reserved)

    running = {id(req) for req in live.running}
    needs = {id(req): need(req, req.kv_allocated_len) for req in (*live.running, *admitted, *live.coming)}
    retractable = sum(rule.held(req.kv_allocated_len) for req in live.running)
    growth = sum(one.soon - one.now for one in needs.values())
    lacks = max((one.at_length - (0 if key in running else one.now) for key, one in needs.items()), default=0)
    return max(growth, lacks - retractable) + sum(need(req, req.seqlen - 1).soon for req in live.retracted)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(0, 5)), min_size=5, max_size=40))
def test_what_is_kept_of_windows_is_kept_up_by_admissions(steps):
    world = world_of(size=192, pool=80, reserved=6, max_reqs=32)
    admitted: list[Req] = []
    admission, covers = world.queue.admission, Budget.covers
    admit_one = admission.admit_one
    admission.admit_one = lambda dr, *more: admitted.append(dr.req) or admit_one(dr, *more)

    def checked(budget: Budget, plan: AdmissionPlan, promised: Memory) -> bool:
        assert budget.beside.tokens == kept_by_asking_all(world, admitted)
        return covers(budget, plan, promised)

    fits = retraction._fits

    def asked(plan: AdmissionPlan, free: Memory, *more: Any) -> bool:
        assert free == world.queue.accounts.free(world.queue.live().running)
        return fits(plan, free, *more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Budget, "covers", checked)
        patched.setattr(retraction, "_fits", asked)
        for n, (what, prefix, own) in enumerate(steps):
            if what <= 2:
                prompts = [tokens(prefix + 1, 8 * prefix) + tokens(20 + 2 * n + i, 1 + 5 * own) for i in range(2)]
                queue(world, *prompts, max_new=1 + 4 * own)
            elif what == 3 and world.transfer.queue:
                world.complete(world.transfer.queue[own % len(world.transfer.queue)])
            elif what == 4 and world.running:
                world.finish(world.running[own % len(world.running)])
            elif what == 5 and world.running:
                world.retract(world.running[own % len(world.running)])
            else:
                world.decode()
            admitted.clear()
            world.step()
            world.check()


# ---- failures ----


def test_the_window_of_a_failed_transfer_stays_in_quarantine_through_a_flush():
    world = world_of()
    serve_to_end(world, tokens(1, 40))
    decode_req = world.arrive(tokens(1, 40) + tokens(2, 20))
    world.handshake(decode_req)
    world.step()
    pages = list(decode_req.kv_receiver.state_indices)
    decode_req.kv_receiver.abort()
    world.step()
    assert world.flush()
    world.check()
    free = torch.cat([world.tree.windows.pool.free_pages, world.tree.windows.pool.release_pages]).tolist()
    assert pages and not set(pages) & set(free)
    # The late writer.
    world.deliver(decode_req, 100)
    decode_req.kv_receiver.quiet = True
    world.step()
    world.check()
    assert world.tree.windows.available_size() == 96 and world.tree.pool.available_size() == 256


# ---- both workers' schedulers ----


def refuse(tree: type | None = None, **options) -> Scheduler:
    scheduler = object.__new__(Scheduler)
    scheduler.server_args = args_of(disaggregation_decode_enable_radix_cache=True, **options)
    runner = SimpleNamespace(mambaish_config=None, is_hybrid_swa=True)
    scheduler.tp_worker = SimpleNamespace(model_runner=runner)
    return scheduler


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
    ],
)
def test_what_is_not_verified_with_windows_is_refused(monkeypatch, options, named):
    monkeypatch.setattr(engine_class(Scheduler), "init_cache_with_memory_pool", lambda self: pytest.fail("too late"))
    with pytest.raises(ValueError, match=f"sliding windows together with {named}.*--disable-hybrid-swa-memory"):
        refuse(**options).init_cache_with_memory_pool()


@pytest.mark.parametrize("radix", [True, False])
def test_the_tree_takes_the_place_of_the_engine_s(monkeypatch, radix):
    world = world_of()

    def engines(scheduler: Scheduler) -> None:
        scheduler.sliding_window_size = WINDOW
        made = object.__new__(SWAChunkCache)
        scheduler.tree_cache = swa_radix_cache.SWARadixCache(world_params(world)) if radix else made

    monkeypatch.setattr(engine_class(Scheduler), "init_cache_with_memory_pool", engines)
    scheduler = refuse()
    scheduler.tp_worker.get_memory_pool = lambda: (world.pool, world.allocator)
    if not radix:
        with pytest.raises(ValueError, match="engine chose SWAChunkCache"):
            scheduler.init_cache_with_memory_pool()
        return
    scheduler.init_cache_with_memory_pool()
    tree = scheduler.tree_cache
    assert type(tree) is type(world.tree) and tree.supports_swa() and tree.sliding_window_size == WINDOW


def world_params(world: World):
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    return CacheInitParams(
        disable=False,
        req_to_token_pool=world.pool,
        token_to_kv_pool_allocator=world.allocator,
        page_size=world.page_size,
    )


@pytest.mark.parametrize("prefix_len", [0, 12, 24, 28])
def test_prefill_sends_the_window_with_the_last_chunk_however_much_decode_holds(prefix_len):
    """Also to a decode worker that says that it holds all, which those of this package do not."""
    world, sent = world_of(), []

    class Prefill(SchedulerDisaggregationPrefillMixin):
        token_to_kv_pool_allocator, req_to_token_pool = world.allocator, world.pool
        sliding_window_size = WINDOW
        disagg_metadata_buffers = SimpleNamespace(set_buf=lambda req: None)

    slots = world.allocator.alloc_extend(*(torch.tensor([n]) for n in (0, 0, 28, 28, -1)), 28)
    world.pool.write((0, slice(0, 28)), slots)
    req = SimpleNamespace(
        origin_input_ids=tokens(1, 28),
        fill_ids=tokens(1, 28),
        start_send_idx=prefix_len,
        req_pool_idx=0,
        mamba_pool_idx=None,
        rid="r",
        bootstrap_room=1,
        disagg_kv_sender=SimpleNamespace(send=lambda pages, states: sent.append((len(pages), list(states)))),
    )
    Prefill().send_kv_chunk(req, last_chunk=True)
    own = world.allocator.full_to_swa_index_mapping[slots[16:]] // PAGE
    assert sent == [((28 - prefix_len) // PAGE, own[::PAGE].tolist())]
    assert isinstance(world.allocator.get_kvcache(), SWAKVPool)


@pytest.mark.skipif("prefix_order" not in loader.extras(), reason="nobody waits for a prefix in transfer")
@pytest.mark.parametrize("page_size", [1, 4])
def test_followers_have_windows_of_their_own(page_size):
    """They wait for what the leader's commit will share, which is not all that it brings."""
    world, shared = world_of(page_size), tokens(1, 44)
    leader = world.arrive(shared)
    followers = [world.arrive(shared), world.arrive(shared + tokens(2, 30))]
    for decode_req in (leader, *followers):
        world.handshake(decode_req)
    world.step()
    assert leader.kv_receiver.asked and not any(follower.kv_receiver.asked for follower in followers)
    end = world.window_start(44)
    assert [follower.entry.coming for follower in followers] == [end, end]
    world.complete(leader)
    world.step()
    assert [follower.req.decode_prefix_len for follower in followers] == [end, end]
    world.check()
    for follower in followers:
        world.complete(follower)
    world.step()
    world.check()
    for req in (leader.req, *(follower.req for follower in followers)):
        world.finish(req)
        world.check()
