"""The panels of the dashboard as plain data: what each answers, and its queries to Prometheus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# Filters of the two variables: workers by their address, and their DP ranks, which most do not have.
_FILTER = 'instance=~"$worker",dp_rank=~"$rank"'
# Metrics of the tokenizer process, which belong to no rank, and of Prometheus itself.
_OF_WORKER = 'instance=~"$worker"'
_WHO = "{{instance}} {{dp_rank}}"


class Query(NamedTuple):
    """A query, and how its lines are named: Grafana's format."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """A panel. unit: Grafana's name of it. stat: one large figure in place of lines."""

    title: str
    says: str
    queries: tuple[Query, ...]
    unit: str = "short"
    stat: bool = False


def _gauge(name: str, more: str = "", by: str = "instance, dp_rank") -> str:
    return f"sum by ({by}) (sglang:{name}{{{_FILTER}{more}}})"


def _rate(name: str, by: str = "instance, dp_rank") -> str:
    return f"sum by ({by}) (rate(sglang:{name}{{{_FILTER}}}[$__rate_interval]))"


def _increase(name: str, by: str = "instance") -> str:
    return f"sum by ({by}) (increase(sglang:{name}{{{_FILTER}}}[$__rate_interval]))"


def _once(how: str, name: str, by: str = "instance, dp_rank") -> str:
    """What the engine's scheduler counts, and so every TP rank under a label of its own. how: rate or increase."""
    each = f"max by (instance, dp_rank) ({how}(sglang:{name}{{{_FILTER}}}[$__rate_interval]))"
    return each if by == "instance, dp_rank" else f"sum by ({by}) ({each})"


def _quantile(part: float, name: str) -> str:
    """Of what clients see, without prefill's: its engine observes no first token, and tokens of failed requests."""
    rate = f"rate(sglang:{name}_bucket{{{_OF_WORKER}}}[$__rate_interval])"
    # The tokenizer process does not say which kind of worker it is of.
    prefill = 'sglang:pd_requests{engine_type="prefill"}'
    return f"histogram_quantile({part}, sum by (le, instance) ({rate})) unless on (instance) {prefill}"


def _counted(metric: str, says: str) -> Query:
    return Query(_rate(metric), f"{says} {_WHO}")


WORTH_IT = (
    Panel(
        "Part of prompts held",
        "Prompt tokens that decode's tree held, of all of committed requests. Near 0: prompts share nothing, or are "
        "not routed to the worker that has them.",
        (Query(f"{_rate('decode_prefix_hit_tokens_total')} / {_rate('decode_prompt_tokens_total')}", _WHO),),
        "percentunit",
        stat=True,
    ),
    Panel(
        "Prompt tokens",
        "Where the KV of prompts came from.",
        (
            _counted("decode_prefix_hit_tokens_total", "held"),
            _counted("decode_transferred_tokens_total", "sent"),
            _counted("decode_computed_tokens_total", "computed on decode"),
            _counted("decode_host_loaded_tokens_total", "of held, from host memory"),
        ),
        "cps",
    ),
    Panel(
        "KV over the wire",
        "Bytes that prefill has sent, and has not sent because decode held them.",
        (
            _counted("kv_transfer_saved_bytes_total", "saved"),
            _counted("kv_transfer_sent_bytes_total", "sent"),
            _counted("kv_transfer_state_bytes_total", "states"),
        ),
        "Bps",
    ),
    Panel(
        "Requests running",
        "In decode's batch. What the tree saves lets more of them run at once.",
        (Query(_gauge("pd_requests", ',state="running",engine_type="decode"'), _WHO),),
    ),
    Panel(
        "Tree",
        "Tokens in decode's tree: those that requests or copies hold, and those that only the tree keeps. Copies go to "
        "and come from host memory and a PegaFlow server; what they hold goes back to 0 while there is no request.",
        (
            Query(_gauge("decode_radix_tree_tokens"), f"all {_WHO}"),
            Query(_gauge("decode_radix_protected_tokens"), f"held {_WHO}"),
            Query(_gauge("decode_radix_evictable_tokens"), f"only kept {_WHO}"),
            Query(_gauge("decode_copying_tokens"), f"copies {_WHO}"),
        ),
    ),
    Panel(
        "Bytes in one run of pages, all layers",
        "Pages that are contiguous on both sides are one run. The backend writes it layer by layer, K and V apart: one "
        "write has this many bytes over twice the number of layers (MLA: over the number of layers). Small writes cost "
        "prefill's processor.",
        (Query(f"{_rate('kv_transfer_sent_bytes_total')} / {_rate('kv_transfer_runs_total')}", _WHO),),
        "bytes",
    ),
    Panel(
        "Prompts that decode computes itself",
        "Requests of which prefill computed and sent nothing.",
        (Query(_rate("decode_local_prefills_total"), _WHO),),
        "reqps",
    ),
)

