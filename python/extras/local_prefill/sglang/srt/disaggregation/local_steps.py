"""Local prefill steps in the scheduler of a decode worker; see local_prefill.py.

Upstream: none is known.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.disaggregation.decode_radix.hooks import events_of
from sglang.srt.disaggregation.decode_radix.phase import Phase
from sglang.srt.disaggregation.local_policy import Policy
from sglang.srt.disaggregation.local_prefill import LocalHooks, LocalPrefills, Slice, needs_prefill
from sglang.srt.managers.schedule_batch import FINISH_ABORT, ScheduleBatch
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.observability.req_time_stats import set_schedule_time_batch, set_time_batch

__all__ = [
    "end_local_step",
    "make_local_prefills",
    "merge_computed",
    "next_local_batch",
]

logger = logging.getLogger(__name__)

FLAG = "--disaggregation-decode-local-prefill"


def make_local_prefills(queue: Any) -> LocalHooks | None:
    """Local prefills of this rank as the options request them; None if off or unsupported."""
    scheduler, tree, admission = queue.scheduler, queue.tree_cache, queue.policy
    policy = Policy.of(scheduler.server_args.disaggregation_decode_local_prefill)
    if policy is None:
        return None
    rows = scheduler.req_to_token_pool
    reason = needs_prefill(tree.state.word)
    if reason is not None:
        # auto is the default, so it is no warning there.
        level = logging.INFO if policy.paced else logging.WARNING
        logger.log(level, "%s has no effect on this worker: %s.", FLAG, reason)
        return None
    args = scheduler.server_args
    # The engine reserves activation memory for a chunk of a prompt on workers that compute prompts.
    most = args.chunked_prefill_size if args.chunked_prefill_size > 0 else args.max_prefill_tokens
    policy = policy.within(most, slices=not tree.is_eagle)
    logger.info("Local prefill: decode computes prompt remainders of up to %d tokens.", policy.most)
    events = events_of(scheduler.server_args)
    queue.local = LocalPrefills(tree, rows, admission, events, policy, scheduler.attn_tp_rank == 0)
    return LocalHooks(queue.local)


def next_local_batch(scheduler: Any, local: LocalPrefills | None) -> Any:
    """The next local prefill step; None if there is none or decoding requests come first.

    Called once per iteration of the event loop, on all ranks.
    """
    if local is None:
        return None
    batch = _local_batch(scheduler, local)
    if batch is None:
        # A decode step follows, if any request decodes.
        local.bucket.decoded(max(scheduler.running_batch.batch_size(), local.ranks.decoding))
    return batch


def _local_batch(scheduler: Any, local: LocalPrefills) -> Any:
    after_local = local.launched is not None
    end_aborted(scheduler, local)
    merge_computed(scheduler, local)
    running = scheduler.running_batch
    if running.is_empty():
        running.batch_is_full = False
    elif after_local:
        running.filter_batch(v1_spec_info_filtered=True)
    # Otherwise requests that decode, or could begin to, would be stalled as long as prompts arrive.
    decoding = who_wait(scheduler, local)
    # With joint DP steps, the other ranks' decoding requests are known only from steps without prompts.
    if (after_local and (decoding or local.ranks.together)) or not local.may_step(decoding):
        return None
    slices = begin(scheduler, local)
    if not slices:
        return None
    batch = launch(scheduler, local, slices)
    batch = scheduler.maybe_prepare_mlp_sync_batch(batch)
    set_schedule_time_batch(batch)
    return batch


class Aborted(FINISH_ABORT):
    """The end of a request that was aborted before its prompt was computed."""

    def to_json(self) -> dict[str, Any]:
        """Omits a null status, on which the engine's streamed chat fails: it looks up the status by name.

        The engine's aborts of queued requests have no status either.
        """
        return {name: value for name, value in super().to_json().items() if name != "status_code"}


def end_aborted(scheduler: Any, local: LocalPrefills) -> None:
    """Release requests that were aborted before they were computed completely."""
    for decode_req in local.take_aborted(scheduler.enable_overlap):
        req = decode_req.req
        req.finished_reason = req.to_finish if req.to_finish.status_code else Aborted(req.to_finish.message)
        decode_req.advance(Phase.RELEASED)
        release_kv_cache(req, scheduler.tree_cache, is_insert=False)
        scheduler.stream_output([req], req.return_logprob)


def merge_computed(scheduler: Any, local: LocalPrefills) -> None:
    """Move the requests of the last step to the running batch, as the engine's aggregated scheduler does."""
    computed = local.computed()
    if computed is None:
        return
    batch, unfinished = computed
    batch.filter_batch(chunked_req_to_exclude=unfinished)
    if batch.is_empty():
        return
    if scheduler.running_batch.is_empty():
        scheduler.running_batch = batch
    else:
        scheduler.running_batch.merge_batch(batch)


