"""``pd-radix verify``: is the decode prefix cache right on this machine, with this model? A verdict for a report.

One prefill worker, and behind it a decode worker without the flag and one with it. The same prompts go to both: what is
new, the same again, longer, cut off in the middle of a page, a herd with one new prefix, chats. What they may differ by
is measured first, between two runs without the flag: one request at a time, and many at once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import platform
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_pd_radix.errors import PdRadixError

from . import bench, doctor
from .cluster import Progress, http
from .make_model import make_model
from .rounding import Answer, Difference, difference, limit_of
from .up import check_json, check_may_switch, check_model

# What the benchmark's workload (a) is held to here. Times are told and not judged: one run of each side shows little.
MOST_OVER_LEAST = 1.05
MOST_DIFFERENT = 0.03
ANSWER_TOKENS, LIKELIEST = 24, 5

_EPILOG = """
Engine options for all workers follow after --. Three workers run: on one GPU each needs a third of it, for example

  pd-radix verify --model Qwen/Qwen3-0.6B -- --page-size 64 --mem-fraction-static 0.25

Exit code: 0 the verdict is PASSED, 1 it is not.
"""


@dataclass
class Verdict:
    """What was found. ``failures`` make it FAILED."""

    setting: dict[str, Any]
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """For a terminal and for a report."""
        what = ", ".join(f"{name} {value}" for name, value in self.setting.items())
        return "\n".join(
            [
                f"pd-radix verify: {'FAILED' if self.failures else 'PASSED'}",
                f"  {what}",
                *(f"  {line}" for line in self.lines),
                *(f"  FAILED: {failure}" for failure in self.failures),
            ]
        )


# ------------------------------------------------------------------------------------------------------------- oracle


@dataclass(frozen=True)
class Wave:
    """Prompts that are asked at the same time. least_held: tokens of each that decode must have held by then.

    follows: whether each goes on with the reference's answer to the prompt at its place in the wave before.
    """

    name: str
    prompts: list[list[int]]
    least_held: list[int]
    follows: bool = False


class Script:
    """The prompts of the oracle. ``words``: ids to make them of. Lengths in tokens."""

    def __init__(self, words: range, page_size: int, seed: int) -> None:
        self._words, self._page, self._rnd = words, page_size, random.Random(seed)

    def _some(self, count: int) -> list[int]:
        return [self._rnd.choice(self._words) for _ in range(count)]

    def whole_pages(self, count: int) -> int:
        return count // self._page * self._page

    def waves(self) -> list[Wave]:
        """All but the chats."""
        page = self._page
        new = [self._some(count) for count in (page, 3 * page + 1, 5 * page + page // 2, 300 + page)]
        longer = [[*prompt, *self._some(20)] for prompt in new]
        cut = [[*prompt[: len(prompt) * 2 // 3], *self._some(30)] for prompt in new[1:]]
        shared = self._some(12 * page)
        herd = [[*shared, *self._some(7 + i)] for i in range(8)]
        return [
            Wave("new", new, [0] * len(new)),
            Wave("the same again", new, [self.whole_pages(len(p)) for p in new]),
            Wave("longer", longer, [self.whole_pages(len(p)) for p in new]),
            Wave("cut off", cut, [self.whole_pages(len(p) * 2 // 3) for p in new[1:]]),
            Wave("a herd", herd, [0] * len(herd)),
            Wave("the herd again", herd, [len(shared)] * len(herd)),
        ]

    def questions(self, clients: int = 4, turns: int = 3) -> list[list[list[int]]]:
        """What each client adds to its history in each turn, by turn."""
        first = [self._some(self._rnd.randrange(40, 260)) for _ in range(clients)]
        return [first, *([self._some(self._rnd.randrange(3, 70)) for _ in first] for _ in range(turns - 1))]


def ask(url: str, prompt: Sequence[int], likeliest: int = 0) -> tuple[Answer, int]:
    """A greedy answer of `ANSWER_TOKENS` tokens, and how many tokens of the prompt decode held. Raises PdRadixError."""
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True},
        "return_logprob": True,
        **({"top_logprobs_num": likeliest} if likeliest else {}),
    }
    status, content = http(url + "/generate", body, timeout=600)
    if status != 200:
        raise PdRadixError(f"{url}/generate answered HTTP {status}: {content.decode(errors='replace')[:300]}")
    meta = json.loads(content)["meta_info"]
    told = meta["output_token_logprobs"]
    top = [{token: logprob for logprob, token, *_ in place} for place in meta.get("output_top_logprobs") or []]
    answer = Answer(tuple(token for _, token, *_ in told), tuple(logprob for logprob, *_ in told), tuple(top))
    return answer, (meta.get("cached_tokens_details") or {}).get("decode_prefix", 0)


def ask_alone(url: str, script: Script) -> tuple[list[Wave], list[list[Answer]]]:
    """Ask everything one by one. Chats go on with the answers: the waves returned have them in their prompts."""
    waves, answers = script.waves(), []
    for wave in waves:
        answers.append([ask(url, prompt, LIKELIEST)[0] for prompt in wave.prompts])
    histories: list[list[int]] = []
    for turn, added in enumerate(script.questions()):
        held = [script.whole_pages(len(history) - 1) for history in histories] or [0] * len(added)
        histories = [[*old, *new] for old, new in zip(histories or [[] for _ in added], added, strict=True)]
        waves.append(Wave(f"chats, turn {turn + 1}", [list(history) for history in histories], held, turn > 0))
        answers.append([ask(url, history, LIKELIEST)[0] for history in histories])
        histories = [[*old, *new.tokens] for old, new in zip(histories, answers[-1], strict=True)]
    return waves, answers


def ask_together(url: str, waves: Sequence[Wave]) -> tuple[list[list[Answer]], list[list[int]]]:
    """Ask wave by wave, each at once; the answers and what decode held of each prompt."""
    answers, held = [], []
    with ThreadPoolExecutor(max(len(wave.prompts) for wave in waves)) as pool:
        for wave in waves:
            found = list(pool.map(lambda prompt: ask(url, prompt), wave.prompts))
            answers.append([answer for answer, _ in found])
            held.append([tokens for _, tokens in found])
    return answers, held


def differences(reference: Sequence[Sequence[Answer]], others: Sequence[Sequence[Answer]]) -> list[list[Difference]]:
    """By wave and prompt."""
    return [[difference(a, b) for a, b in zip(x, y, strict=True)] for x, y in zip(reference, others, strict=True)]


def judge(
    verdict: Verdict, waves: Sequence[Wave], noise: list[list[Difference]], on: list[list[Difference]], what: str
) -> None:
    """Compare one run with the flag to the reference, by what the noise allows."""
    limit = limit_of(d for wave in noise for d in wave)
    flat = [d for wave in on for d in wave]
    same = sum(d.parted_at is None for d in flat)
    alike = sum(d.parted_at is None for wave in noise for d in wave)
    drift = max(d.drift for d in flat)
    verdict.lines.append(
        f"{what}: {same} of {len(flat)} answers have the same tokens ({alike} in two runs with the flag off); "
        f"log-probabilities differ by at most {drift:.2g} (limit {limit:.2g}, from the runs with the flag off)"
    )
    verdict.figures[what] = {"same": same, "asked": len(flat), "same_off": alike, "drift": drift, "limit": limit}
    for wave, found in zip(waves, on, strict=True):
        for number, d in enumerate(found, 1):
            if d.within(limit):
                continue
            parted = ""
            if d.parted_at is not None:
                likely = f"{d.behind:.2g} nats behind" if math.isfinite(d.behind or 0) else "not among the likeliest"
                parted = f", other tokens from token {d.parted_at + 1} on, where its own was {likely}"
            verdict.failures.append(
                f"{what}, {wave.name}, prompt {number}: log-probabilities differ by {d.drift:.2g}{parted}; "
                "that is more than rounding"
            )


def judge_reuse(
    verdict: Verdict, waves: Sequence[Wave], held: Sequence[Sequence[int]], on: list[list[Difference]], page_size: int
) -> None:
    """Whether decode held of each prompt what it must have; on: what its answers differ by."""
    tokens = sum(sum(wave) for wave in held)
    prompts = sum(len(prompt) for wave in waves for prompt in wave.prompts)
    verdict.lines.append(f"reuse: decode held {tokens} of {prompts} prompt tokens ({tokens / prompts:.0%})")
    verdict.figures["reuse"] = {"held": tokens, "prompt": prompts}
    for i, (wave, found) in enumerate(zip(waves, held, strict=True)):
        for number, (least, tokens) in enumerate(zip(wave.least_held, found, strict=True)):
            parted_at = on[i - 1][number].parted_at if wave.follows else None
            if parted_at is not None:
                # Within rounding, or that has been told: decode holds its own answer, and the prompt has another.
                most = len(waves[i - 1].prompts[number]) + parted_at
                least = min(least, most // page_size * page_size)
            if tokens < least:
                verdict.failures.append(f"{wave.name}, prompt {number + 1}: decode held {tokens} tokens, not {least}")


# ------------------------------------------------------------------------------------------------------------ command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``pd-radix verify``."""
    parser.description = "Check the decode prefix cache on this machine, with your model: a verdict for a report."
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", metavar="MODEL", help="model directory or Hugging Face name (default: a made one)")
    parser.add_argument("--backend", choices=("nixl", "mooncake"), default="nixl", help="KV transfer (default: nixl)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdict and its figures there")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="where logs go (default: a temporary directory)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another seed asks other tokens")
    parser.add_argument("engine_options", nargs="*", metavar="-- ENGINE OPTIONS", help="engine options for all workers")


