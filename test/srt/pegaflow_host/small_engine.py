"""A radix cache with a KV pool and nothing else of an engine, on a real PegaFlow server.

The KV of a token is a number that depends on all tokens up to it, so a slot that holds anything else is seen at once.
"""

from __future__ import annotations

import itertools
import os
import pickle
import time
import zlib

import shared_kv
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pegaflow import memory as pegaflow_memory
from sglang.srt.mem_cache.pegaflow import session as pegaflow_session
from sglang.srt.mem_cache.pegaflow.memory import kv_layout
from sglang.srt.mem_cache.pegaflow.tree import PegaFlowRadixCache
from sglang.srt.mem_cache.radix_cache import RadixKey

pegaflow_memory.wrapper_bytes = lambda tensor: pickle.dumps(shared_kv.SharedTensor(tensor))

LAYERS = 2
_numbers = itertools.count()


def kv_of(token_ids: list[int], weights: int = 0) -> int:
    """What a model with these weights would put into the slot of the last of these tokens; exact in float32."""
    return zlib.crc32(repr(token_ids).encode(), weights) & 0xFFFFFF


def record_saves(session) -> list:
    """The list of all saves that are handed to ``session`` from now on."""
    saves, hand_over = [], session.save

    def save(one) -> None:
        saves.append(one)
        hand_over(one)

    session.save = save
    return saves


def wait_until_found(session, saves: list) -> None:
    """Until the server has what it said it had copied in its index too, which is soon after. Empties ``saves``."""
    end = time.monotonic() + 10
    for save in saves if session.up else []:
        while save.saved:
            question = f"settle-{next(_numbers)}"
            reply = session.connection.client.query_prefetch(session.connection.instance_id, save.hashes, question)
            if reply.lease:
                session.connection.client.release(reply.lease)
            if reply.num_hit_blocks == len(save.hashes):
                break
            assert time.monotonic() < end, "saved, and not found"
            time.sleep(0.002)
    saves.clear()


class NoRoom(Exception):
    """The pool is held by what is being saved or loaded: the request would not be admitted now."""


