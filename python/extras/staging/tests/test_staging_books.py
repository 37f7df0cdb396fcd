"""The books of decode's staging buffer: who may write where, and who is given nothing."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.common import delta_staging
from sglang.srt.disaggregation.common.delta_staging import DeltaStaging


def staging_of(pool: list[torch.Tensor], units: int) -> DeltaStaging:
    """A buffer of so many pieces of the smallest size, for a pool of one layer."""
    return DeltaStaging(torch.ones(units * 256, dtype=torch.uint8), pool[:1], pool[1:], 4, tp_size=1, tp_rank=0)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock by which a prefill is silent, in seconds."""
    found = [100.0]
    monkeypatch.setattr(delta_staging, "time", SimpleNamespace(monotonic=lambda: found[0]))
    return found


def test_a_room_that_is_closed_is_given_nothing_and_copies_nothing():
    """Trap 22: its pages may be another's by the time its prefill has written."""
    pool = [torch.zeros(64, 1, 4) for _ in range(2)]
    page = 4 * 4 * 4 * 2
    staging = staging_of(pool, 64)
    granted: list[int] = []
    # One that nobody here knows, as its request has ended.
    staging.request(1, 0, 1, 0, granted.append)
    staging.written(1, 0, 0)
    assert staging.landed(1) and staging.close(1) and not granted
    staging.open(1, np.array([3, 4, 5]), prefill_tp=1, prefill="prefill")
    staging.request(1, 0, 2, 0, granted.append)
    assert len(granted) == 1 and not staging.landed(1) and staging.is_missing(1)
    free = sum(length for _, length in staging.space.free)
    assert free <= staging.space.size - 2 * page
    assert staging.close(1)
    staging.request(1, 2, 1, 0, granted.append)
    staging.written(1, 0, 0)
    assert len(granted) == 1 and not any(buffer.any() for buffer in pool)
    assert not staging.landed(1) and staging.is_missing(1)
    staging.drop(1)
    assert sum(length for _, length in staging.space.free) == staging.space.size


def test_a_prefill_that_stands_still_leaves_the_staging_buffer_to_the_others():
    """What it has been given and does not write comes back when its requests have timed out, minutes later."""
    pool = [torch.zeros(64, 1, 4) for _ in range(2)]
    staging = staging_of(pool, 64)
    granted: list[tuple[str, int]] = []

    def ask(prefill: str, room: int, num_pages: int = 1) -> None:
        staging.open(room, np.zeros(num_pages, dtype=np.int32), 1, prefill)
        staging.request(room, 0, num_pages, 0, lambda offset: granted.append((prefill, room)))

    for room in range(100):
        ask("still", room)
    page = next(iter(staging.rooms.values())).pieces[0].length
    share = staging.space.size // 4 // page
    assert len(granted) == min(share, 64) < 64
    asked_at = len(granted)
    for room in range(100, 110):
        ask("goes on", room)
        assert granted[-1] == ("goes on", room)
    # In the order of asking, as it writes; and what is being copied is nobody's share.
    assert len(granted) == asked_at + 10
    staging.written(0, 0, 0)
    assert granted[-1] == ("still", asked_at)
    staging.drop(1)
    assert granted[-1] == ("still", asked_at + 1)
    # One that has no part of the buffer gets a piece of any size, and its next one when that is written.
    ask("large", 200, 40)
    ask("large", 201, 40)
    ask("large", 202)
    assert granted[-1] == ("large", 200)
    staging.written(200, 0, 0)
    assert granted[-1] == ("large", 201)
    staging.written(201, 0, 0)
    assert granted[-1] == ("large", 202)
    for room in range(300):
        staging.drop(room)
    assert sum(length for _, length in staging.space.free) == staging.space.size
    assert not staging.shares.all and not staging.rooms


@pytest.mark.parametrize("size, piece, lost", [(64, 16, 1), (64, 8, 2), (1024, 16, 16)])
def test_a_prefill_whose_grants_were_lost_goes_on(now: list[float], size: int, piece: int, lost: int):
    """With a connection that is reset what was on its way is gone, and nobody writes what it was about."""
    pool = [torch.zeros(4 * piece * 2, 1, 4) for _ in range(2)]
    staging = staging_of(pool, size)
    granted: list[int] = []
    # A page is half of the smallest piece of memory.
    for room in range(200):
        staging.open(room, np.zeros(2 * piece, dtype=np.int32), 1, "prefill")
        staging.request(room, 0, 2 * piece, 0, lambda offset, room=room: granted.append(room))
    assert len(granted) == lost
    assert not staging.landed(0) and len(granted) == lost
    now[0] += delta_staging.SILENT_S + 1
    assert not staging.landed(0) and len(granted) == lost + 1
    # What it writes now says that what came before is not to be waited for.
    for room in range(lost, 200):
        assert granted[-1] >= room
        staging.written(room, 0, 0)
    assert sorted(granted) == list(range(200))
    for room in range(200):
        staging.drop(room)
    assert sum(length for _, length in staging.space.free) == staging.space.size and not staging.shares.all