def run(args: argparse.Namespace) -> int:
    """Check everything and print the verdict. Returns the exit code."""
    check_json(args.json)
    check_may_switch("verify", args.engine_options)
    verdict = Verdict(_versions())
    checks = doctor.diagnose()
    unwell = [check for check in checks if check.status == "fail"]
    verdict.lines.append("doctor: " + ("nothing is wrong" if not unwell else ", ".join(c.name for c in unwell)))
    verdict.failures += [f"doctor: {check.name}: {check.detail}. {check.way_out}" for check in unwell]
    with tempfile.TemporaryDirectory(prefix="pd-radix-verify-") as scratch:
        logs = args.log_dir or Path(scratch)
        try:
            model = check_model(args.model) if args.model else str(make_model(Path(scratch) / "model"))
            _verify(args, model, logs, verdict)
        except PdRadixError as error:
            if not verdict.setting.get("model"):
                raise
            # What has been found so far belongs to the report as well.
            verdict.failures.append(str(error))
    if not verdict.failures:
        verdict.lines.append("pools: after each part every page was free or in the tree, and no lock was left")
    print(verdict.text)
    if args.json:
        document = {**asdict(verdict), "passed": not verdict.failures}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if verdict.failures else 0


def _verify(args: argparse.Namespace, model: str, logs: Path, verdict: Verdict) -> None:
    command, deploy, measure = (bench.package(name) for name in ("command", "deploy", "measure"))
    sizes = bench.package("workload").KINDS["a"]()
    for name, value in {**command.QUICK["a"], **command.QUICK_SHAPE}.items():
        setattr(sizes, name, value)
    options = deploy.engine_options(args.engine_options, command.PAGE_SIZE, made_model=not args.model)

    def starting(step: Progress) -> None:
        _say(f"starting: {step}")

    with contextlib.ExitStack() as stack:
        load = stack.enter_context(contextlib.closing(measure.LoadGenerator(model, logs / "load.log")))
        deployment = stack.enter_context(
            deploy.Deployment(model, command.shape_of(sizes), options, args.backend, logs, starting)
        )
        # Leaves before the servers are ended: a worker that died says more than the request it took along.
        stack.push(lambda kind, error, trace: deployment.cluster.check() if kind is PdRadixError else None)
        off, on = deployment.variants
        info = deployment.info(on)
        verdict.setting |= {
            "model": args.model or "pd-radix make-model",
            "device": info["device"],
            "dtype": info["dtype"],
            "attention": info["attention_backend"],
            "transfer": args.backend,
            "page size": info["page_size"],
            "tp": info["tp_size"],
            "overlap": "off" if info["disable_overlap_schedule"] else "on",
        }
        load.wait_ready()
        script = Script(load.words, info["page_size"], args.seed)
        _say("flag off, one request at a time")
        deployment.use(off)
        waves, reference = ask_alone(deployment.url(off), script)
        _say("flag off, many requests at once")
        deployment.use(off)
        noise = differences(reference, ask_together(deployment.url(off), waves)[0])
        _judge_pools(verdict, deployment, off)
        _say("flag on, nothing in the caches")
        deployment.use(on)
        answers, held = ask_together(deployment.url(on), waves)
        cold = differences(reference, answers)
        judge(verdict, waves, noise, cold, "cold cache")
        judge_reuse(verdict, waves, held, cold, info["page_size"])
        _say("flag on, everything in the caches")
        answers, held = ask_together(deployment.url(on), waves)
        judge(verdict, waves, noise, differences(reference, answers), "warm cache")
        _judge_pools(verdict, deployment, on)
        _measure(
            verdict, deployment, load, sizes.make("a", bench.package("workload").Tokens(load.words, args.seed)), info
        )
        _judge_pools(verdict, deployment, on)


