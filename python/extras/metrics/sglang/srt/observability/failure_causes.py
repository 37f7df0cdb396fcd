"""Classifies failure messages by cause, as a metrics label.

Upstream: none is known.
"""

from __future__ import annotations

import re

__all__ = ["CAUSES", "ELSEWHERE", "OTHER", "cause_of"]

# The message comes from another rank of this worker; and no sign matches.
ELSEWHERE, OTHER = "other_rank", "other"
# The first match counts: a reported message is classified by the peer's own reason.
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
# The subject at a message's start, which names the room.
_BEGINNING = re.compile(
    r"^(?:Decode|Prefill) \w+ failed for request .*?(?:bootstrap_room=|room )\d+\)?:? ?"
    r"|^(?:with exception )?KVTransferError\(bootstrap_room=\d+\): "
)
# Host names must not match a sign.
_ADDRESS = re.compile(r"[\w.\-\[\]:]+:\d+")
# Messages of ranks that have no reason of their own.
_UNKNOWN = re.compile("no reason was recorded|another pipeline stage|failed on another rank of")


def cause_of(message: str) -> str:
    """The cause of a failed request, one of `CAUSES`."""
    reason = _BEGINNING.sub("", _BEGINNING.sub("", message))
    if not reason or _UNKNOWN.search(reason):
        return ELSEWHERE
    reason = _ADDRESS.sub("", reason)
    return next((cause for cause, pattern in _PATTERNS if pattern.search(reason)), OTHER)
