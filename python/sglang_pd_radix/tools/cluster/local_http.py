"""HTTP to the servers of this machine."""

from __future__ import annotations

import os
from typing import Any

import requests

#: The variable that has the key of servers that are started with ``--api-key``.
API_KEY = "SGLANG_PD_RADIX_API_KEY"


def servers_key() -> str | None:
    """The key of the servers that are asked; None if they have none."""
    return os.environ.get(API_KEY) or None


def status_text(status: int) -> str:
    """An answer's HTTP status in words, for an error that names the way out."""
    return f"HTTP {status}" + (f" (it asks for a key, which {API_KEY} has to have)" if status == 401 else "")


def local_session() -> requests.Session:
    """A session for the servers of this machine, on which a proxy of the environment has no business."""
    session = requests.Session()
    session.trust_env = False
    if key := servers_key():
        session.headers["Authorization"] = f"Bearer {key}"
    return session


def http(url: str, body: Any = None, timeout: float = 10.0) -> tuple[int, bytes]:
    """GET ``url`` (or POST ``body`` as JSON). Returns status and content; status 0 if nobody answered."""
    with local_session() as session:
        try:
            reply = session.request("GET" if body is None else "POST", url, json=body, timeout=timeout)
        except (requests.RequestException, ValueError) as error:
            return 0, str(error).encode()
    return reply.status_code, reply.content


def freeze(url: str) -> None:
    """Have no garbage collection of the worker at ``url`` look through what it has loaded, if it does that.

    Each of its processes has half a million objects by then. To look through all of them again takes a third of a
    second every minute or two, in which the process does nothing else (docs/deploy.md, "Pauses").
    """
    http(url + "/freeze_gc", {}, timeout=10)