def end_local_step(scheduler: Any, local: LocalPrefills | None) -> None:
    """Process the step in flight, if there is one, and move its requests to the running batch."""
    if local is None or local.launched is None:
        return
    steps = getattr(scheduler, "result_queue", None)
    if steps:
        scheduler.process_batch_result(*steps.popleft())
    merge_computed(scheduler, local)
    scheduler.last_batch = scheduler.cur_batch = None


def who_wait(scheduler: Any, local: LocalPrefills) -> int:
    """Number of requests that decode, or could, during a prefill step; the maximum over this and other DP ranks."""
    return max(scheduler.running_batch.batch_size() + len(scheduler.waiting_queue), local.ranks.decoding)


def pick(scheduler: Any, local: LocalPrefills) -> list[Slice]:
    """Slices of the next step, within the time that decoding requests can wait."""
    running, rows = scheduler.running_batch, scheduler.req_to_token_pool
    tokens = local.most_tokens(who_wait(scheduler, local))
    places = min(rows.size, scheduler.max_running_requests) - running.batch_size()
    places = places_for_prompts(local, places, len(scheduler.waiting_queue))
    tests = [may_begin() for may_begin in scheduler.disagg_decode_transfer_queue.hooks.may_begin]
    return local.pick(tokens, places, lambda req: all(test(req) for test in tests))


def places_for_prompts(local: LocalPrefills, places: int, arrived: int) -> int:
    """Free req slots that prompts may take: at most half while more requests whose KV has arrived need them.

    A single one: every second time. Prompts see a freed slot first, so a steady stream of short turns would take all.
    """
    if not arrived or places <= 0 or places >= arrived + len(local.waiting):
        return places
    if places > 1:
        return places - places // 2
    local.stood_back = not local.stood_back
    return 0 if local.stood_back else 1


def begin(scheduler: Any, local: LocalPrefills) -> list[Slice]:
    """Begin the slices of the next step; empty if there is nothing to compute."""
    begun = {id(one) for one in local.waiting if one.begun}
    slices = local.begin(pick(scheduler, local))
    for began in scheduler.disagg_decode_transfer_queue.hooks.began:
        began(one.req for one, _ in slices if id(one) not in begun)
    return slices


def launch(scheduler: Any, local: LocalPrefills, slices: list[Slice]) -> Any:
    """The engine's batch that computes ``slices``, which were begun."""
    # Not at the top: circular import with the engine's scheduler.
    from sglang.srt.observability.scheduler_metrics_mixin import PrefillStats, QueueCount

    reqs = [one.req for one, _ in slices]
    set_time_batch(reqs, "set_forward_entry_time")
    batch = ScheduleBatch.init_new(
        reqs,
        scheduler.req_to_token_pool,
        scheduler.token_to_kv_pool_allocator,
        scheduler.tree_cache,
        scheduler.model_config,
        scheduler.enable_overlap,
        scheduler.spec_algorithm,
    )
    batch.has_slots = True
    cached_before = sum(req.cached_tokens for req in reqs)
    batch.prepare_for_extend()
    local.launch(batch, slices)
    batch.prefill_stats = PrefillStats(
        log_input_tokens=batch.extend_num_tokens,
        # Tokens before a later slice were counted before, as held or computed.
        log_hit_tokens=sum(req.cached_tokens for req in reqs) - cached_before,
        new_token_ratio=scheduler.new_token_ratio,
        num_running_reqs=QueueCount.from_reqs(scheduler.running_batch.reqs, scheduler.enable_priority_scheduling),
        num_new_seqs=len(reqs),
    )
    if getattr(scheduler, "future_map", None) is not None:
        ScheduleBatch.future_map = scheduler.future_map
    return batch
