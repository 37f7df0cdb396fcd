"""An admission or a resume on a device without memory: that request fails, and everything else is as it was."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch
from decode_world import HostSizes, World, aborted
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.managers.schedule_batch import Req
from test_traps import serve, serve_to_end
from torch.overrides import TorchFunctionMode

WORLDS: dict[str, Callable[[], World]] = {
    "pages": lambda: World(size=64, page_size=4),
    "tokens": lambda: World(size=64, page_size=1),
    "windows": lambda: World(size=64, page_size=4, windows=(8, 64)),
    "states": lambda: World(size=64, page_size=4, states=6),
    "host": lambda: World(size=64, page_size=4, host=HostSizes(128)),
}
# What makes no tensor, or one that shares another's memory.
TAKES_NONE = {"__get__", "__len__", "__iter__", "dim", "expand", "item", "numel", "size", "tolist", "unsqueeze", "view"}


class FullDevice(TorchFunctionMode):
    """Has no memory from the ``first`` time on that something called by one of ``within`` takes any, so often."""

    def __init__(self, first: int, times: int, *within: str):
        super().__init__()
        self.first, self.times, self.within = first, times, within
        self.asked = 0

    @property
    def came(self) -> bool:
        return self.asked >= self.first

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._takes_memory(function.__name__, args):
            self.asked += 1
            if self.first <= self.asked < self.first + self.times:
                raise torch.OutOfMemoryError("by the test")
        return function(*args, **(kwargs or {}))

    def _takes_memory(self, name: str, args: Any) -> bool:
        if name in TAKES_NONE or (name == "__getitem__" and not isinstance(args[1], torch.Tensor)):
            return False
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_name not in self.within:
            frame = frame.f_back
        return frame is not None


def filled(kind: str) -> World:
    """A world whose tree holds three prompts, of which an admission takes one and a part of another's memory."""
    world = WORLDS[kind]()
    for n in (1, 2, 3):
        serve_to_end(world, [n] * 13 + [9] * 3, max_new=2)
    return world


def go_on(world: World, reqs: list[Req]) -> None:
    """Until everybody has ended; then all is free or in the tree, and all of that can go."""
    for _ in range(60):
        for decode_req in list(world.transfer.queue):
            if decode_req.kv_receiver.asked and decode_req.kv_receiver.state != KVPoll.Success:
                world.complete(decode_req)
        for decode_req in world.transfer.quarantine:
            decode_req.kv_receiver.quiet = True
        world.step()
        world.decode()
        if world.idle() and not world.queue.retracted_queue:
            break
    world.check()
    assert all(aborted(req) or len(req.output_ids) >= 4 for req in reqs)
    pool, tree = world.tree.pool, world.tree
    assert pool.available_size() + tree.evictable_size() == world.size and tree.protected_size() == 0
    if world.windows is not None:
        assert tree.windows.available_size() == tree.windows.size
    tree.evict_shortfall(world.size)
    assert pool.available_size() == world.size


def admit(kind: str, device: FullDevice) -> None:
    world = filled(kind)
    # Of the first, half a node, and in place of others the rest; the second takes what is left.
    reqs = [world.arrive([1] * 8 + [70] * 22), world.arrive([8] * 13)]
    for decode_req in reqs:
        world.handshake(decode_req)
    with device:
        world.step()
    if device.came and not any(decode_req.error for decode_req in reqs):
        # What could be freed at another try.
        assert device.times == 1
    world.step()
    world.check()
    go_on(world, [decode_req.req for decode_req in reqs])


def resume(kind: str, device: FullDevice) -> None:
    world = filled(kind)
    req = serve(world, [1] * 8 + [70] * 22).req
    world.retract(req)
    world.tree.evict_shortfall(world.tree.evictable_size() // 2)
    with device:
        world.waiting.extend(world.queue.resume_retracted_reqs())
    world.step()
    go_on(world, [req])


@pytest.mark.parametrize("times", [1, 1000])
@pytest.mark.parametrize("kind", WORLDS)
@pytest.mark.parametrize("what", [admit, resume])
def test_a_request_fails_alone_wherever_the_memory_is_short(what: Callable, kind: str, times: int) -> None:
    """Once, or from then on, so that what it has got cannot be given back in that step either."""
    first = 0
    while True:
        first += 1
        device = FullDevice(first, times, "give", "end_step")
        what(kind, device)
        if not device.came:
            break
    assert first > 5


@pytest.mark.parametrize("first", range(1, 9))
def test_a_window_is_dropped_or_it_stays(first: int) -> None:
    tree = WORLDS["windows"]().tree
    slots = tree.pool.alloc_long_runs(16)
    tree.windows.take(slots, 14)
    try:
        with FullDevice(first, 1, "drop"):
            tree.windows.drop(slots)
    except torch.OutOfMemoryError:
        assert tree.windows.available_size() == tree.windows.size - 16
        tree.windows.drop(slots)
    tree.windows.pool.free_unfreed()
    tree.pool.free(slots)
    assert tree.windows.audit([]) == []


@pytest.mark.parametrize("pool", ["pool", "windows.pool"])
def test_a_request_that_is_beyond_what_a_pool_has_fails(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Python leaves assertions out."""
    world = filled("windows")
    decode_req = world.arrive([8] * 13)
    world.handshake(decode_req)
    with monkeypatch.context() as patch:
        patch.setattr(attrgetter(pool)(world.tree), "alloc_long_runs", lambda size: None)
        world.step()
    assert decode_req.error.startswith("RuntimeError: ") and "admitted beyond what the" in decode_req.error
    world.step()
    go_on(world, [decode_req.req])


def test_what_could_not_be_freed_is_tried_again_while_somebody_waits_to_resume() -> None:
    """Nobody is admitted then; the pool is too small for who waits until all of it is free."""
    world = World(size=64, page_size=4)
    decodes = serve(world, [1] * 20, max_new=4).req
    fails = world.arrive([8] * 23)
    world.handshake(fails)
    with FullDevice(3, 10**6, "give", "end_step"):
        world.step()
        # More than was reckoned with.
        decodes.sampling_params.max_new_tokens = 40
        while not world.queue.retracted_queue:
            world.step()
            world.decode()
    assert fails.error and world.tree.pool.unfreed
    for _ in range(80):
        for decode_req in world.transfer.quarantine:
            decode_req.kv_receiver.quiet = True
        world.step()
        world.decode()
    assert len(decodes.output_ids) == 40 and world.idle()
    world.check()


@pytest.mark.parametrize("first", range(1, 8))
def test_what_lies_behind_windows_is_freed_once(first: int) -> None:
    """An admission frees it of those that run, in the middle of which the device may lack memory."""
    world = World(size=160, page_size=4, windows=(8, 64))
    for n in (1, 4, 5):
        serve(world, [n] * 13, max_new=12)
    for _ in range(8):
        world.decode()
    device = FullDevice(first, 1, "free_behind_windows")
    with device, contextlib.suppress(torch.OutOfMemoryError):
        world.scheduler.running_batch.free_behind_windows()
    assert device.came
    world.scheduler.running_batch.free_behind_windows()
    pool = world.tree.windows.pool
    free = torch.cat([pool.free_pages, pool.release_pages]).tolist()
    assert len(set(free)) == len(free)
    for _ in range(12):
        world.decode()
        world.step()
    world.check()
    assert pool.available_size() == world.tree.windows.size
