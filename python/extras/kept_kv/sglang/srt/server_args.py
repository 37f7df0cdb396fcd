"""The option that names weights.

Upstream: none is known.
"""

from __future__ import annotations

import argparse
import dataclasses

from sglang.srt import server_args as engine

__all__ = ["ServerArgs"]


@dataclasses.dataclass
class ServerArgs(engine.ServerArgs):
    """Server arguments with the name under which KV is kept."""

    kv_namespace: str = ""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Adds the option to the engine's."""
        engine.ServerArgs.add_cli_args(parser)
        parser.add_argument(
            "--kv-namespace",
            default="",
            metavar="NAME",
            help="Name of the weights under which KV is kept in a PegaFlow server, in a storage below host memory, or "
            "read from decode: workers with the same NAME and layout of KV read each other's. Without it the model's "
            "path, --revision and --weight-version are the name. Give another NAME whenever other weights come under "
            "the same path.",
        )
