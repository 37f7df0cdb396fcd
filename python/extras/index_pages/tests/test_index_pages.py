"""Index pages: random lives, retraction, and what prefill sends over NIXL and Mooncake."""

from __future__ import annotations

import mooncake_world as mooncake
import nixl_world as nixl
import numpy as np
import pytest
import test_life_of_a_request
import torch
from decode_world import Receiver, World, kv_of
from engine_classes import engine_class
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common import conn as common
from sglang.srt.disaggregation.common.prefill_peers import Capabilities
from sglang.srt.mem_cache.index_pages import IndexPages
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, NSATokenToKVPool

HEAD_DIM, SCALE = 128, 4


class SmallPages(NSATokenToKVPool):
    """The engine's pool with pages that need not have 64 tokens, one layer, and a view of its KV as keys."""

    def __init__(self, size: int, page_size: int):
        MLATokenToKVPool.__init__(self, size, page_size, torch.float32, 1, 1, 1, "cpu", False, use_nsa=True)
        self.index_head_dim = HEAD_DIM
        page = page_size * (HEAD_DIM + SCALE)
        self.index_k_with_scale_buffer = [torch.zeros((size + page_size) // page_size, page, dtype=torch.uint8)]
        self.k_buffer = [self.kv_buffer[0][..., :1]]

    def index(self, slot: int) -> torch.Tensor:
        """The bytes of a token, by the layout that the engine describes: keys of the page, then scales of the page."""
        page, at = divmod(slot, self.page_size)
        row, keys = self.index_k_with_scale_buffer[0][page], self.page_size * HEAD_DIM
        scale = keys + at * SCALE
        return torch.cat([row[at * HEAD_DIM : (at + 1) * HEAD_DIM], row[scale : scale + SCALE]])

    def write_index(self, slot: int, value: torch.Tensor) -> None:
        page, at = divmod(slot, self.page_size)
        row, keys = self.index_k_with_scale_buffer[0][page], self.page_size * HEAD_DIM
        row[at * HEAD_DIM : (at + 1) * HEAD_DIM] = value[:HEAD_DIM]
        row[keys + at * SCALE : keys + (at + 1) * SCALE] = value[HEAD_DIM:]


def index_of(tokens: list[int], weights: int) -> torch.Tensor:
    """Index key and scale that a model would give the last of these tokens: every byte depends on them."""
    seed = kv_of(tokens, weights)
    return (torch.arange(HEAD_DIM + SCALE) * 7 + seed % 251 + seed // 251 % 241).remainder(256).to(torch.uint8)


class IndexReceiver(Receiver):
    def check_state_indices(self) -> None:
        """Index pages of the delta: those of the prefix are others'. None of an empty delta."""
        assert self.state_indices == (self.page_indices or None)


class IndexWorld(World):
    receiver = IndexReceiver

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tree.state = IndexPages(self.page_size)

    def make_pool(self, size: int, page_size: int) -> SmallPages:
        return SmallPages(size, page_size)

    def deliver_state(self, receiver, req) -> None:
        tokens = req.origin_input_ids
        for n, page in enumerate(receiver.state_indices):
            first = receiver.prefix_len + n * self.page_size
            for end in range(first, min(first + self.page_size, len(tokens))):
                self.kv.write_index(page * self.page_size + end - first, index_of(tokens[: end + 1], self.weights))

    def compute(self, slot: int, tokens: list[int], weights: int) -> None:
        super().compute(slot, tokens, weights)
        self.kv.write_index(slot, index_of(tokens, weights))

    def _check_kv(self, slots: list[int], tokens: list[int], weights: int) -> None:
        super()._check_kv(slots, tokens, weights)
        for n, slot in enumerate(slots):
            assert self.kv.index(slot).equal(index_of(tokens[: n + 1], weights)), (n, slot)


@pytest.mark.parametrize("page_size", [4, *(pytest.param(size, marks=pytest.mark.thorough) for size in (1, 16))])
def test_invariants_hold_in_every_life(page_size):
    """I1 to I4, with the index key of every token of every request and of the tree by content."""
    test_life_of_a_request.test_invariants_hold_in_every_life(page_size, world_type=IndexWorld)


def engines_pool(layers: int = 2) -> NSATokenToKVPool:
    pool = NSATokenToKVPool(256, 64, 16, torch.float32, 8, layers, "cpu", 128, False, 24)
    for n, buffer in enumerate((*pool.kv_buffer, *pool.index_k_with_scale_buffer)):
        raw = buffer.view(torch.uint8).flatten()
        raw[:] = (torch.arange(len(raw)) * (n + 3) + torch.arange(len(raw)) // 256).remainder(251).to(torch.uint8)
    return pool


@pytest.mark.parametrize("piece", [8, 100, 8192])
def test_a_copy_in_host_memory_brings_back_index_keys(piece):
    pool = engines_pool()
    pool.cpu_offloading_chunk_size = piece
    slots = torch.cat([torch.arange(64, 128), torch.arange(192, 230)])
    expected = [pool._read(buffer, slots) for buffer in pool.index_k_with_scale_buffer]
    latents = [buffer[slots].clone() for buffer in pool.kv_buffer]
    saved = pool.get_cpu_copy(slots)
    for buffer in (*pool.kv_buffer, *pool.index_k_with_scale_buffer):
        buffer.zero_()
    elsewhere = torch.arange(128, 230)
    pool.load_cpu_copy(saved, elsewhere)
    for buffer, one in zip(pool.index_k_with_scale_buffer, expected, strict=True):
        assert pool._read(buffer, elsewhere).equal(one)
        # By the engine's layout: page 2 has what was in page 1.
        assert (
            buffer[2].equal(engines_pool().index_k_with_scale_buffer[0][1])
            or buffer is not pool.index_k_with_scale_buffer[0]
        )
    for buffer, one in zip(pool.kv_buffer, latents, strict=True):
        assert buffer[elsewhere].equal(one)


def test_fp8_layout_is_copied_byte_for_byte():
    """With fp8 KV a slot has latents, scales and rotary part in ``kv_cache_dim`` bytes."""
    pool = NSATokenToKVPool(128, 64, 512, torch.float8_e4m3fn, 64, 1, "cpu", 128, False, 656)
    assert pool.kv_buffer[0].shape == (192, 1, 656) and pool.kv_buffer[0].dtype == torch.uint8
    pool.cpu_offloading_chunk_size = 64
    pool.kv_buffer[0][:] = torch.arange(192 * 656).remainder(251).to(torch.uint8).view(192, 1, 656)
    slots = torch.arange(64, 100)
    saved = pool.get_cpu_copy(slots)
    pool.load_cpu_copy(saved, slots + 64)
    assert pool.kv_buffer[0][slots + 64].equal(pool.kv_buffer[0][slots])


def nixl_world(monkeypatch, ours: list[int], theirs: list[int] | None) -> nixl.World:
    """Prefill has index pages ``ours`` of the prompt, and decode asks for ``theirs``."""
    world = nixl.World(monkeypatch, windows=(ours, theirs), state_type="nsa")
    for rank in world.decode:
        rank.manager.prefills.capabilities[nixl.ADDR] = Capabilities(version=1, others={"index_pages": 1})
    if not theirs:
        world.states = None
    return world


# Prompt and prefix in tokens: nothing held, a hit in part with a partly filled page, a full hit.
PROMPTS = [(26, 0), (26, 8), (24, 24)]


@pytest.mark.parametrize(("prompt_len", "prefix_len"), PROMPTS)
def test_nixl_sends_the_index_pages_of_the_delta(monkeypatch, prompt_len, prefix_len):
    num_pages, first = -(-prompt_len // nixl.PAGE), prefix_len // nixl.PAGE
    theirs = list(range(40, 40 + num_pages - first))
    world = nixl_world(monkeypatch, list(range(num_pages)), theirs or None)
    counted = world.prefill[0].manager.events = mooncake.Counters()
    request = world.request(7, prompt_len, prefix_len).bootstrap()
    request.send()
    request.wait_senders(KVPoll.Success)
    request.wait_receivers(KVPoll.Success)
    index = [t for t in world.wire.transfers if t.notification == b"7_state_0"]
    assert len(index) == bool(theirs)
    item = nixl.STATE_ITEM
    read = {int(at) + n for t in index for at, size, _ in t.sources for n in range(int(size))}
    written = {int(at) + n for t in index for at, size, _ in t.targets for n in range(int(size))}
    buffers = (4 << 20, 5 << 20)
    assert (
        read == {at + page * item + n for at in buffers for page in range(first, num_pages) for n in range(item)}
        or not theirs
    )
    assert written == {at + page * item + n for at in buffers for page in theirs for n in range(item)}
    assert counted.state_bytes == len(theirs) * 2 * item


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 2), (1, 2), (2, 1)])
@pytest.mark.parametrize(("prompt_len", "prefix_len"), PROMPTS)
def test_mooncake_sends_the_index_pages_of_the_delta(monkeypatch, prompt_len, prefix_len, prefill_tp, decode_tp):
    num_pages, first = -(-prompt_len // 4), prefix_len // 4
    theirs = list(range(num_pages - first))[::-1]
    world = mooncake.World(
        monkeypatch,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        mla=True,
        windows=(list(range(num_pages)), theirs),
        state_type="nsa",
    )
    for rank in world.prefill:
        for pool in rank.states:
            pool[:] = np.arange(1, pool.size + 1).reshape(pool.shape) % 251
    if not theirs:
        world.states = None
    request = world.request(7, prompt_len, prefix_len).bootstrap()
    request.send()
    request.finish()
    for rank in world.decode:
        for sent, ours in zip(world.prefill[0].states, rank.states, strict=True):
            expected = np.zeros_like(ours)
            expected[theirs] = sent[first:num_pages]
            assert (ours == expected).all()
    world.close()


def test_more_index_pages_than_the_prompt_has_are_refused(monkeypatch):
    world = nixl_world(monkeypatch, [0, 1], [40, 41, 42])
    request = world.request(7).bootstrap()
    request.send()
    request.assert_fails("transfer over NIXL failed")


def test_without_this_extra_prefill_refuses_them_with_a_reason(monkeypatch):
    core = [one for one in common.CommonKVManager.__mro__ if "unfit" in vars(one)][-1]
    world = nixl_world(monkeypatch, [0], [40])
    monkeypatch.setattr(common.CommonKVManager, "unfit", core.unfit)
    request = world.request(7).start_prefill().start_decode().ask()
    request.assert_fails("keeps more than KV")


def test_a_prefill_of_an_earlier_release_is_asked_for_the_whole_prompt(monkeypatch):
    """It would send all index pages, also where decode asks for those of the delta."""
    world = nixl_world(monkeypatch, [0], [40])
    manager = world.decode[0].manager
    receiver = nixl.NixlKVReceiver(manager, nixl.ADDR, 7)
    assert receiver.peer_takes_prefix
    manager.prefills.capabilities[nixl.ADDR] = Capabilities(version=1)
    assert not receiver.peer_takes_prefix
    manager.kv_args.state_type = "none"
    assert receiver.peer_takes_prefix


def test_without_the_flag_mooncake_cuts_nothing(monkeypatch):
    """As in the engine, decode that asks for fewer pages than the prompt has gets no success."""
    world = mooncake.World(monkeypatch, mla=True, windows=(list(range(7)), [2, 3, 4, 5, 6]), state_type="nsa")
    sent = []
    engines = engine_class(mooncake.MooncakeKVManager)
    monkeypatch.setattr(
        engines, "maybe_send_extra", lambda manager, req, pages, *args, **kwargs: sent.append(pages) or 0
    )
    request = world.request(7, 28, None).bootstrap()
    request.send()
    mooncake.until(lambda: sent, "index pages are sent")
    assert list(sent[0]) == list(range(7))
    world.close()
