"""For a decode worker whose steps write their KV as late as a device may: when their end is waited for.

A CPU has no such freedom. So what a step has written is written once more then, and on top of it what the steps after
it have written; if a request of the step has ended meanwhile, a transfer gets the time to come in between.
With LATE_WRITES_FENCE=0 the worker does not know that there is a step in flight.
"""

import os
import time

import wrapt

TRANSFER_S = 1.0


class Step:
    def __init__(self, scheduler, batch, before):
        self.scheduler, self.reqs, self.loc = scheduler, list(batch.reqs), batch.out_cache_loc.clone()
        pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        self.written = [(buffer, buffer[self.loc].clone()) for buffer in (*pool.k_buffer, *pool.v_buffer)]
        self.over, self.next = False, None
        if before is not None:
            before.next = self

    def synchronize(self):
        if self.over:
            return
        if self.scheduler.disagg_decode_transfer_queue.queue and any(req.finished() for req in self.reqs):
            time.sleep(TRANSFER_S)
        step, self.over = self, True
        while step is not None:
            for buffer, values in step.written:
                buffer[step.loc] = values
            step = step.next


def _patch(module):
    run_batch = module.Scheduler.run_batch

    def late(scheduler, batch, *args):
        if os.environ.get("LATE_WRITES_FENCE") == "0":
            from sglang.srt.disaggregation.decode_radix import overlap_guard

            overlap_guard.make_guard = lambda *args: overlap_guard.OPEN
        result = run_batch(scheduler, batch, *args)
        if batch.forward_mode.is_decode():
            before = getattr(scheduler, "late_step_before", None)
            result.copy_done = scheduler.late_step_before = Step(scheduler, batch, before)
        return result

    module.Scheduler.run_batch = late


wrapt.register_post_import_hook(_patch, "sglang.srt.managers.scheduler")
