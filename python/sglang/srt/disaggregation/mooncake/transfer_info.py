"""Decode's request for KV over Mooncake. `conn.py` puts it before the engine's.

Upstream: sgl-project/sglang#24257 (merged).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from sglang.srt.disaggregation.common.wire import check_prefix_frames, split_parts, wire_int

# Placeholder: `conn.py` puts the engine's class behind this one.
Base: Any = object


@dataclasses.dataclass
class PrefixedInfo(Base):
    """Decode's request for KV, with the prefix it holds.

    decode_prefix_len: tokens, None without the flag. parts, heard_until: `MessagePart`, `Pulse`.
    """

    decode_prefix_len: int | None = None
    parts: dict[bytes, Any] = dataclasses.field(default_factory=dict)
    heard_until: float = math.inf

    @property
    def names_prefix(self) -> bool:
        """Whether decode runs with the flag, so that this message names its prefix."""
        return self.decode_prefix_len is not None

    @classmethod
    def from_zmq(cls, msg: list[bytes]) -> PrefixedInfo:
        """Wraps the engine's parser: reads the frames after its own. Raises ValueError."""
        info = super().from_zmq(msg)
        if len(msg) > 8:
            msg, info.parts = split_parts(msg)
            check_prefix_frames(msg)
            info.decode_prefix_len = wire_int(msg[8], "decode_prefix_len")
            # In the engine missing frames mean a dummy, but a full hit has no pages either.
            if info.is_dummy != (msg[9] == b"1"):
                raise ValueError("its dummy mark and its metadata index contradict each other")
        return info
