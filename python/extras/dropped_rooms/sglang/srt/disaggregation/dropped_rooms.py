"""The message to a prefill's scheduler about a request that decode computes itself.

Upstream: none is known.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COMPUTED", "ComputedReq"]

# The finish reason on prefill of a request that it is computing then.
COMPUTED = "decode computes it itself"


@dataclass
class ComputedReq:
    """To prefill's scheduler: decode computes the prompt of this room. rid: of the front-end's request."""

    room: int
    rid: str
