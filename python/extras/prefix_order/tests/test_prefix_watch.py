"""What is known of prompts that wait: what it costs to know, and that it is what a comparison of all would find."""

from __future__ import annotations

import gc
import itertools
import weakref
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from decode_world import World
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache import prefix_reader
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from test_traps import tokens

PAGE = 4
LONG = 8192
# What is looked at of two prompts, in tokens, where nothing is to be found: a few slices.
LOOKS = 1200


class Counted(list):
    """A prompt that counts how many of its tokens are read."""

    read = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        Counted.read += len(found) if isinstance(index, slice) else 1
        return found


@contextmanager
def tokens_read(most: int):
    """``most``: tokens that are read meanwhile, of all prompts."""
    before = Counted.read
    yield
    assert Counted.read - before <= most


def long_world(page: int, eagle: bool) -> World:
    world = World(size=4 * LONG, page_size=page)
    world.tree.is_eagle = eagle
    return world


def enter(world: World, prompt: list[int], extra_key: str | None = None) -> None:
    """Put a prompt, whole pages, into the tree."""
    tree = world.tree
    keys = [*zip(prompt, prompt[1:], strict=False)] if tree.is_eagle else [*prompt]
    keys = keys[: len(keys) // tree.page_size * tree.page_size]
    held = tree.peek(keys, extra_key)
    parts = [*(node.value for node in held.path[:-1]), *(node.value[: held.in_last] for node in held.path[-1:])]
    if held.length < len(keys):
        parts.append(tree.pool.alloc(len(keys) - held.length))
    key = RadixKey(keys, extra_key, is_bigram=tree.is_eagle)
    tree.insert(InsertParams(key=key, value=torch.cat([torch.zeros(0, dtype=torch.int64), *parts])))


KINDS = pytest.mark.parametrize(("page", "eagle"), [(1, False), (16, False)])


@KINDS
def test_a_herd_is_compared_as_it_arrives_and_not_again(page: int, eagle: bool):
    """Once more with the leader in the step after its admission, and with the tree in the step that commits it."""
    world, herd = long_world(page, eagle), 12
    watches, shared = world.tree.watches, [n * 7919 % 99991 for n in range(LONG)]
    parts = 2 if eagle else 1  # Of each pair that is made both tokens are read.
    with tokens_read(parts * (herd * 3 * (LONG + LOOKS))):
        leader, *others = (watches.add(Counted(shared + tokens(n, 32)), None) for n in range(1, herd + 1))
    watches.lead(leader)
    with tokens_read(parts * herd * LOOKS):
        found = [watches.leader(other) for other in others]
    assert found == [(leader, (LONG - eagle) // page * page)] * len(others)
    watches.remove(leader)
    # The first of them with the leaf.
    with tokens_read(parts * (2 * LONG + herd * LOOKS)):
        enter(world, shared)
    assert all(other.length == (LONG - eagle) // page * page for other in others)
    assert all(other.peek() == world.tree.peek(other.token_ids, None) for other in others)


@KINDS
def test_strangers_in_the_place_of_a_herd_hide_none_of_it(page: int, eagle: bool):
    """Who arrived was compared with the first of the place alone, and with a stranger there learned nothing of its
    like: all of them were compared in full in the step in which one led, and in that in which the tree got it."""
    world, herd = long_world(page, eagle), 12
    watches, shared = world.tree.watches, [n * 7919 % 99991 for n in range(LONG)]
    others = []
    for n in range(1, herd + 1):
        # They share a page, and another two of them a few more.
        watches.add(Counted(shared[: page * (1 + n % 3) + eagle] + tokens(-n, 600)), None)
        others.append(watches.add(Counted(shared + tokens(n, 32)), None))
    parts = 2 if eagle else 1
    leader = others.pop(0)
    watches.lead(leader)
    with tokens_read(parts * herd * LOOKS):
        found = [watches.leader(other) for other in others]
    assert found == [(leader, (LONG - eagle) // page * page)] * len(others)
    with tokens_read(parts * (2 * LONG + 2 * herd * LOOKS)):
        enter(world, shared)
    assert all(watch.peek() == world.tree.peek(watch.token_ids, None) for watch in watches)


class Prompt(list):
    """One that can be referred to weakly."""


def test_a_prompt_that_is_gone_is_not_kept_by_those_that_wait():
    """What is known of a leader outlived it in whoever waited elsewhere by then, with its tokens and its node."""
    world, start = World(size=256, page_size=PAGE), tokens(1, 4 * PAGE)
    watches, prompts = world.tree.watches, [Prompt(start + tokens(n, 40)) for n in (50, 150)]
    leader, other = (watches.add(prompt, None) for prompt in prompts)
    watches.lead(leader)
    assert watches.leader(other) == (leader, 4 * PAGE)
    enter(world, [*prompts[0]])
    assert other.place != leader.place
    watches.remove(leader)
    gone = weakref.ref(prompts.pop(0))
    del leader
    gc.collect()
    assert gone() is None


def test_a_leader_is_looked_at_once_by_each_who_waits(monkeypatch):
    """Each step walked all of them for each that waits: 15 ms where 1000 share a page with 256."""
    world, start, looked = World(size=256, page_size=PAGE), tokens(1, PAGE), []
    watches = world.tree.watches
    waits = watches.add(start + tokens(50, 8), None)
    find = watches._best

    def counted(watch, leaders, *args):
        leaders = [*leaders]
        looked.extend(leaders)
        return find(watch, leaders, *args)

    monkeypatch.setattr(watches, "_best", counted)
    leaders = [watches.add(start + tokens(n, 8), None) for n in range(60, 70)]
    for leader in leaders[:8]:
        watches.lead(leader)
    for _ in range(3):
        assert watches.leader(waits) == (leaders[0], PAGE) and looked == leaders[:8]
    for leader in leaders[8:]:
        watches.lead(leader)
    watches.remove(leaders[3])
    for _ in range(3):
        assert watches.leader(waits) == (leaders[0], PAGE) and looked == leaders
    # Only if the best has gone are all that are left looked at.
    watches.remove(leaders[0])
    assert watches.leader(waits) == (leaders[1], PAGE) and len(looked) == 10 + 8


@KINDS
def test_prompts_that_share_a_page_cost_that_page(page: int, eagle: bool):
    """Of each leader and each that waits half of the prompt was read, a quarter, an eighth and so on."""
    world = long_world(page, eagle)
    watches, start = world.tree.watches, tokens(1, page + eagle)
    prompts = [Counted(start + [n] * LONG) for n in range(101, 117)]
    with tokens_read(8 * len(prompts) * LOOKS):  # Each with eight at most.
        leaders, others = ([watches.add(prompt, None) for prompt in half] for half in (prompts[:8], prompts[8:]))
    for leader in leaders:
        watches.lead(leader)
    with tokens_read(2 * len(leaders) * len(others) * LOOKS):
        assert all(watches.leader(other) == (leaders[0], page) for other in others)
    with tokens_read(2 * len(prompts) * LOOKS):
        enter(world, [*prompts[0]])
    assert leaders[0].length == (LONG + page) // page * page and all(other.length == page for other in others)


# ---- and what is known is what a comparison of all would find ----


def alike(a, b, page: int) -> int:
    """Tokens, whole pages, that two prompts share from their start."""
    same = list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
    return len(same) // page * page


@pytest.mark.parametrize("eagle", [False])
@given(st.data())
def test_what_two_prompts_share_is_found_from_wherever_it_is_looked_for(eagle, data):
    world = World(size=64, page_size=data.draw(st.sampled_from([1, 3, 4])))
    reader, page = world.tree.reader, world.tree.page_size
    world.tree.is_eagle = eagle
    few = st.lists(st.integers(0, 1), max_size=40)
    start, before = data.draw(few), data.draw(few)
    a, b = (reader.keys_of(start + data.draw(few)) for _ in "ab")
    expected = alike(a, b, page)
    known = data.draw(st.integers(0, expected // page)) * page
    with patch.object(prefix_reader, "FIRST_LOOK", data.draw(st.sampled_from([1, 8, 256]))):
        assert reader.common_length(a, b, known) == expected
        assert reader.common_length(list(a), b, known) == expected
        # As of a node, whose tokens stand further down in the prompt.
        assert reader.common_length(list(a), [*before, *b], known, len(before)) == expected


class Herd:
    """A tree and prompts that wait, each of which is known to stand where a comparison of all would put it."""

    def __init__(self, data, page: int, eagle: bool):
        self.world, self.data = World(size=256, page_size=page), data
        self.world.tree.is_eagle = eagle
        self.waiting, self.leading, self.locks = [], [], []
        self.prompts = [[1] * 32]
        for _ in range(data.draw(st.integers(0, 5))):
            prompt = self.prompt()
            self.waiting.append(self.world.tree.watches.add(prompt, None, owner=prompt))

    def prompt(self) -> list[int]:
        """As one that has been, up to somewhere, and a few words that are a page long or less: many begin alike."""
        start = self.one(self.prompts)
        words = self.data.draw(st.lists(st.sampled_from([[1] * 4, [1, 1, 1, 2], [3], [1] * 8]), max_size=3))
        new = start[: 4 * self.data.draw(st.integers(0, 8))] + [token for word in words for token in word]
        self.prompts.append(new[:48])
        return self.prompts[-1]

    def key(self) -> str | None:
        return self.data.draw(st.sampled_from([None, None, None, "salt"]))

    def one(self, of: list):
        return of[self.data.draw(st.integers(0, len(of) - 1))]

    def step(self) -> None:
        tree, watches = self.world.tree, self.world.tree.watches
        acts = ["add", "add", "insert", "insert", "evict", "lock", "unlock", "lead", "remove", "leave", "flush"]
        act = self.data.draw(st.sampled_from(acts))
        if act == "add":
            prompt = self.prompt()
            self.waiting.append(watches.add(prompt, self.key(), owner=prompt))
        elif act == "insert":
            ahead = [*self.waiting, *self.leading]
            # What somebody waits for, as a rule.
            prompt = self.one(ahead).owner if ahead and self.data.draw(st.booleans()) else self.prompt()
            if tree.pool.available_size() > len(prompt):
                enter(self.world, prompt, self.key())
        elif act == "evict":
            tree.evict_shortfall(self.data.draw(st.integers(1, 40)))
        elif act == "lock":
            self.locks.append(tree.lock_prefix(tree.peek(self.prompt(), self.key()))[1])
        elif act == "unlock" and self.locks:
            tree.dec_lock_ref(self.locks.pop(self.data.draw(st.integers(0, len(self.locks) - 1))))
        elif act == "lead" and self.waiting:
            watch = self.one(self.waiting)
            watches.lead(watch, self.data.draw(st.sampled_from([0, 0, 5])))
            self.waiting.remove(watch)
            self.leading.append(watch)
        elif act in ("remove", "leave"):
            of = self.leading if act == "remove" else self.waiting
            if of:
                watch = self.one(of)
                of.remove(watch)
                watches.remove(watch)
        elif act == "flush" and self.data.draw(st.booleans()):
            for lock in self.locks:
                tree.dec_lock_ref(lock)
            self.locks.clear()
            self.world.flush()

    def check(self) -> None:
        tree = self.world.tree
        assert tree.audit(self.locks) == []
        for watch in (*self.waiting, *self.leading):
            found = tree.peek(watch.token_ids, watch.extra_key)
            assert watch.peek() == found and watch.length == found.length
            assert watch.unlocked_tokens() == found.evictable
        for watch in self.waiting:
            if self.data.draw(st.booleans()):
                assert tree.watches.leader(watch) == self.leader(watch)

    def leader(self, watch):
        """Of all that are on the way, compared token by token, the one that brings most."""
        best, most = None, 0
        place = self.world.tree.watches._at[watch.node][watch.place]
        assert set(place) == {
            other for other in (*self.waiting, *self.leading) if (other.node, other.place) == (watch.node, watch.place)
        }
        for other in place.leading if watch.place[1] is not None else ():
            coming = alike(watch.token_ids, other.token_ids, self.world.tree.page_size) - watch.length
            if coming > most and coming >= other.least:
                best, most = other, coming
        return None if best is None else (best, most)


@pytest.mark.parametrize(("page", "eagle"), [pytest.param(1, False, marks=pytest.mark.thorough), (4, False)])
@given(st.data())
def test_what_is_known_of_prompts_that_wait_is_what_a_comparison_would_find(page: int, eagle: bool, data):
    """Whatever comes into the tree and goes, and whoever leads."""
    herd = Herd(data, page, eagle)
    with patch.object(prefix_reader, "FIRST_LOOK", data.draw(st.sampled_from([1, 8, 256]))):
        for _ in range(data.draw(st.integers(1, 25))):
            herd.step()
            herd.check()


@KINDS
def test_those_who_wait_for_what_is_evicted_are_moved_unread(page: int, eagle: bool):
    """Thousands may wait for one prefix, whose end others' admissions take, a few pages with each."""
    world = long_world(page, eagle)
    watches, shared = world.tree.watches, [n * 7919 % 99991 for n in range(64 * page + eagle)]
    enter(world, shared)
    others = [watches.add(Counted(shared + tokens(n, 2 * page)), None) for n in range(1, 9)]
    left = 64 * page
    for pages in (4, 1, 4):
        with tokens_read(0):
            assert world.tree.evict_shortfall(pages * page) == pages * page
        left -= pages * page
        assert all(other.length == left and other.peek() == world.tree.peek(other.token_ids, None) for other in others)
    # They find each other, and what comes, as before.
    leader, *rest = others
    watches.lead(leader)
    assert all(watches.leader(other) == (leader, 64 * page - left) for other in rest)
    enter(world, shared)
    assert all(other.length == 64 * page for other in others)
