"""KV in host memory below the decode tree: what is saved, what comes back, and that nobody reads anything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from decode_world import World, aborted, queue
from host_world import HostSizes
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test
from overlapped_loop import Loop, LoopEnds
from ranks import assert_same
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode_radix import tp_agreement
from sglang.srt.disaggregation.local_policy import Policy
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.host_tier.tier import HITS
from sglang.srt.mem_cache.radix_cache import RadixKey
from speculating_loop import SpeculatingLoop
from test_life_of_a_request import Life
from test_overlap_guard import Play, scripts
from test_ranks_admit import restore_clock, set_clock
from test_speculation import ask
from test_traps import serve, serve_to_end, tokens

PAGE = 4


class HostLife(Life):
    """The same lives with a host tier, whose copies end at once or late."""

    @initialize(
        size=st.sampled_from([48, 64]),
        tokens=st.sampled_from([16, 64, 256]),
        hits=st.sampled_from([*HITS.values()]),
        late=st.booleans(),
    )
    def begin(self, size, tokens, hits, late):
        self.world = World(size=size, page_size=self.page_size, states=self.states, host=HostSizes(tokens, hits, late))
        # Conversations that may come back.
        for prompt in ([1, 2] * 9, [1] * 17, [2, 1, 1] * 8):
            saved(self.world, prompt)

    @precondition(lambda self: getattr(self.world.tier.memory, "begun", None))
    @rule(count=st.integers(1, 4))
    def copies_end(self, count):
        self.world.tier.memory.end(count)

    @rule()
    def evict(self):
        """Others take the pool."""
        self.world.tree.evict_shortfall(self.world.tree.evictable_size())

    @rule()
    def memory_runs_out(self):
        """As in a decode step: saves let go of the device, and then others take the pool."""
        self.world.tier.saves.release_device()
        self.evict()

    @precondition(lambda self: self.world.tier.host.evictable_size())
    @rule(i=st.integers(0, 9), more=st.lists(st.integers(1, 2), max_size=6))
    def come_back(self, i, more):
        """A conversation that has left the pool."""
        self.evict()
        tokens, _ = self.pick(list(self.world._tree_paths(self.world.tier.host)), i)
        if len(tokens) + len(more) + 6 <= self.world.size and len(self.world.queue.queue) < 6:
            self.world.handshake(self.world.arrive([*tokens, *more]))
            self.world.step()

    def teardown(self):
        if not hasattr(self, "world"):
            return
        tier = self.world.tier
        for _ in range(300):
            if self.world.idle() and not self.world.queue.retracted_queue:
                break
            tier.memory.wait()
            for decode_req in self.world.transfer.quarantine:
                decode_req.kv_receiver.quiet = True
            for decode_req in self.world.transfer.queue:
                if decode_req.kv_receiver.state != KVPoll.Failed:
                    self.world.complete(decode_req)
            self.world.step()
            self.world.decode()
            self.world.check()
        self.ends_with_a_load()
        super().teardown()
        assert tier.faults() == []
        LIVES.append((tier.saves.saved_tokens, tier.loaded_tokens))

    def ends_with_a_load(self):
        """Whatever was before, what is used often enough is saved, and comes back."""
        tier, prompt = self.world.tier, [3] * 20
        for _ in range(tier.saves.hits):
            saved(self.world, prompt)
        self.evict()
        before = tier.loaded_tokens
        decode_req = admit(self.world, prompt)
        assert tier.loaded_tokens > before
        tier.memory.wait()
        self.world.complete(decode_req)
        self.world.step()
        self.world.finish(decode_req.req)
        for _ in range(40):
            tier.memory.wait()
            self.world.step()


LIVES: list[tuple[int, int]] = []


@pytest.mark.parametrize(
    ("page_size", "states"),
    [(1, None), (4, 16), *(pytest.param(size, None, marks=pytest.mark.thorough) for size in (4, 16))],
)
def test_invariants_hold_in_every_life_with_a_host_tier(page_size, states):
    machine = type("HostLife", (HostLife,), {"page_size": page_size, "states": states})
    LIVES.clear()
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None))
    saved, loaded = (sum(column) for column in zip(*LIVES, strict=True))
    assert saved and loaded


# ---- what comes back ----


def world(host: int = 256, late: bool = False, hits: int = 1, size: int = 64, **options: Any) -> World:
    return World(size=size, page_size=PAGE, host=HostSizes(host, hits, late), **options)


def saved(one: World, prompt: list[int], **options: Any) -> None:
    """A request from its arrival to its end, and until it has been saved."""
    serve_to_end(one, prompt, **options)
    for _ in range(40):
        if one.tier.saves.busy:
            one.tier.memory.wait()
            one.step()
    assert not one.tier.saves.busy
    one.check()


def leave_pool(one: World) -> None:
    """Others have taken all of the pool that is not held."""
    one.tree.evict_shortfall(one.tree.evictable_size())
    assert one.tree.evictable_size() == 0


def admit(one: World, prompt: list[int], **options: Any):
    decode_req = one.arrive(prompt, **options)
    one.handshake(decode_req)
    one.step()
    return decode_req


def test_a_conversation_that_comes_back_is_copied_and_prefill_sends_what_is_new():
    one = world()
    first = tokens(1, 24)
    saved(one, first)
    leave_pool(one)
    assert one.tier.report()["saved"] == 24 and not one.tier.saves.busy
    prompt = first + tokens(9, 10)
    decode_req = admit(one, prompt)
    receiver, req = decode_req.kv_receiver, decode_req.req
    assert (receiver.prefix_len, len(receiver.page_indices)) == (24, 3)
    assert (req.decode_prefix_len, req.host_prefix_len, req.from_host, req.transfer_prefix_len) == (0, 24, 24, 24)
    one.complete(decode_req)
    assert req in one.step()
    # Its KV is the model's, as `check` finds; and what is new of it is saved.
    one.check()
    assert one.tier.loaded_tokens == 24 and decode_req.load is None
    one.step()
    assert one.tier.host.peek(prompt, None).length == 32
    assert one.tier.host.protected_size() == 0


def test_prompts_of_another_extra_key_are_not_the_same():
    one = world()
    saved(one, tokens(1, 24), extra_key="a")
    leave_pool(one)
    assert admit(one, tokens(1, 24), extra_key="b").kv_receiver.prefix_len == 0
    assert admit(one, tokens(1, 24), extra_key="a").kv_receiver.prefix_len == 24


def test_only_what_the_tree_lacks_is_copied():
    one = world()
    saved(one, tokens(1, 24))
    one.tree.evict_shortfall(8)
    decode_req = admit(one, tokens(1, 24) + tokens(9, 4))
    assert (decode_req.req.decode_prefix_len, decode_req.req.from_host) == (16, 8)
    assert decode_req.load.start == 16 and one.tier.loaded_tokens == 8
    one.complete(decode_req)
    assert decode_req.req in one.step()
    one.check()


def test_a_commit_waits_for_the_copy():
    one = world(late=True)
    saved(one, tokens(1, 24))
    leave_pool(one)
    decode_req = admit(one, tokens(1, 24) + tokens(9, 4))
    one.complete(decode_req)
    for _ in range(3):
        assert one.step() == [] and one.transfer.queue == [decode_req]
        one.check()
    one.tier.memory.end(1)
    assert one.step() == [decode_req.req]
    one.check()


def test_pages_of_a_request_that_has_failed_are_given_back_when_its_copy_has_ended():
    one = world(late=True)
    saved(one, tokens(1, 24))
    leave_pool(one)
    decode_req = admit(one, tokens(1, 24) + tokens(9, 4))
    decode_req.kv_receiver.abort()
    one.step()
    assert aborted(decode_req.req) and one.transfer.quarantine and one.tier.host.protected_size() == 24
    one.check()
    decode_req.kv_receiver.quiet = True
    one.step()
    # It has been waited for, or it would write to what is another's.
    assert decode_req.load is None and not one.tier.memory.begun and not one.transfer.quarantine
    assert one.tier.host.protected_size() == 0
    one.check()


def test_a_flush_forgets_both_and_waits_for_copies():
    one = world(late=True)
    saved(one, tokens(1, 24))
    leave_pool(one)
    decode_req = admit(one, tokens(1, 24) + tokens(9, 4))
    decode_req.kv_receiver.abort()
    one.step()
    assert one.transfer.quarantine == [decode_req] and one.tier.memory.begun
    assert one.flush()
    assert not one.tier.memory.begun and one.tier.host.pool.available_size() == one.tier.host.pool_size
    one.check()
    decode_req.kv_receiver.quiet = True
    one.step()
    one.check()
    assert one.tier.faults() == []
    assert admit(one, tokens(1, 24)).kv_receiver.prefix_len == 0


# ---- what is saved ----


def test_what_is_on_the_host_is_not_saved_again():
    one = world()
    saved(one, tokens(1, 24))
    leave_pool(one)
    saved(one, tokens(1, 24))
    assert one.tier.saves.saved_tokens == 24


def test_a_node_that_holds_too_much_of_the_pool_is_saved_in_parts():
    one = world(late=True, size=128)
    serve_to_end(one, tokens(1, 64))
    parts = []
    while one.tier.saves.busy:
        one.step()
        one.check()
        parts.append(one.tier.saves.tokens)
        one.tier.memory.end(1)
    assert [part for part in parts if part] == [16, 16, 16, 16] and one.tier.saves.saved_tokens == 64


def test_two_that_do_not_fit_together_do_not_take_it_from_each_other_for_ever():
    one = world(host=16)
    for start in (1, 50):
        serve_to_end(one, tokens(start, 24))
    for _ in range(20):
        one.step()
    assert not one.tier.saves.busy and one.tier.report()["dropped"] > 0
    one.check()


@pytest.mark.parametrize("policy", ["lfu", "slru"])
def test_what_is_loaded_has_been_used_to_the_eviction_policy(policy):
    """Also where nothing is saved behind it: what six requests had outlasts what others have had once since."""

    class Chosen(World):
        def _hosted(self, sizes, params):
            params.eviction_policy = policy
            return super()._hosted(sizes, params)

    one = Chosen(size=256, page_size=PAGE, host=HostSizes(48))
    hot, cold = tokens(1, 20), [tokens(start, 20) for start in (30, 60, 90)]
    for prompt in [hot] * 6 + cold:
        saved(one, prompt, max_new=1)
        leave_pool(one)
    assert one.tier.loaded_tokens == 5 * len(hot)
    assert one.tier.host.peek(hot, None).length == len(hot)
    assert one.tier.host.peek(cold[0], None).length < len(hot)


def test_memory_that_only_saves_hold_is_had_before_anybody_is_retracted():
    one = world(late=True)
    req = serve(one, tokens(1, 16), max_new=30).req
    one.step()
    (node,) = one.tier.saves.locked()
    locks = node.lock_ref
    assert one.tier.saves.release_device() == 1 and node.lock_ref == locks - 1 and not one.tier.memory.begun
    one.check()
    for _ in range(8):
        one.tier.memory.wait()
        one.step()
    assert one.tier.saves.saved_tokens == 16 and req in one.running
    one.check()


def settle(one: World) -> None:
    for _ in range(30):
        one.tier.memory.wait()
        one.step()


@pytest.mark.parametrize("under_way", [False, True])
def test_the_head_of_a_leaf_that_left_before_it_was_saved_is_saved(under_way):
    """An eviction takes what it needs off a leaf: what it leaves was to be saved with it."""
    one = world(late=True, size=128, host=512)
    prompt = tokens(1, 32)
    if not under_way:
        # As much as may be held for saving.
        serve_to_end(one, tokens(500, 32))
        one.step()
    serve_to_end(one, prompt)
    one.step()
    if under_way:
        assert one.tier.saves.release_device() == 1
    # Of what waits, the rest of the other goes first.
    one.tree.evict_shortfall(8 if under_way else 16 + 8)
    assert one.tree.peek(prompt, None).length == 24
    settle(one)
    assert one.tier.host.peek(prompt, None).length == 24
    leave_pool(one)
    assert admit(one, prompt[:24]).kv_receiver.prefix_len == 24
    one.check()


def insert(one: World, prompt: list[int]) -> None:
    """What a request with that prompt leaves in the tree."""
    held = one.tree.peek(prompt, None)
    slots = torch.cat([*(node.value for node in held.path), one.tree.pool.alloc(len(prompt) - held.length)])
    one.tree.insert(InsertParams(key=RadixKey(prompt), value=slots))


def test_what_has_left_host_memory_is_saved_again_with_what_comes_behind_it():
    one = world(size=256, host=512)
    prompt = tokens(1, 64)
    insert(one, prompt[:32])
    settle(one)
    one.tier.host.evict_shortfall(8)
    insert(one, prompt)
    settle(one)
    assert one.tier.host.peek(prompt, None).length == 64 and one.tier.saves.saved_tokens == 72
    # And all of it.
    one.tier.host.evict_shortfall(64)
    insert(one, prompt + tokens(9, 4))
    settle(one)
    assert one.tier.host.peek(prompt + tokens(9, 4), None).length == 68 and one.tier.faults() == []


def test_host_memory_that_others_hold_is_not_taken():
    one = world(host=24)
    saved(one, tokens(1, 24))
    leave_pool(one)
    held = admit(one, tokens(1, 24))
    assert held.load is not None and one.tier.host.protected_size() == 24
    other = serve(one, tokens(50, 12))
    for _ in range(4):
        one.step()
        one.check()
    assert one.tier.report()["dropped"] == 12 and one.tier.host.peek(tokens(1, 24), None).length == 24
    # When it is met again, there may be room.
    one.complete(held)
    one.step()
    one.finish(other.req)
    for _ in range(6):
        one.step()
    one.check()
    assert one.tier.host.peek(tokens(50, 12), None).length == 12


def test_of_a_node_that_left_while_a_part_of_it_was_saved_nothing_more_is():
    """A step that lacks memory lets go of it; its slots are others' when the next part would be copied."""
    one = world(late=True, size=128, host=512)
    prompt = tokens(1, 64)
    serve_to_end(one, prompt)
    one.step()
    (saving,) = one.tier.saves.under_way
    assert one.tier.saves.to_come
    assert one.tier.saves.release_device() == 1
    leave_pool(one)
    other = admit(one, tokens(200, 120))
    one.complete(other)
    settle(one)
    # `World.check` reads what is in them.
    assert one.tier.host.peek(prompt, None).length == len(saving.slots) == 16
    one.check()


