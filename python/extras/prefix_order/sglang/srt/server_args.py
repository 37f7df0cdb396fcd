"""Options for the order of admission and its bypass bound.

Upstream: none is known.
"""

from __future__ import annotations

import argparse
import dataclasses

from sglang.srt import server_args as engine
from sglang.srt.mem_cache.cache_support import FLAG

__all__ = ["ServerArgs"]

# Bypasses after which a request goes first.
DEFAULT_MAX_OVERTAKEN = 32


@dataclasses.dataclass
class ServerArgs(engine.ServerArgs):
    """Adds the order of admission."""

    disaggregation_decode_admission: str = "prefix"
    disaggregation_decode_max_overtaken: int = DEFAULT_MAX_OVERTAKEN

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
        engine.ServerArgs.add_cli_args(parser)
        parser.add_argument(
            "--disaggregation-decode-admission",
            choices=("prefix", "fcfs"),
            default="prefix",
            help="Order of admission on decode with a radix cache. prefix: requests with most of their prompt in the "
            "tree first; a request whose prefix is in transfer waits for it instead of transferring it again. fcfs: "
            "first come, first served; no request waits for another's transfer.",
        )
        parser.add_argument(
            "--disaggregation-decode-max-overtaken",
            type=int,
            default=DEFAULT_MAX_OVERTAKEN,
            metavar="N",
            help="With --disaggregation-decode-admission prefix: how many later requests may be admitted before an "
            "earlier one. 0: none.",
        )

    def _handle_pd_disaggregation(self) -> None:
        """Checks the bound, and that the options come with the flag."""
        if not self.disaggregation_decode_enable_radix_cache:
            if self.disaggregation_decode_admission != "prefix":
                raise ValueError(f"--disaggregation-decode-admission needs {FLAG}. Give both to the decode worker.")
            if self.disaggregation_decode_max_overtaken != DEFAULT_MAX_OVERTAKEN:
                raise ValueError(f"--disaggregation-decode-max-overtaken needs {FLAG}. Give both to the decode worker.")
        elif self.disaggregation_decode_max_overtaken < 0:
            raise ValueError(
                f"--disaggregation-decode-max-overtaken is {self.disaggregation_decode_max_overtaken}: give 0 or more."
            )
        super()._handle_pd_disaggregation()
