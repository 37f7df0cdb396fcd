"""KV events of prompts with an ``extra_key``."""

from __future__ import annotations

from decode_world import World
from kv_listener import Listener, names_in, names_of
from test_kv_events import listened_to
from test_traps import PAGE, serve_to_end, tokens


def test_an_extra_key_has_names_of_its_own():
    """The pages of both are there, and when those of one go, the other's stay. JSON can bring half a surrogate pair."""
    world, prompt, listener = listened_to(World(size=128, page_size=PAGE)), tokens(1, 16), Listener()
    keys = (None, "adapter", "salt", "\ud800")
    for extra_key in keys:
        serve_to_end(world, prompt, extra_key=extra_key)
    listener.hear(world.tree.take_events())
    names = {key: names_of(prompt, key, PAGE) for key in keys}
    assert len({name for each in names.values() for name in each}) == 16 <= len(listener.parents)
    # The first page hangs on no page that anybody could have.
    assert listener.parents[names[None][0]] is None
    assert {listener.parents[names[key][0]] for key in keys[1:]}.isdisjoint({None, *listener.parents})
    held = world.tree.peek(prompt, "adapter").length
    world.tree.evict_shortfall(world.tree.evictable_size() - 1)
    listener.hear(world.tree.take_events())
    assert held and set(listener.parents) == set(names_in(world.tree))