# ---- several ranks ----


def on_ranks(rank: int) -> list[Any]:
    one = world(group=dist.group.WORLD)
    told: list[Any] = []
    saved(one, tokens(1, 24))
    leave_pool(one)
    decode_req = admit(one, tokens(1, 24) + tokens(9, 4))
    told.append((decode_req.kv_receiver.prefix_len, decode_req.error))
    one.complete(decode_req)
    told.append(decode_req.req in one.step())
    one.check()
    saved(one, tokens(50, 16))
    told.append(one.tier.host.peek(tokens(50, 16), None).length)
    one.finish(decode_req.req)
    leave_pool(one)
    one.check()
    told += [one.tier.figures(), one.queue.ranks.disagreements]
    return told


def test_tp_ranks_save_and_load_the_same(pair):
    told = assert_same(pair.run(on_ranks))
    assert told[:3] == [(24, None), True, 16] and told[-1] == 0


def reductions(rank: int) -> list[int]:
    """Of transfers: while a request that has ended is saved, and after that; and the same of what was saved before."""
    one = world(size=128, host=512, group=dist.group.WORLD)
    counted: list[int] = []
    reduce = tp_agreement.engine.poll_and_all_reduce

    def counting(pollers, group):
        counted.append(len(pollers))
        return reduce(pollers, group)

    tp_agreement.engine.poll_and_all_reduce = counting
    told = []
    try:
        for _ in range(2):
            serve_to_end(one, tokens(1, 32))
            counted.clear()
            settle(one)
            told.append(len(counted))
            counted.clear()
            settle(one)
            told.append(len(counted))
    finally:
        tp_agreement.engine.poll_and_all_reduce = reduce
    return told


