"""What ``--enable-pegaflow`` needs at the start; what it does not go with is in `cache_support.py`.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache import cache_support
from sglang.srt.mem_cache.pegaflow import memory
from sglang.srt.mem_cache.pegaflow.server import check_server, is_loopback, server_url

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

__all__ = ["check"]


def check(args: ServerArgs) -> None:
    """Raise ValueError for what is wrong or not verified, or if no server of the right version is there.

    Before the model is loaded, and with all defaults settled.
    """
    cache_support.check(cache_support.PEGAFLOW, args)
    url = server_url(args.pegaflow_endpoint)
    if not is_loopback(url) and not args.pegaflow_allow_non_loopback:
        raise ValueError(
            f"--pegaflow-endpoint is {args.pegaflow_endpoint!r}, which other machines may reach: whoever reaches a "
            "PegaFlow server can have it run any code. Bind it to 127.0.0.1, or give --pegaflow-allow-non-loopback "
            "if that network is closed."
        )
    memory.check_device(args.device)
    check_server(url)
