"""A decode worker without a server, driven step by step.

Stand-ins are only what lies outside the worker: the network (`Receiver`) and the model (a token's KV is a number that
depends on all tokens up to it, so a slot that holds another prefix's KV is seen at once).
"""

from __future__ import annotations

import itertools
import time
import zlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from decode_worker import DecodeWorker, make_window_pool
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode import DecodeRequest
from sglang.srt.disaggregation.decode_radix.prefix import check_decode_prefix, pages
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, DisaggregationMode
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import evict_from_tree_cache, release_kv_cache
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams

try:
    from sglang.srt.managers.kv_pool_state import Pools
except ImportError:
    # The extra pool_state is not loaded, and trees have no audit.
    Pools = None


def kv_of(token_ids: list[int], weights: int) -> int:
    """What a model with these weights would put into the slot of the last of these tokens; exact in float32."""
    return zlib.crc32(bytes(token_ids), weights) & 0xFFFFFF


class Receiver:
    """The wire as the decode worker sees it: states that a test sets, and what was asked of prefill."""

    carries_prefix = True
    require_staging = False
    metadata_room = None
    fenced = False

    def __init__(self, world: World, req: Req, peer_takes_prefix: bool = True, prefill: str = "10.0.0.1:1"):
        self.world, self.req = world, req
        self.made_at = time.monotonic()
        self.bootstrap_addr = prefill
        self.peer_takes_prefix = peer_takes_prefix
        self.state = KVPoll.Bootstrapping
        self.asked = False
        # Whether the remote writers of a failed request have said that they are done.
        self.quiet = False
        self.prefix_len = 0
        self.page_indices: list[int] = []
        self.sent_pages = 0
        # What the engine calls the state is to be written to: a slot, or the pages of the window.
        self.state_indices: list[int] | None = None

    def poll(self) -> int:
        return self.state

    def send_metadata(self, page_indices, aux_index, state_indices, decode_prefix_len=None) -> None:
        assert not self.asked, "asked twice"
        assert (decode_prefix_len is not None) == self.peer_takes_prefix
        self.asked = True
        self.prefix_len = decode_prefix_len or 0
        self.page_indices = page_indices.tolist()
        self.aux_index = aux_index
        self.state_indices = None if state_indices is None else [int(slot) for slot in state_indices]
        self.check_state_indices()
        # I4, as prefill checks it.
        check_decode_prefix(
            self.prefix_len, len(self.page_indices), len(self.req.origin_input_ids), self.world.page_size
        )

    def check_state_indices(self) -> None:
        # On a full hit as well.
        world = self.world
        assert (self.state_indices is not None) == (world.states is not None or world.windows is not None)
        if world.windows is not None:
            # As many as prefill will send.
            num_tokens = len(self.req.origin_input_ids)
            assert len(self.state_indices) == pages(num_tokens - world.window_start(num_tokens), world.page_size)

    def failure_exception(self) -> None:
        raise RuntimeError("failed by the test")

    def abort(self) -> None:
        self.state = KVPoll.Failed

    def cancel(self) -> None:
        self.state = KVPoll.Failed

    @property
    def kv_mgr(self) -> SimpleNamespace:
        # For extras: all drop what decode computes.
        can = SimpleNamespace()
        return SimpleNamespace(prefills=SimpleNamespace(of=lambda addr: can), drops=lambda addr: True)

    @property
    def conclude_state(self) -> KVPoll | None:
        return self.state if self.state in (KVPoll.Failed, KVPoll.Success) else None

    @conclude_state.setter
    def conclude_state(self, state: KVPoll) -> None:
        self.state = state

    def end(self) -> None:
        assert not self.asked

    def writers_done(self) -> bool:
        return self.quiet

    def clear(self) -> None:
        pass


def end_patience(entry: Any) -> None:
    """It has waited for long enough for the transfer of another, where requests do."""
    if hasattr(entry, "due"):
        entry.since -= 1000
        entry.due -= 1000


