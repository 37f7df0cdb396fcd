"""Workers whose peers are looked after: what is lost with one fails at once.

Upstream: none is known. sgl-project/sglang#34289 (open) finds a prefill that was replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import zmq
from sglang.srt.disaggregation.common import conn as engine
from sglang.srt.disaggregation.common.outbound import NotTaken
from sglang.srt.disaggregation.common.peer_liveness import Endpoint
from sglang.srt.disaggregation.common.peer_sockets import MOST_SOCKETS, PeerSocket, PeerSockets, answer_s
from sglang.srt.disaggregation.common.peer_watch import (
    DecodeWatch,
    Refusing,
    Unclaimed,
    check_rank,
    fail_lost_prefills,
    forget_heartbeats,
)
from sglang.srt.disaggregation.common.prefill_peers import listen_for
from sglang.srt.disaggregation.common.pulse import Pulse
from sglang.srt.disaggregation.common.waiting_rooms import QUEUED, WaitingRooms
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.utils.network import NetworkAddress

__all__ = ["CommonKVBootstrapServer", "CommonKVManager", "CommonKVReceiver", "CommonKVSender"]

# What a prefill says that wants to hear what waits on decode.
HEARS_OF_WAITING = "queued"
listen_for(HEARS_OF_WAITING)


class CommonKVManager(engine.CommonKVManager):
    """Knows which of its peers are lost."""

    def __init__(self, *args, **kwargs):
        """Adds what is known of peers, before the engine's, which starts threads; and the thread that looks."""
        self.peer_sockets = PeerSockets(CommonKVReceiver._ctx, answer_s())
        self.pulse, self.refusing = Pulse(), Refusing()
        super().__init__(*args, **kwargs)
        self.waiting = WaitingRooms(self.rooms, self.met_decode)
        if self.has_radix:
            self.peer_sockets.start(lambda: fail_lost_prefills(self))
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            self.decode_watch = DecodeWatch(
                self.peer_sockets, self.rooms, self.waiting, self._askers, Unclaimed(self), self.events.lost_peer
            )
            self.peer_sockets.start(self._check_decode)

    def _connect(self, endpoint: str, is_ipv6: bool = False) -> PeerSocket:
        """Replaces the engine's sockets, which stay for good."""
        return self.peer_sockets.connect(endpoint, is_ipv6)

    def connect_unwaiting(self, host: str, port: int) -> PeerSocket:
        """Replaces the engine's sockets, which do not say whether the peer lives."""
        address = NetworkAddress(host, port)
        return self.peer_sockets.connect(address.to_tcp(), address.is_ipv6, waits=False)

    def _check_decode(self) -> None:
        # By which it is found out whether this worker stood still.
        self.pulse.beat()
        self.decode_watch.check()

    def _askers(self, room: int) -> set[Endpoint]:
        """The decode ranks with the flag that have asked for the KV of a room."""
        infos = self.transfer_infos.get(room, {}).values()
        return {(info.endpoint, info.dst_port) for info in infos if getattr(info, "names_prefix", False)}

    def met_decode(self, host: str, port: int) -> None:
        """It is looked after from now on."""
        super().met_decode(host, port)
        self.peer_sockets.watch(host, port)

    def heard_until(self, info: Any) -> float:
        """After a standstill of this worker its messages have still to be read."""
        return self.pulse.heard_until()

    def are_gone(self, ranks: Sequence[Endpoint]) -> bool:
        """Whether nobody listens any more where all these did, as far as that has been found out."""
        return self.peer_sockets.are_gone(ranks)

    def end_room(self, room: int, *args, **kwargs) -> None:
        """It waits nowhere any more."""
        with self.rooms.lock:
            super().end_room(room, *args, **kwargs)
            self.waiting.pop(room, None)

    def asked_prefill(self, addr: str, answered: bool) -> None:
        """One that refuses connections is gone."""
        self.refusing.note(addr, answered)

    def why_unreached(self, addr: str, since: float) -> str | None:
        """Or that its prefill is gone."""
        return self.refusing.why_unreached(addr, since) or super().why_unreached(addr, since)

    def lose_prefill(self, addr: str) -> None:
        """The engine's heartbeat has perhaps not found out."""
        super().lose_prefill(addr)
        forget_heartbeats(self, addr)


class CommonKVSender(engine.CommonKVSender):
    """Sender of a request of which decode says that it waits there."""

    def waits_unasked(self) -> bool:
        """Too late for decode's request, this one fails."""
        if not super().waits_unasked():
            return False
        unheard = self.kv_mgr.waiting.silent_s(self.bootstrap_room, self.made_at)
        if unheard < self.kv_mgr.bootstrap_timeout:
            return True
        self.fail(f"timed out after {unheard:.0f} s, in which no decode worker has said that it knows of it")
        return False


class CommonKVReceiver(engine.CommonKVReceiver):
    """Receiver whose prefill ranks can be looked after, and know where it waits."""

    _ctx = engine.CommonKVReceiver._ctx
    _ctx.set(zmq.MAX_SOCKETS, MOST_SOCKETS)

    def _get_bootstrap_info_from_server(self, *rank: int):
        """Checks where a rank listens before that is kept: whoever watches prefills looks at it."""
        info = super()._get_bootstrap_info_from_server(*rank)
        if info is not None and self.kv_mgr.has_radix:
            check_rank(self.bootstrap_addr, info)
        return info

    def announce(self, peers: Iterable[dict] | None = None) -> list[dict]:
        """Tell prefill, where it listens, that this request waits here: it then knows whose end is also that of it.

        peers: prefill ranks, all if not given. Returns those that did not take it.
        """
        untold: list[dict] = []
        if HEARS_OF_WAITING not in self.kv_mgr.prefills.of(self.bootstrap_addr).others:
            return untold
        # Those that write nothing for it wait for it too.
        for peer in (self.bootstrap_infos or []) if peers is None else peers:
            try:
                self._send_to(peer, [*self.header, QUEUED])
            except NotTaken:
                # At nobody else's expense.
                untold.append(peer)
        return untold


class CommonKVBootstrapServer(engine.CommonKVBootstrapServer):
    """Says that its prefill wants to hear what waits on decode."""

    async def _capabilities(self) -> dict[str, Any]:
        answer = await super()._capabilities()
        hears = int(bool(self.decode_prefix_version))
        return {"version": answer["version"], HEARS_OF_WAITING: hears, **answer}