class SmallEngine:
    """``size`` in tokens. Two of one ``namespace`` share what the server has."""

    def __init__(self, server, size=1024, page=16, mla=False, namespace="test", tree_type=PegaFlowRadixCache, rank=0):
        self.server, self.size, self.page, self.weights = server, size, page, rank
        if mla:
            self.kv = MLATokenToKVPool(size, page, torch.float32, 4, 4, LAYERS, "cpu", False)
            self.kv.kv_buffer = [shared_kv.share(b.shape, b.dtype) for b in self.kv.kv_buffer]
            self.buffers = self.kv.kv_buffer
        else:
            self.kv = MHATokenToKVPool(size, page, torch.float32, 1, 4, LAYERS, "cpu", False)
            self.kv.k_buffer = [shared_kv.share(b.shape, b.dtype) for b in self.kv.k_buffer]
            self.kv.v_buffer = [shared_kv.share(b.shape, b.dtype) for b in self.kv.v_buffer]
            self.buffers = [*self.kv.k_buffer, *self.kv.v_buffer]
        if page == 1:
            self.allocator = TokenToKVPoolAllocator(size, torch.float32, "cpu", self.kv, False)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(size, page, torch.float32, "cpu", self.kv, False)
        params = CacheInitParams(
            disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=self.allocator, page_size=page
        )
        self.tree = tree_type(params)
        self.namespace = namespace
        self.session = self.connect()
        self.saves = record_saves(self.session)
        self.tree.attach(self.session)

    def connect(self):
        layout = kv_layout(self.kv, self.page)
        instance = f"small-{os.getpid()}-{next(_numbers)}"
        return pegaflow_session.PegaFlowSession(self.server.endpoint, instance, self.namespace, layout)

    def settle(self) -> None:
        """Wait until nothing is under way, and what was saved can be found."""
        assert self.tree.drain()
        wait_until_found(self.session, self.saves)

    def close(self):
        assert self.tree.drain()
        self.session.close()

    # ---- a request, in its steps ----

    def ask(self, rid: str, tokens: list[int], extra_key: str | None = None) -> None:
        self.tree.prefetch(rid, tokens[:-1], extra_key)

    def wait(self, rid: str, seconds: float = 10) -> int:
        """Step until ``rid`` waits for nothing; the tokens that were loaded for it."""
        end = time.monotonic() + seconds
        while True:
            self.tree.advance()
            if self.tree.check_prefetch_progress(rid):
                return self.tree.pop_prefetch_loaded_tokens(rid)
            assert time.monotonic() < end, "still loading"
            time.sleep(0.001)

    def run(self, tokens: list[int], extra_key: str | None = None) -> int:
        """Compute what the tree lacks of ``tokens``, checking what it has; how many it had."""
        tree, page = self.tree, self.page
        found = tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens[:-1], extra_key)))
        tree.inc_lock_ref(found.last_device_node)
        slots, held = found.device_indices, len(found.device_indices)
        self.check(tokens[:held], slots)
        need = -(-(len(tokens) - held) // page) * page
        short = need - self.allocator.available_size()
        if short > 0:
            tree.evict(EvictParams(num_tokens=short))
        new = self.allocator.alloc(need)
        if new is None:
            tree.dec_lock_ref(found.last_device_node)
            raise NoRoom
        for i in range(held, len(tokens)):
            for k, buffer in enumerate(self.buffers):
                buffer[new[i - held]] = kv_of(tokens[: i + 1], self.weights + k)
        whole = len(tokens) // page * page
        slots = torch.cat([slots, new])
        result = tree.insert(InsertParams(key=RadixKey(tokens[:whole], extra_key), value=slots[:whole].clone()))
        self.allocator.free(slots[held : result.prefix_len])
        self.allocator.free(slots[whole:])
        tree.dec_lock_ref(found.last_device_node)
        return held

    def check(self, tokens: list[int], slots: torch.Tensor) -> None:
        for i, slot in enumerate(slots.tolist()):
            for k, buffer in enumerate(self.buffers):
                wanted = kv_of(tokens[: i + 1], self.weights + k)
                assert (buffer[slot] == wanted).all(), f"token {i}, buffer {k}: {buffer[slot]}, not {wanted}"

    def serve(self, tokens: list[int], extra_key: str | None = None) -> tuple[int, int]:
        """A whole request: tokens loaded for it, and tokens that its match found."""
        rid = f"r{next(_numbers)}"
        self.ask(rid, tokens, extra_key)
        loaded = self.wait(rid)
        return loaded, self.run(tokens, extra_key)

    # ---- looking inside ----

    def flush(self) -> None:
        """Empty the device: the tree and all KV."""
        self.settle()
        self.tree.reset()
        self.allocator.clear()
        for buffer in self.buffers:
            buffer.fill_(-1)

    def audit(self) -> None:
        """At rest: every slot is free or in the tree once, nothing is locked, and the tree's counts are right."""
        tree = self.tree
        assert tree.drain()
        total = self.allocator.available_size() + tree.evictable_size() + tree.protected_size()
        assert total == self.size, (self.allocator.available_size(), tree.evictable_size(), tree.protected_size())
        assert tree.protected_size() == 0
        leaves, tokens, stack = set(), 0, list(tree.root_node.children.values())
        while stack:
            node = stack.pop()
            assert node.lock_ref == 0 and len(node.key) == len(node.value) == len(node.page_names) * self.page
            tokens += len(node.key)
            stack.extend(node.children.values())
            if not node.children:
                leaves.add(node)
        assert leaves == tree.evictable_leaves
        assert tokens == tree.evictable_size()
        # Everything can be evicted.
        tree.evict(EvictParams(num_tokens=self.size))
        assert self.allocator.available_size() == self.size and not tree.root_node.children
