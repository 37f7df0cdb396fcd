"""The decode prefix: what both workers must agree on when decode already holds the start of a prompt.

Backends bring the wire; the arithmetic, the checks and the counters are here, once.

Upstream: not in 0.5.10.post1; later releases carry their own decode-side cache.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

__all__ = [
    "CANCEL",
    "DECODE_PREFIX_ROUTE",
    "DECODE_PREFIX_VERSION",
    "DIGEST",
    "GIVEN_UP",
    "KvTransferCounters",
    "QUEUED",
    "check_decode_prefix",
    "check_prefix_frames",
    "count_runs",
    "pages",
    "wire_int",
]

# Where a prefill's bootstrap server says that it understands a decode prefix, and in which version.
DECODE_PREFIX_ROUTE = "/decode_prefix"
DECODE_PREFIX_VERSION = 1
# Last frame of decode's message that it gave a request up, and the reason for which prefill then fails it.
CANCEL = b"cancel"
GIVEN_UP = "decode gave the request up"
# Frame behind those of the prefix in decode's request for KV: it wants a digest of what is sent.
DIGEST = b"digest"
# Last frame of decode's message that a request waits there for memory.
QUEUED = b"queued"


def pages(num_tokens: int, page_size: int) -> int:
    """Pages that ``num_tokens`` tokens occupy, the last one possibly in part."""
    return -(-num_tokens // page_size)


def count_runs(sources: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]) -> int:
    """Runs of pages that are contiguous on both sides; a backend sends one descriptor for each, layer, and K or V."""
    # Of a decode worker without the flag, prefill takes what fits; it has not been checked here.
    length = min(len(sources), len(targets))
    if length == 0:
        return 0
    sources, targets = sources[:length], targets[:length]
    return 1 + int(np.count_nonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)))


def wire_int(frame: bytes, name: str) -> int:
    """The decimal number in a message frame. Raises ValueError naming the field when it is not one."""
    try:
        return int(frame.decode("ascii"))
    except ValueError:
        raise ValueError(f"{name} is not a number: {frame[:32]!r}") from None


def check_prefix_frames(message: list[bytes]) -> None:
    """Check what a decode worker with a radix cache appends to the engine's eight frames. Raises ValueError."""
    if len(message) not in (10, 11):
        raise ValueError(f"a message with a decode prefix has 10 or 11 frames, this one has {len(message)}")
    if message[9] not in (b"0", b"1"):
        raise ValueError(f"whether this rank is a dummy is not 0 or 1: {message[9][:32]!r}")
    if message[10:] not in ([], [DIGEST]):
        raise ValueError(f"its last frame is unknown: {message[10][:32]!r}")


def check_decode_prefix(prefix_len: int, num_delta_pages: int | None, prompt_len: int, page_size: int) -> None:
    """Check a decode prefix against the prompt it is for (invariant I4).

    prefix_len: tokens that decode says it holds. num_delta_pages: pages it offers for the rest, None from a rank that
    receives no KV. prompt_len: tokens of the prompt. Raises ValueError with the reason.
    """
    if prefix_len < 0:
        raise ValueError(f"decode_prefix_len {prefix_len} is negative")
    if prefix_len % page_size:
        raise ValueError(f"decode_prefix_len {prefix_len} is not a multiple of the page size {page_size}")
    if prefix_len > prompt_len:
        raise ValueError(f"decode_prefix_len {prefix_len} is beyond the prompt of {prompt_len} tokens")
    expected = pages(prompt_len - prefix_len, page_size)
    if num_delta_pages is not None and num_delta_pages != expected:
        raise ValueError(
            f"decode_prefix_len {prefix_len} leaves {expected} pages of a prompt of {prompt_len} tokens, "
            f"but decode allocated {num_delta_pages}"
        )


