"""HTTP to the servers of this machine."""

from __future__ import annotations

from typing import Any

import requests

from sglang_pd_radix.environment import ADMIN_API_KEY, API_KEY, servers_key

#: What is asked here of servers, and those that have an admin's key let nobody else do.
ADMIN_ROUTES = ("/flush_cache", "/freeze_gc")


def status_text(status: int, route: str = "") -> str:
    """An answer's HTTP status in words, for an error that names the way out. route: that answered so."""
    of_admin = f", or with --admin-api-key {ADMIN_API_KEY}," if route in ADMIN_ROUTES else ""
    return f"HTTP {status}" + (f" (it asks for a key, which {API_KEY}{of_admin} has to have)" if status == 401 else "")


def local_session(admin: bool = False) -> requests.Session:
    """A session for the servers of this machine, on which a proxy of the environment has no business.

    admin: with the key of their admin, if there is one.
    """
    session = requests.Session()
    session.trust_env = False
    if key := servers_key(admin):
        session.headers["Authorization"] = f"Bearer {key}"
    return session


def http(url: str, body: Any = None, timeout: float = 10.0) -> tuple[int, bytes]:
    """GET ``url`` (or POST ``body`` as JSON). Returns status and content; status 0 if nobody answered."""
    of_admin = url.endswith(ADMIN_ROUTES)
    status, content = _ask(url, body, timeout, of_admin)
    if status == 401 and of_admin:
        # Of a server that has no key for its admin all ask with the other one.
        status, content = _ask(url, body, timeout, admin=False)
    return status, content


def _ask(url: str, body: Any, timeout: float, admin: bool) -> tuple[int, bytes]:
    with local_session(admin) as session:
        try:
            reply = session.request("GET" if body is None else "POST", url, json=body, timeout=timeout)
        except (requests.RequestException, ValueError) as error:
            return 0, str(error).encode()
    return reply.status_code, reply.content


def freeze(url: str) -> str:
    """Have no garbage collection of the worker at ``url`` look through what it has loaded, if it does that.

    Each of its processes has half a million objects by then. To look through all of them again takes a third of a
    second every minute or two, in which the process does nothing else (docs/deploy.md, "Production checklist"). Returns
    why they do it all the same; "" if they do not.
    """
    status, _ = http(url + "/freeze_gc", {}, timeout=10)
    if status == 200:
        return ""
    said = f"answers {status_text(status, '/freeze_gc')}" if status else "does not answer"
    return f"garbage collections will pause it: /freeze_gc {said}"
