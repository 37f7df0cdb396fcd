"""How the time that is left is shared out among the parts that are left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """least_s: seconds below which a part shows nothing. share: of what is left once all have theirs, relative."""

    name: str
    share: float
    least_s: float


def allot(claims: Sequence[Claim], seconds: float) -> dict[str, float]:
    """Seconds of each part that gets any.

    claims: in the order of worth. Each gets its least if there is room for it beside those before it: one of less worth
    never takes the place of one before it, but may have what is too little for that. The rest is divided by share.
    """
    chosen: list[Claim] = []
    left = seconds
    for claim in claims:
        if claim.least_s <= left:
            left -= claim.least_s
            chosen.append(claim)
    shares = sum(claim.share for claim in chosen)
    return {claim.name: claim.least_s + left * claim.share / shares for claim in chosen}
