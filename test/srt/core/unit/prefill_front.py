"""The bootstrap server of a prefill worker, as its tokenizer manager starts it, and what decode knows of prefills."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import requests
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer
from sglang.srt.disaggregation.common.prefill_peers import PrefillPeers

from sglang_pd_radix.tools.cluster import free_ports


def listens(host: str, port: int) -> bool:
    """Whether somebody does."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


@contextlib.contextmanager
def bootstrap_server(
    host: str = "127.0.0.1", server: type[CommonKVBootstrapServer] = CommonKVBootstrapServer
) -> Iterator[int]:
    """Its port, once it listens there. server: of a transfer backend."""
    (port,) = free_ports(1)
    running = server(host, port)
    end = time.monotonic() + 20
    while not listens(host, port):
        assert time.monotonic() < end
    yield port
    running.close()


def peers_of(**manager: Any) -> PrefillPeers:
    """Those of a decode worker with such a manager; prefills answer the engine."""
    hooks = {"met_prefill": lambda addr: None, "asked_prefill": lambda *asked: None, "query_prefill": lambda addr: True}
    own = {"server_args": None, "requests": requests, "prefill_info_table": {}}
    return PrefillPeers(SimpleNamespace(**hooks | own | manager))
