"""Decode's NIXL registration with its state sizes appended; over Mooncake the engine sends them. See docs/protocol.md.


Upstream: none is known.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
from sglang.srt.disaggregation.nixl import conn as engine

__all__ = ["KVArgsRegisterInfo", "NixlKVReceiver"]

# Frames of the engine's registration, without NIXL's guard frame.
REGISTRATION_FRAMES = 12


class KVArgsRegisterInfo(engine.KVArgsRegisterInfo):
    """A decode rank's memory, with bytes per slot of each state; empty if not reported."""

    @classmethod
    def from_zmq(cls, msg: list[bytes]) -> KVArgsRegisterInfo:
        """Raises ValueError for an invalid registration."""
        registered = super().from_zmq(msg)
        sizes = np.frombuffer(b"".join(msg[REGISTRATION_FRAMES:]), dtype="<u4")
        registered.dst_state_item_lens = sizes.tolist()
        return registered


class NixlKVReceiver(engine.NixlKVReceiver):
    """Reports its state sizes."""

    def _register_kv_args(self) -> None:
        """Adds the state sizes of a model with states, with a radix cache."""
        args = self.kv_mgr.kv_args
        if not (args.state_data_ptrs and self.kv_mgr.has_radix):
            super()._register_kv_args()
            return
        more = np.array(args.state_item_lens, dtype="<u4").tobytes()

        def connect(peer: dict) -> tuple[Any, Any]:
            socket, lock = self._connect_to_bootstrap_server(peer)
            return SimpleNamespace(send_multipart=lambda frames: socket.send_multipart([*frames, more])), lock

        sized = copy.copy(self)
        sized._connect_to_bootstrap_server = connect
        # Another overlay may have replaced the class of this name.
        super()._register_kv_args.__func__(sized)