def test_ranks_with_nothing_to_save_reduce_nothing(pair):
    saving, after, known, later = assert_same(pair.run(reductions))
    # Parts of 16 tokens at most.
    assert 0 < saving <= 5 and known == after == later == 0


def a_follower_goes_on(rank: int, why: str) -> list[Any]:
    """What is asked for a request that follows another, when the ranks' host memory holds other prompts of one size."""
    one, now = world(group=dist.group.WORLD, size=128), [100.0]
    saved(one, tokens(1, 24))
    saved(one, tokens(40, 24))
    leave_pool(one)
    set_clock(lambda: now[0])
    try:
        (leader,) = queue(one, tokens(1, 16) + tokens(70, 4), peer_takes_prefix=False)
        one.step()
        (follower,) = queue(one, tokens(1, 24) + tokens(9, 4))
        one.step()
        followed = follower.entry.coming, follower.wire.asked
        host = one.tier.host
        _, kept = host.lock_prefix(host.peek(tokens(40 if rank else 1, 24), None))
        host.evict_shortfall(24)
        host.dec_lock_ref(kept)
        if why == "patience":
            now[0] += 11
        else:
            leader.wire.state = KVPoll.Failed
        # Clocks are looked at in every sixteenth step.
        for _ in range(17):
            one.step()
        return [followed, follower.wire.asked, follower.wire.prefix_len, one.queue.ranks.disagreements]
    finally:
        restore_clock()


