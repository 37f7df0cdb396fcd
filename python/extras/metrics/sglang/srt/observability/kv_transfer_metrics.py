"""Counters of a worker's KV transfers.

Upstream: none is known.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.decode_radix.hooks import Events
from sglang.srt.observability.failure_causes import CAUSES, cause_of

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.server_args import ServerArgs

__all__ = ["KvTransferCounters"]


class KvTransferCounters(Events):
    """Prometheus counters of one worker; every method is a no-op without ``--enable-metrics``.

    The engine's multiprocess exporter sums the ranks. Requests and their tokens are equal on all TP ranks, so only the
    rank that answers clients counts them. Bytes, runs and peers are counted by each rank.
    """

    _made: dict[tuple[str, str], KvTransferCounters] = {}

    @classmethod
    def of(cls, scheduler: Any) -> KvTransferCounters:
        """The counters of a scheduler's rank; has to be the first call, since later ones omit the rank."""
        args = scheduler.server_args
        if not args.enable_metrics:
            return cls.get(args)
        answers = not (scheduler.pp_rank or scheduler.attn_tp_rank or scheduler.attn_cp_rank)
        dp_rank = (scheduler.dp_rank or 0) if args.dp_size > 1 else None
        return cls.get(args, dp_rank, answers)

    @classmethod
    def get(cls, server_args: ServerArgs, dp_rank: int | None = None, answers: bool = True) -> KvTransferCounters:
        """The counters of this process; created once, since Prometheus refuses a second registration.

        The first call's arguments count. dp_rank: with DP, a label as in the engine's metrics. answers: whether this
        rank answers its DP rank's clients.
        """
        key = (server_args.served_model_name, server_args.disaggregation_mode)
        if key not in cls._made:
            cls._made[key] = cls(*key, enabled=server_args.enable_metrics, dp_rank=dp_rank, answers=answers)
        return cls._made[key]

    def __init__(self, model_name: str, engine_type: str, enabled: bool, dp_rank: int | None = None, answers=True):
        self.enabled, self._counts_requests = enabled, enabled and answers
        if not enabled:
            return
        # After the engine has set PROMETHEUS_MULTIPROC_DIR.
        from prometheus_client import Counter, Gauge

        # Gauges show one process's last write, and each DP rank has its own tree.
        of_rank = {} if dp_rank is None else {"dp_rank": str(dp_rank)}
        self._labels = {"model_name": model_name, "engine_type": engine_type, **of_rank}
        names = list(self._labels)

        def counter(name: str, text: str, by: str | None = None):
            made = Counter(f"sglang:{name}", text, [*names, *([by] if by else ())])
            return made if by else made.labels(**self._labels)

        def gauge(name: str, text: str):
            return Gauge(f"sglang:{name}", text, names, multiprocess_mode="mostrecent").labels(**self._labels)

        self._failed = counter("kv_transfer_failures", "Requests that failed with status 500, by cause.", by="cause")
        for cause in CAUSES:
            # Exposed from the start: a counter that starts at 1 shows no increase.
            self._failed.labels(**self._labels, cause=cause)
        self._lost = counter("kv_transfer_peers_lost", "Workers of the other kind that were lost.")
        if engine_type == "prefill":
            self._sent = counter("kv_transfer_sent_bytes", "KV bytes handed to the transfer backend.")
            self._saved = counter("kv_transfer_saved_bytes", "KV bytes not sent because decode held them.")
            self._runs = counter("kv_transfer_runs", "Runs of pages sent; each is contiguous on both workers.")
            self._states = counter("kv_transfer_state_bytes", "Bytes of hybrid models' states that were sent.")
        else:
            self._prompt = counter("decode_prompt_tokens", "Prompt tokens of committed requests.")
            self._hit = counter("decode_prefix_hit_tokens", "Prompt tokens that the decode tree held.")
            self._moved = counter("decode_transferred_tokens", "Prompt tokens whose KV prefill sent.")
            self._computed = counter("decode_computed_tokens", "Prompt tokens that decode computed itself.")
            self._local = counter("decode_local_prefills", "Requests that needed no prefill.")
            self._blocked = counter(
                "decode_admissions_blocked", "Admissions blocked: the next request did not fit in KV memory."
            )
            self._followed = counter(
                "decode_followed_requests", "Requests that waited for another's transfer of their prefix."
            )
            self._not_sent_twice = counter(
                "decode_followed_tokens", "Prompt tokens that these requests then found in the tree."
            )
            self._following = counter("decode_following_seconds", "Seconds that these requests waited, summed.")
            self._overtaken = counter(
                "decode_overtaken_requests", "Requests bypassed by a later one, counted once per step."
            )
            self._tree = gauge("decode_radix_tree_tokens", "Tokens in the decode tree.")
            self._evictable = gauge("decode_radix_evictable_tokens", "Tokens in the decode tree that no request holds.")
            self._protected = gauge("decode_radix_protected_tokens", "Tokens in the decode tree that requests hold.")

    @property
    def counts_requests(self) -> bool:
        return self._counts_requests

    @property
    def labels(self) -> dict[str, str]:
        return dict(self._labels) if self.enabled else {}

    def ended(self, reason: Any) -> None:
        """A request was aborted. Counted if the client was not at fault."""
        if self._counts_requests and getattr(reason, "status_code", None) == HTTPStatus.INTERNAL_SERVER_ERROR:
            self.failed(reason.message)

    def failed(self, message: str) -> None:
        """A request failed. message: the client's."""
        if self._counts_requests:
            self._failed.labels(**self._labels, cause=cause_of(message)).inc()

    def lost_peer(self) -> None:
        if self.enabled:
            self._lost.inc()

    def sent(
        self, kv_args: Any, their_item_len: int, sent_pages: int, saved_pages: int, runs: int = 0, states: int = 0
    ) -> None:
        if not self.enabled:
            return
        # For another TP size all buffers are cut as the first one. A draft's have other sizes, and are not cut then.
        first = kv_args.kv_item_lens[0] if kv_args.kv_item_lens else 1
        page_bytes = sum(kv_args.kv_item_lens) * min(their_item_len, first) // first
        self._states.inc(states * sum(kv_args.state_item_lens) if states else 0)
        self._runs.inc(runs)
        self._sent.inc(sent_pages * page_bytes)
        self._saved.inc(saved_pages * page_bytes)

    def committed(self, prompt_len: int, prefix_len: int, computed: int = 0) -> None:
        if self._counts_requests:
            self._prompt.inc(prompt_len)
            self._hit.inc(prefix_len)
            self._moved.inc(prompt_len - prefix_len - computed)
            if computed:
                self._computed.inc(computed)
                self._local.inc()

    def blocked(self) -> None:
        if self._counts_requests:
            self._blocked.inc()

    def admitted(self, decode_req: DecodeRequest, prefix_len: int, loaded: int) -> None:
        entry = decode_req.entry
        # Only the extra prefix_order has it.
        waited_s = getattr(entry, "waited_s", 0.0)
        if self._counts_requests and getattr(entry, "following_since", None) is not None:
            self._followed.inc()
            self._not_sent_twice.inc(max(prefix_len - entry.held_alone, 0))
            self._following.inc(waited_s)
        decode_req.req.time_stats.note_admitted(prefix_len, loaded, entry.local, waited_s)

    def overtaken(self, num_requests: int) -> None:
        if self._counts_requests:
            self._overtaken.inc(num_requests)

    def tree(self, evictable: int, protected: int) -> None:
        if self.enabled:
            self._tree.set(evictable + protected)
            self._evictable.set(evictable)
            self._protected.set(protected)
