"""``--load-balance-method longest_prefix``: chooses the DP rank by prefix.

Upstream: sgl-project/sglang#26561 (open), which goes by digests that the ranks report.
"""

from __future__ import annotations

import argparse

from sglang.srt import server_args as engine
from sglang.srt.mem_cache.cache_support import FLAG

__all__ = ["ServerArgs"]

LONGEST_PREFIX = "longest_prefix"


class ServerArgs(engine.ServerArgs):
    """Adds the load balance method."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Adds the choice."""
        engine.ServerArgs.add_cli_args(parser)
        for action in parser._actions:
            if action.dest == "load_balance_method":
                action.choices = [*(action.choices or ()), LONGEST_PREFIX]
                action.help = f"{action.help} {LONGEST_PREFIX}, on a decode worker with a radix cache: the rank that "
                action.help += "holds most of the prompt, unless it is so full that sending the KV again costs less."

    def _handle_load_balance_method(self) -> None:
        """Checks the flag."""
        super()._handle_load_balance_method()
        if self.load_balance_method == LONGEST_PREFIX and not self.disaggregation_decode_enable_radix_cache:
            raise ValueError(
                f"--load-balance-method {LONGEST_PREFIX} needs {FLAG} on a decode worker. Add it, or use round_robin."
            )
