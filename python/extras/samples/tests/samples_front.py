"""A tokenizer manager that gives samples rooms, without a server."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import tokenizer_front
from prefill_front import bootstrap_server
from sglang.srt.disaggregation import peer_calls
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import samples, tokenizer_manager
from sglang.srt.managers.samples import sample_room

ROOMS = [sample_room(room, i) for room in (11, 12) for i in range(3)]


def looped(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine."""

    @functools.wraps(test)
    def run(*args: Any, **options: Any) -> None:
        tokenizer_front.run(test(*args, **options))

    return run


class Manager(tokenizer_front.Manager):
    """One that has its notes of samples."""

    def __init__(self, mode: DisaggregationMode, flag: bool, context_len: int = 100):
        super().__init__(mode, flag, context_len)
        self.samples = samples.SampleRooms()


@pytest.fixture(autouse=True)
def no_shared_memory(monkeypatch):
    monkeypatch.setattr(tokenizer_manager, "wrap_shm_features", lambda message: message)


@pytest.fixture
def server(monkeypatch):
    """The bootstrap server of a prefill whose tokenizer manager is made later."""
    monkeypatch.setattr(peer_calls, "_listeners", {})
    with bootstrap_server() as port:
        yield port
