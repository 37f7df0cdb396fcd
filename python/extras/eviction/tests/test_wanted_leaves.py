"""What queued requests match is evicted last, and not for the watermark."""

from __future__ import annotations

from decode_world import World, queue
from test_traps import serve, serve_to_end, tokens


def fill(world: World, *prompts: list[int]) -> None:
    for prompt in prompts:
        serve_to_end(world, prompt, max_new=1)


def held(world: World, *prompts: list[int]) -> list[int]:
    return [world.tree.peek(prompt, None).length for prompt in prompts]


def test_what_many_wait_for_goes_last():
    world = World(size=256, page_size=4)
    prompts = [tokens(n, 16) for n in range(1, 6)]
    fill(world, *prompts)
    # The oldest is waited for by two, the next by one.
    for prompt in (prompts[0], prompts[0], prompts[1]):
        world.arrive(prompt + tokens(30, 4))
    world.tree.evict_shortfall(3 * 16)
    assert held(world, *prompts) == [16, 16, 0, 0, 0]
    world.tree.evict_shortfall(8)
    assert held(world, *prompts) == [16, 8, 0, 0, 0]
    world.check()
    world.tree.evict_shortfall(256)
    assert held(world, *prompts) == [0, 0, 0, 0, 0]
    world.check()


def test_of_a_leaf_that_is_waited_for_in_part_the_rest_goes():
    world = World(size=128, page_size=4)
    old, new = tokens(1, 32), tokens(2, 32)
    fill(world, old, new)
    waiting = world.arrive(old[:20] + tokens(3, 8))
    world.tree.evict_shortfall(12)
    assert held(world, old, new) == [20, 32]
    world.tree.evict_shortfall(32)
    assert held(world, old, new) == [20, 0]
    # Nobody waits for it any more.
    world.queue.queue.remove(waiting)
    world.queue.policy.leave(waiting.entry)
    world.tree.evict_shortfall(4)
    assert held(world, old) == [16]
    world.check()


def test_the_watermark_takes_nothing_that_a_request_waits_for():
    world = World(size=128, page_size=4)
    wanted, other = tokens(1, 48), tokens(2, 48)
    fill(world, wanted, other)
    world.tree.watermark = 96
    world.arrive(wanted + tokens(3, 8))
    for _ in range(10):
        world.tree.evict_to_watermark()
    assert held(world, wanted, other) == [48, 0]


def test_the_watermark_is_not_kept_while_a_request_waits_for_memory():
    world = World(size=128, page_size=4, reserved=2)
    kept = tokens(1, 32)
    fill(world, kept)
    running = serve(world, tokens(2, 60), max_new=8).req
    world.tree.watermark = 64
    (blocked,) = queue(world, tokens(3, 80))
    for _ in range(40):
        world.step()
    assert not blocked.wire.asked
    assert held(world, kept) == [32], "somebody may ask for it before the room for the other is there"
    world.finish(running)
    world.step()
    assert blocked.wire.asked
