"""What a step asks of each request that runs: counted, not timed. `benchmark/step_costs.py` times steps."""

from __future__ import annotations

from types import SimpleNamespace

from decode_world import World
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.disaggregation.decode_radix.budget import live_reqs
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


def test_rows_that_are_last_already_are_not_sorted():
    """They have just been freed, as a rule; of the others there may be hundreds."""
    asked = []

    class Rows(set):
        def __contains__(self, row):
            asked.append(row)
            return super().__contains__(row)

    pool = SimpleNamespace(free_slots=[*range(500)])
    assert KeptRows.give_last(pool, Rows({498, 499})) == 2
    assert pool.free_slots == [*range(500)] and asked == [499, 498, 497]


class Reason:
    pass


@given(st.data())
def test_live_requests_are_those_of_all_places_but_each_that_decodes_once(data):
    """Who decodes may still stand in the batch that was prebuilt, or among those that are computed here."""
    reqs = [SimpleNamespace(finished_reason=Reason() if data.draw(st.booleans()) else None) for _ in range(9)]
    some = st.lists(st.sampled_from(reqs), unique_by=id, max_size=4)
    running, prebuilt, local = data.draw(some), data.draw(some), data.draw(some)
    apart = [req for req in reqs if not any(req is one for one in running)]
    places = [data.draw(st.lists(st.sampled_from(apart), max_size=3)) if apart else [] for _ in range(3)]
    transfers = SimpleNamespace(
        queue=[SimpleNamespace(req=req) for req in places[0]],
        arrived=places[1],
        hooks=SimpleNamespace(reqs=[lambda: local] if data.draw(st.booleans()) else []),
        quarantine=[],
    )
    mode = SimpleNamespace(is_prebuilt=lambda: is_prebuilt)
    is_prebuilt = data.draw(st.booleans())
    scheduler = SimpleNamespace(
        running_batch=SimpleNamespace(reqs=running),
        last_batch=SimpleNamespace(reqs=prebuilt, forward_mode=mode),
        waiting_queue=places[2],
    )
    found = live_reqs(scheduler, transfers, ())
    more = [*(prebuilt if is_prebuilt else ()), *(local if transfers.hooks.reqs else ())]
    expected = [*places[0], *places[1], *places[2], *[req for req in more if not any(req is one for one in running)]]
    assert [id(req) for req in found.coming] == [id(req) for req in expected if req.finished_reason is None]
    assert [id(req) for req in found.running] == [id(req) for req in running if req.finished_reason is None]
