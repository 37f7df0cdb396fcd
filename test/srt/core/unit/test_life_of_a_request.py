"""Random lives of many requests on one decode worker; I1 to I4 are checked after every step."""

from __future__ import annotations

import pytest
from decode_world import World, aborted, end_patience
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kv_listener import Listener, names_in
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.mem_cache.hicache_storage import hash_str_to_int64

try:
    from sglang.srt.mem_cache.kv_event_namespaces import namespace_hash
except ImportError:
    # Without the extra engine_fixes one name stands for pages under two keys.
    namespace_hash = None

# Few different tokens, so that prompts share prefixes of all lengths. Where none is drawn, most lists are short.
prompts = st.integers(1, 40).flatmap(lambda n: st.lists(st.integers(1, 2), min_size=n, max_size=n))


class Life(RuleBasedStateMachine):
    page_size = 4
    states: int | None = None
    windows: tuple[int, int] | None = None
    listener: Listener | None = None
    world_type: type[World] = World

    @initialize(
        size=st.sampled_from([48, 64, 128]), watermark=st.sampled_from([0, 0, 8, 32]), listened_to=st.booleans()
    )
    def begin(self, size, watermark, listened_to):
        self.world = self.world_type(
            size=size, page_size=self.page_size, watermark=watermark, states=self.states, windows=self.windows
        )
        if listened_to and namespace_hash is not None:
            self.world.tree.enable_kv_cache_events = True
            self.world.tree.reset()
            self.listener = Listener()

    def pick(self, items, index):
        return items[index % len(items)]

    @rule(
        prompt=prompts,
        extra_key=st.sampled_from([None, None, "a"]),
        max_new=st.integers(1, 12),
        warmup=st.integers(0, 9).map(lambda n: n == 0),
        capable=st.integers(0, 9).map(lambda n: n != 0),
        prefill=st.sampled_from(["a:1", "a:1", "b:1"]),
    )
    def arrive(self, prompt, extra_key, max_new, warmup, capable, prefill):
        if len(prompt) + max_new + 2 <= self.world.size and len(self.world.queue.queue) < 6:
            decode_req = self.world.arrive(prompt, extra_key, max_new, warmup, capable, prefill)
            self.world.handshake(decode_req)

    @rule()
    def step(self):
        self.world.step()

    @rule(prompt=prompts)
    def serve(self, prompt):
        """One that goes through to its end if there is memory for it, as most do; by chance few come that far."""
        self.arrive(prompt, None, 1, False, True, "a:1")
        self.world.step()
        for decode_req in list(self.world.transfer.queue):
            self.world.complete(decode_req)
        self.world.step()
        for req in list(self.world.running):
            self.world.finish(req)

    @precondition(lambda self: self.world.transfer.queue)
    @rule(i=st.integers(0, 9), num_pages=st.integers(1, 4))
    def chunk(self, i, num_pages):
        self.world.deliver(self.pick(self.world.transfer.queue, i), num_pages)

    @precondition(lambda self: self.world.transfer.queue)
    @rule(i=st.integers(0, 9))
    def commit(self, i):
        self.world.complete(self.pick(self.world.transfer.queue, i))
        self.world.step()

    @precondition(lambda self: self.world.transfer.queue)
    @rule(i=st.integers(0, 9))
    def fail(self, i):
        decode_req = self.pick(self.world.transfer.queue, i)
        decode_req.kv_receiver.abort()
        self.world.step()
        assert aborted(decode_req.req)

    @precondition(lambda self: self.world.transfer.quarantine)
    @rule(i=st.integers(0, 9), num_pages=st.integers(0, 4), quiet=st.booleans())
    def write_late(self, i, num_pages, quiet):
        """A prefill goes on writing for a request that decode has given up, and stops some time."""
        decode_req = self.pick(self.world.transfer.quarantine, i)
        self.world.deliver(decode_req, num_pages)
        decode_req.kv_receiver.quiet = quiet

    @rule()
    def patience_ends(self):
        """Whoever waits for another's transfer has waited for long enough."""
        for decode_req in self.world.queue.queue:
            end_patience(decode_req.entry)

    @precondition(lambda self: self.world.queue.queue)
    @rule(i=st.integers(0, 9))
    def abort_queued(self, i):
        self.pick(self.world.queue.queue, i).kv_receiver.abort()

    @rule(steps=st.integers(1, 4))
    def decode(self, steps):
        for _ in range(steps):
            self.world.decode()

    @precondition(lambda self: self.world.running)
    @rule(i=st.integers(0, 9))
    def finish(self, i):
        self.world.finish(self.pick(self.world.running, i))

    @precondition(lambda self: self.world.running)
    @rule(i=st.integers(0, 9))
    def retract(self, i):
        self.world.retract(self.pick(self.world.running, i))

    @precondition(lambda self: self.world.queue.retracted_queue)
    @rule(i=st.integers(0, 9))
    def abort_retracted(self, i):
        self.world.abort_retracted(self.pick(self.world.queue.retracted_queue, i))

    @rule(now=st.integers(0, 9).map(lambda n: n == 0))
    def flush(self, now):
        """Now and then: more often, and there is hardly ever anything in the tree."""
        if now:
            self.world.flush()

    @invariant()
    def sound(self):
        if hasattr(self, "world"):
            self.world.check()
            transfer = self.world.transfer
            errors = [dr.error for dr in (*self.world.queue.queue, *transfer.queue, *transfer.quarantine)]
            assert not any(errors), errors

    @invariant()
    def by_events_exactly_the_tree_is_known(self):
        if self.listener is not None:
            self.listener.hear(self.world.tree.take_events())
            held = names_in(self.world.tree)
            assert len(held) == len(set(held))
            assert set(self.listener.parents) == set(held)
            # What comes first hangs on no page.
            assert set(self.listener.parents.values()) - set(held) <= {None, hash_str_to_int64(namespace_hash("a"))}

    def teardown(self):
        """Whatever happened, everything drains: nothing hangs and nothing leaks."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for _ in range(300):
            if world.idle() and not world.queue.retracted_queue:
                break
            for decode_req in world.transfer.quarantine:
                decode_req.kv_receiver.quiet = True
            for decode_req in world.transfer.queue:
                if decode_req.kv_receiver.state != KVPoll.Failed:
                    world.complete(decode_req)
            world.step()
            world.decode()
            world.check()
        assert world.idle() and not world.queue.retracted_queue, "requests are left that never end"
        assert world.tree.protected_size() == 0
        assert world.tree.locks_taken == world.tree.locks_released
        assert len(world.meta_alloc.free_slots) == world.meta_alloc.size


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_invariants_hold_in_every_life(page_size, **attributes):
    machine = type("Life", (Life,), {"page_size": page_size, **attributes})
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None))
