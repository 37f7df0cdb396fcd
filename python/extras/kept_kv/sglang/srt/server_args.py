"""The option that names the namespace of KV.

Upstream: none is known.
"""

from __future__ import annotations

import argparse
import dataclasses

from sglang.srt import server_args as engine

__all__ = ["ServerArgs"]


@dataclasses.dataclass
class ServerArgs(engine.ServerArgs):
    """Adds the namespace of KV."""

    kv_namespace: str = ""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Adds the option."""
        engine.ServerArgs.add_cli_args(parser)
        parser.add_argument(
            "--kv-namespace",
            default="",
            metavar="NAME",
            help="Namespace of KV in a PegaFlow server, in a storage below host memory, and of reads from decode. "
            "Workers with the same NAME and KV layout share KV. Default: model path, --revision and --weight-version. "
            "Give another NAME if the weights under that path change.",
        )
