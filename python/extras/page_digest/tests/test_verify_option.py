"""The option by which decode verifies pages, the counter of those that are wrong, and why a request fails then."""

from __future__ import annotations

import pytest
from sglang.srt.disaggregation.common import conn  # noqa: F401
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.observability.digest_metrics import DigestCounters
from sglang.srt.observability.failure_causes import CAUSES, cause_of
from sglang.srt.observability.kv_transfer_metrics import KvTransferCounters
from test_decode_windows import engine_class, refuse
from test_flag import DECODE, FLAG, parse  # noqa: F401
from test_transfer_counters import registry, scheduler_of, told  # noqa: F401

OPTION = "--disaggregation-decode-verify-pages"
NO_DIGESTS = "decode asks for digests of pages, which this prefill's KV pool does not have"


def test_pages_are_verified_only_where_there_is_a_radix_cache(parse):  # noqa: F811
    assert parse(*DECODE, FLAG, OPTION).disaggregation_decode_verify_pages
    with pytest.raises(ValueError, match=f"needs {FLAG}"):
        parse(*DECODE, OPTION)


def test_not_with_windows(monkeypatch):
    monkeypatch.setattr(engine_class(Scheduler), "init_cache_with_memory_pool", lambda self: pytest.fail("too late"))
    with pytest.raises(ValueError, match=f"sliding windows together with {OPTION}.*--disable-hybrid-swa-memory"):
        refuse(disaggregation_decode_verify_pages=True).init_cache_with_memory_pool()


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_counts_for_itself(registry, rank):  # noqa: F811
    counters = KvTransferCounters.of(scheduler_of("decode", attn_tp_rank=rank))
    for _ in range(2):
        DigestCounters.of(counters).mismatched()
    assert told(registry) == {"decode_page_digest_mismatches_total": 2}


def test_without_metrics_nothing_is_counted(registry):  # noqa: F811
    DigestCounters.of(KvTransferCounters("m", "decode", enabled=False)).mismatched()
    assert not list(registry.collect())


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("what has arrived of KV head 3 is not what prefill sent", "digest"),
        (f"transfer over NIXL failed: {ValueError(NO_DIGESTS)!r}", "mismatch"),
    ],
)
def test_the_cause_that_a_message_names(reason, cause):
    assert cause_of(reason) == cause and cause in CAUSES
    assert cause_of(f"Decode transfer failed for request a (bootstrap_room=7): {reason}") == cause
