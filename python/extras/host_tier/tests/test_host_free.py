"""Whether a host has the memory that a host tier asks for is looked at before the model is loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.host_tier.checks import check_free, free_bytes


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"memory.max": "max", "memory.current": "5", "memory.stat": "inactive_file 0"}, None),
        ({"memory.max": "9000", "memory.current": "5000", "memory.stat": "anon 1\ninactive_file 1000"}, 5000),
        ({"memory.max": "9000", "memory.current": "9500", "memory.stat": "inactive_file 0"}, 0),
        (
            {
                "memory/memory.limit_in_bytes": "7000",
                "memory/memory.usage_in_bytes": "5000",
                "memory/memory.stat": "total_inactive_file 500",
            },
            2500,
        ),
        ({}, None),
    ],
)
def test_memory_that_a_container_leaves(files, free, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found, whose = free_bytes(tmp_path)
    assert (found, whose) == (free, "this container") if free is not None else whose == "this machine" and found > 0


V1, V2 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"), ("", "memory.max", "memory.current")


@pytest.mark.parametrize(("mount", "limit", "used"), [V1, V2], ids=["v1", "v2"])
@pytest.mark.parametrize(
    ("own", "limits", "free", "whose"),
    [
        # The least of its own group and those above it; others' do not count.
        ("/a/b", {"a/b": 500, "a": 900, "c": 10}, 400, "control group /a/b"),
        ("/a/b", {"a/b": "max", "a": 300, ".": 900}, 200, "control group /a"),
        ("/a/b", {".": 900}, 800, "this container"),
        # As a container sees it whose groups are named as the host's.
        ("/", {".": 900, "a": 10}, 800, "this container"),
        ("/../a", {".": 900, "a": 10}, 800, "this container"),
        (None, {".": 900, "a": 10}, 800, "this container"),
    ],
)
def test_memory_that_a_control_group_leaves(tmp_path, mount, limit, used, own, limits, free, whose):
    root, listed = tmp_path / "cgroup", tmp_path / "listed"
    for name, most in limits.items():
        group = root / mount / name
        group.mkdir(parents=True, exist_ok=True)
        for file, text in ((limit, f"{most}\n"), (used, "100\n"), ("memory.stat", "")):
            (group / file).write_text(text)
    if own is not None:
        # Of v1 each controller has a hierarchy of its own.
        listed.write_text(f"3:cpu,{mount}:{own}\n0::/elsewhere\n" if mount else f"3:memory:/elsewhere\n0::{own}\n")
    assert free_bytes(root, listed) == (free, whose)


def asks_for_host_memory(**given: Any) -> Any:
    defaults = {"hicache_size": 10**6, "tp_size": 1, "nnodes": 1, "dp_size": 1, "enable_dp_attention": False}
    return SimpleNamespace(**{**defaults, **given})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tp_size": 4, "nnodes": 2}, "1000000 takes 2000000.0 GB of host memory for 2 ranks"),
        ({"tp_size": 2, "dp_size": 4}, "1000000 takes 8000000.0 GB of host memory for 8 ranks"),
        # These share its ranks.
        ({"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}, "takes 4000000.0 GB of host memory for 4 ranks"),
    ],
)
def test_more_memory_than_there_is_is_refused_before_the_model_is_loaded(tmp_path, given, says):
    check_free(asks_for_host_memory(**{**given, "hicache_size": 0}), cgroup=tmp_path)
    with pytest.raises(ValueError, match=f"--hicache-size .*{says}"):
        check_free(asks_for_host_memory(**given), cgroup=tmp_path)
