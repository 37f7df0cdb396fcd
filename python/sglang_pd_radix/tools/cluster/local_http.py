"""HTTP to the servers of this machine."""

from __future__ import annotations

from typing import Any

import requests

from sglang_pd_radix.environment import ADMIN_API_KEY, API_KEY, servers_key

# Requests made here that servers with an admin key accept with that key only.
ADMIN_ROUTES = ("/flush_cache", "/freeze_gc")


def status_text(status: int, route: str = "") -> str:
    """An HTTP status in words, with a remedy. route: that returned it."""
    of_admin = f", or with --admin-api-key {ADMIN_API_KEY}," if route in ADMIN_ROUTES else ""
    return f"HTTP {status}" + (f" (it asks for a key, which {API_KEY}{of_admin} has to have)" if status == 401 else "")


def local_session(admin: bool = False) -> requests.Session:
    """A session for this machine's servers, without proxies of the environment.

    admin: use the admin key, if there is one.
    """
    session = requests.Session()
    session.trust_env = False
    if key := servers_key(admin):
        session.headers["Authorization"] = f"Bearer {key}"
    return session


def http(url: str, body: Any = None, timeout: float = 10.0) -> tuple[int, bytes]:
    """GET ``url`` (or POST ``body`` as JSON). Returns status and content; status 0 without an answer."""
    of_admin = url.endswith(ADMIN_ROUTES)
    status, content = _ask(url, body, timeout, of_admin)
    if status == 401 and of_admin:
        # Servers without an admin key use the other one.
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
    """Exclude a worker's loaded objects from garbage collections.

    Each of its processes has half a million. Scanning them takes a third of a second every minute or two, in which the
    process does nothing else (docs/deploy.md, "Production checklist"). Returns why it failed; "" if it did not.
    """
    status, _ = http(url + "/freeze_gc", {}, timeout=10)
    if status == 200:
        return ""
    said = f"answers {status_text(status, '/freeze_gc')}" if status else "does not answer"
    return f"garbage collections will pause it: /freeze_gc {said}"
