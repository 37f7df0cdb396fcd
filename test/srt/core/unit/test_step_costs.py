"""What a step of a decode worker's scheduler does in each state: counted, where `benchmark/step_costs.py` times it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch.distributed as dist
from decode_world import World
from instrumented import Meter, counts
from ranks import assert_same

from sglang_pd_radix.patching import loader

# To start processes that import the engine takes long on a busy machine.
pytestmark = pytest.mark.timeout(400)
Steps = list[dict[str, dict[str, int]]]
TOUCHES = ("waits", "copies", "launches", "collectives", "walks")
UNCHANGED = ["idle", "no memory", "no row", "following", "long prompts"]
CHANGING = ["ends", "turnover", "turnover without a row", "together", "one token", "first turns", "late turns"]
# Long prompts that arrive in one step; see `benchmark/step_costs.py`, which a process of its own imports: its worker
# sets the environment of all that is imported after it.
TOGETHER = 24
# Calls of one function of ours in a step. What waits is 32 for memory, 64 for rows and 256 behind one transfer.
CALLS = 8


def needs(extra: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(extra not in loader.extras(), reason=f"the extra {extra} brings that")


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> dict[str, dict[str, Steps]]:
    """What each step did in each state, with the flag off and on: two processes, each with a real scheduler."""
    sides = {side: tmp_path_factory.mktemp("counted") / side for side in ("off", "on")}
    with ThreadPoolExecutor(2) as threads:
        return dict(zip(sides, threads.map(counts, sides, sides.values()), strict=True))


def seen(steps: Steps, kind: str, owner: str = "", part: str = "") -> list[int]:
    """How many of a kind there were in each step, of the owner's and with ``part`` in where and what they are."""
    return [sum(n for what, n in step[kind].items() if what.startswith(owner) and part in what) for step in steps]


def told(steps: Steps, kind: str, owner: str = "") -> str:
    """How many there are in each step, and where they are in the step with most of them."""
    most = max(steps, key=lambda step: seen([step], kind, owner))[kind]
    places = sorted((what for what in most if what.startswith(owner)), key=lambda what: -most[what])[:12]
    return "\n".join([f"{kind}: {seen(steps, kind, owner)}", *(f"{most[what]:5} {what}" for what in places)])


@pytest.mark.parametrize("state", [*UNCHANGED, *CHANGING[:-1]])
def test_without_the_flag_nothing_of_ours_touches_the_device(counted, state):
    """Also while requests end and others are admitted behind a step in flight."""
    for kind in TOUCHES:
        steps = counted["off"][state]
        assert not any(seen(steps, kind, "ours ")), told(steps, kind, "ours ")


