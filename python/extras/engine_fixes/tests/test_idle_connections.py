"""Idle HTTP connections of workers."""

from __future__ import annotations

import pytest
from sglang.srt.environ import envs
from test_flag import DECODE, parse  # noqa: F401


@pytest.mark.parametrize(("given", "options", "kept"), [(None, [], "5"), (None, DECODE, "4000"), ("7", DECODE, "7")])
def test_workers_of_a_pair_outlast_a_routers_idle_connections(parse, monkeypatch, given, options, kept):  # noqa: F811
    """An hour, without a variable; an ordinary worker keeps them as the engine does, and what is set is kept."""
    name = "SGLANG_TIMEOUT_KEEP_ALIVE"
    # Whatever is made of it is taken back at the end.
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    if given is not None:
        monkeypatch.setenv(name, given)
    parse(*options)
    assert str(envs.SGLANG_TIMEOUT_KEEP_ALIVE.get()) == kept
