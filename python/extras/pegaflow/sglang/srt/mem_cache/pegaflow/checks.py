"""Checks before the start with ``--enable-pegaflow``: a server of the client's version runs on this machine.

Refused combinations are in `support.py`.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from sglang.srt.mem_cache import cache_support
from sglang.srt.mem_cache.pegaflow import memory
from sglang.srt.mem_cache.pegaflow.support import PEGAFLOW

from sglang_pd_radix.supplied import pegaflow_host
from sglang_pd_radix.supplied.pegaflow_host import VERSION

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

__all__ = ["check", "check_server", "is_loopback", "server_url"]


def check(args: ServerArgs) -> None:
    """Raise ValueError for unsupported options, or if no server of the right version responds.

    Called before the model is loaded and after all defaults are set.
    """
    cache_support.check(PEGAFLOW, args)
    url = server_url(args.pegaflow_endpoint)
    if not is_loopback(url) and not args.pegaflow_allow_non_loopback:
        raise ValueError(
            f"--pegaflow-endpoint is {args.pegaflow_endpoint!r}, which other machines may reach: a client of a "
            "PegaFlow server can run any code in it. Bind it to 127.0.0.1, or give --pegaflow-allow-non-loopback "
            "if that network is closed."
        )
    memory.check_device(args.device)
    check_server(url)


def server_url(endpoint: str) -> str:
    """``endpoint`` (``host:port``, with or without ``http://``) as a URL. Raises ValueError."""
    url = endpoint if "://" in endpoint else f"http://{endpoint}"
    try:
        parts = urlsplit(url)
        complete = parts.scheme == "http" and parts.hostname and parts.port
    except ValueError:
        complete = False
    if not complete:
        raise ValueError(f"--pegaflow-endpoint is {endpoint!r}: give HOST:PORT, for example 127.0.0.1:50055.")
    return url


def is_loopback(url: str) -> bool:
    """Whether only this machine can reach ``url``. Of names, only localhost counts."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_server(endpoint: str) -> None:
    """Raise ValueError unless the client is installed and a server of its version listens at ``endpoint``."""
    url = server_url(endpoint)
    version = pegaflow_host.installed_version()
    if version != VERSION:
        found = f"{version} is installed" if version else "it is not installed"
        raise ValueError(f"--enable-pegaflow needs pegaflow-llm=={VERSION}, and {found}: {pegaflow_host.INSTALL}.")
    from pegaflow import EngineRpcClient

    start = f"Start one with `pegaflow-server --addr {urlsplit(url).netloc} --http-addr 127.0.0.1:9091`."
    try:
        client = EngineRpcClient(url)
        client.health()
    except Exception as error:
        raise ValueError(f"--enable-pegaflow: no PegaFlow server answers at {url} ({error}). {start}") from error
    try:
        # An empty registration, which the server rejects only after comparing versions.
        client.register_context_batch("version", "version", 0, 0, 1, 1, 0, [], [], [], [], [], [], "direct", False)
    except ValueError:
        return
    except Exception as error:
        raise ValueError(
            f"--enable-pegaflow: the PegaFlow server at {url} rejects this client ({error}). "
            f"Both must be {VERSION}: install pegaflow-llm=={VERSION} and start its pegaflow-server."
        ) from error
