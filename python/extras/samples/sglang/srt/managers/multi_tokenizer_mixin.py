"""Several tokenizer processes on prefill: samples are refused, since it is unknown which process gets the request.

Upstream: none is known.
"""

from __future__ import annotations

from sglang.srt.disaggregation.peer_calls import listen
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import multi_tokenizer_mixin as engine
from sglang.srt.managers.samples import SAMPLE_ROUTE

__all__ = ["MultiTokenizerRouter"]


class MultiTokenizerRouter(engine.MultiTokenizerRouter):
    """Refuses announcements of samples."""

    def __init__(self, server_args, port_args):
        """Registers the route before the bootstrap server starts."""
        if server_args.disaggregation_mode == DisaggregationMode.PREFILL.value:
            listen(SAMPLE_ROUTE, _refuse_samples)
        super().__init__(server_args, port_args)


def _refuse_samples(rooms: list[int], derivation: int) -> None:
    raise ValueError(
        "n must be 1: this prefill has several tokenizer processes, which cannot share rooms of samples. "
        "Start it without --tokenizer-worker-num, or send the request n times."
    )
