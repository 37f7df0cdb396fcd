"""What a prefill's scheduler is told of a request that decode asks nothing for.

Upstream: none is known.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COMPUTED", "ComputedReq"]

# Why a request ends on prefill that it works on when decode says so.
COMPUTED = "decode computes it itself"


@dataclass
class ComputedReq:
    """To prefill's scheduler: decode computes the prompt of this room, which the front has sent with this rid."""

    room: int
    rid: str