@pytest.mark.parametrize("state", UNCHANGED)
def test_a_step_in_which_nothing_changes_touches_nothing(counted, state):
    """And makes the engine do no more than a step of the engine alone; now and then some memory is freed."""
    for kind in TOUCHES:
        steps, alone = counted["on"][state], counted["off"]["idle"]
        assert not any(seen(steps, kind, "ours ")), told(steps, kind, "ours ")
        assert sorted(seen(steps, kind))[-len(steps) // 8] <= max(seen(alone, kind)), told(steps, kind)


@pytest.mark.parametrize("state", UNCHANGED)
def test_a_step_in_which_nothing_changes_looks_at_nobody(counted, state):
    """But for every 16th, which looks for what nobody tells."""
    steps = counted["on"][state]
    busiest = sorted(max(step["calls"].values()) for step in steps)
    assert busiest[-len(steps) // 8] <= CALLS, told(steps, "calls")


@pytest.mark.parametrize("state", CHANGING)
def test_a_step_in_flight_is_waited_for_once_and_only_for_who_is_admitted(counted, state):
    """One wait for what it still uses, and one for the pages that prefill is told of, of all who are admitted."""
    steps = counted["on"][state]
    admitted = seen(steps, "calls", part="PrefillDeltas.request")
    assert any(admitted) == (state != "ends")
    most = [2 * bool(n) for n in admitted]
    waits = seen(steps, "waits", "ours ")
    assert all(map(int.__le__, waits, most)), f"{told(steps, 'waits', 'ours ')}\nadmitted: {admitted}"


@pytest.mark.parametrize("state", ["turnover", "together", "one token"])
def test_an_admission_is_no_more_than_the_engines(counted, state):
    """In all of the steps, ours and the engine's together."""
    for kind in ("waits", "copies", "launches", "collectives"):
        on, off = (sum(seen(counted[side][state], kind)) for side in ("on", "off"))
        assert on <= off, f"on {on}, off {off}, {told(counted['on'][state], kind)}"


@pytest.mark.parametrize(
    ("state", "kind", "part", "most"),
    [
        # Of 24 prompts of 16,500 tokens, most of which decode holds, there was a list, and a tensor of the device.
        ("together", "flattened", "", 0),
        # All are committed in one step, and all end in another.
        ("together", "walks", "", TOGETHER),
        # To free is to wait for the device. 16 answers end in one step.
        pytest.param("one token", "waits", "unique", 1, marks=needs("engine_fixes")),
    ],
)
def test_no_step_does_more_than_it_must(counted, state, kind, part, most):
    steps = counted["on"][state]
    assert max(seen(steps, kind, part=part)) <= most, f"{seen(steps, kind, part=part)}, {told(steps, kind)}"


@pytest.mark.parametrize(
    "kind", ["waits", "copies", "launches", "walks", pytest.param("calls", marks=needs("prefix_order"))]
)
def test_a_turn_takes_no_more_behind_hundreds_on_its_path(counted, kind):
    """But for what the engine calls for each node of a path that it locks."""
    locked = "_update_leaf_status"
    both = [counted["on"][f"{when} turns"] for when in ("first", "late")]
    first, late = (sum(seen(steps, kind)) - sum(seen(steps, kind, part=locked)) for steps in both)
    assert late <= 1.1 * first, f"first {first}, {told(counted['on']['late turns'], kind)}"


# ---- two TP ranks ----


def _queue(world: World, first: int, count: int, length: int) -> None:
    for seed in range(first, first + count):
        prompt = [1 + seed % 240, 1 + seed // 240, *((seed * 7 + j * j + 13) % 250 for j in range(length - 2))]
        world.handshake(world.arrive(prompt, max_new=8))


def _run(world: World) -> None:
    """All that wait come to run."""
    while world.queue.queue or world.transfer.queue:
        world.step()
        for decode_req in world.transfer.queue:
            if decode_req.kv_receiver.asked:
                world.complete(decode_req)


def ranks(rank: int, rows: int, held: int, running: int, waiting: int, length: int) -> list[tuple[int, int]]:
    """Requests that arrive, and how many are admitted in each step and how many collectives there are.

    rows: half of those that there are. held: prompts that have the tree fill the pool. running: who runs before.
    """
    world, meter = World(size=1 << 13, page_size=16, reserved=16, max_reqs=rows, group=dist.group.WORLD), Meter()
    for n in range(held):
        _queue(world, 500 + n, 1, 500)
        _run(world)
        world.finish(world.running[0])
    _queue(world, 300, running, 64)
    _run(world)
    _queue(world, 0, waiting, length)
    assert (world.pool.available_size() == 0) == bool(running)
    assert (world.allocator.available_size() < length) == bool(held)
    left = [waiting]
    for _ in range(15):
        meter.begin()
        world.step()
        meter.end()
        left.append(len(world.queue.queue))
    return list(zip([a - b for a, b in pairwise(left)], seen(meter.steps, "collectives"), strict=True))


def test_ranks_without_a_row_meet_when_requests_come_and_now_and_then(pair):
    """There is nothing to agree on until somebody ends."""
    admitted, collectives = zip(*assert_same(pair.run(ranks, 16, 0, 32, 64, 64)), strict=True)
    assert not any(admitted) and max(collectives) <= 1 and sum(collectives) <= 4, collectives
