"""Options of PegaFlow.

Upstream: none: sgl-project/sglang#17221 was closed.
"""

from __future__ import annotations

import argparse
import dataclasses

from sglang.srt import server_args as engine
from sglang.srt.mem_cache import cache_support
from sglang.srt.mem_cache.pegaflow.support import PEGAFLOW_FLAG

__all__ = ["ServerArgs"]

DEFAULT_ENDPOINT = "127.0.0.1:50055"


@dataclasses.dataclass
class ServerArgs(engine.ServerArgs):
    """Server arguments with PegaFlow's options."""

    enable_pegaflow: bool = False
    pegaflow_endpoint: str = DEFAULT_ENDPOINT
    pegaflow_allow_non_loopback: bool = False

    @property
    def keyed(self) -> bool:  # type: ignore[override]
        return self.enable_pegaflow

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Adds PegaFlow's options to the engine's."""
        engine.ServerArgs.add_cli_args(parser)
        parser.add_argument(
            "--enable-pegaflow",
            action="store_true",
            help="Also keep KV in a PegaFlow server on this machine. Other engines on the machine share it.",
        )
        parser.add_argument(
            "--pegaflow-endpoint",
            default=DEFAULT_ENDPOINT,
            metavar="HOST:PORT",
            help=f"Address of the PegaFlow server. Default: {DEFAULT_ENDPOINT}.",
        )
        parser.add_argument(
            "--pegaflow-allow-non-loopback",
            action="store_true",
            help="Accept an endpoint that other machines can reach. A client of it can run any code in the server.",
        )

    def check_server_args(self) -> None:
        """Checks the server, and that the radix cache is still on, after all defaults are set."""
        super().check_server_args()
        if not self.enable_pegaflow:
            return
        # Decode without the flag never has the cache; that is refused below.
        if self.disaggregation_mode != "decode":
            cache_support.check_not_turned_off(PEGAFLOW_FLAG, self)
        # Not at the top: its imports import this module.
        from sglang.srt.mem_cache.pegaflow import checks

        checks.check(self)
