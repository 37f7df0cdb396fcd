"""The option to verify pages on decode.

Upstream: sgl-project/sglang#39500 (merged) has a checksum, which #39729 (open) makes safe to enable.
"""

from __future__ import annotations

import argparse
import dataclasses

from sglang.srt import server_args as engine
from sglang.srt.mem_cache import cache_support
from sglang.srt.mem_cache.cache_support import FLAG, Rule

__all__ = ["ServerArgs"]

OPTION = "--disaggregation-decode-verify-pages"
for kind in cache_support.kinds_with("sliding windows"):
    cache_support.add(
        kind, Rule(f"{OPTION}, whose digests leave windows out", lambda args: args.disaggregation_decode_verify_pages)
    )


@dataclasses.dataclass
class ServerArgs(engine.ServerArgs):
    """Server arguments with the option to verify pages on decode."""

    disaggregation_decode_verify_pages: bool = False

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Adds the option to the engine's."""
        engine.ServerArgs.add_cli_args(parser)
        parser.add_argument(
            OPTION,
            action="store_true",
            help="Decode with a radix cache compares a digest of the KV that arrived with prefill's digest of the KV "
            "that it sent. If they differ, the request fails and its KV does not enter the tree.",
        )

    def _handle_pd_disaggregation(self) -> None:
        """Checks that the option comes with the flag."""
        if self.disaggregation_decode_verify_pages and not self.disaggregation_decode_enable_radix_cache:
            raise ValueError(f"{OPTION} needs {FLAG}. Give both to the decode worker.")
        super()._handle_pd_disaggregation()