@pytest.mark.parametrize("why", ["patience", "the leader fails"])
def test_who_follows_no_more_is_compared_before_it_is_admitted(pair, why):
    """A copy from host memory is begun by all ranks together: one for a prefix that only one of them has ends them."""
    assert assert_same(pair.run(a_follower_goes_on, why)) == [(16, False), True, 0, 0]


# ---- beside prompts that are computed here ----


def test_what_comes_from_host_memory_needs_no_prefill():
    loop = Loop(
        options={"disaggregation_decode_local_prefill": "40"},
        size=128,
        page_size=PAGE,
        reserved=0,
        host=HostSizes(256),
    )
    loop.transfer.local.policy = Policy(most=12, slice=8, step=16, debt=100)
    first = tokens(1, 24)

    def between() -> None:
        if loop.iterations == 1:
            loop.handshake(loop.arrive(first, max_new=2))
        if loop.iterations == 12:
            leave_pool(loop)
            loop.handshake(loop.arrive(first + tokens(9, 6), max_new=3))
        for decode_req in loop.asked:
            loop.complete(decode_req)
        if loop.iterations > 12 and loop.idle() and loop.in_flight is None:
            raise LoopEnds
        assert loop.iterations < 200

    loop.run(between)
    loop.check_answers()
    assert loop.tier.loaded_tokens == 24
    assert [part[:2] for part in loop.extended] == [("r2", 24)]
    assert loop.tier.faults() == []


