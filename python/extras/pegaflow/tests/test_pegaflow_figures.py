"""What the pool can spare for loads and saves with PegaFlow, figure by figure, without a tree or a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.pegaflow.room import Live, Room, live_on_scheduler
from sglang.srt.mem_cache.radix_cache import RadixKey

PAGE = 4


class Node:
    def __init__(self, parent: Node | None, tokens: int = 0, lock_ref: int = 0) -> None:
        self.parent, self.key, self.lock_ref = parent, RadixKey([0] * tokens), lock_ref


def request(
    prompt: int, answered: int = 0, most: int = 0, allocated: int = 0, shared: int = 0, node: Any = None
) -> Any:
    return SimpleNamespace(
        origin_input_ids=range(prompt),
        output_ids=range(answered),
        sampling_params=SimpleNamespace(max_new_tokens=most),
        kv_allocated_len=allocated,
        cache_protected_len=shared,
        last_node=node or Node(None),
        req_pool_idx=1,
        finished=lambda: False,
    )


def tree(size: int, available: int, evictable: int = 0, unreturned: int = 0, in_use: tuple = ()) -> Any:
    allocator = SimpleNamespace(size=size, available_size=lambda: available)
    return SimpleNamespace(
        page_size=PAGE,
        token_to_kv_pool_allocator=allocator,
        evictable_size=lambda: evictable,
        unreturned_tokens=unreturned,
        nodes_in_use=lambda: in_use,
    )


def test_what_stays_locked_is_counted_once():
    root = Node(None)
    shared = Node(root, 16, 2)
    own, used = Node(shared, 8, 1), Node(shared, 4, 1)
    moving = request(30, most=10, allocated=25, shared=24, node=own)
    ended = request(20, allocated=20, shared=16, node=shared)
    room = Room(tree(200, 100, unreturned=8, in_use=(used,)), Live([], [moving], [ended], 0))
    # A page of each that is not in the tree, and the nodes.
    assert room.left == 200 - 8 - (28 - 24) - (20 - 16) - (16 + 8 + 4)
    assert room.fixed == {shared, own, used}


@pytest.mark.parametrize(
    ("tokens", "growth", "chunks", "least"),
    [(16, 20, 8, 20 + 16), (16, 8, 20, 20 + 16), (0, 20, 8, 8), (0, 8, 20, 20), (16, 0, 0, 16)],
)
def test_what_is_free_must_do_for_the_next_steps(tokens, growth, chunks, least):
    """A save takes nothing of what those that run grow by; a load must leave it."""
    root = Node(None)
    for short in (0, 1):
        room = Room(tree(200, least - short), Live([], [], [], growth, chunks))
        assert room.take(Node(root, 0, 1), tokens) == (not short)


# ---- of a scheduler ----


def scheduler(running=(), computed=(), chunked=None, sent=None, extends=True, ratio=0.5) -> Any:
    last = SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: extends), reqs=list(computed))
    made = SimpleNamespace(
        page_size=PAGE,
        chunked_req=chunked,
        last_batch=last if computed else None,
        running_batch=SimpleNamespace(reqs=list(running)),
        new_token_ratio=ratio,
    )
    if sent is not None:
        made.disagg_prefill_inflight_queue = list(sent)
    return made


def test_who_is_live_on_a_scheduler():
    runs, over, computed, empty = (request(8, most=n) for n in (11, 100, 21, 100))
    over.finished = lambda: True
    empty.req_pool_idx = None
    chunked = request(30, allocated=12, most=8)
    lost, sent = request(8), request(8)
    lost.req_pool_idx = None
    live = live_on_scheduler(scheduler([runs, over], [computed, runs, empty], chunked, [sent, lost, computed]))
    assert (live.running, live.moving, live.ended) == ([runs], [computed, chunked], [sent])
    # 18 tokens of the prompt are left, five pages, and one more as the engine has it.
    assert live.chunks == 24
    assert live.growth == (11 + 21 + 8) // 2 + 24


def test_a_prompt_in_chunks_that_has_answered_before_is_computed_with_its_answer():
    chunked = request(8, answered=5, most=50, allocated=4)
    live = live_on_scheduler(scheduler(chunked=chunked, ratio=1.0))
    assert (live.moving, live.chunks, live.growth) == ([chunked], 4 * (3 + 1), 45 + 16)
    chunked.kv_allocated_len = 40
    assert live_on_scheduler(scheduler(chunked=chunked)).chunks == 4