def _judge_pools(verdict: Verdict, deployment: Any, variant: Any) -> None:
    """What is left in the pools of the side that has just been asked; the other one's worker is stopped."""
    verdict.failures += deployment.problems(variant)


def _measure(verdict: Verdict, deployment: Any, load: Any, workload: Any, info: dict[str, Any]) -> None:
    """The benchmark's workload (a) in small, once on each side. info: what a worker says of itself."""
    command, measure, report = (bench.package(name) for name in ("command", "measure", "report"))
    off, on = deployment.variants
    page_size = info["page_size"]
    runs = {}
    for variant in (off, on):
        _say(f"workload (a) in small, flag {variant.name}")
        measure.run_once(deployment, load, workload.beginning(command.WARM_UP_REQUESTS), variant, 0, page_size)
        runs[variant.name] = measure.run_once(deployment, load, workload, variant, 1, page_size)
        verdict.failures += [f"(a), flag {variant.name}: {problem}" for problem in runs[variant.name].problems]
    a, b = (runs[name].figures for name in ("off", "on"))
    over_least = b["sent_bytes"] / (b["least_pages"] * a["sent_bytes"] / a["prompt_pages"])
    exact = str(info["dtype"]).endswith("float32")
    ratios = {key: b[key] / a[key] for key in ("requests_per_s", "ttft_p50_s", "itl_mean_s", "sent_bytes")}
    different = sum(report.compare_answers([runs["off"].texts, runs["on"].texts]))
    verdict.figures["(a)"] = {"off": a, "on": b, "different_answers": different}
    verdict.lines.append(
        f"(a) in small, one run, on over off: requests/s {ratios['requests_per_s']:.2f}, "
        f"TTFT p50 {ratios['ttft_p50_s']:.2f}, ITL mean {ratios['itl_mean_s']:.2f}, KV sent {ratios['sent_bytes']:.2f} "
        f"({over_least:.3f} times the least possible); {workload.requests - different} of {workload.requests} answers "
        f"are the same{'' if exact else ' (told, not judged: rounding parts answers, see above)'}"
    )
    # Sums in another order part an answer in a thousand also in float32; what is overwritten parts more.
    if exact and different > workload.requests * MOST_DIFFERENT:
        verdict.failures.append(
            f"(a): {different} of {workload.requests} answers differ, which in float32 is no rounding"
        )
    if over_least > MOST_OVER_LEAST:
        verdict.failures.append(f"(a): {over_least:.3f} times the least possible was sent, above {MOST_OVER_LEAST}")


def _versions() -> dict[str, Any]:
    found = {"python": platform.python_version()}
    for name in ("sglang", "sglang-pd-radix", "torch", "sglang-router"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _say(text: str) -> None:
    print(f"pd-radix: {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
