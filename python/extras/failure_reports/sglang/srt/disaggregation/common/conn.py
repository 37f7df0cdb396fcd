"""Prefill's answers to decode about rooms that it has refused.

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

# What decode adds where it asks for DP ranks: it understands that one has refused a room.
HEARS_REFUSALS = "hears_refusals"


class _Requests(BootstrapRequests):
    def post(self, url: str, **kwargs: Any) -> Any:
        """As ``requests.post``, with which the engine asks for the DP ranks of rooms, and says them."""
        args = server_args._global_server_args
        if url.endswith(RANKS_ROUTE) and getattr(args, "disaggregation_decode_enable_radix_cache", False):
            kwargs["json"] = {**kwargs["json"], HEARS_REFUSALS: 1}
        return http.post(url, **kwargs)


requests = _Requests()


class CommonKVManager(engine.CommonKVManager):
    """Answers decode's request for what is refused."""

    def refuse_room(self, room: int, reason: str, kept: bool = False) -> None:
        """Answer decode's request for a room that is refused here, come or not. kept: `RefusedPairs` has it."""
        with self.rooms.lock:
            if not self.ends_rooms or self.rooms.holder(room) is not None:
                return  # or it is another request's
            # Without the flag decode understands no answer, and `RefusedPairs` gives it its one token.
            if kept and (asked := self.transfer_infos.get(room)) and not names_prefix(asked.values()):
                return
            peers = self.end_failed_room(room, {}, reason)
            self.forget(room)
        self.tell_failure(room, peers, reason)


class CommonKVBootstrapServer(engine.CommonKVBootstrapServer):
    """Knows which DP ranks have refused rooms."""

    def _setup_routes(self) -> None:
        """Adds them to what the engine answers."""
        super()._setup_routes()
        ranks = RefusedRanks()
        self.app.middlewares.append(ranks.add)
        peer_calls.listen(REFUSED_RANK_ROUTE, ranks.note)
