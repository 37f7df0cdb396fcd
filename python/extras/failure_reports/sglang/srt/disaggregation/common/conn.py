"""Prefill reports rooms that it has refused to decode.

Upstream: none is known.
"""

from __future__ import annotations

from typing import Any

import requests as http
from sglang.srt import server_args
from sglang.srt.disaggregation import peer_calls
from sglang.srt.disaggregation.common import conn as engine
from sglang.srt.disaggregation.common.bootstrap_routes import BootstrapRequests
from sglang.srt.disaggregation.common.delta_sender import names_prefix
from sglang.srt.disaggregation.refusal import RANKS_ROUTE, REFUSED_RANK_ROUTE, RefusedRanks

__all__ = ["CommonKVBootstrapServer", "CommonKVManager", "requests"]

# Decode adds this when it queries DP ranks: it understands a report of a refused room.
HEARS_REFUSALS = "hears_refusals"


class _Requests(BootstrapRequests):
    def post(self, url: str, **kwargs: Any) -> Any:
        """As ``requests.post``, with which the engine queries and registers the DP ranks of rooms."""
        args = server_args._global_server_args
        if url.endswith(RANKS_ROUTE) and getattr(args, "disaggregation_decode_enable_radix_cache", False):
            kwargs["json"] = {**kwargs["json"], HEARS_REFUSALS: 1}
        return http.post(url, **kwargs)


requests = _Requests()


class CommonKVManager(engine.CommonKVManager):
    """Fails decode's request for a refused room."""

    def refuse_room(self, room: int, reason: str, kept: bool = False) -> None:
        """Fail decode's request, present or future, for a room refused here. kept: `RefusedPairs` has its request."""
        with self.rooms.lock:
            if not self.ends_rooms or self.rooms.holder(room) is not None:
                return  # or the room belongs to another request
            # Decode without the flag understands no report; `RefusedPairs` serves it one token.
            if kept and (asked := self.transfer_infos.get(room)) and not names_prefix(asked.values()):
                return
            peers = self.end_failed_room(room, {}, reason)
            self.forget(room)
        self.tell_failure(room, peers, reason)


class CommonKVBootstrapServer(engine.CommonKVBootstrapServer):
    """Adds the DP ranks that have refused rooms."""

    def _setup_routes(self) -> None:
        """Adds these ranks to the engine's answers."""
        super()._setup_routes()
        ranks = RefusedRanks()
        self.app.middlewares.append(ranks.add)
        peer_calls.listen(REFUSED_RANK_ROUTE, ranks.note)
