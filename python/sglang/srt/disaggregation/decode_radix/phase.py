"""The phases of a request on a decode worker with a radix cache, until it decodes or has failed.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged), with deferred release
(#35049, #35360, merged).
"""

from __future__ import annotations

import enum

__all__ = ["Phase"]


class Phase(enum.Enum):
    """Where a request is. An error (`DecodeRequest.error`) may come in any phase and leads to
    `QUARANTINED`.
    """

    # In the queue before admission: its prefill is being found; it may be admitted.
    HANDSHAKE = enum.auto()
    READY = enum.auto()
    # In the transfer queue: its delta has been asked for of nobody; a step in flight is waited for
    # first; it has been.
    ADMITTED = enum.auto()
    DEFERRED = enum.auto()
    ASKED = enum.auto()
    # Or prefill is asked for nothing: another source brings it, see `hooks.DeltaSource`.
    LOCAL = enum.auto()
    # Its KV is in the tree, and it waits for its prebuilt batch; or the step that computes it has
    # been launched.
    COMMITTED = enum.auto()
    # It has failed and been told, and a prefill may still write to its pages.
    QUARANTINED = enum.auto()
    # It has given back what it held.
    RELEASED = enum.auto()
