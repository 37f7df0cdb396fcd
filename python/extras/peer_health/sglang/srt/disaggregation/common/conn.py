"""Workers whose peers are looked after: what is lost with one fails at once.

Upstream: none is known. sgl-project/sglang#34289 (open) finds a prefill that was replaced.
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq
from sglang.srt.disaggregation.common import conn as engine
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
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.utils.network import NetworkAddress

__all__ = ["CommonKVManager", "CommonKVReceiver"]


class CommonKVManager(engine.CommonKVManager):
    """Knows which of its peers are lost."""

    def __init__(self, *args, **kwargs):
        """Adds what is known of peers, before the engine's, which starts threads; and the thread that looks."""
        self.peer_sockets = PeerSockets(CommonKVReceiver._ctx, answer_s())
        self.pulse, self.refusing = Pulse(), Refusing()
        super().__init__(*args, **kwargs)
        if self.has_radix:
            self.peer_sockets.start(lambda: fail_lost_prefills(self))
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            lost_peer, unclaimed = self.events.lost_peer, Unclaimed(self)
            self.decode_watch = DecodeWatch(self.peer_sockets, self.rooms, self._askers, unclaimed, lost_peer)
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
        self.peer_sockets.watch(host, port)

    def heard_until(self) -> float:
        """After a standstill of this worker its messages have still to be read."""
        return self.pulse.heard_until()

    def are_gone(self, ranks: Sequence[Endpoint]) -> bool:
        """Whether nobody listens any more where all these did, as far as that has been found out."""
        return self.peer_sockets.are_gone(ranks)

    def asked_prefill(self, addr: str, answered: bool) -> None:
        """One that refuses connections is gone."""
        self.refusing.note(addr, answered)

    def why_unreached(self, addr: str, since: float) -> str | None:
        """Or that its prefill is gone."""
        return self.refusing.why_unreached(addr, since) or super().why_unreached(addr, since)

    def lose_prefill(self, addr: str) -> list[int]:
        """The engine's heartbeat has perhaps not found out."""
        rooms = super().lose_prefill(addr)
        forget_heartbeats(self, addr)
        return rooms


class CommonKVReceiver(engine.CommonKVReceiver):
    """Receiver whose prefill ranks can be looked after."""

    _ctx = engine.CommonKVReceiver._ctx
    _ctx.set(zmq.MAX_SOCKETS, MOST_SOCKETS)

    def _get_bootstrap_info_from_server(self, *rank: int):
        """Checks where a rank listens before that is kept: whoever watches prefills looks at it."""
        info = super()._get_bootstrap_info_from_server(*rank)
        if info is not None and self.kv_mgr.has_radix:
            check_rank(self.bootstrap_addr, info)
        return info
