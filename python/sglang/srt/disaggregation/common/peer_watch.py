"""Each worker looks after the peers of its requests: what is lost with a process that ends is failed at once.

Upstream: not in 0.5.10.post1.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from sglang.srt.disaggregation.common import peer_liveness
from sglang.srt.disaggregation.common.peer_liveness import Endpoint
from sglang.srt.disaggregation.common.rooms import REMEMBERED_ROOMS, Rooms
from sglang.srt.utils.network import NetworkAddress

logger = logging.getLogger(__name__)

# Seconds between two looks at the ports of a prefill with requests of this decode worker, and of one without.
LOOK_S, IDLE_LOOK_S = 0.15, 2.0
# Seconds between two looks for sockets to peers that are gone.
SWEEP_S = 10.0


def host_and_port(addr: str) -> Endpoint:
    """Of an address as the engine writes it."""
    parsed = NetworkAddress.parse(addr)
    return parsed.host, parsed.port


class PeerWatch:
    """The part of both workers' managers that looks after peers, in a thread. All are looked at together."""

    # Of the engine's manager and ours.
    prefill_info_table: dict[str, Any]
    connection_pool: dict[str, list[dict]]
    addr_to_rooms_tracker: dict[str, set[int]]
    transfer_infos: dict[int, dict[str, Any]]
    rooms: Rooms

    def __init__(self, *args, **kwargs):
        """Adds what the thread keeps. Before the engine's, which starts threads that use it."""
        # Prefill: decode ranks, host and port, that have not refused a connection.
        self.reachable_ranks: set[Endpoint] = set()
        # When sockets of dead peers were last looked for.
        self._swept_at = time.monotonic()
        super().__init__(*args, **kwargs)

    def _watch_prefills(self) -> None:
        """Fail the requests of a prefill as soon as the operating system says that its processes are gone.

        The engine asks its bootstrap server, and takes it for lost after two failures, ten seconds or more; one that
        was restarted meanwhile it never misses, and what it goes on to send nobody receives.
        """
        looked: dict[str, float] = {}
        while True:
            time.sleep(LOOK_S)
            try:
                self._sweep_sockets()
                now = time.monotonic()
                ports = {
                    addr: self._ports(addr)
                    for addr in list(self.prefill_info_table)
                    if self.addr_to_rooms_tracker.get(addr) or now - looked.get(addr, 0.0) >= IDLE_LOOK_S
                }
                looked |= dict.fromkeys(ports, now)
                gone = peer_liveness.gone(port for theirs in ports.values() for port in theirs)
                for addr, theirs in ports.items():
                    # One of its schedulers is enough.
                    if gone & theirs:
                        self._handle_node_failure(addr)
            except Exception:
                logger.exception("Could not look after prefills")

    def _ports(self, addr: str) -> set[Endpoint]:
        """Where the schedulers of a prefill listen that this worker knows, or else its bootstrap server."""
        # A copy in one go: the scheduler makes connections.
        infos = [infos for key, infos in list(self.connection_pool.items()) if key.startswith(addr + "_")]
        return {(info["rank_ip"], info["rank_port"]) for each in infos for info in each} or {host_and_port(addr)}

    def _handle_node_failure(self, failed_bootstrap_addr: str) -> None:
        raise NotImplementedError

    def _watch_decodes(self) -> None:
        """Fail the requests of a decode rank, on prefill, as soon as the operating system says that it is gone.

        In the engine those that it had not asked for wait until a time-out, over NIXL as long as their client does;
        and the router waits for both workers. Only of ranks that run with the flag; nobody is looked at who has no
        request here, but once.
        """
        while True:
            self.rooms.wait_for_newcomers(LOOK_S)
            try:
                self._sweep_sockets()
                rooms = self._rooms_of_decodes()
                # Who ends now has been there.
                ranks = rooms.keys() | self.rooms.take_newcomers()
                gone = peer_liveness.gone(ranks)
                if len(self.reachable_ranks) > REMEMBERED_ROOMS:
                    self.reachable_ranks.clear()
                self.reachable_ranks |= ranks - gone
                # Over NIXL nobody else connects to it from here, and a firewall may refuse that in its place.
                for host, port in gone & self.reachable_ranks & rooms.keys():
                    lost = rooms[host, port]
                    logger.error("Decode at %s:%s is gone, and with it %s requests", host, port, len(lost))
                    self.rooms.lose_decode(lost, f"decode {host}:{port} is gone: it refuses connections")
            except Exception:
                logger.exception("Could not look after decode workers")

    def _rooms_of_decodes(self) -> dict[Endpoint, list[int]]:
        """The live requests by the decode ranks, host and port, in which they wait or that have asked for them."""
        found: dict[Endpoint, list[int]] = {}
        with self.rooms.lock:
            for room in self.rooms.live:
                if room in self.rooms.refused:
                    continue
                infos = self.transfer_infos.get(room, {}).values()
                asked = {(i.endpoint, i.dst_port) for i in infos if getattr(i, "names_prefix", False)}
                for rank in asked | set(self.rooms.waiting.get(room, ())):
                    found.setdefault(rank, []).append(room)
        return found

    def _sweep_sockets(self) -> None:
        """Close the sockets to peers at whose port nobody listens any more, every `SWEEP_S` seconds.

        The engine keeps them. ZeroMQ goes on trying to reach each of them, ten times a second, and what still waits in
        one is sent to whoever is given that port next.
        """
        now = time.monotonic()
        if now - self._swept_at < SWEEP_S:
            return
        self._swept_at = now
        # Ours, which is made of this class.
        from sglang.srt.disaggregation.common.conn import CommonKVReceiver

        peers = {host_and_port(at.removeprefix("tcp://")): at for at in list(CommonKVReceiver._socket_cache)}
        for peer in peer_liveness.gone(peers):
            CommonKVReceiver.close_socket(peers[peer])
