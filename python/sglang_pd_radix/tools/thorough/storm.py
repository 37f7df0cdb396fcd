"""Workers are flushed, stopped and killed while clients ask, and every answer is compared.

    python -m sglang_pd_radix.tools.thorough.storm --model MODEL --seconds 120 --json storm.json --log-dir logs

One prefill and one decode worker with the flag, asked without a router, so that no retry hides anything. Answers of
the calm are scored by prefill; those of the storm have to be the same, or as likely. Only who had a request in a worker
that is killed may get none, and is told so in time. After the calm and after each fault the pools are read.
`benchmark/chaos.py` of a checkout does more, and for longer.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_pd_radix.errors import PdRadixError

from .. import demo, forced
from ..chat_load import Workload
from ..cluster import RADIX_FLAG, Cluster, Process, add_router_option, http, named_gateway
from ..progress import print_ready
from ..rounding import LEAST_LIMIT
from ..up import write_json
from ..workers import empty_caches, idle_pools, problems_of

# So much of the vocabulary of a made model is ordinary words.
WORDS = range(400, 1900)
PREFIXES, PER_PREFIX, SHARED, OWN, ANSWER = 3, 4, 256, 48, 48
#: Seconds: in which a client has to be told, for which a worker is stopped, and before and after what is done. A kill
#: is to meet a request, and on a loaded host the next one comes later than that.
TOLD_S, STOPPED_S, AROUND_S, MET_S = 60.0, 3.0, 1.0, 20.0
# Seconds until a worker that was started again has to answer.
_BACK_S = 90.0
# Seconds in which an idle worker has to have let go of everything; the time-outs of `ENV` run out in it.
SETTLED_S = 40.0
# A dead peer is noticed in ten seconds, and one that is stopped for three is not taken for dead.
ENV = {
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "5",
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "30",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "30",
}


@dataclass(frozen=True)
class Told:
    """What a client was told of prompt ``number``. tokens: None of a request that failed. held: by decode."""

    number: int
    tokens: tuple[int, ...] | None
    error: str
    seconds: float
    held: int = 0


@dataclass
class Round:
    """What was done, and what the clients were told meanwhile."""

    what: str
    asked: int = 0
    right: int = 0
    tied: int = 0
    failed: int = 0
    slowest_s: float = 0.0
    held: int = 0


@dataclass
class Report:
    """Problems make it FAILED; what was not judged is said."""

    rounds: list[Round] = field(default_factory=list)
    judged: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    not_judged: list[str] = field(default_factory=list)


def prompts(seed: int = 0) -> list[tuple[int, ...]]:
    """Some that begin alike, token ids."""
    pick = random.Random(seed)

    def some(count: int) -> tuple[int, ...]:
        return tuple(pick.choice(WORDS) for _ in range(count))

    return [shared + some(OWN) for shared in [some(SHARED) for _ in range(PREFIXES)] for _ in range(PER_PREFIX)]


def judge(
    report: Report,
    what: str,
    told: Sequence[Told],
    right: Sequence[tuple[int, ...]],
    as_likely: Callable[[int, tuple[int, ...]], bool],
    may_fail: bool,
) -> None:
    """Add a round to ``report``.

    right: the tokens of each prompt's answer. as_likely: whether another one is no worse.
    """
    found = Round(what, len(told), held=sum(one.held for one in told))
    found.slowest_s = max((one.seconds for one in told), default=0.0)
    wrong = []
    for one in told:
        if one.tokens is None:
            found.failed += 1
        elif one.tokens == right[one.number]:
            found.right += 1
        elif as_likely(one.number, one.tokens):
            found.tied += 1
        else:
            wrong.append(one.number)
    report.rounds.append(found)
    if wrong:
        report.problems.append(f"{what}: {len(wrong)} answers are wrong, the first to prompt {wrong[0] + 1}")
    if found.failed and not may_fail:
        error = next(one.error for one in told if one.tokens is None)
        report.problems.append(
            f"{what}: {found.failed} of {len(told)} requests failed, and nothing explains it: {error}"
        )
    if may_fail and not found.failed:
        report.not_judged.append(f"{what}: it met no request")
    if found.slowest_s > TOLD_S:
        report.problems.append(f"{what}: a client waited {found.slowest_s:.0f} s, not at most {TOLD_S:.0f}")


@dataclass
class Storm:
    """A running cluster, and what comes of it."""

    cluster: Cluster
    report: Report
    asks: list[tuple[int, ...]] = field(default_factory=prompts)
    right: list[tuple[int, ...]] = field(default_factory=list)

    def worker(self, role: str) -> Process:
        return next(process for process in self.cluster.processes if process.role == role)

    def all(self, seconds: float, most_turns: float = math.inf) -> None:
        """Calm, then what can be done to the workers, turn by turn, for ``seconds``. Raises PdRadixError."""
        end = time.monotonic() + seconds
        self._calm()
        if self.report.problems:
            return
        undone = [what for what, *_ in self._faults()]
        turns = 0
        while not self.report.problems:
            began = time.monotonic()
            for what, fault, kills in self._faults():
                # The first turn takes what time there is; a further one is begun only if it can be ended.
                if time.monotonic() > end or self.report.problems:
                    break
                self._under(what, fault, kills)
                undone = [one for one in undone if one != what]
            turns += 1
            if turns >= most_turns or 2 * time.monotonic() - began > end:
                break
        self.report.not_judged += [f"{what}: there was no time for it" for what in undone]
        if not self.report.problems:
            self.report.judged.append(
                "after the calm and each fault every page of both workers was free or in the tree, and no lock was left"
            )
        asked = sum(one.asked for one in self.report.rounds)
        self.report.judged.append(f"{asked} requests in {len(self.report.rounds)} rounds, {turns} turns of faults")

    def _faults(self) -> list[tuple[str, Callable[[], None], bool]]:
        prefill, decode = self.worker("prefill"), self.worker("decode")

        def flush(worker: Process) -> Callable[[], None]:
            def fault() -> None:
                # Refused while it is busy, which is part of what is tried.
                for _ in range(3):
                    http(worker.url + "/flush_cache", {}, 10)

            return fault

        def stop(worker: Process) -> Callable[[], None]:
            def fault() -> None:
                self.cluster.pause([worker.name])
                try:
                    time.sleep(STOPPED_S)
                finally:
                    self.cluster.resume([worker.name])

            return fault

        def kill(worker: Process) -> Callable[[], None]:
            return lambda: self.cluster.kill(worker.name)

        return [
            ("flush decode", flush(decode), False),
            ("flush prefill", flush(prefill), False),
            ("stop prefill", stop(prefill), False),
            ("stop decode", stop(decode), False),
            ("kill decode", kill(decode), True),
            ("kill prefill", kill(prefill), True),
        ]

    def _calm(self) -> None:
        empty_caches(self.cluster, [self.worker("prefill").url, self.worker("decode").url], 20)
        first = self._each_once()
        if any(one.tokens is None for one in first):
            error = next(one.error for one in first if one.tokens is None)
            raise PdRadixError(f"a request failed before anything was done: {error}")
        self.right = [one.tokens or () for one in first]
        behind = max(self._behind(number, tokens) for number, tokens in enumerate(self.right))
        self.report.judged.append(
            f"in calm no token of {len(first)} answers is more than {behind:.2g} nats behind the likeliest, by "
            f"prefill's own pass (at most {2 * LEAST_LIMIT:.2g})"
        )
        if not behind <= 2 * LEAST_LIMIT:
            self.report.problems.append(f"in calm a token is {behind:.2g} nats behind the likeliest of its place")
        self._judge("calm", first, False)
        self._judge("again", self._each_once(), False)
        if not self.report.rounds[-1].held:
            self.report.problems.append("again: decode held nothing of prompts that it has had")
        self._pools("again")

    def _under(self, what: str, fault: Callable[[], None], kills: bool) -> None:
        """Clients ask all the while; a worker that was killed is started again, and then everything is right."""
        over = threading.Event()
        told: list[Told] = []

        def client(number: int) -> None:
            while True:
                told.append(self._ask(number))
                if over.is_set():
                    return
                if told[-1].tokens is None:
                    time.sleep(0.5)

        with ThreadPoolExecutor(len(self.asks)) as pool:
            clients = [pool.submit(client, number) for number in range(len(self.asks))]
            try:
                time.sleep(AROUND_S)
                fault()
                time.sleep(AROUND_S)
                until = time.monotonic() + MET_S
                while kills and time.monotonic() < until and all(one.tokens is not None for one in list(told)):
                    time.sleep(0.1)
            finally:
                # The pool waits for its clients, however this ends.
                over.set()
            for one in clients:
                one.result()
        if kills:
            dead = self.cluster.dead()
            assert dead
            self.cluster.restart(dead.name)
            self._wait_back()
        # Prefill scores what may be as likely, so it has to be there.
        self._judge(what, told, kills)
        self.cluster.check()
        self._judge(f"after: {what}", self._each_once(), False)
        # Now, since a kill may be next, and who is started again has new pools.
        self._pools(f"after: {what}")

    def _wait_back(self) -> None:
        deadline = time.monotonic() + _BACK_S
        while self._ask(0).tokens is None:
            if time.monotonic() > deadline:
                raise PdRadixError(f"a worker that was started again answers nothing for {_BACK_S:.0f} s")
            time.sleep(0.5)

    def _judge(self, what: str, told: Sequence[Told], may_fail: bool) -> None:
        print(f"{what}: {len(told)} asked", flush=True)
        judge(
            self.report, what, told, self.right, lambda n, tokens: self._behind(n, tokens) <= 2 * LEAST_LIMIT, may_fail
        )

    def _behind(self, number: int, tokens: Sequence[int]) -> float:
        """By how much an answer's token is less likely than the likeliest of its place, at most."""
        score = forced.score(self.worker("prefill").url, self.asks[number], tokens, 1, prefill_alone=True)
        places = zip(score.likeliest, score.logprobs, strict=True)
        return max(max(place.values()) - own for place, own in places)

    def _each_once(self) -> list[Told]:
        with ThreadPoolExecutor(len(self.asks)) as pool:
            return list(pool.map(self._ask, range(len(self.asks))))

    def _ask(self, number: int) -> Told:
        """Ask both workers, as a router would."""
        prefill, decode = self.worker("prefill"), self.worker("decode")
        body = {
            "input_ids": list(self.asks[number]),
            "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": random.randrange(1, 2**62),
        }
        began = time.monotonic()
        beside = threading.Thread(target=http, args=(prefill.url + "/generate", body, 2 * TOLD_S), daemon=True)
        beside.start()
        status, content = http(decode.url + "/generate", body, 2 * TOLD_S)
        took = time.monotonic() - began
        tokens, held, error = read_answer(status, content)
        return Told(number, tokens, error, took, held)

    def _pools(self, what: str) -> None:
        """What both workers hold and should not, after the round ``what``."""
        until = time.monotonic() + SETTLED_S
        for role in ("prefill", "decode"):
            worker, keeps = self.worker(role), role == "decode"
            while (wrong := problems_of(worker.name, idle_pools(worker.url), keeps)) and time.monotonic() < until:
                time.sleep(0.1)
            self.report.problems += [f"{what}: {problem}" for problem in wrong]


