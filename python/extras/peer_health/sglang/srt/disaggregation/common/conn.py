"""Workers that monitor their peers: requests of a lost peer fail at once.

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
from sglang.srt.disaggregation.common.pulse import Pulse
from sglang.srt.disaggregation.common.waiting_rooms import QUEUED, WaitingRooms
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.utils.network import NetworkAddress

__all__ = ["CommonKVBootstrapServer", "CommonKVManager", "CommonKVReceiver", "CommonKVSender"]

# Capability of a prefill that takes reports of requests that wait on decode.
HEARS_OF_WAITING = "queued"


class CommonKVManager(engine.CommonKVManager):
    """Monitors its peers."""

    def __init__(self, *args, **kwargs):
        """Adds the peer state before the engine starts its threads, and then the monitoring thread."""
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
        """Replaces the engine's sockets, which are never closed."""
        return self.peer_sockets.connect(endpoint, is_ipv6)

    def connect_unwaiting(self, host: str, port: int) -> PeerSocket:
        """Replaces the engine's sockets, which do not report lost peers."""
        address = NetworkAddress(host, port)
        return self.peer_sockets.connect(address.to_tcp(), address.is_ipv6, waits=False)

    def _check_decode(self) -> None:
        # Detects stalls of this worker.
        self.pulse.beat()
        self.decode_watch.check()

    def _askers(self, room: int) -> set[Endpoint]:
        """The decode ranks with the flag that have requested a room's KV."""
        infos = self.transfer_infos.get(room, {}).values()
        return {(info.endpoint, info.dst_port) for info in infos if getattr(info, "names_prefix", False)}

    def met_decode(self, host: str, port: int) -> None:
        """Monitors it from now on."""
        super().met_decode(host, port)
        self.peer_sockets.watch(host, port)

    def heard_until(self, info: Any) -> float:
        """After a stall of this worker, messages are still unread."""
        return self.pulse.heard_until()

    def are_gone(self, ranks: Sequence[Endpoint]) -> bool:
        """Whether the processes of all these ranks are known to have ended."""
        return self.peer_sockets.are_gone(ranks)

    def end_room(self, room: int, *args, **kwargs) -> None:
        """Removes its waiting state too."""
        with self.rooms.lock:
            super().end_room(room, *args, **kwargs)
            self.waiting.pop(room, None)

    def asked_prefill(self, addr: str, answered: bool) -> None:
        """Notes refused connections."""
        self.refusing.note(addr, answered)

    def why_unreached(self, addr: str, since: float) -> str | None:
        """Adds that its prefill has ended."""
        return self.refusing.why_unreached(addr, since) or super().why_unreached(addr, since)

    def lose_prefill(self, addr: str) -> None:
        """Removes the engine's heartbeat state too."""
        super().lose_prefill(addr)
        forget_heartbeats(self, addr)


class CommonKVSender(engine.CommonKVSender):
    """Waits for as long as decode reports that the request waits there."""

    def waits_unasked(self) -> bool:
        """Fails after the bootstrap time-out without a report: decode's request for KV would come too late."""
        if not super().waits_unasked():
            return False
        unheard = self.kv_mgr.waiting.silent_s(self.bootstrap_room, self.made_at)
        if unheard < self.kv_mgr.bootstrap_timeout:
            return True
        self.fail(f"timed out after {unheard:.0f} s, in which no decode worker has said that it knows of it")
        return False


class CommonKVReceiver(engine.CommonKVReceiver):
    """Reports to prefill that its request waits; its prefill ranks are monitored."""

    _ctx = engine.CommonKVReceiver._ctx
    _ctx.set(zmq.MAX_SOCKETS, MOST_SOCKETS)

    def _get_bootstrap_info_from_server(self, *rank: int):
        """Checks a rank's address before the engine caches it: the monitor connects to it."""
        info = super()._get_bootstrap_info_from_server(*rank)
        if info is not None and self.kv_mgr.has_radix:
            check_rank(self.bootstrap_addr, info)
        return info

    def announce(self, peers: Iterable[dict] | None = None) -> list[dict]:
        """Report to prefill that this request waits here, so that prefill fails it if this worker is lost.

        peers: prefill ranks, all by default. Returns those that did not take the report.
        """
        untold: list[dict] = []
        if HEARS_OF_WAITING not in self.kv_mgr.prefills.of(self.bootstrap_addr).others:
            return untold
        # Dummy ranks, which write nothing, wait for the request too.
        for peer in (self.bootstrap_infos or []) if peers is None else peers:
            try:
                self._send_to(peer, [*self.header, QUEUED])
            except NotTaken:
                # Its queue is full; others must not wait for it.
                untold.append(peer)
        return untold


class CommonKVBootstrapServer(engine.CommonKVBootstrapServer):
    """Announces that its prefill takes reports of waiting requests."""

    async def _capabilities(self) -> dict[str, Any]:
        answer = await super()._capabilities()
        hears = int(bool(self.decode_prefix_version))
        return {"version": answer["version"], HEARS_OF_WAITING: hears, **answer}
