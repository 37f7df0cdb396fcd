"""The targets for ITL and TTFT.

Upstream: none is known.
"""

from __future__ import annotations

import argparse
import dataclasses

from sglang.srt import server_args as engine
from sglang.srt.mem_cache.cache_support import FLAG

__all__ = ["ServerArgs"]

# Of a target: eleven days. Steps are counted in picoseconds, of which this many fit into 64 bits.
MOST_MS = 1e9


@dataclasses.dataclass
class ServerArgs(engine.ServerArgs):
    """Server arguments with targets for ITL and TTFT."""

    disaggregation_decode_itl_target: float | None = None
    disaggregation_decode_ttft_target: float | None = None

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Adds the targets."""
        engine.ServerArgs.add_cli_args(parser)
        parser.add_argument(
            "--disaggregation-decode-itl-target",
            type=float,
            metavar="MS",
            help="Have a decode worker with a radix cache admit requests only as far as decode steps, as it has "
            "learned to predict them, give each a token within that many milliseconds. One request always runs.",
        )
        parser.add_argument(
            "--disaggregation-decode-ttft-target",
            type=float,
            metavar="MS",
            help="Have a decode worker with a radix cache put requests last whose first token cannot come within that "
            "many milliseconds any more, but for every fourth that it admits, so that a queue makes few late and not "
            "all.",
        )

    def _handle_pd_disaggregation(self) -> None:
        """Checks that a target is a time, on a worker with the flag."""
        for name in ("itl", "ttft"):
            option = f"--disaggregation-decode-{name}-target"
            target_ms = getattr(self, f"disaggregation_decode_{name}_target")
            if target_ms is not None and not self.disaggregation_decode_enable_radix_cache:
                raise ValueError(f"{option} needs {FLAG}. Give both to the decode worker.")
            if target_ms is not None and not 0 < target_ms <= MOST_MS:
                raise ValueError(f"{option} is {target_ms:g}: give milliseconds, above 0 and at most {MOST_MS:g}.")
        super()._handle_pd_disaggregation()
