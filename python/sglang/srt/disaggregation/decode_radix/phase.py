"""The phases of a request on a decode worker with a radix cache, until it decodes or has failed.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged), with deferred release
(#35049, #35360, merged).
"""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """The phase of a request. An error (`DecodeRequest.error`) leads from any to `QUARANTINED`."""

    # Before admission: the handshake with prefill is under way; it is done.
    HANDSHAKE = enum.auto()
    READY = enum.auto()
    # In the transfer queue: delta not requested; waiting for the in-flight batch; requested.
    ADMITTED = enum.auto()
    DEFERRED = enum.auto()
    ASKED = enum.auto()
    # Or a source other than prefill brings the delta, see `hooks.DeltaSource`.
    LOCAL = enum.auto()
    # KV in the tree, waiting for the prebuilt batch; or the prompt step has been launched.
    COMMITTED = enum.auto()
    # Failed and reported; a prefill may still write to its pages.
    QUARANTINED = enum.auto()
    # All that it held is released.
    RELEASED = enum.auto()
