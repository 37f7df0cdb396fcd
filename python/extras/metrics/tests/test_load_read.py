"""What a scheduler says of its load with each output: counted, not timed. It looks at all that waits to say it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from decode_world import World
from sglang.srt.disaggregation.utils import DisaggregationMode, prepare_abort
from sglang.srt.managers.io_struct import GetLoadReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from test_traps import tokens


class Waiting(list):
    """Requests that say how often somebody has gone through all of them."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return super().__iter__()


def decode_scheduler(world: World, dp_size: int = 1) -> Any:
    """The real scheduler of a decode worker around ``world``; its messages go to ``sent``."""
    scheduler: Any = object.__new__(Scheduler)
    scheduler.spec_algorithm, scheduler.disaggregation_mode = SpeculativeAlgorithm.NONE, DisaggregationMode.DECODE
    scheduler.dp_rank, scheduler.attn_tp_rank, scheduler.stream_interval, scheduler.is_generation = None, 0, 1, True
    scheduler.refused_rooms, scheduler.enable_hisparse = (), False
    scheduler.is_hybrid_swa = scheduler.is_hybrid_ssm = False
    scheduler.server_args = SimpleNamespace(
        enable_request_time_stats_logging=False, enable_metrics=False, dp_size=dp_size
    )
    scheduler.max_total_num_tokens, scheduler.tree_cache = world.size, world.tree
    scheduler.token_to_kv_pool_allocator = world.allocator
    scheduler.waiting_queue, scheduler.running_batch = [], world.scheduler.running_batch
    scheduler.disagg_decode_prealloc_queue, scheduler.disagg_decode_transfer_queue = world.queue, world.transfer
    scheduler.sent = []
    scheduler.send_to_detokenizer = SimpleNamespace(send_output=lambda message, *_: scheduler.sent.append(message))
    return scheduler


@pytest.mark.parametrize("dp_size, flag", [(1, True), (2, True), (1, False)])
def test_an_output_looks_at_all_that_waits_only_where_its_load_is_read(dp_size, flag):
    """By a DP controller. Without the flag it is the engine's; and who asks for the load is always told."""
    one = World(size=256, page_size=4)
    reqs = [one.arrive(tokens(start, 8)) for start in (1, 20, 40)]
    scheduler = decode_scheduler(one, dp_size)
    one.queue.queue = Waiting(one.queue.queue)
    if not flag:
        scheduler.tree_cache = SimpleNamespace(evictable_size=lambda: 0, protected_size=lambda: 0)
    prepare_abort(reqs[0].req, "its prefill is gone")
    reqs[0].req.sampling_params.stop_strs = reqs[0].req.sampling_params.stop_regex_strs = []
    scheduler.stream_output([reqs[0].req], False)
    is_read = dp_size > 1 or not flag
    (message,) = scheduler.sent
    assert message.rids == [reqs[0].req.rid] and (one.queue.queue.passes > 0) == is_read
    assert (message.load is not None) == is_read and (not is_read or message.load.num_waiting_reqs == 3)
    assert scheduler.get_load(GetLoadReqInput()).num_waiting_reqs == 3
