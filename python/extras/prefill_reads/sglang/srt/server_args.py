"""The option for reads from decode.

Upstream: none is known; vLLM lets prefill pull KV from decode (vllm-project/vllm#32553).
"""

from __future__ import annotations

import argparse
import dataclasses

from sglang.srt import server_args as engine
from sglang.srt.mem_cache import cache_support
from sglang.srt.mem_cache.read_support import READ_FLAG, READS

__all__ = ["ServerArgs"]


@dataclasses.dataclass
class ServerArgs(engine.ServerArgs):
    """Adds the fewest tokens that prefill reads from decode."""

    disaggregation_prefill_read_decode: int | None = None

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Adds the option."""
        engine.ServerArgs.add_cli_args(parser)
        parser.add_argument(
            "--disaggregation-prefill-read-decode",
            type=int,
            metavar="N",
            help="Prefill reads KV that only decode holds from decode instead of computing it, from N tokens on.",
        )

    def _handle_pd_disaggregation(self) -> None:
        """Checks the option."""
        if self.disaggregation_prefill_read_decode is not None:
            if self.disaggregation_prefill_read_decode < 1:
                raise ValueError(f"{READ_FLAG} is {self.disaggregation_prefill_read_decode}: give 1 token or more.")
            cache_support.check_not_turned_off(READ_FLAG, self)
            cache_support.check(READS, self)
        super()._handle_pd_disaggregation()

    def check_server_args(self) -> None:
        """Checks that the cache is still on."""
        super().check_server_args()
        if self.disaggregation_prefill_read_decode is not None:
            cache_support.check_not_turned_off(READ_FLAG, self)
