"""``pd-radix demo``: the same chat twice, with the decode prefix cache off and on, and what the difference is."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_pd_radix import __version__
from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.supplied import cpu_host, torch_layers

from .chat_load import ChatError, Chats, Reply, Workload
from .cluster import ATTENTION_OPTIONS, RADIX_FLAG, Cluster, Progress, has_option, http, option_value
from .make_model import make_model
from .rounding import Difference, difference, limit_of
from .up import check_json, check_may_switch, check_model

# The cache may send this much more than the least that any cache could.
MOST_OVER_LEAST = 1.05

# The first turn is the same work in both runs. Where it took this many times longer in one of them, something else ran.
MOST_DISTURBED = 1.1

# Tokens of each place whose log-probabilities are asked for where rounding has to be judged.
LIKELIEST = 5

# What the workers count, with the flag off as with it on.
PREFILL_COUNTERS = {
    "sent_bytes": "sglang:kv_transfer_sent_bytes_total",
    "saved_bytes": "sglang:kv_transfer_saved_bytes_total",
}
DECODE_COUNTERS = {
    "prompt_tokens": "sglang:decode_prompt_tokens_total",
    "reused_tokens": "sglang:decode_prefix_hit_tokens_total",
    "transferred_tokens": "sglang:decode_transferred_tokens_total",
}

_EPILOG = """
Engine options for all workers follow after --, for example:

  pd-radix demo --model Qwen/Qwen3-0.6B -- --page-size 64 --tp 2