class KvTransferCounters:
    """Prometheus counters of one worker; every method is a no-op unless the server runs with ``--enable-metrics``.

    Each rank counts for itself and the engine's multiprocess exporter adds them up.
    """

    _made: dict[tuple[str, str], KvTransferCounters] = {}

    @classmethod
    def get(cls, server_args: ServerArgs, dp_rank: int | None = None) -> KvTransferCounters:
        """The counters of this process; made once, since Prometheus refuses a second registration.

        dp_rank: the first to ask gives it, where there are several; it becomes a label, as of the engine's metrics.
        """
        key = (server_args.served_model_name, server_args.disaggregation_mode)
        if key not in cls._made:
            cls._made[key] = cls(*key, enabled=server_args.enable_metrics, dp_rank=dp_rank)
        return cls._made[key]

    def __init__(self, model_name: str, engine_type: str, enabled: bool, dp_rank: int | None = None):
        self.enabled = enabled
        if not enabled:
            return
        # After the engine has set PROMETHEUS_MULTIPROC_DIR, as its own collectors do.
        from prometheus_client import Counter, Gauge

        self._labels = {"model_name": model_name, "engine_type": engine_type}
        if dp_rank is not None:
            # Gauges show what one process wrote last, and each DP rank has a tree of its own.
            self._labels["dp_rank"] = str(dp_rank)
        names = list(self._labels)

        def counter(name: str, text: str):
            return Counter(f"sglang:{name}", text, names).labels(**self._labels)

        def gauge(name: str, text: str):
            return Gauge(f"sglang:{name}", text, names, multiprocess_mode="mostrecent").labels(**self._labels)

        if engine_type == "prefill":
            self._sent = counter("kv_transfer_sent_bytes", "KV bytes handed to the transfer backend.")
            self._saved = counter("kv_transfer_saved_bytes", "KV bytes not sent because decode held them.")
            self._runs = counter("kv_transfer_runs", "Runs of pages, contiguous on both sides, in which KV was sent.")
            self._states = counter("kv_transfer_state_bytes", "Bytes of states of hybrid models that were sent.")
        else:
            self._prompt = counter("decode_prompt_tokens", "Prompt tokens of committed requests.")
            self._hit = counter("decode_prefix_hit_tokens", "Prompt tokens that the decode tree held.")
            self._moved = counter("decode_transferred_tokens", "Prompt tokens whose KV prefill sent.")
            self._blocked = counter(
                "decode_admissions_blocked", "Requests that had to wait for KV memory at least once."
            )
            self._followed = counter(
                "decode_followed_requests", "Requests that waited for the transfer of another, with which they share."
            )
            self._not_sent_twice = counter(
                "decode_followed_tokens", "Prompt tokens that came into the tree while their request waited for them."
            )
            self._following = counter(
                "decode_following_seconds", "Time that requests waited for transfers of others, summed."
            )
            self._overtaken = counter("decode_overtaken_requests", "Steps in which a request was overtaken, summed.")
            self._mismatched = counter(
                "decode_page_digest_mismatches", "Transfers whose KV did not arrive as prefill sent it."
            )
            self._tree = gauge("decode_radix_tree_tokens", "Tokens in the decode tree.")
            self._evictable = gauge("decode_radix_evictable_tokens", "Tokens in the decode tree that nobody holds.")
            self._protected = gauge("decode_radix_protected_tokens", "Tokens in the decode tree held by requests.")

    def sent(self, num_bytes: int, saved_bytes: int = 0, runs: int = 0) -> None:
        if self.enabled:
            self._runs.inc(runs)
            self._sent.inc(num_bytes)
            self._saved.inc(saved_bytes)

    def sent_states(self, num_bytes: int) -> None:
        if self.enabled:
            self._states.inc(num_bytes)

    def committed(self, prompt_len: int, prefix_len: int) -> None:
        if self.enabled:
            self._prompt.inc(prompt_len)
            self._hit.inc(prefix_len)
            self._moved.inc(prompt_len - prefix_len)

    def blocked(self) -> None:
        if self.enabled:
            self._blocked.inc()

    def followed(self, num_tokens: int, seconds: float) -> None:
        if self.enabled:
            self._followed.inc()
            self._not_sent_twice.inc(max(num_tokens, 0))
            self._following.inc(seconds)

    def mismatched(self) -> None:
        if self.enabled:
            self._mismatched.inc()

    def overtaken(self, num_requests: int) -> None:
        if self.enabled:
            self._overtaken.inc(num_requests)

    def tree(self, evictable: int, protected: int) -> None:
        if self.enabled:
            self._tree.set(evictable + protected)
            self._evictable.set(evictable)
            self._protected.set(protected)
