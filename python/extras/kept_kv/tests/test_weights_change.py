"""What is told of weights that are about to change."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from sglang.srt.managers.io_struct import (
    CheckWeightsReqInput,
    ReleaseMemoryOccupationReqInput,
)
from test_flush_together import Rank


@pytest.mark.parametrize(
    "message, changes",
    [
        *((ReleaseMemoryOccupationReqInput(tags), 1) for tags in (None, [], ["weights"], ["kv_cache", "weights"])),
        *((ReleaseMemoryOccupationReqInput(tags), 0) for tags in (["kv_cache"], ["cuda_graph"])),
        *((CheckWeightsReqInput(action), 0) for action in ("snapshot", "compare")),
        (CheckWeightsReqInput("reset_tensors"), 1),
    ],
    ids=lambda value: str(getattr(value, "action", getattr(value, "tags", value))),
)
def test_what_may_change_the_weights(message, changes, monkeypatch):
    """Memory that is given back with them, and an action of /weights_checker that overwrites them."""
    scheduler, done = Rank(), []
    scheduler.tp_size = 1
    monkeypatch.setattr(dist, "barrier", lambda group: None)

    def check_weights(action: str) -> None:
        done.append((action, scheduler.changes))

    scheduler.tp_worker.model_runner = SimpleNamespace(model=torch.nn.Module(), check_weights=check_weights)
    scheduler.before_weight_update = lambda: done.append(("left", scheduler.changes + 1))
    scheduler.process_input_requests([message])
    assert scheduler.answered == [message] and scheduler.changes == changes
    # What keeps KV elsewhere under the model's name is left; memory comes back with the weights that it had.
    assert ("left" in dict(done)) == (getattr(message, "action", "") == "reset_tensors")
    # Before it is done.
    assert all(so_far == changes for _, so_far in done)