Exit code: 0 the cache saved what it can and changed no answer, 1 something was wrong (it says what).
"""


@dataclass
class Turn:
    """One turn of all clients. Tokens and bytes are sums over the clients, as the workers counted them."""

    prompt_tokens: int
    reused_tokens: int
    transferred_tokens: int
    sent_bytes: int
    saved_bytes: int
    replies: list[Reply]

    @property
    def ttft_s(self) -> float:
        """Median time to the first token of an answer, seconds."""
        return statistics.median(reply.ttft_s for reply in self.replies)


@dataclass
class Run:
    """The whole chat on one deployment. ``overlapped``: whether decode overlaps its steps. ``problems``: what its KV
    pools hold that they should not."""

    start_s: float
    page_size: int
    dtype: str
    device: str
    overlapped: bool
    turns: list[Turn] = field(default_factory=list)
    # The answers of the same chat held once more, by turn, where rounding may differ.
    again: list[list[Reply]] = field(default_factory=list)
    pools: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def total(self, name: str) -> int:
        return sum(getattr(turn, name) for turn in self.turns)

    @property
    def later_ttfts_s(self) -> list[float]:
        """TTFT of all answers from the second turn on, where there is something to reuse; seconds."""
        later = self.turns[1:] or self.turns
        return [reply.ttft_s for turn in later for reply in turn.replies]

    @property
    def later_ttft_s(self) -> float:
        """Their median, seconds."""
        return statistics.median(self.later_ttfts_s)


# ----------------------------------------------------------------------------------------------------------- figures


def pages_of_prompts(turns: Sequence[Sequence[tuple[int, int]]], page_size: int) -> int:
    """Pages that cross when decode holds nothing: every page of every prompt, a page that is filled in part included.

    turns: per turn and conversation (prompt tokens, answer tokens).
    """
    return sum(-(-prompt // page_size) for turn in turns for prompt, _ in turn)


def kept_of_answer(answer: int, overlapped: bool) -> int:
    """Of how many tokens of an answer decode has the KV when it has ended.

    The last token is never fed back, unless the worker overlaps its steps: then the next one has been launched before
    the answer is seen to have ended. An answer of one token, which prefill makes, takes no step.
    """
    return answer if overlapped and answer > 1 else answer - 1


def least_pages(turns: Sequence[Sequence[tuple[int, int]]], page_size: int, overlapped: bool) -> int:
    """The fewest pages that must cross, by the size of the conversations alone.

    turns: per turn and conversation (prompt tokens P, answer tokens A), where each prompt begins with the previous
    prompt and answer of its conversation. After a turn decode holds the KV of P + K tokens: of the prompt and of
    K = `kept_of_answer` (A) of the answer. It can reuse whole pages of it, so of the next prompt P'

        ceil(P' / page) - floor((P + K) / page)

    pages have to be sent, and of a first prompt ceil(P / page). That counts each token of a prompt once, and no token
    of an answer that decode has kept. Conversations are taken to have nothing in common.
    """
    total = 0
    held = [0] * len(turns[0]) if turns else []
    for turn in turns:
        for client, (prompt, answer) in enumerate(turn):
            total += -(-prompt // page_size) - held[client] // page_size
            held[client] = prompt + kept_of_answer(answer, overlapped)
    return total


def parse_counters(text: str, names: dict[str, str]) -> dict[str, float]:
    """Sums over all label sets of the Prometheus counters in ``names`` (ours -> theirs). A missing one is left out."""
    theirs = {metric: name for name, metric in names.items()}
    sums: dict[str, float] = {}
    for line in text.splitlines():
        metric, _, rest = line.partition("{")
        name = theirs.get(metric.strip() if rest else line.split(" ", 1)[0])
        if name is not None:
            sums[name] = sums.get(name, 0.0) + float(line.rpartition(" ")[2])
    return sums


def pool_problems(name: str, pool: dict[str, Any], keeps_tree: bool) -> list[str]:
    """What is wrong with the KV pool of an idle worker, from its ``kv_pool`` figures (tokens).

    keeps_tree: it is a decode worker with the flag, which counts its locks and audits its tree.
    """
    missing = [key for key in ("locks_taken", "locks_released", "audit") if keeps_tree and key not in pool]
    if missing:
        return [f"{name} does not tell its {' and '.join(missing)}"]
    wrong = []
    if not pool["idle"]:
        wrong.append(f"{name} is not idle although every answer is complete")
    free, kept = pool["available"], pool["evictable"]
    if free + kept != pool["size"]:
        wrong.append(f"{name}: {free} free and {kept} evictable tokens do not make its pool of {pool['size']}")
    if pool["protected"]:
        wrong.append(f"{name}: {pool['protected']} tokens are locked and nobody uses them")
    if pool.get("locks_taken") != pool.get("locks_released"):
        wrong.append(f"{name}: {pool['locks_taken']} locks were taken and {pool['locks_released']} released")
    wrong += [f"{name}: {fault}" for fault in pool.get("audit", ())]
    return wrong


def differences(off: Run, on: Run) -> list[str]:
    """Every answer that is not the same in both runs, and where it parts."""
    found = []
    for number, (one, other) in enumerate(zip(off.turns, on.turns, strict=True), 1):
        for client, (a, b) in enumerate(zip(one.replies, other.replies, strict=True), 1):
            if a.text != b.text:
                same = len(os.path.commonprefix([a.text, b.text]))
                found.append(
                    f"turn {number}, client {client}: the answers part after {same} characters, "
                    f"off {_excerpt(a.text, same)}, on {_excerpt(b.text, same)}"
                )
    return found


def roundings(one: Sequence[Sequence[Reply]], other: Sequence[Sequence[Reply]]) -> list[Difference]:
    """What each answer differs by, with log-probabilities; of a conversation until it parts, as then its prompts do."""
    found = []
    for clients in zip(zip(*one, strict=True), zip(*other, strict=True), strict=True):
        for a, b in zip(*clients, strict=True):
            assert a.answer and b.answer
            found.append(difference(a.answer, b.answer))
            if found[-1].parted_at is not None:
                break
    return found


def _excerpt(text: str, at: int) -> str:
    start = max(0, at - 12)
    return json.dumps(("..." if start else "") + text[start : at + 24], ensure_ascii=False)


@dataclass
class Comparison:
    """Both runs against each other. ``failures`` is what makes the demo fail, ``notes`` what a reader has to know."""

    off: Run
    on: Run
    page_bytes: float
    least_bytes: float
    differences: list[str]
    failures: list[str]
    notes: list[str]
    # What rounding may do to a log-probability, nats, where it was judged.
    rounding_limit: float | None = None

    @property
    def bytes_ratio(self) -> float:
        """KV bytes sent with the flag off over those with it on."""
        return _ratio(self.off.total("sent_bytes"), self.on.total("sent_bytes"))

    @property
    def ttft_ratio(self) -> float:
        """TTFT with the flag off over that with it on, medians of all answers from the second turn on."""
        return _ratio(self.off.later_ttft_s, self.on.later_ttft_s)

    @property
    def over_least(self) -> float:
        """KV bytes sent with the flag on over the least possible."""
        return _ratio(self.on.total("sent_bytes"), self.least_bytes)


def _parted(found: Sequence[Difference]) -> str:
    return _count(sum(d.parted_at is not None for d in found), "conversation")


def _ratio(a: float, b: float) -> float:
    return a / b if b else float("inf") if a else 1.0


@dataclass(frozen=True)
class Rounding:
    """noise: what two runs with the flag off differ by. seen: what the run with it does. limit: what may be, nats."""

    noise: list[Difference]
    seen: list[Difference]
    limit: float

    @property
    def beyond(self) -> list[Difference]:
        """What is seen and rounding does not explain."""
        return [d for d in self.seen if not d.within(self.limit)]


def rounding_of(off: Run, on: Run, control: Sequence[Sequence[Reply]] = ()) -> Rounding:
    """What rounding does in two runs, of which ``off`` held the chat twice.

    ``control``: the answers of one engine with the prefix cache that it has. Prefill computes the KV of an earlier
    answer in one pass over its tokens, and the steps that made the answer computed it one by one, which rounds
    otherwise. Off, every answer reads what prefill computed; any cache that keeps answers reads the steps' own.
    """
    first = [turn.replies for turn in off.turns]
    noise = roundings(first, off.again)
    limit = limit_of(noise + (roundings(first, control) if control else []))
    return Rounding(noise, roundings(first, [turn.replies for turn in on.turns]), limit)


def compare(off: Run, on: Run, control: Sequence[Sequence[Reply]] = ()) -> Comparison:
    """Judge the two runs of one workload; ``control`` as for `rounding_of`."""
    page = off.page_size
    sizes = [[(reply.prompt_tokens, reply.answer_tokens) for reply in turn.replies] for turn in off.turns]
    prompt_pages = pages_of_prompts(sizes, page)
    # Off, every page of every prompt is sent, so the bytes of a page follow for any model, dtype and TP degree.
    page_bytes = off.total("sent_bytes") / prompt_pages
    failures: list[str] = []
    notes: list[str] = []
    different = differences(off, on)
    # Another batch rounds differently. How much is measured, between two runs with the flag off.
    rounding = rounding_of(off, on, control) if off.again else None
    if rounding:
        seen, beyond = rounding.seen, rounding.beyond
        conversations, answers = len(on.turns[0].replies), sum(len(turn.replies) for turn in on.turns)
        engine = " and by one engine with its own prefix cache" if control else ""
        told = (
            f"in {on.dtype}, {_parted(seen)} part, and {_parted(rounding.noise)} of two runs with the flag off; "
            f"log-probabilities differ by at most {max(d.drift for d in seen):.2g}, where {rounding.limit:.2g} is "
            f"rounding by those two runs{engine} ({len(seen)} of {answers} answers compared: "
            "none after the first that parts)"
        )
        if len(seen) <= conversations < answers:
            told += ". No answer that used the cache could be compared: pd-radix verify asks the same in both runs"
        (failures if beyond else notes).append(f"{told}; {len(beyond)} answers differ by more" if beyond else told)
    elif different:
        failures.append(f"{len(different)} answers are not identical")
    unlike = sorted((off.turns[0].ttft_s, on.turns[0].ttft_s))
    if unlike[1] > MOST_DISTURBED * unlike[0]:
        notes.append(
            "turn 1 is the same work in both runs, and its TTFT differs. That much is chance, or other work of this "
            "machine, and so may the other times be (tokens and bytes are exact)"
        )
    if off.total("reused_tokens") or off.total("saved_bytes"):
        failures.append("with the flag off, decode reused part of a prompt")
    if page_bytes != int(page_bytes):
        failures.append(f"with the flag off, {prompt_pages} pages of prompts took {off.total('sent_bytes')} bytes")
    for name, run in (("off", off), ("on", on)):
        counted, asked = run.total("prompt_tokens"), sum(r.prompt_tokens for t in run.turns for r in t.replies)
        if counted != asked:
            failures.append(f"flag {name}: decode counted {counted} prompt tokens, and {asked} were answered")
        if run.total("reused_tokens") + run.total("transferred_tokens") != counted:
            failures.append(f"flag {name}: reused and transferred tokens do not make the prompts")
        failures += [f"flag {name}: {problem}" for problem in run.problems]
    # The least is that of the conversation which ran with the flag on: other answers may tokenize to other lengths.
    sizes = [[(reply.prompt_tokens, reply.answer_tokens) for reply in turn.replies] for turn in on.turns]
    least_bytes = least_pages(sizes, page, on.overlapped) * page_bytes
    result = Comparison(
        off, on, page_bytes, least_bytes, different, failures, notes, rounding.limit if rounding else None
    )
    if result.over_least > MOST_OVER_LEAST:
        failures.append(
            f"with the flag on, {result.over_least:.3f} times the least possible was sent, above {MOST_OVER_LEAST} "
            "(a template that rewrites earlier answers costs them anew each turn, a pool that is too small the rest)"
        )
    return result


# -------------------------------------------------------------------------------------------------------------- runs


class _Progress:
    """On a terminal one line that changes and one that stays for each finished step; elsewhere a line for each step."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.text import Text

        self._text = Text
        self._console = Console(stderr=True, highlight=False)
        self._status = self._console.status("") if self._console.is_terminal else None

    def __enter__(self) -> _Progress:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()

    def now(self, text: str) -> None:
        """What is being done."""
        if self._status:
            self._status.update(self._text(text))
        else:
            self._line(f"  {text}")

    def done(self, text: str) -> None:
        """What has been done."""
        self._line(text)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


def summed_counters(
    prefill_urls: Sequence[str], decode_urls: Sequence[str], optional: dict[str, str] | None = None
) -> dict[str, int]:
    """The counters of these workers, summed; of decode also the ``optional``, which are not there while they are 0.

    Raises PdRadixError for a worker that does not count.
    """
    optional = optional or {}
    sums = dict.fromkeys(optional, 0)
    for urls, names in ((prefill_urls, PREFILL_COUNTERS), (decode_urls, DECODE_COUNTERS)):
        for url in urls:
            status, content = http(url + "/metrics", timeout=30)
            wanted = {**names, **optional} if names is DECODE_COUNTERS else names
            found = parse_counters(content.decode(errors="replace"), wanted) if status == 200 else {}
            missing = sorted(set(names) - set(found))
            if missing:
                raise PdRadixError(
                    f"{url}/metrics does not have {names[missing[0]]} (HTTP {status}): see if `pd-radix doctor` "
                    "finds the patch set active, and that SGLANG_PD_RADIX is not 0"
                )
            for name, value in found.items():
                sums[name] = sums.get(name, 0) + int(value)
    return sums


def server_info(url: str) -> dict[str, Any]:
    """What the worker at ``url`` says of itself. Raises PdRadixError if it does not answer with 200."""
    status, content = http(url + "/get_server_info", timeout=30)
    if status != 200:
        raise PdRadixError(f"{url}/get_server_info answered HTTP {status}: {content.decode(errors='replace')[:200]}")
    return json.loads(content)


def idle_pools(url: str) -> list[dict[str, Any]]:
    """The KV pools of the worker at ``url``, one per rank, once all are idle or after 10 seconds."""
    deadline = time.monotonic() + 10
    while True:
        pools = [state["kv_pool"] for state in server_info(url)["internal_states"]]
        if all(pool["idle"] for pool in pools) or time.monotonic() > deadline:
            return pools
        time.sleep(0.1)


def _pools(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """The KV pool of every worker (``decode-0``; with data parallelism one per rank), once all are idle."""
    pools = {}
    for worker in cluster.processes:
        if worker.role == "router":
            continue
        found = idle_pools(worker.url)
        for rank, pool in enumerate(found):
            pools[worker.name if len(found) == 1 else f"{worker.name} rank {rank}"] = pool
    return pools


def empty_caches(cluster: Cluster, urls: Sequence[str], timeout_s: float = 10) -> None:
    """Empty the caches of the workers at ``urls``, as if they had just been started. Raises PdRadixError."""
    for url in urls:
        deadline = time.monotonic() + timeout_s
        while http(url + "/flush_cache", {}, timeout=timeout_s)[0] != 200:  # refused until the last request is gone
            cluster.check()
            if time.monotonic() > deadline:
                raise PdRadixError(f"{url}/flush_cache keeps failing: its log is in {cluster.log_dir}")
            time.sleep(0.1)


def hold(cluster: Cluster, name: str, workload: Workload, show: _Progress) -> Run:
    """Start ``cluster``, hold the chat, look at the pools and stop it. Raises PdRadixError."""
    started = time.monotonic()
    with cluster:
        info = server_info(cluster.decode_urls[0])
        start_s, overlapped = time.monotonic() - started, not info["disable_overlap_schedule"]
        run = Run(start_s, info["page_size"], str(info["dtype"]), str(info["device"]), overlapped)
        show.done(f"flag {name}: serving after {run.start_s:.0f} s")
        try:
            # The first long prompt of a process pays for memory and kernels that are set up once.
            show.now(f"flag {name}: warming up")
            warm_up = Workload(1, 1, workload.document, 1, workload.answer, workload.seed)
            Chats(cluster.router_url, cluster.model_path, warm_up, first_client=-1).turn(cluster.check)
            empty_caches(cluster, (*cluster.prefill_urls, *cluster.decode_urls))
            likeliest = 0 if run.dtype == "float32" else LIKELIEST
            if likeliest and name == "off":
                chats = Chats(cluster.router_url, cluster.model_path, workload, likeliest=likeliest)
                for number in range(1, workload.turns + 1):
                    show.now(
                        f"flag {name}: turn {number} of {workload.turns}, to see what rounding does in {run.dtype}"
                    )
                    run.again.append(chats.turn(cluster.check))
                empty_caches(cluster, (*cluster.prefill_urls, *cluster.decode_urls))
            chats = Chats(cluster.router_url, cluster.model_path, workload, likeliest=likeliest)
            before = summed_counters(cluster.prefill_urls, cluster.decode_urls)
            for number in range(1, workload.turns + 1):
                show.now(f"flag {name}: turn {number} of {workload.turns}, {_count(workload.clients, 'client')}")
                replies = chats.turn(cluster.check)
                after = summed_counters(cluster.prefill_urls, cluster.decode_urls)
                turn = Turn(**{key: after[key] - before[key] for key in after}, replies=replies)
                before = after
                run.turns.append(turn)
                show.done(
                    f"flag {name}: turn {number} of {workload.turns}: {turn.prompt_tokens} prompt tokens, "
                    f"{turn.reused_tokens} reused on decode, {_mib(turn.sent_bytes)} MiB sent, "
                    f"median TTFT {turn.ttft_s:.2f} s"
                )
        except ChatError as error:
            cluster.check()  # a worker that died says more than the request it took along
            raise PdRadixError(f"flag {name}: {error}. Logs are in {cluster.log_dir}") from None
        run.pools = _pools(cluster)
        for worker, pool in run.pools.items():
            run.problems += pool_problems(worker, pool, keeps_tree=name == "on" and worker.startswith("decode"))
        show.now(f"flag {name}: stopping")
    return run


def _mib(count: float) -> str:
    return f"{count / 2**20:.1f}"


# ------------------------------------------------------------------------------------------------------------ output


def print_report(comparison: Comparison, title: str) -> None:
    """Print the table and the verdict to stdout."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=110)
    off, on = comparison.off, comparison.on
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=box.SIMPLE, show_footer=True)
    reused, prompts = on.total("reused_tokens"), on.total("prompt_tokens")
    for heading, footer in (
        ("turn", "all"),
        ("prompt tokens", f"{prompts}"),
        ("reused on decode", f"{reused} ({reused / prompts:.0%})"),
        ("MiB sent, off", _mib(off.total("sent_bytes"))),
        ("on", _mib(on.total("sent_bytes"))),
        ("off/on", f"{comparison.bytes_ratio:.2f}x"),
        ("TTFT, off", ""),
        ("on", ""),
        ("off/on", ""),
    ):
        table.add_column(heading, footer=Text(footer), justify="right", no_wrap=True)
    for number, (a, b) in enumerate(zip(off.turns, on.turns, strict=True), 1):
        table.add_row(
            f"{number}",
            f"{b.prompt_tokens}",
            f"{b.reused_tokens} ({b.reused_tokens / b.prompt_tokens:.0%})",
            _mib(a.sent_bytes),
            _mib(b.sent_bytes),
            f"{_ratio(a.sent_bytes, b.sent_bytes):.2f}x",
            f"{a.ttft_s:.3f} s",
            f"{b.ttft_s:.3f} s",
            f"{_ratio(a.ttft_s, b.ttft_s):.2f}x",
        )
    console.print()
    console.print(table)
    answers = sum(len(turn.replies) for turn in on.turns)
    same = answers - len(comparison.differences)
    since = "from turn 2 on, " if len(on.turns) > 1 else ""
    lines = [
        f"KV sent:  {_mib(off.total('sent_bytes'))} MiB off, {_mib(on.total('sent_bytes'))} MiB on: "
        f"{comparison.bytes_ratio:.2f}x",
        f"          on is {comparison.over_least:.3f} times the least possible, {_mib(comparison.least_bytes)} MiB "
        f"(at most {MOST_OVER_LEAST} is accepted)",
        f"TTFT:     {since}median {_spread(off)} off, {_spread(on)} on: {comparison.ttft_ratio:.2f}x",
        f"          in turn 1, the same work in both runs: {_ratio(off.turns[0].ttft_s, on.turns[0].ttft_s):.2f}x",
        f"Answers:  {same} of {answers} identical with the flag off and on",
    ]
    pools = len(off.pools) + len(on.pools)
    sound = "sound" if not off.problems + on.problems else "NOT sound"
    lines.append(f"KV pools: {sound} on {pools} workers after the chat (every page free or in the tree, no lock left)")
    lines += [f"          {line}" for line in comparison.differences]
    lines += [f"Note:     {note}" for note in comparison.notes]
    lines += [f"FAILED:   {failure}" for failure in comparison.failures]
    for line in lines:
        console.print(Text(line, style="bold red" if line.startswith("FAILED") else ""), soft_wrap=True)


def _spread(run: Run) -> str:
    return f"{run.later_ttft_s:.3f} s ({min(run.later_ttfts_s):.3f} to {max(run.later_ttfts_s):.3f})"


def as_document(comparison: Comparison, workload: Workload, setting: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured, ready for JSON."""
    runs = {}
    for name, run in (("off", comparison.off), ("on", comparison.on)):
        turns = []
        for number, turn in enumerate(run.turns, 1):
            entry = asdict(turn)
            told = [vars(reply).items() for reply in turn.replies]
            entry["replies"] = [{k: v for k, v in reply if k not in ("text", "answer")} for reply in told]
            turns.append({"turn": number, "ttft_median_s": turn.ttft_s, **entry})
        names = (*PREFILL_COUNTERS, *DECODE_COUNTERS)
        totals = {key: run.total(key) for key in names} | {"ttft_median_from_turn_2_s": run.later_ttft_s}
        runs[name] = {"start_s": run.start_s, "turns": turns, "totals": totals, "pools": run.pools}
    return {
        "setting": setting,
        "workload": asdict(workload),
        "runs": runs,
        "page_bytes": comparison.page_bytes,
        "least_bytes": comparison.least_bytes,
        "sent_bytes_off_over_on": comparison.bytes_ratio,
        "sent_bytes_on_over_least": comparison.over_least,
        "ttft_off_over_on": comparison.ttft_ratio,
        "identical": not comparison.differences,
        "differences": comparison.differences,
        "rounding_limit": comparison.rounding_limit,
        "failures": comparison.failures,
        "notes": comparison.notes,
    }


# ----------------------------------------------------------------------------------------------------------- command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``pd-radix demo``."""
    default = Workload()
    parser.description = "Hold the same multi-turn chat with the decode prefix cache off and on, and compare."
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", metavar="MODEL", help="model directory or Hugging Face name (default: a made one)")
    parser.add_argument(
        "--backend", choices=("nixl", "mooncake"), default="nixl", help="KV transfer backend (default: nixl)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured there")
    parser.add_argument(
        "--work-dir", type=Path, metavar="DIR", help="for the made model and the logs (default: a new temporary one)"
    )
    sizes = parser.add_argument_group("the chat")
    for name, what in (
        ("clients", "conversations at the same time"),
        ("turns", "turns of each"),
        ("document", "words of each first message"),
        ("question", "words of each later message"),
        ("answer", "tokens of each answer"),
        ("seed", "another seed gives other words"),
    ):
        text = f"{what} (default: {getattr(default, name)})"
        sizes.add_argument(f"--{name}", type=int, metavar="N", default=getattr(default, name), help=text)
    parser.add_argument("engine_options", nargs="*", metavar="-- ENGINE OPTIONS", help="engine options for all workers")


def engine_options(given: Sequence[str], workload: Workload, made_model: bool) -> list[str]:
    """The options of all workers: what the demo needs, unless the user's say otherwise."""
    options = [*given]
    if not has_option(given, "--enable-metrics"):
        options += ["--enable-metrics"]
    if not has_option(given, "--page-size"):
        options += ["--page-size", "16"]
    if cpu_host.active():
        if not has_option(given, "--max-total-tokens", "--mem-fraction-static"):
            # Room for every conversation twice, since words may take more than one token. More costs start-up time.
            options += ["--max-total-tokens", str(max(8192, -(-2 * workload.clients * workload.words // 1024) * 1024))]
    elif torch_layers.wanted():
        # In float32 another batch changes a token in some ten thousand at most.
        if not has_option(given, "--dtype"):
            options += ["--dtype", "float32"]
        if not has_option(given, *ATTENTION_OPTIONS):
            options += ["--attention-backend", "triton"]
    else:
        if made_model and not has_option(given, "--dtype"):
            options += ["--dtype", "bfloat16"]  # the engine's own kernels for GPUs have no float32
        options += deterministic_options(given)
    return options


def deterministic_options(given: Sequence[str]) -> list[str]:
    """What makes answers of a GPU independent of the batch, unless ``given`` chooses a backend that cannot.

    Of the engine's deterministic attention backends these two keep their radix cache.
    """
    backend = option_value(given, "--attention-backend")
    if backend not in (None, "fa3", "triton") or has_option(
        given, "--prefill-attention-backend", "--decode-attention-backend", "--enable-deterministic-inference"
    ):
        return []
    return ["--enable-deterministic-inference", *(["--attention-backend", "triton"] if backend is None else [])]


def run(args: argparse.Namespace) -> int:
    """Do both runs and print the comparison. Returns the exit code."""
    workload = Workload(args.clients, args.turns, args.document, args.question, args.answer, args.seed)
    workload.check()
    check_json(args.json)
    check_may_switch("the demo", args.engine_options)
    model = check_model(args.model) if args.model else None
    started = time.monotonic()
    with _work_dir(args.work_dir) as work_dir, _Progress() as show:
        model = model or _made_model(work_dir, show)
        options = engine_options(args.engine_options, workload, made_model=not args.model)
        runs = []
        for name, decode_args in (("off", []), ("on", [RADIX_FLAG])):

            def progress(step: Progress, name: str = name) -> None:
                show.now(f"flag {name}: {step}")

            cluster = Cluster(
                model,
                common_args=options,
                decode_args=decode_args,
                backend=args.backend,
                log_dir=work_dir / name,
                on_progress=progress,
            )
            runs.append(hold(cluster, name, workload, show))
        off, on = runs
        control = []
        if off.again and rounding_of(off, on).beyond:

            def control_progress(step: Progress) -> None:
                show.now(f"one engine, to see what its own prefix cache rounds: {step}")

            engine = Cluster(
                model, common_args=options, aggregated=True, log_dir=work_dir / "engine", on_progress=control_progress
            )
            try:
                with engine:
                    chats = Chats(engine.router_url, engine.model_path, workload, likeliest=LIKELIEST)
                    control = [chats.turn(engine.check) for _ in range(workload.turns)]
                    show.now("one engine: stopping")
            except (PdRadixError, ChatError) as error:
                # Both runs stand, and are judged without it.
                show.done(f"one engine, to see what its own prefix cache rounds: {error}")
                control = []
    comparison = compare(off, on, control)
    size = f"{_count(workload.clients, 'client')}, {_count(workload.turns, 'turn')}"
    title = (
        f"{size} over {args.backend}, {off.device} {off.dtype}, pages of {off.page_size} tokens "
        f"({_kib(comparison.page_bytes / off.page_size)} KiB of KV per token)"
    )
    print_report(comparison, title)
    if args.json:
        setting = {
            "model": args.model or "pd-radix make-model",
            "backend": args.backend,
            "device": off.device,
            "dtype": off.dtype,
            "page_size": off.page_size,
            "engine_options": options,
            "sglang_pd_radix": __version__,
            "sglang": importlib.metadata.version("sglang"),
            "python": platform.python_version(),
            "cores": len(os.sched_getaffinity(0)),
            "seconds": round(time.monotonic() - started, 1),
        }
        document = json.dumps(as_document(comparison, workload, setting), indent=1)
        try:
            args.json.write_text(document + "\n")
        except OSError as error:
            raise PdRadixError(f"cannot write {args.json}: {error.strerror or error}") from error
    return 1 if comparison.failures else 0


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


def _kib(count: float) -> str:
    return f"{count / 1024:g}"


@contextlib.contextmanager
def _work_dir(given: Path | None) -> Iterator[Path]:
    """``given``, made if missing; else a temporary directory that stays only if a run fails, for its logs."""
    if given is not None:
        try:
            given.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PdRadixError(f"--work-dir {given}: {error.strerror or error}") from error
        yield given
        return
    import shutil

    path = Path(tempfile.mkdtemp(prefix="pd-radix-demo-"))
    try:
        yield path
    except PdRadixError:
        raise
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    shutil.rmtree(path, ignore_errors=True)


def _made_model(work_dir: Path, show: _Progress) -> str:
    show.now("making the model")
    path = make_model(work_dir / "model")
    show.done(f"model: random weights, made in {path}")
    return str(path)


if __name__ == "__main__":
    from .cli import main

    sys.exit(main(["demo", *sys.argv[1:]]))