class World(DecodeWorker):
    """One decode rank. ``size`` and ``watermark`` (None: the default part of the pool) in tokens.

    host: what makes a tree with a tier, and checks it; see `host_world.HostSizes`.
    """

    receiver: type[Receiver] = Receiver

    def __init__(
        self,
        size: int = 64,
        page_size: int = 4,
        reserved: int = 2,
        max_reqs: int = 8,
        group=None,
        watermark: int | None = 0,
        options: dict | None = None,
        tree_type: type[BasePrefixCache] = DecodeRadixCache,
        states: int | None = None,
        windows: tuple[int, int] | None = None,
        host: Any = None,
    ):
        self.states, self.windows, self.tier, self.host = states, windows, None, host
        if host is not None:
            tree_type = partial(self._hosted, host)
        pool: MHATokenToKVPool | HybridLinearKVPool | SWAKVPool
        if windows is not None:
            pool = make_window_pool(size, windows[1], page_size)
            self.kv, self.window_kv = pool.full_kv_pool, pool.swa_kv_pool
            self.window_kv.cpu_offloading_chunk_size = 8
        elif states is None:
            self.kv = pool = self.make_pool(size, page_size)
        else:
            pool = HybridLinearKVPool(size, torch.float32, page_size, 1, 1, [0], False, "cpu", mamba_pool=None)
            self.kv = pool.full_kv_pool
        self.kv.cpu_offloading_chunk_size = 8
        super().__init__(
            size,
            page_size,
            max_reqs=max_reqs,
            max_len=4 * size,
            reserved=reserved,
            watermark=watermark,
            kv=pool,
            group=group,
            options=options,
            tree_type=tree_type,
            states=states,
            windows=windows,
        )
        self._ids = itertools.count(1)
        # Whether followers were not looked at in the last step, and nothing shows that any more.
        self.looks_later = False
        # Advanced by every flush, as by a weight update; and the weights that each request's KV was made with.
        self.weights = 1
        self.weights_of: dict[str, int] = {}

    def make_pool(self, size: int, page_size: int) -> MHATokenToKVPool:
        """Of a model with full attention."""
        return MHATokenToKVPool(size, page_size, torch.float32, 1, 1, 1, "cpu", False)

    def _hosted(self, sizes: Any, params: CacheInitParams) -> DecodeRadixCache:
        """A tree with a tier; see `host_world.HostSizes`."""
        return sizes.tree(self, params)

    def draft_pools(self, sizes: Any, page_size: int) -> list:
        """More pools of KV at the same slots, each with one in host memory."""
        return []

    # ---- what happens to requests ----

    def arrive(
        self,
        prompt: list[int],
        extra_key=None,
        max_new: int = 4,
        warmup: bool = False,
        peer_takes_prefix: bool = True,
        prefill: str = "10.0.0.1:1",
        priority: int | None = None,
    ) -> DecodeRequest:
        n = next(self._ids)
        req = Req(
            f"r{n}",
            "",
            list(prompt),
            SamplingParams(max_new_tokens=max_new),
            extra_key=extra_key,
            bootstrap_host=FAKE_BOOTSTRAP_HOST if warmup else "10.0.0.1",
            bootstrap_port=1,
            bootstrap_room=n,
            disagg_mode=DisaggregationMode.DECODE,
            priority=priority,
        )
        decode_req = DecodeRequest(req, self.receiver(self, req, peer_takes_prefix and not warmup, prefill))
        self.queue.queue.append(decode_req)
        if self.queue.has_radix:
            self.queue._register(decode_req)
        return decode_req

    def handshake(self, decode_req: DecodeRequest) -> None:
        decode_req.kv_receiver.state = KVPoll.WaitingForInput

    def step(self) -> list[Req]:
        """One pass of the scheduler's ``process_decode_queue``, and the prebuilt batch. Returns what got ready."""
        self.waiting.extend(self.queue.resume_retracted_reqs())
        if not self.queue.retracted_queue:
            admitted, _ = self.queue.pop_preallocated()
            self.transfer.extend(admitted)
        self.waiting.extend(self.transfer.pop_transferred())
        ready, self.scheduler.waiting_queue = self.waiting, []
        for req in ready:
            req.init_next_round_input(self.tree)
            self.tree.cache_unfinished_req(req)
        self.running.extend(ready)
        return ready

    def deliver(self, decode_req: DecodeRequest, num_pages: int) -> None:
        """The remote writer fills the next pages of the delta."""
        receiver, req = decode_req.kv_receiver, decode_req.req
        for page in receiver.page_indices[receiver.sent_pages : receiver.sent_pages + num_pages]:
            start = receiver.prefix_len + receiver.sent_pages * self.page_size
            for offset in range(min(self.page_size, len(req.origin_input_ids) - start)):
                token_ids = req.origin_input_ids[: start + offset + 1]
                self.kv.k_buffer[0][page * self.page_size + offset] = kv_of(token_ids, self.weights)
            receiver.sent_pages += 1
        if receiver.state_indices is None or receiver.sent_pages < len(receiver.page_indices):
            return
        self.deliver_state(receiver, req)

    def deliver_state(self, receiver: Receiver, req: Req) -> None:
        """The remote writer fills what the request has beside KV."""
        if self.windows is not None:
            self._deliver_window(receiver.state_indices, req.origin_input_ids)
        else:
            self.state(receiver.state_indices[0]).fill_(kv_of(req.origin_input_ids, self.weights))

    def window_start(self, num_tokens: int) -> int:
        """Where the window behind so many tokens begins, whole pages."""
        return max(0, num_tokens - self.windows[0]) // self.page_size * self.page_size

    def _deliver_window(self, page_indices: list[int], token_ids: list[int]) -> None:
        start = self.window_start(len(token_ids))
        for n, page in enumerate(page_indices):
            for offset in range(min(self.page_size, len(token_ids) - start - n * self.page_size)):
                tokens = token_ids[: start + n * self.page_size + offset + 1]
                self.window_kv.k_buffer[0][page * self.page_size + offset] = kv_of(tokens, self.weights)

    def window_slots(self, req: Req) -> torch.Tensor:
        """A request's slots of the full pool from where it has a window."""
        return self.pool.req_to_token[req.req_pool_idx, req.swa_evicted_seqlen : req.kv_allocated_len].long()

    def check_window(self, req: Req, tokens: list[int]) -> None:
        """What the next step attends to is there."""
        if self.windows is not None:
            start = self.window_start(len(tokens))
            assert start >= req.swa_evicted_seqlen
            table = self.pool.req_to_token[req.req_pool_idx, start : len(tokens)].long()
            got = self.window_kv.k_buffer[0][self.tree.windows.of(table)].flatten().int().tolist()
            assert got == [kv_of(tokens[: i + 1], self.weights_of[req.rid]) for i in range(start, len(tokens))]

    def state(self, slot: int) -> torch.Tensor:
        """What is in a state slot. A model with states has in it a number that depends on all tokens so far."""
        return self.pool.mamba_pool.mamba_cache.temporal[0, slot]

    def check_state(self, req: Req, tokens: list[int]) -> None:
        if self.states is not None:
            assert self.state(req.mamba_pool_idx).item() == kv_of(tokens, self.weights_of[req.rid]), req.rid

    def complete(self, decode_req: DecodeRequest, first_token: int = 7) -> None:
        """All KV and the metadata have arrived."""
        receiver = decode_req.kv_receiver
        self.weights_of[decode_req.req.rid] = self.weights
        self.deliver(decode_req, len(receiver.page_indices))
        self.meta.output_ids[receiver.aux_index, 0] = first_token
        self.meta.bootstrap_room[receiver.aux_index, 0] = decode_req.req.bootstrap_room
        receiver.state = KVPoll.Success

    def decode(self, token: int = 5) -> None:
        """One decode step of all running requests, retracting from the back when memory runs out."""
        while True:
            need = sum(
                self.page_size for r in self.running if self.page_size == 1 or r.kv_allocated_len % self.page_size == 0
            )
            evict_from_tree_cache(self.tree, need)
            if self.allocator.available_size() < need and self.windows is not None:
                self.scheduler.running_batch.free_behind_windows()
            if self.allocator.available_size() >= need or not self.running:
                break
            self.retract(self.running[-1])
        if self.windows is not None:
            self.scheduler.running_batch.forward_mode = ForwardMode.DECODE
            self.scheduler.running_batch.maybe_evict_swa()
        for req in list(self.running):
            n = req.kv_committed_len
            req.decode_batch_idx += 1
            table = self.pool.req_to_token[req.req_pool_idx]
            if self.page_size == 1 or n % self.page_size == 0:
                slot = self._new_page(int(table[n - 1]), n)
            else:
                slot = int(table[n - 1]) + 1
                if self.windows is not None:
                    mapping = self.allocator.full_to_swa_index_mapping
                    mapping[slot] = mapping[slot - 1] + 1
            table[n] = slot
            tokens = req.origin_input_ids + req.output_ids
            self.compute(slot, tokens[: n + 1], self.weights_of[req.rid])
            if self.windows is not None:
                self.check_window(req, tokens[:n])
                at = self.allocator.full_to_swa_index_mapping[slot]
                self.window_kv.k_buffer[0][at] = kv_of(tokens[: n + 1], self.weights_of[req.rid])
            if self.states is not None:
                self.check_state(req, tokens[:n])
                self.state(req.mamba_pool_idx).fill_(kv_of(tokens[: n + 1], self.weights_of[req.rid]))
            req.kv_committed_len = req.kv_allocated_len = n + 1
            req.output_ids.append(token)
            if len(req.output_ids) >= req.sampling_params.max_new_tokens:
                self.finish(req)

    def compute(self, slot: int, tokens: list[int], weights: int) -> None:
        """The step writes the KV of the last of ``tokens``."""
        self.kv.k_buffer[0][slot] = kv_of(tokens, weights)

    def _new_page(self, last: int, length: int) -> int:
        """The first slot of a page for the token behind ``length`` others."""
        if self.windows is None or self.page_size == 1:
            return int(self.allocator.alloc(self.page_size)[0])
        seq_lens = torch.tensor([length + 1])
        return int(self.allocator.alloc_decode(seq_lens, seq_lens, torch.tensor([last]))[0])

    def finish(self, req: Req) -> None:
        self.running.remove(req)
        release_kv_cache(req, self.tree)

    def retract(self, req: Req) -> None:
        self.running.remove(req)
        req.offload_kv_cache(self.pool, self.allocator)
        release_kv_cache(req, self.tree, is_insert=False)
        req.reset_for_retract()
        self.queue.add(req, is_retracted=True)

    def abort_waiting(self, req: Req) -> None:
        self.waiting.remove(req)
        release_kv_cache(req, self.tree)

    def abort_retracted(self, req: Req) -> None:
        self.queue.retracted_queue.remove(req)
        del req.kv_cache_cpu
        req.window_cpu = None

    def idle(self) -> bool:
        moving = self.queue.queue or self.transfer.queue or self.transfer.quarantine
        local = self.elsewhere() or self.taken()
        saving = self.tier is not None and self.tier.saves.busy
        return not (moving or local or saving or self.waiting or self.running)

    def flush(self) -> bool:
        """As the scheduler flushes after a weight update: only when no request holds KV in the pool."""
        if self.queue.queue or self.transfer.queue or self.waiting or self.running:
            return False
        if self.transfer.quarantine:
            self.tree.empty([dr.req for dr in self.transfer.quarantine])
        else:
            self.tree.reset()
            self.pool.clear()
            self.allocator.clear()
        self.weights += 1
        return True

    def elsewhere(self) -> list[Req]:
        """The requests in queues of extras."""
        return [req for reqs in self.transfer.hooks.reqs for req in reqs()]

    def taken(self) -> list[DecodeRequest]:
        """Those whose delta is to come from another source than prefill."""
        return [decode_req for source in self.transfer.hooks.source for decode_req in source().taken()]

    # ---- invariants ----

    def check(self) -> None:
        moving = self.transfer.queue + self.transfer.quarantine
        local = self.elsewhere()
        # But for those that an error has kept from getting anything.
        holders = [dr.req for dr in moving if dr.req.req_pool_idx is not None] + self.waiting + self.running
        holders += [req for req in local if all(req is not other for other in holders) and not req.finished()]
        # I1: every token is somewhere, once; every lock has its holder.
        saving = list(self.tree.tier.nodes_in_use())
        nodes = [r.last_node for r in holders] + saving
        if self.windows is None:
            wrong = self.tree.audit(nodes)
        else:
            # Every window is a request's, and every slot of that pool is somewhere, once.
            wrong = self.tree.audit(nodes, [self.window_slots(r) for r in holders])
        assert not wrong, wrong
        page = self.page_size
        private = sum(pages(r.kv_allocated_len, page) * page - r.cache_protected_len for r in holders)
        tree = self.tree.evictable_size() + self.tree.protected_size()
        pool = self.tree.pool
        assert pool.available_size() + tree + private == self.size
        assert self.tree.locks_taken - self.tree.locks_released == len(holders) + len(saving)
        assert len(self.pool.free_slots) == self.pool.size + self.pool.pre_alloc_size - len(holders)
        # I2: a page that may be written from outside is nobody else's.
        free = set(torch.cat([pool.free_pages, pool.release_pages]).tolist())
        in_tree = {slot // self.page_size for slot in self._tree_slots()}
        written: set[int] = set()
        for decode_req in moving:
            mine = set(getattr(decode_req.kv_receiver, "page_indices", ()))
            assert not mine & (free | in_tree | written)
            written |= mine
        if self.states is not None:
            # Every state slot is free or a request's, and what is not in the pool is in nobody's tree.
            slots = self.pool.mamba_pool.free_slots.tolist() + [int(r.mamba_pool_idx) for r in holders]
            assert sorted(slots) == list(range(1, self.pool.mamba_pool.size + 1))
            for req in holders:
                assert self.pool.req_index_to_mamba_index_mapping[req.req_pool_idx] == req.mamba_pool_idx
        self._check_entries()
        # No reader sees KV of another prefix, in requests that run or in the tree.
        for req in self.waiting + self.running:
            tokens = (req.origin_input_ids + req.output_ids)[: req.kv_committed_len]
            slots = self.pool.req_to_token[req.req_pool_idx, : len(tokens)].tolist()
            self._check_kv(slots, tokens, self.weights_of[req.rid])
            self.check_state(req, tokens)
            self.check_window(req, tokens)
        for tokens, slots in self._tree_paths(self.tree):
            self._check_kv(slots, tokens, self.weights)
        if Pools is not None and not holders and self.idle() and not self.tree.tier.busy:
            # As the worker itself looks at it.
            assert Pools(self.tree, self.allocator, self.pool, self.size).audit() == []
        if self.tier is not None:
            # One that is computed here is in both while it waits for its copy.
            self.host.check(
                self, list({id(decode_req): decode_req for decode_req in (*moving, *self.taken())}.values())
            )

    def _check_entries(self) -> None:
        """What is known of each prompt that waits, or is waited for, is what the tree would say now."""
        computed = self.taken()
        entries = [dr.entry for dr in (*self.queue.queue, *self.transfer.queue, *computed)]
        for entry in entries:
            if entry.keys is not None:
                found = self.tree.peek(entry.keys, entry.extra_key)
                # Its own, where a test has broken that of one policy.
                assert type(self.queue.policy).find(self.queue.policy, entry) == found
        if not hasattr(self.queue.policy, "watches"):
            return
        watches = [entry.watch for entry in entries if entry.watch is not None]
        assert set(watches) == set(self.tree.watches)
        for watch in watches:
            found = watch.peek()
            assert watch.length == found.length
            assert watch.node is (found.path[-1] if found.path else self.tree.root_node)
        # Nobody waits for a transfer that has ended, as far as they are looked at: while a retracted request waits for
        # memory, or the next one for time or a row, that is not in each step.
        transfers = {dr.entry for dr in (*self.transfer.queue, *computed)}
        held = self.queue.admission.refused is not None and self.queue.admission.blocked is None
        looked_at = not self.queue.retracted_queue and not self.looks_later and not held
        assert not looked_at or all(
            # One that is computed here leaves when its step is launched, after they were looked at.
            entry.leader is None or not entry.coming or entry.leader.owner in transfers or entry.leader.owner.local
            for entry in entries
        )

    def _check_kv(self, slots: list[int], tokens: list[int], weights: int) -> None:
        got = self.kv.k_buffer[0][slots].flatten().int().tolist()
        assert got == [kv_of(tokens[: i + 1], weights) for i in range(len(tokens))]

    def _tree_slots(self) -> list[int]:
        return [slot for node in self._nodes() for slot in node.value.tolist()]

    def _nodes(self):
        stack = list(self.tree.root_node.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _tree_paths(self, tree):
        stack = [(node, [], []) for node in tree.root_node.children.values()]
        while stack:
            node, tokens, slots = stack.pop()
            tokens, slots = tokens + list(node.key.token_ids), slots + node.value.tolist()
            yield tokens, slots
            stack.extend((child, tokens, slots) for child in node.children.values())


def queue(world: World, *prompts: list[int], **options: Any) -> list[DecodeRequest]:
    """Requests that have shaken hands and wait for a step."""
    arrived = [world.arrive(prompt, **options) for prompt in prompts]
    for decode_req in arrived:
        world.handshake(decode_req)
        # The engine drops it at commit.
        decode_req.wire = decode_req.kv_receiver
    return arrived


def asked(requests: list[DecodeRequest]) -> list[bool]:
    return [decode_req.wire.asked for decode_req in requests]


def sent(requests: list[DecodeRequest]) -> int:
    """Pages asked of prefill."""
    return sum(len(decode_req.wire.page_indices) for decode_req in requests)


def aborted(req: Req) -> bool:
    return isinstance(req.finished_reason, FINISH_ABORT)


def tokens(start: int, n: int) -> list[int]:
    """A prompt that shares no prefix with one of another ``start``; a token fits a byte, for `kv_of`."""
    return [1 + (start * 31 + i * 7) % 250 for i in range(n)]


def serve(world: World, prompt: list[int], **options: Any) -> DecodeRequest:
    """Bring a request to where it runs."""
    decode_req = world.arrive(prompt, **options)
    world.handshake(decode_req)
    world.step()
    assert decode_req.kv_receiver.asked
    world.complete(decode_req)
    assert decode_req.req in world.step()
    world.check()
    return decode_req


def serve_to_end(world: World, prompt: list[int], **options: Any) -> Req:
    """A request from its arrival to its end; its prompt is in the tree then."""
    req = serve(world, prompt, **options).req
    world.finish(req)
    world.check()
    return req
