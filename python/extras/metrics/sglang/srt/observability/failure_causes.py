"""Causes of failed requests in a few words, so that they can be counted by them.

Upstream: none is known.
"""

from __future__ import annotations

import re

__all__ = ["CAUSES", "ELSEWHERE", "OTHER", "cause_of"]

# What a rank counts that has only been told by another rank of its worker, and what none of the rest is.
ELSEWHERE, OTHER = "other_rank", "other"
# The first that is found in a reason names its cause: what a peer reports is looked at for what it says itself.
_SIGNS = {
    "gave_up": "decode gave the request up|[Aa]borted",
    "digest": "is not what prefill sent|no digest of|the digest that prefill sent",
    "peer_lost": "is gone|it was lost in the meantime|Losing connection|[Ii]nstance could be dead",
    "timeout": (
        "timed out|[Tt]imeout|has not answered for|takes no messages|granted no staging memory for|for which it waits"
        "|metadata has not come"
    ),
    "secret": "Do all workers have the same|it is not signed|its signature|it was signed|it has come before",
    "mismatch": (
        "cannot be used|this decode worker (?:has|with)|it has TP size|draft model|refused decode"
        "|pages of its state or window|asks for digests"
    ),
    "room": "room|has not been asked for",
    "backend": "NIXL|Mooncake|[Mm]ooncake|kv chunk|transfer over|state could not be written|staging memory|piece",
}
CAUSES = (*_SIGNS, ELSEWHERE, OTHER)
_PATTERNS = [(cause, re.compile(signs)) for cause, signs in _SIGNS.items()]
# A message begins with what it is about, and there names the room.
_BEGINNING = re.compile(
    r"^(?:Decode|Prefill) \w+ failed for request .*?(?:bootstrap_room=|room )\d+\)?:? ?"
    r"|^(?:with exception )?KVTransferError\(bootstrap_room=\d+\): "
)
# A worker by its address, whose name says nothing of a cause.
_ADDRESS = re.compile(r"[\w.\-\[\]:]+:\d+")
# What a rank says that knows of no reason of its own.
_UNKNOWN = re.compile("no reason was recorded|another pipeline stage|failed on another rank of")


def cause_of(message: str) -> str:
    """The cause, one of `CAUSES`, that the message of a failed request names."""
    reason = _BEGINNING.sub("", _BEGINNING.sub("", message))
    if not reason or _UNKNOWN.search(reason):
        return ELSEWHERE
    reason = _ADDRESS.sub("", reason)
    return next((cause for cause, pattern in _PATTERNS if pattern.search(reason)), OTHER)
