"""What the scheduler thread hands over to a session, and looks at later.

Upstream: none: sgl-project/sglang#17221 was closed. From #25101 (merged) on a release takes trees of other packages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Counters", "Load", "Lookup", "Save"]


@dataclass(eq=False)
class Save:
    """Pages to be copied to the server. They must not change before ``done``.

    slots: int64, the KV slots of whole pages in order. hashes: one per page.
    """

    slots: torch.Tensor
    hashes: list[bytes]
    done: bool = False
    saved: bool = False

    def is_done(self) -> bool:
        """Whether the server reads the pages no more."""
        return self.done


@dataclass(eq=False)
class Lookup:
    """A question how many of ``hashes``, from the first on, the server holds; None until it is answered.

    What it holds is leased to this process until the lease is loaded or dropped. failed: there was no answer, which
    counts as none held. fetching: the server has said that it fetches them from a slower tier.
    """

    hashes: list[bytes]
    failed: bool = False
    fetching: bool = False
    hits: int | None = None
    lease: bytes = b""
    leased: int = 0
    dropped: bool = False


@dataclass(eq=False)
class Load:
    """A copy of leased pages, after the first ``skip``, into ``slots``, which belong to the server until ``final``.

    failed: they will not arrive; the server may yet write to them while not ``final``.
    """

    lease: bytes
    leased: int
    slots: torch.Tensor
    skip: int = 0
    final: bool = False
    failed: bool = False
    state: Any = None
    registration: int = 0
    failed_at: float = 0.0

    def is_done(self) -> bool:
        """Whether the server writes to the pages no more."""
        return self.final


@dataclass
class Counters:
    """What has been done, in pages, for `get_internal_state`; ``lost``: how often the server was."""

    saved: int = 0
    saves_failed: int = 0
    asked: int = 0
    hits: int = 0
    loaded: int = 0
    loads_failed: int = 0
    lost: int = 0
