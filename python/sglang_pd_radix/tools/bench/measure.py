"""One run: a workload on one variant, with the clients' times and the workers' counters and pools."""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import itertools
import json
import math
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools.cluster import http, log_tail
from sglang_pd_radix.tools.cluster.local_http import servers_key

from . import breakdown
from .asked import Asked, RequestFailed
from .deploy import Deployment, Variant
from .least import Keeper, PageIndex, pages_of, tokens_to_hold
from .stats import p99, percentile
from .steady import SteadyClients
from .workload import Request, Workload

# The last of a chat's early turns.
EARLY = 10


# ---------------------------------------------------------------------------------------------------- load generator


class LoadGenerator:
    """The process of `load.py`. It imports the engine for some seconds, in parallel with other work."""

    def __init__(self, model: str, log: Path, rids: bool = False) -> None:
        """rids: give each request a rid of its own."""
        self._log_path = log
        self._rids = {"rids": True} if rids else {}
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log.open("wb")
        command = [sys.executable, "-m", "sglang_pd_radix.tools.bench.load", model]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log)
        self._lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.vocabulary = 0
        self._jobs = 0

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def _next(self, check: Callable[[], None] | None = None) -> dict[str, Any]:
        while True:
            try:
                line = self._lines.get(timeout=0.5)
            except queue.Empty:
                if check:
                    check()
                continue
            if not line:
                # Later callers get it too.
                self._lines.put(line)
                tail = "\n".join(f"  | {text}" for text in log_tail(self._log_path, 15))
                raise PdRadixError(f"the load generator ended. The end of its log, {self._log_path}:\n{tail}")
            return json.loads(line)

    def wait_ready(self) -> None:
        if not self.vocabulary:
            self.vocabulary = self._next()["vocabulary"]

    @property
    def words(self) -> range:
        """Token ids for prompts, without the first and last, which may be special. Call when ready."""
        return range(self.vocabulary // 4, self.vocabulary * 3 // 4)

    def run(self, job: dict[str, Any], check: Callable[[], None]) -> dict[str, Any]:
        """Run ``job`` (see `load.py`). Raises PdRadixError if it fails."""
        self.wait_ready()
        assert self._process.stdin
        self._jobs += 1
        told = {"number": self._jobs, "key": servers_key(), **self._rids, **job}
        # If the process has ended, its last output has the reason.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(told).encode() + b"\n")
            self._process.stdin.flush()
        while True:
            message = self._next(check)
            if message["number"] != self._jobs:
                continue  # of an abandoned job, which `load.py` finishes
            if "error" in message:
                raise PdRadixError(f"the load generator failed: {message['error']}. Its log is {self._log_path}")
            return message

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of ``texts``. Raises PdRadixError if it cannot."""
        return self.run({"texts": list(texts)}, lambda: None)["ids"]

    def close(self) -> None:
        if self._process.poll() is None:
            assert self._process.stdin
            self._process.stdin.close()
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()


# ---------------------------------------------------------------------------------------------------------- watching


# Seconds between two looks.
SAMPLE_S = 0.5


class Watch(threading.Thread):
    """Looks every `SAMPLE_S` seconds between `start` and `stop` how many requests run on decode."""

    def __init__(self, deployment: Deployment, variant: Variant) -> None:
        super().__init__(daemon=True)
        self._decode = deployment.decode_urls(variant)
        self._end = threading.Event()
        #: Most that was seen.
        self.running = 0

    def run(self) -> None:
        while not self._end.is_set():
            self.look()
            self._end.wait(SAMPLE_S)

    def look(self) -> None:
        running = 0
        for url in self._decode:
            # Not /v1/loads: with --enable-metrics it fails under the FastAPI that this engine installs (its metrics
            # read the path of a route that has none).
            status, content = http(url + "/get_load", timeout=20)
            for load in json.loads(content) if status == 200 else ():
                running += load["num_reqs"] - load["num_waiting_reqs"]
        self.running = max(self.running, running)

    def stop(self) -> int:
        self._end.set()
        self.join()
        return self.running


# ------------------------------------------------------------------------------------------------------------ one run


@dataclass
class Run:
    """One run. ``figures``: for the tables. ``texts``: the answers in order. ``prompts``: theirs, token ids."""

    variant: str
    number: int
    figures: dict[str, float]
    rounds: list[dict[str, float]]
    ttft_s: list[float]
    texts: list[str] = field(repr=False)
    prompts: list[Sequence[int]] = field(repr=False)
    problems: list[str] = field(default_factory=list)
    # Per request, as `ttft_s`: mean seconds between its tokens.
    tpot_s: list[float] = field(default_factory=list)
    # Per request with a due time: seconds by which it was sent late.
    late_s: list[float] = field(default_factory=list)
    # Records of measured requests with a rid.
    lives: list[dict[str, Any]] = field(default_factory=list, repr=False)
    # Requests that the side refused, which are in no other field.
    refused: int = 0

    @property
    def digest(self) -> str:
        """Digest of all answers, in order."""
        return hashlib.sha256("\0".join(self.texts).encode()).hexdigest()[:16]


class _Course:
    """The rounds of one run and their results."""

    def __init__(
        self,
        deployment: Deployment,
        load: LoadGenerator,
        workload: Workload,
        variant: Variant,
        page_size: int,
        steady: SteadyClients,
    ) -> None:
        self._deployment, self._load, self._workload, self._variant = deployment, load, workload, variant
        self._url, self._steady = deployment.url(variant), steady
        self.index = PageIndex(page_size)
        overlapped = not deployment.info(variant).get("disable_overlap_schedule", False)
        self._keeper = Keeper(self.index, overlapped)
        self._histories: dict[int, list[int]] = {}
        self.answered: list[list[Asked]] = []
        self.rounds: list[dict[str, float]] = []
        # Requests answered with status 503.
        self.refused = 0
        self._before = deployment.counters(variant)

    @property
    def asked(self) -> list[Asked]:
        """All answered requests, in the order of the workload."""
        return list(itertools.chain(*self.answered))

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Send the unmeasured requests before a round."""
        concurrency, check = self._workload.concurrency, self._steady.check
        _ask(self._load, self._url, requests, [r.ids for r in requests], concurrency, False, False, check)
        for request in requests:
            self._keeper.send(request.ids)
        self._before = self._deployment.counters(self._variant)

    def ask(self, requests: Sequence[Request], is_last: bool) -> None:
        """Send a round."""
        workload, histories, check = self._workload, self._histories, self._steady.check
        prompts = [[*histories.get(r.group, ()), *r.ids] if workload.chat else r.ids for r in requests]
        refuses = workload.may_refuse and self._variant.refuses
        outputs = _ask(self._load, self._url, requests, prompts, workload.concurrency, workload.chat, refuses, check)
        # Only refused ones have an error here.
        served = [not output["error"] for output in outputs]
        self.refused += served.count(False)
        requests, prompts = [*compress(requests, served)], [*compress(prompts, served)]
        outputs = [*compress(outputs, served)]
        if is_last:
            self._steady.stop()  # so that what they sent is complete when the workers are sampled
        beside = self._steady.fresh()
        least = sum(self._keeper.send(prompt) for prompt in (*prompts, *beside))
        if workload.chat:
            for request, prompt, output in zip(requests, prompts, outputs, strict=True):
                self._keeper.answered(prompt, output["ids"])
                histories[request.group] = [*prompt, *output["ids"]]
        together = zip(requests, prompts, outputs, strict=True)
        answers = [Asked.of(request, prompt, output) for request, prompt, output in together]
        self.answered.append(answers)
        after = self._deployment.counters(self._variant)
        record = _round_of(answers, least, self.index.page_size, self._before, after, beside)
        if workload.steady:
            # The steady clients' prompts, never repeated, would hide the chat's own reuse.
            record["prompt_tokens"] = record["asked_tokens"]
        self.rounds.append(record)
        self._before = after


def run_once(
    deployment: Deployment,
    load: LoadGenerator,
    workload: Workload,
    variant: Variant,
    number: int,
    page_size: int,
) -> Run:
    """Empty the caches, run all rounds, compute figures. Raises PdRadixError; RequestFailed if a request fails."""
    deployment.use(variant)
    steady = SteadyClients(workload.steady, deployment.url(variant), deployment.check)
    course = _Course(deployment, load, workload, variant, page_size, steady)
    watch = Watch(deployment, variant)
    watch.start()
    try:
        together = [sum(workload.rounds, [])] if workload.stream else workload.rounds
        with steady:
            for i, requests in enumerate(together):
                if workload.warm:
                    course.warm_up(workload.warm[i])
                course.ask(requests, i == len(together) - 1)
    finally:
        running = watch.stop()
    asked, rounds = course.asked, course.rounds
    figures = figures_of(asked, rounds, running, course.index, deployment.used_peak(variant), steady.asked)
    figures |= steady.figures() | (figures_of_turns(course.answered, rounds) if workload.chat else {})
    return Run(
        variant.name,
        number,
        figures,
        rounds,
        first_tokens(asked),
        [a.text for a in asked],
        [a.prompt for a in asked],
        deployment.problems(variant),
        [a.tpot_s for a in asked],
        sent_late(asked),
        breakdown.collect(deployment, variant, workload, asked, len(steady.asked)),
        course.refused,
    )


def figures_of_turns(turns: Sequence[Sequence[Asked]], rounds: Sequence[dict[str, float]] = ()) -> dict[str, float]:
    """A chat's figures: TTFT of first and later turns; for long chats also of turns 2 to 10 and later ones; and the
    part of later turns for which prefill computed nothing."""
    parts = {"first": turns[:1], "later": turns[1:]}
    if len(turns) > EARLY:
        parts |= {"early": turns[1:EARLY], "late": turns[EARLY:]}
    ttfts = {name: first_tokens(itertools.chain(*part)) for name, part in parts.items()}
    forms = {"p50": lambda ttft: percentile(ttft, 50), "p99": p99}
    found = {f"{name}_ttft_{p}_s": form(ttft) for name, ttft in ttfts.items() for p, form in forms.items()}
    later = sum(map(len, turns[1:]))
    if later and rounds:
        found["without_prefill"] = sum(r.get("computed_requests", math.nan) for r in rounds[1:]) / later
    return found


def sent_late(asked: Iterable[Asked]) -> list[float]:
    """Seconds by which each request with a due time was late, relative to the first."""
    timed = [(a.due_s, a.start_s) for a in asked if a.due_s is not None]
    first_due, first_start = min(timed, default=(0.0, 0.0))
    return [(start - first_start) - (due - first_due) for due, start in timed]


def first_tokens(asked: Iterable[Asked]) -> list[float]:
    """TTFT of measured requests, seconds."""
    return [a.ttft_s for a in asked if not a.beside]


def _round_of(
    answers: Sequence[Asked],
    least_pages: int,
    page_size: int,
    before: dict[str, float],
    after: dict[str, float],
    beside: Sequence[Sequence[int]] = (),
) -> dict[str, float]:
    """Clients' and workers' figures of one round. beside: prompts of steady clients."""
    began, ended = min(a.start_s for a in answers), max(a.start_s + a.latency_s for a in answers)
    prompts = [a.prompt for a in answers]
    return {
        "requests": len(answers),
        "duration_s": ended - began,
        "least_pages": least_pages,
        "prompt_pages": pages_of([*prompts, *beside], page_size),
        "asked_tokens": sum(map(len, prompts)),
        "ttft_p50_s": percentile(first_tokens(answers), 50),
        **{name: after[name] - before[name] for name in after},
    }


# How the error of the load generator begins for status 503.
REFUSED = "Service Unavailable"


def _ask(
    load: LoadGenerator,
    url: str,
    requests: Sequence[Request],
    prompts: Sequence[Sequence[int]],
    concurrency: int | None,
    encode: bool,
    refuses: bool,
    check: Callable[[], None],
) -> list[dict[str, Any]]:
    """Send requests and wait for the answers, which may be `REFUSED` if the side ``refuses``; not the first one."""
    body = [
        {"ids": list(prompt), "answer": request.answer, "arrival_s": request.arrival_s}
        for prompt, request in zip(prompts, requests, strict=True)
    ]
    outputs = load.run({"url": url, "concurrency": concurrency, "encode": encode, "requests": body}, check)["outputs"]
    for i, (request, output) in enumerate(zip(requests, outputs, strict=True), 1):
        if output["error"]:
            if refuses and i > 1 and output["error"].startswith(REFUSED):
                continue
            check()  # a dead worker is a better reason than its failed request
            raise RequestFailed(f"request {i} of {len(requests)} failed: {output['error']}")
        if output["tokens"] != request.answer:
            raise RequestFailed(
                f"request {i} of {len(requests)} got {output['tokens']} tokens of {request.answer}: it was cut off"
            )
    return outputs


def figures_of(
    asked: Sequence[Asked],
    rounds: Sequence[dict[str, float]],
    running_max: int,
    index: PageIndex,
    used_peak: float,
    steady: Sequence[Asked] = (),
) -> dict[str, float]:
    """The figures of one run. Times in seconds; with several rounds only the time within rounds counts.

    used_peak: most tokens held by requests on decode, from its own record. steady: requests of steady clients, which
    take memory and the workers' time.
    """
    everything = [*asked, *steady]
    duration = sum(r["duration_s"] for r in rounds)
    ttft = first_tokens(asked)
    itl = [gap for a in asked for gap in a.itl_s]
    tpot = [a.tpot_s for a in asked if a.answer_tokens > 1]

    def total(name: str) -> float:
        return sum(r[name] for r in rounds)

    least_peak = peak_to_hold(everything, index)
    return {
        "duration_s": duration,
        "requests_per_s": len(asked) / duration,
        "output_tokens_per_s": sum(a.answer_tokens for a in asked) / duration,
        "ttft_p50_s": percentile(ttft, 50),
        "ttft_p99_s": p99(ttft),
        "itl_p50_s": percentile(itl, 50),
        "itl_p99_s": p99(itl),
        "itl_mean_s": sum(itl) / len(itl) if itl else float("nan"),
        "tpot_p50_s": percentile(tpot, 50),
        "tpot_p99_s": p99(tpot),
        "sent_bytes": total("sent_bytes"),
        "prompt_pages": total("prompt_pages"),
        "least_pages": total("least_pages"),
        "prompt_tokens": total("prompt_tokens"),
        "reused_tokens": total("reused_tokens"),
        **({"computed_tokens": total("computed_tokens")} if "computed_tokens" in rounds[0] else {}),
        "blocked": total("blocked"),
        **{name: total(name) / len(everything) for name in ("prefill_cpu_s", "decode_cpu_s", "cpu_s")},
        # Mean number of answers between first and last token, by the clients' clock.
        "answering_mean": sum(a.latency_s - a.ttft_s for a in asked) / duration,
        "running_max": running_max,
        "used_peak": used_peak,
        "least_peak": least_peak,
        "peak_over_least": used_peak / least_peak,
    }


def peak_to_hold(asked: Sequence[Asked], index: PageIndex) -> int:
    """Most tokens that unfinished requests needed at one moment.

    Counted from the sending: a worker allocates a request's pages before its first token. The need falls only when an
    answer ends, so the maximum is just before one of these moments.
    """
    fewest_at = fewest_tokens(asked, index, [a.start_s for a in asked])
    return max(fewest_at(math.nextafter(a.start_s + a.latency_s, 0.0)) for a in asked)


def fewest_tokens(asked: Sequence[Asked], index: PageIndex, since_s: Sequence[float]) -> Callable[[float], int]:
    """The least tokens (`tokens_to_hold`) needed at a moment by the clients' clock (seconds), as a function of it.

    since_s: when each request starts to count; it ends with its last token.
    """
    pages = [index.pages(a.prompt) for a in asked]
    times = [a.token_times() for a in asked]

    def fewest(at_s: float) -> int:
        return tokens_to_hold(
            [
                (pages[i], len(a.prompt), bisect.bisect_right(times[i], at_s))
                for i, a in enumerate(asked)
                if since_s[i] <= at_s < a.start_s + a.latency_s
            ],
            index.page_size,
        )

    return fewest
