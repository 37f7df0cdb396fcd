"""What a step asks of each request that runs: counted, not timed. `benchmark/step_costs.py` times steps."""

from __future__ import annotations

from types import SimpleNamespace

from decode_world import World
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.disaggregation.decode_radix.overlap_guard import KeptRows
from test_traps import serve, tokens


def test_a_blocked_queue_does_not_add_up_who_runs_in_every_step():
    """Nothing can fit while nobody ends and no memory becomes free."""
    world = World(size=64)
    running = serve(world, tokens(2, 24), max_new=30).req
    head = world.arrive(tokens(3, 40))
    world.handshake(head)
    world.step()
    assert not head.kv_receiver.asked
    asked, budget = [], world.queue.accounts.budget
    world.queue.accounts.budget = lambda *args: asked.append(1) or budget(*args)
    for _ in range(10):
        world.decode()
        world.step()
    # At most in the step in which what is blocked is looked at whatever has happened.
    assert len(asked) <= 1 and not head.kv_receiver.asked
    world.finish(running)
    world.step()
    assert head.kv_receiver.asked
    world.check()


@given(st.permutations(range(8)), st.integers(0, 8), st.sets(st.integers(0, 8)))
def test_rows_that_a_step_reads_go_last(order, free, rows):
    pool = SimpleNamespace(free_slots=order[:free])
    wanted = sorted(pool.free_slots, key=rows.__contains__)
    assert KeptRows.give_last(pool, rows) == len(rows.intersection(wanted))
    assert pool.free_slots == wanted
