"""Scheduler of a prefill or decode worker: its tree, and flushes.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged); the limit on LoRA adapters #39332
(merged).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from sglang.srt.disaggregation.decode_radix.hooks import has_work, hooks_of
from sglang.srt.managers import scheduler as engine
from sglang.srt.managers.scheduler_abort_mixin import SchedulerAbortMixin
from sglang.srt.managers.scheduler_refusal_mixin import SchedulerRefusalMixin
from sglang.srt.mem_cache import cache_support, kv_cache_builder, state_kind
from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache
from sglang.srt.mem_cache.state_kind import StateKind

__all__ = ["Scheduler"]


class Scheduler(SchedulerAbortMixin, SchedulerRefusalMixin, engine.Scheduler):
    """Gives a decode worker its tree, tells whether it rests, and flushes around quarantine.

    What the engine has in its mixins is overridden in their modules.
    """

    # ---- the tree ----

    def init_cache_with_memory_pool(self) -> None:
        """Puts the decode tree in the place of the engine's radix cache when the flag asks for it."""
        args = self.server_args
        if not self.takes_decode_tree():
            super().init_cache_with_memory_pool()
            return
        kind = state_kind.kind_of(self.tp_worker.model_runner)
        if kind is not StateKind:
            cache_support.check(kind.support, args)
            # The engine is to build its tree for KV alone.
            self.tp_worker.get_memory_pool()[0].kv_alone = True
        # Of the tree that the engine would build: what an extra keeps of this one elsewhere is its own.
        self.enable_hierarchical_cache = self.enable_hicache_storage = False
        super().init_cache_with_memory_pool()
        self.tree_cache = kv_cache_builder.build(kind, self.tree_cache, self)

    def takes_decode_tree(self) -> bool:
        """Whether it does. An extra may say no, and put a tree of its own there."""
        return self.server_args.disaggregation_decode_enable_radix_cache

    def get_internal_state(self, recv_req):
        """Adds ``kv_pool``."""
        output = super().get_internal_state(recv_req)
        output.internal_state = {**output.internal_state, "kv_pool": self.kv_pool_state()}
        return output

    def kv_pool_state(self) -> dict[str, Any]:
        """What ``kv_pool`` says. Extras say more."""
        return {"idle": self.rests()}

    def rests(self) -> bool:
        """Whether the worker has no request, and nothing in quarantine."""
        return self.is_fully_idle() and not self.has_quarantine()

    def note_step(self, batch, result) -> None:
        """A step's result has been processed."""
        for note_step in hooks_of(self).note_step:
            note_step(batch, result)

    def kv_manager(self):
        """The transfer backend's manager, None without disaggregation."""
        name = {
            engine.DisaggregationMode.PREFILL: "disagg_prefill_bootstrap_queue",
            engine.DisaggregationMode.DECODE: "disagg_decode_prealloc_queue",
        }.get(self.disaggregation_mode)
        return getattr(self, name).kv_manager if name else None

    # ---- steps ----

    def process_batch_result(self, batch, result) -> None:
        """Adds that it is noted."""
        super().process_batch_result(batch, result)
        self.note_step(batch, result)

    def update_running_batch(self, batch):
        """Adds, on decode, that what cannot be taken back is processed before a request is retracted.

        What is saved of a request is the KV of the tokens whose results have been processed. A step in flight goes
        further. KV of those tokens is computed again after the resume; `is_final` says of what that is not enough.
        """
        steps = getattr(self, "result_queue", None)
        if (
            steps
            and self.disaggregation_mode == engine.DisaggregationMode.DECODE
            and self.is_final(steps[-1][0])
            and (engine.TEST_RETRACT or not batch.check_decode_mem())
        ):
            self._end_step()
        return super().update_running_batch(batch)

    def is_final(self, batch) -> bool:
        """Whether a step in flight cannot be taken back: a prompt that was computed here has no tokens before it."""
        return batch.has_slots

    def is_fully_idle(self, for_health_check=False) -> bool:
        """A worker that has a prompt to compute is not idle."""
        return super().is_fully_idle(for_health_check) and not has_work(self)

    def end_step_of_none(self) -> None:
        """Process the result of the step in flight if all of its requests have ended, as the loop is about to do.

        Of a decode worker with the flag.
        """
        steps = getattr(self, "result_queue", None) if isinstance(self.tree_cache, DecodeRadixCache) else None
        if steps and all(req.finished() for req in steps[-1][0].reqs):
            self._end_step()
            self.running_batch.filter_batch()

    def _end_step(self) -> None:
        """Process the result of the step in flight now; the loop then finds none."""
        self.process_batch_result(*self.result_queue.popleft())
        self.last_batch = self.cur_batch = None

    def process_input_requests(self, recv_reqs) -> None:
        """Adds `begin_turn`, once per turn of every event loop."""
        super().process_input_requests(recv_reqs)
        self.begin_turn(recv_reqs)

    def begin_turn(self, recv_reqs) -> None:
        """What a turn of the loop begins with, when its messages have been processed."""

    # ---- flushes ----

    def flush_cache(self) -> bool:
        """A flush leaves pages in quarantine where they are.

        It does not fail for a step in flight when the answers of all requests have been told: a weight update, which
        may come at once after the last of them, takes a refusal for an error that ends the scheduler.
        """
        self.end_step_of_none()
        flush = super().flush_cache
        if self.has_quarantine():
            flush = partial(self.disagg_decode_transfer_queue.flush_around_quarantine, flush)
        return flush()