def read_answer(status: int, content: bytes) -> tuple[tuple[int, ...] | None, int, str]:
    """Tokens (None: it is no whole answer), how many of the prompt decode held, and the error."""
    try:
        document: dict[str, Any] = json.loads(content)
        meta, tokens = document["meta_info"], document["output_ids"]
    except (ValueError, KeyError, TypeError):
        return None, 0, f"HTTP {status}: {content.decode(errors='replace')[:200]}"
    if status != 200 or len(tokens) != ANSWER:
        return None, 0, f"HTTP {status}, {len(tokens)} tokens: {meta.get('finish_reason')}"
    return tuple(tokens), (meta.get("cached_tokens_details") or {}).get("decode_prefix", 0), ""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if all was right, 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--backend", choices=("nixl", "mooncake"), default="nixl")
    add_router_option(parser)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("engine_options", nargs="*")
    args = parser.parse_args(argv)
    report = Report()
    cluster = Cluster(
        args.model,
        common_args=demo.engine_options(args.engine_options, Workload(), made_model=False),
        decode_args=[RADIX_FLAG],
        backend=args.backend,
        gateway=named_gateway(args.router),
        env=ENV,
        log_dir=args.log_dir,
        on_progress=print_ready,
    )
    try:
        with cluster:
            Storm(cluster, report).all(args.seconds)
    except PdRadixError as error:
        report.problems.append(str(error))
    except KeyboardInterrupt:
        report.not_judged.append("it was ended before it was done")
    write_json(args.json, asdict(report))
    for line in (*report.judged, *(f"NOT JUDGED: {one}" for one in report.not_judged)):
        print(line)
    for problem in report.problems:
        print(f"FAILED: {problem}")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
