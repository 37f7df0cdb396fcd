"""An idle scheduler that rests instead of taking the cores that the other workers compute on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TRANSFER_POLL_S = 0.0005
# A request ends the wait at once, so this only bounds how late an idle worker sees anything else.
IDLE_POLL_MS = 100
# With DP attention a rank takes part in every step of the others, which stand still for as long as it rests.
DP_IDLE_POLL_MS = 2


def _waits_for_peer(scheduler: Any) -> bool:
    """True if the scheduler has a request whose next step is announced by a peer worker and not by the tokenizer."""
    queues = ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue", "disagg_decode_transfer_queue")
    return bool(
        scheduler.waiting_queue
        or getattr(scheduler, "disagg_prefill_inflight_queue", None)
        or any(getattr(getattr(scheduler, name, None), "queue", None) for name in queues)
    )


def _patch_idle(module: Any) -> None:
    import time

    import wrapt

    @wrapt.patch_function_wrapper(module, "SchedulerRuntimeCheckerMixin.self_check_during_idle")
    def rest(wrapped: Callable[[], None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # An idle scheduler spins. Beside a GPU that costs a core nobody needs; here the cores are the accelerator, and
        # a spinning prefill worker takes half of the decode worker's time.
        wrapped()
        if _waits_for_peer(instance):
            time.sleep(TRANSFER_POLL_S)
        elif instance.recv_from_tokenizer is not None:  # only the first rank has it; the others wait for that one
            instance.recv_from_tokenizer.poll(DP_IDLE_POLL_MS if instance.require_mlp_sync else IDLE_POLL_MS)


HOOKS: dict[str, Callable[[Any], None]] = {
    "sglang.srt.managers.scheduler_runtime_checker_mixin": _patch_idle,
}
