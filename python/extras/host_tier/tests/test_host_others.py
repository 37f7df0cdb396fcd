"""What others of a decode worker do with host memory below its tree: KV events, the ITL target, weight updates."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from decode_world import World
from host_world import HostSizes
from hypothesis import settings
from hypothesis.stateful import invariant, run_state_machine_as_test
from kv_listener import Listener, names_in
from overlapped_loop import Loop
from overlapped_loop import LoopEnds as OverlappedLoopEnds
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.kv_events import MEDIUM_CPU, MEDIUM_GPU
from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput
from test_host_tier import HostLife, settle
from test_itl_target import estimate, known, queue, target
from test_traps import serve, serve_to_end, tokens


class OverheardTier:
    """Lives with a host tier: who listens knows of each page whether it is on the device, in host memory, or both."""

    @invariant()
    def sound(self):
        super().sound()
        if not hasattr(self, "world"):
            return
        if not hasattr(self, "listeners"):
            # What was there before is not told again.
            assert self.world.flush()
            self.world.tree.enable_kv_cache_events = self.world.tier.host.enable_kv_cache_events = True
            self.listeners = {MEDIUM_GPU: Listener(), MEDIUM_CPU: Listener()}
            for prompt in ([1, 2] * 9, [1] * 17, [2, 1, 1] * 8):
                serve_to_end(self.world, prompt)
                settle(self.world)
        events = self.world.tree.take_events()
        for medium, tree in ((MEDIUM_GPU, self.world.tree), (MEDIUM_CPU, self.world.tier.host)):
            listener = self.listeners[medium]
            listener.hear([event for event in events if getattr(event, "medium", medium) == medium])
            assert set(listener.parents) == set(names_in(tree))
        device, host = (set(listener.parents) for listener in self.listeners.values())
        HEARD.append((len(device - host), len(host - device), len(device & host)))


# Pages on the device alone, in host memory alone, and in both.
HEARD: list[tuple[int, int, int]] = []


@pytest.mark.parametrize(("page_size", "states"), [pytest.param(1, None, marks=pytest.mark.thorough), (4, 3)])
def test_by_events_both_media_are_known_in_every_life_with_a_host_tier(page_size, states):
    machine = type("Overheard", (OverheardTier, HostLife), {"page_size": page_size, "states": states})
    HEARD.clear()
    run_state_machine_as_test(machine, settings=settings(max_examples=20, stateful_step_count=40, deadline=None))
    device, host, both = map(any, zip(*HEARD, strict=True))
    assert device and both and host


def test_what_a_save_or_a_failed_request_has_locked_no_step_reads():
    world = World(size=512, page_size=4, host=HostSizes(1024, late=True), options=target(3.0))
    gate = known(world, estimate(1, 0, 0.01))
    gate._shares = True
    serve(world, tokens(1, 64), max_new=1)
    world.finish(world.running[0])
    world.step()
    assert world.tier.saves.tokens == 64 == world.tree.protected_size_
    assert gate.load(world.queue.live()).shared == 0
    (half,) = queue(world, tokens(1, 32) + tokens(50, 8))
    world.step()
    assert gate.load(world.queue.live()).shared == 32
    half.kv_receiver.state = KVPoll.Failed
    world.step()
    assert world.transfer.quarantine and gate.load(world.queue.live()).shared == 0


def test_memory_is_not_taken_away_from_copies_to_the_host(monkeypatch):
    """The engine takes it first and flushes then, which is what waits for them."""
    loop = Loop(size=64, page_size=4, host=HostSizes(64, hits=1, late=True))
    scheduler, seen = loop.scheduler, []
    scheduler.offload_tags = set()
    copies = loop.tier.memory.begun
    scheduler.memory_saver_adapter = SimpleNamespace(pause=lambda tag: seen.append((tag, len(copies))))
    monkeypatch.setattr(torch, "get_device_module", lambda: SimpleNamespace(synchronize=lambda: None))
    turns = itertools.count()

    def between() -> None:
        if next(turns) == 0:
            loop.handshake(loop.arrive([1, 2, 3, 4, 5, 6, 7, 8, 9], max_new=3))
        for asked in loop.asked:
            loop.complete(asked)
        if loop.tier.saves.under_way and not loop.running and scheduler.is_fully_idle():
            assert copies
            scheduler.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["kv_cache"]))
            raise OverlappedLoopEnds
        assert next(turns) < 100

    loop.run(between)
    assert seen == [("kv_cache", 0)]