HURTS = (
    Panel(
        "Time to first token",
        "As each worker's clients see it. Prefill observes none, and is left out.",
        (
            Query(_quantile(0.5, "time_to_first_token_seconds"), "p50 {{instance}}"),
            Query(_quantile(0.95, "time_to_first_token_seconds"), "p95 {{instance}}"),
        ),
        "s",
    ),
    Panel(
        "Time between tokens",
        "It rises with the number of requests that run. Prefill, which sends one token, is left out. With "
        "--disaggregation-decode-itl-target also a decode step, as measured and as its parts explain it, and the "
        "target.",
        (
            Query(_quantile(0.5, "inter_token_latency_seconds"), "p50 {{instance}}"),
            Query(_quantile(0.95, "inter_token_latency_seconds"), "p95 {{instance}}"),
            Query(_gauge("decode_step_seconds"), f"step {_WHO}"),
            Query(_gauge("decode_step_predicted_seconds"), f"step, explained {_WHO}"),
            Query(_gauge("decode_itl_target_seconds"), f"target {_WHO}"),
        ),
        "s",
    ),
    Panel(
        "Queues",
        "Requests before they run, by state.",
        (
            Query(_gauge("pd_requests", ',state!="running"', "instance, dp_rank, state"), f"{{{{state}}}} {_WHO}"),
            Query(_gauge("decode_itl_waiting_requests"), f"for the ITL target {_WHO}"),
        ),
    ),
    Panel(
        "Oldest request of each state",
        "A line that rises by a second each second is a request that stands still.",
        (
            Query(
                f"max by (instance, dp_rank, state) (sglang:pd_oldest_request_seconds{{{_FILTER}}})",
                f"{{{{state}}}} {_WHO}",
            ),
        ),
        "s",
    ),
    Panel(
        "Why requests wait",
        "For memory (blocked), for the ITL target, for the transfer of another that brings their prefix (held back), "
        "overtaken by others whose prompt the tree holds, and since they are too late for the TTFT target.",
        (
            _counted("decode_admissions_blocked_total", "blocked"),
            _counted("decode_itl_held_requests_total", "for the ITL target"),
            _counted("decode_followed_requests_total", "held back"),
            _counted("decode_overtaken_requests_total", "overtaken"),
            _counted("decode_ttft_late_requests_total", "late for the TTFT target"),
        ),
        "reqps",
    ),
    Panel(
        "What holding back brings and costs",
        "Tokens that were not sent twice, for each second that requests waited for them.",
        (
            _counted("decode_followed_tokens_total", "tokens"),
            _counted("decode_following_seconds_total", "seconds"),
        ),
    ),
    Panel(
        "Free part of each pool",
        "Tokens of KV, of windows, slots of states, rows of the request table, metadata buffers. The tree's are not "
        "free, and are given to whoever needs them.",
        (
            Query(
                f"{_gauge('pd_pool_free', by='instance, dp_rank, pool')}"
                f" / {_gauge('pd_pool_size', by='instance, dp_rank, pool')}",
                f"{{{{pool}}}} {_WHO}",
            ),
            Query(
                f"1 - {_gauge('hicache_host_used_tokens')} / {_gauge('hicache_host_total_tokens')}",
                f"host memory {_WHO}",
            ),
        ),
        "percentunit",
    ),
    Panel(
        "Retracted",
        "Requests that were taken out of the batch for want of memory: those that wait to come back, and how many a "
        "second.",
        (
            Query(_gauge("pd_requests", ',state="retracted"'), f"waiting {_WHO}"),
            Query(_once("rate", "num_retracted_requests_total"), f"retracted {_WHO}"),
        ),
    ),
)

BROKEN = (
    Panel(
        "Workers that answer",
        "0: Prometheus cannot read the worker's metrics.",
        (Query(f"up{{{_OF_WORKER}}}", "{{instance}}"),),
        stat=True,
    ),
    Panel(
        "Failures by cause",
        "Requests that were answered with status 500. Of several TP ranks the one that answers counts.",
        (Query(_increase("kv_transfer_failures_total", "instance, cause"), "{{cause}} {{instance}}"),),
    ),
    Panel(
        "Failures by stage",
        "The engine's count: before decode has asked for anything, and from then on.",
        (
            Query(_once("increase", "num_bootstrap_failed_reqs_total", "instance"), "handshake {{instance}}"),
            Query(_once("increase", "num_transfer_failed_reqs_total", "instance"), "transfer {{instance}}"),
            Query(_increase("kv_transfer_failures_total"), "all {{instance}}"),
        ),
    ),
    Panel(
        "Digest mismatches",
        "KV that did not arrive as it was sent, with --disaggregation-decode-verify-pages.",
        (Query(_gauge("decode_page_digest_mismatches_total"), _WHO),),
    ),
    Panel(
        "Peers lost",
        "How often a worker has found one at the other end gone.",
        (Query(_gauge("kv_transfer_peers_lost_total"), _WHO),),
    ),
    Panel(
        "Quarantine",
        "Tokens of failed requests to which a prefill may still write. It ends when that says that it writes no more, "
        "is gone, or after the transfer's time-out.",
        (Query(_gauge("decode_quarantined_tokens"), _WHO),),
    ),
    Panel(
        "Audit",
        "Contradictions in tree and pools when the worker was last idle. Anything but 0 is a fault.",
        (Query(_gauge("decode_audit_faults"), _WHO),),
        stat=True,
    ),
)

#: The rows of the dashboard.
SECTIONS = {
    "Is the cache worth it now?": WORTH_IT,
    "What hurts?": HURTS,
    "What is broken?": BROKEN,
}

#: Metrics of this package on no panel, each with the reason.
ON_NO_PANEL: dict[str, str] = {
    "sglang:prefill_read_tokens_total": "of an option that is off by default; docs/deploy.md says what to look for",
    "sglang:prefill_reads_total": "of an option that is off by default; docs/deploy.md says what to look for",
}
