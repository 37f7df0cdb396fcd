"""Both ends of one request on the wire, for the tests of a transfer backend: its senders and its receivers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from sglang.srt.disaggregation.common import delta_receiver, prefill_peers
from typing_extensions import Self
from waiting import until

# Those of the workers that tests have made. Each closes them in the end.
MADE: list[Any] = []


def keep_threads_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no thread watch peers, and have what a scheduler leaves to threads done before it looks for it."""
    # These threads outlive the test.
    monkeypatch.setenv("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "100000")
    # Of the extra that watches peers, where that runs.
    watch = sys.modules.get("sglang.srt.disaggregation.common.peer_sockets")
    if watch is not None:
        monkeypatch.setattr(watch.PeerSockets, "start", lambda sockets, check: MADE.append(sockets))
    threaded = prefill_peers.in_background

    def at_once(work: Callable[[], Any], name: str) -> Future:
        future = threaded(work, name)
        # The loop that makes the extras' calls never ends, and tests have prefills that do not answer.
        return future if name in ("peer-calls", "ask-prefill") else wait([future]) and future

    for module in (prefill_peers, delta_receiver):
        monkeypatch.setattr(module, "in_background", at_once)


def close_sockets(sockets: Any) -> None:
    """All that lead to peers."""
    for key, peer in list(sockets._peers.items()):
        sockets._drop(key, peer)


@contextmanager
def watching(sockets: Any, check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """What a worker's thread does, for as long as this lasts."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            check()
            sockets.look(0.02)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join()


def first_pages(manager: Any, room: int) -> list[int]:
    """The first page that each decode rank has asked a prefill to write for ``room``, as it has read last."""
    return [int(info.dst_kv_indices[0]) for info in manager.transfer_infos.get(room, {}).values()]


class Ends:
    """The senders and receivers of a request of ``num_pages`` pages, of which decode holds ``first_page``."""

    world: Any
    senders: list
    receivers: list
    first_page: int
    num_pages: int

    def send(self, *ends: int) -> Self:
        """Send the pages up to each of ``ends``; the last chunk ends at the prompt's last page."""
        for sender in self.senders:
            start = self.first_page
            for end in (*ends, self.num_pages):
                states = self.world.states and end == self.num_pages and self.world.states[0]
                sender.send(np.arange(start, end, dtype=np.int32), states or None)
                start = end
        return self

    def wait_senders(self, state: int) -> None:
        """Poll every sender until it says ``state``."""
        for sender in self.senders:
            until(lambda sender=sender: sender.poll() == state, f"the sender gets to {state}", sender.poll)

    def wait_receivers(self, state: int) -> None:
        """Poll every receiver until it says ``state``."""
        for receiver in self.receivers:
            until(lambda receiver=receiver: receiver.poll() == state, f"the receiver gets to {state}", receiver.poll)
