"""TP ranks flush together or not at all.

One rank alone may be busy, as while it saves pages. If only some ranks flushed, their trees would
differ from those of the others.

Upstream: none is known.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.managers.io_struct import FlushCacheReqOutput

__all__ = ["begin_flush", "check_pending_flush"]


def begin_flush(scheduler: Any, recv_req: Any, flush: Callable[[Any], Any]) -> Any:
    """The answer to a flush request, which all ranks take in one step; None if it waits."""
    if recv_req.timeout_s and recv_req.timeout_s > 0:
        scheduler._pending_flush = recv_req, time.monotonic() + recv_req.timeout_s
        return None
    scheduler.end_step_of_none()
    (idle,) = _said_by_all(scheduler, scheduler.is_fully_idle())
    return flush(recv_req) if idle else FlushCacheReqOutput(success=False)


def check_pending_flush(scheduler: Any, check: Callable[[], None]) -> None:
    """Flush, or give up, on all ranks: by their own clocks, one might give up and another flush."""
    recv_req, deadline = scheduler._pending_flush
    idle, in_time = _said_by_all(scheduler, scheduler.is_fully_idle(), time.monotonic() < deadline)
    if idle:
        check()
    elif not in_time:
        scheduler._pending_flush = None
        answer = FlushCacheReqOutput(
            success=False, message="Requests were left until the time was up."
        )
        scheduler.send_to_tokenizer.send_output(answer, recv_req)


def _said_by_all(scheduler: Any, *said: bool) -> list[int]:
    """Per flag: 1 if it is true on all ranks, else 0."""
    state = torch.tensor([int(yes) for yes in said])
    dist.all_reduce(state, op=dist.ReduceOp.MIN, group=scheduler.attn_tp_cpu_group)
    return state.tolist()