class LateCopiesPlay(Play):
    """Copies to and from host memory end one by one, some turns after they have begun."""

    def between(self) -> None:
        if not self.script or self.loop.iterations % 3 == 0:
            self.loop.tier.memory.end(1)
        if self.loop.iterations % 7 == 0:
            # Others take the pool.
            self.loop.tree.evict_shortfall(self.loop.tree.evictable_size())
        super().between()


# The same prompt twice, at the second time with some tokens more and when it has left the pool.
COMES_BACK: list[list[tuple]] = [[] for _ in range(30)]
for turn, rest in ((4, []), (22, [1, 1, 2])):
    options = {"prompt": [1, 2, 2] * 6 + rest, "max_new": 1, "stop": None, "grammar": False, "logprobs": False}
    COMES_BACK[turn] = [("arrive", options)]
    COMES_BACK[turn + 2] = [("commit", 0)]


@pytest.mark.parametrize(("overlap", "page_size"), [(True, 4), (False, 1)])
def test_invariants_hold_in_every_life_with_prompts_computed_here(overlap, page_size):
    loaded = computed = 0

    @example(script=COMES_BACK, size=40)
    @given(script=scripts, size=st.sampled_from([40, 64]))
    @settings(max_examples=15, deadline=None)
    def play(script, size):
        nonlocal loaded, computed
        sizes = {"size": size, "page_size": page_size, "reserved": 0, "max_reqs": 4, "host": HostSizes(128, 1, True)}
        loop = Loop(options={"disaggregation_decode_local_prefill": "12"}, overlap=overlap, **sizes)
        LateCopiesPlay(loop, script).run()
        assert loop.tier.faults() == []
        loaded, computed = loaded + loop.tier.loaded_tokens, computed + len(loop.extended)

    play()
    assert loaded and computed


@pytest.mark.parametrize(("overlap", "page_size"), [(True, 4), (False, 1), (True, 1), (False, 4)])
def test_drafts_find_their_kv_in_host_memory_too(overlap, page_size):
    """No draft starts from another's KV: the pool holds two of three conversations that come back by turns."""
    loop = SpeculatingLoop(True, overlap, size=64, page_size=page_size, reserved=0, host=HostSizes(256))
    ask(loop, [tokens(start, 24) for start in (1, 50, 100)] * 3, together=False)
    assert loop.tier.loaded_tokens > 24 and loop.tier.faults() == []


@pytest.mark.parametrize(("overlap", "page_size"), [(True, 4), (False, 1)])
def test_invariants_hold_in_every_life_with_drafts(overlap, page_size):
    @given(script=scripts, size=st.sampled_from([48, 64]))
    @settings(max_examples=8, deadline=None)
    def play(script, size):
        sizes = {"size": size, "page_size": page_size, "reserved": 0, "max_reqs": 4, "host": HostSizes(128)}
        loop = SpeculatingLoop(True, overlap, **sizes)
        Play(loop, script).run()
        assert loop.tier.faults() == []

    play()
