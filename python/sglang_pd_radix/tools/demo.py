"""``pd-radix demo``: one chat with the decode prefix cache off, on, and with short deltas computed on decode.

A chat of ``pd-radix bench``, once on each side, and a short second one beside clients with long prompts.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_pd_radix import __version__
from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.patching import loader
from sglang_pd_radix.supplied import cpu_host, torch_layers

from .arguments import hidden
from .bench import deploy, measure, parted, report, turns
from .bench.asked import RequestFailed
from .bench.workload import BusyChat, Chat, Tokens
from .cluster import (
    ATTENTION_OPTIONS,
    add_router_option,
    has_option,
    named_gateway,
    option_value,
    with_defaults,
)
from .make_model import make_model
from .progress import Display
from .up import check_json, check_may_switch, check_model, check_page_size, write_whole
from .workers import idle_pools

LOCAL_FLAG = "--disaggregation-decode-local-prefill"
# The chat's sizes.
SIZES = ("clients", "turns", "document", "question", "answer", "seed")
# KV sent from the second turn on, at most this multiple of the lower bound, if anything can be reused.
MOST_OVER_LEAST = 1.05
# Clients beside the second chat, tokens of their prompts, and of their answers with the reserve.
BESIDE, LONG_PROMPT, BESIDE_IT = 2, 3000, 256

_EPILOG = """
Engine options for all workers follow after --, for example:

  pd-radix demo --model Qwen/Qwen3-0.6B -- --page-size 64 --tp 2

A prefill and three decode workers run, which share the GPUs there are.
Exit code: 0 the cache saved what it can and changed no answer, 1 something was wrong (it says what).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``pd-radix demo``."""
    parser.description = "Hold the same multi-turn chat with the decode prefix cache off and on, and compare."
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", metavar="MODEL", help="model directory or Hugging Face name (default: a made one)")
    parser.add_argument(
        "--backend", choices=("nixl", "mooncake"), default="nixl", help="KV transfer backend (default: nixl)"
    )
    add_router_option(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured there")
    parser.add_argument(
        "--work-dir", type=Path, metavar="DIR", help="for the made model and the logs (default: a new temporary one)"
    )
    sizes = parser.add_argument_group("the chat")
    for name, default, what in (
        ("clients", 4, "conversations at the same time"),
        ("turns", 5, "turns of each"),
        ("document", 1000, "tokens of each first message"),
        ("question", 60, "tokens of each later message"),
        ("answer", 16, "tokens of each answer"),
        ("seed", 0, "another seed asks other tokens"),
    ):
        sizes.add_argument(f"--{name}", type=int, metavar="N", default=default, help=f"{what} (default: {default})")
    parser.add_argument("engine_options", nargs="*", metavar="-- ENGINE OPTIONS", help="engine options for all workers")


def run(args: argparse.Namespace) -> int:
    """Do the runs and print the comparison. Returns the exit code."""
    _check_sizes(args)
    check_json(args.json)
    check_may_switch("the demo", args.engine_options)
    check_page_size(args.engine_options)
    model = check_model(args.model) if args.model else None
    started = time.monotonic()
    chat = Chat(_pool(args), 64, args.clients, args.turns, args.document, args.question, args.answer)
    show = Display()
    with _work_dir(args.work_dir) as work_dir:
        model = model or _made_model(work_dir, show)
        options = engine_options(args.engine_options, made_model=not args.model)
        computes = "local_prefill" in loader.extras()
        sides = [deploy.OFF, deploy.Side("on", options=(LOCAL_FLAG, "off") if computes else ())]
        if computes:
            sides.append(deploy.Side("local"))
        deployment = deploy.Deployment(
            model,
            deploy.Shape(chat.pool, chat.reserve, chat.pool),
            options,
            args.backend,
            work_dir / "logs",
            lambda step: show.now(f"starting: {step}"),
            sides=sides,
            gateway=named_gateway(args.router),
        )
        load = measure.LoadGenerator(model, work_dir / "logs" / "load.log")
        try:
            with contextlib.closing(load), deployment:
                load.wait_ready()
                found = _held(args, chat, deployment, load, show)
        except RequestFailed as error:
            raise PdRadixError(f"{error}. Logs are in {work_dir / 'logs'}") from None
    size = f"{args.clients} client{'s'[: args.clients > 1]}, {args.turns} turn{'s'[: args.turns > 1]}"
    info = found.info
    print_report(
        found, f"{size} over {args.backend}, {info['device']} {info['dtype']}, pages of {info['page_size']} tokens"
    )
    if args.json:
        setting = _setting(args, info, options, time.monotonic() - started)
        write_whole(args.json, report.as_json(found.document(setting)))
    return 1 if found.failures else 0


def _check_sizes(args: argparse.Namespace) -> None:
    """Raise PdRadixError naming the first option that gives no conversation, or that a worker would refuse."""
    for name in ("clients", "turns", "document", "question"):
        if getattr(args, name) < 1:
            raise PdRadixError(f"--{name} {getattr(args, name)}: must be at least 1")
    if args.answer < 2:
        raise PdRadixError(f"--answer {args.answer}: must be at least 2, since prefill makes the first token")


def _pool(args: argparse.Namespace) -> int:
    """Tokens of each worker's pool: the user's, or twice all conversations."""
    given = option_value(args.engine_options, "--max-total-tokens")
    if given is not None and given.isdecimal():
        return int(given)
    chat = args.document + (args.turns - 1) * args.question + args.turns * args.answer
    needed = max(16384, 2 * args.clients * chat, BESIDE * (LONG_PROMPT + BESIDE_IT) + 4096)
    return -(-needed // 1024) * 1024


# --------------------------------------------------------------------------------------------------------- what is seen


@dataclass
class Found:
    """Results of the runs. entry: the chat's, from `turns.measure_all`. beside_s: per side, median TTFT of turns 2 and
    3 of the second chat. ``failures`` fail the demo; ``notes`` do not."""

    args: argparse.Namespace
    info: dict[str, Any]
    entry: dict[str, Any]
    beside_s: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def runs(self) -> dict[str, dict[str, Any]]:
        """Each side's run."""
        return {run["variant"]: run for run in self.entry["runs"]}

    def total(self, side: str, key: str) -> float:
        return self.runs[side]["figures"][key]

    def later(self, side: str, key: str) -> float:
        """``key`` of all turns from the second on."""
        return sum(turn[key] for turn in self.runs[side]["rounds"][1:])

    def least(self, side: str) -> float:
        """Lower bound of bytes from the second turn on."""
        return self.later(side, "least_pages") * self.entry["page_bytes"]

    @property
    def identical(self) -> bool:
        return not any(run["different_answers"] for run in self.entry["runs"])

    def document(self, setting: dict[str, Any]) -> dict[str, Any]:
        """All measurements, for JSON."""
        return {
            "setting": setting,
            "workload": {key: getattr(self.args, key) for key in SIZES},
            "runs": {
                side: {
                    "turns": run["rounds"],
                    "totals": run["figures"],
                    "beside_long_prompts_ttft_median_s": self.beside_s.get(side),
                }
                for side, run in self.runs.items()
            },
            "page_bytes": self.entry["page_bytes"],
            "least_bytes": self.total("on", "least_bytes"),
            "sent_bytes_on_over_least": self.total("on", "sent_over_least"),
            "identical": self.identical,
            "differences": self.entry["differences"],
            "failures": self.failures,
            "notes": self.notes,
        }


def _held(
    args: argparse.Namespace, chat: Chat, deployment: deploy.Deployment, load: measure.LoadGenerator, show: Display
) -> Found:
    """Run both chats on all sides, and judge the results. Raises PdRadixError if a request fails."""
    info = deployment.info(deployment.variants[0])
    page, tokens = info["page_size"], Tokens(load.words, args.seed)
    exact = str(info["dtype"]).endswith("float32")
    entry = turns.measure_all(deployment, load, chat.make("c", tokens), 1, page, show, exact)
    found = Found(args, info, entry, failures=list(entry["problems"]))
    if not exact and not found.identical:
        found.notes.append(f"answers part in {info['dtype']}, which rounds; pd-radix verify judges such answers")
    busy = BusyChat(chat.pool, 64, 2, 3, 300, 40, 16, BESIDE, LONG_PROMPT, steady=1).make("i", tokens)
    for variant in deployment.variants:
        show.now(f"{variant.name}: a chat beside {BESIDE} clients with long prompts")
        second = measure.run_once(deployment, load, busy, variant, 1, page)
        found.beside_s[variant.name] = second.figures["later_ttft_p50_s"]
        found.failures += [f"{variant.name}, beside long prompts: {problem}" for problem in second.problems]
    judge(found)
    if "local" in found.runs:
        pools = [pool for url in deployment.decode_urls(deployment.variants[-1]) for pool in idle_pools(url)]
        limits = [pool["computes_up_to"] for pool in pools if "computes_up_to" in pool]
        _judge_computed(found, max(limits, default=None))
    return found


def judge(found: Found) -> None:
    """Compare sent and counted tokens with what they have to be."""
    if not found.entry["page_bytes"] > 0:
        found.failures.append("with the flag off no KV bytes were counted, so those with it on cannot be judged")
        return
    if found.total("off", "reused_tokens"):
        found.failures.append("with the flag off, decode reused part of a prompt")
    for side, run in found.runs.items():
        counted = sum(found.total(side, key) for key in ("reused_tokens", "computed_tokens"))
        counted += sum(turn["transferred_tokens"] for turn in run["rounds"])
        asked = sum(turn["asked_tokens"] for turn in run["rounds"])
        if not counted == found.total(side, "prompt_tokens") == asked:
            found.failures.append(
                f"{side}: decode counted {found.total(side, 'prompt_tokens'):.0f} prompt tokens of {asked}, of which "
                f"{counted:.0f} were reused, transferred or computed"
            )
        if side != "off" and len(run["rounds"]) > 1:
            _judge_bytes(found, side)


def _judge_bytes(found: Found, side: str) -> None:
    args, rounds = found.args, found.runs[side]["rounds"]
    made = [args.clients * (args.document + n * (args.question + args.answer)) for n in range(args.turns)]
    if [turn["asked_tokens"] for turn in rounds] != made:
        found.notes.append(
            f"{side}: the tokenizer makes other tokens of earlier answers than they had, which no cache can reuse"
        )
        return
    sent, least = found.later(side, "sent_bytes"), found.least(side)
    most = MOST_OVER_LEAST * least
    if found.info.get("speculative_algorithm"):
        # With speculation the end of an answer may be missing in the tree: a page for each.
        most += args.clients * (len(rounds) - 1) * found.entry["page_bytes"]
    if sent > most:
        found.failures.append(
            f"{side}: {sent / least:.3f} times the lower bound was sent from turn 2 on, above {MOST_OVER_LEAST} "
            f"(decode reused {found.later(side, 'reused_tokens'):.0f} of {found.later(side, 'prompt_tokens'):.0f} "
            "prompt tokens)"
        )
    elif sent < 0.999 * least and not found.later(side, "computed_tokens"):
        found.failures.append(f"{side}: fewer KV bytes are counted from turn 2 on than any cache has to send")


def _judge_computed(found: Found, most: int | None) -> None:
    """most: bound of a delta that decode computes, tokens; None if it computes none on this deployment."""
    args = found.args
    if most is None:
        found.notes.append("decode computes no prompts on this deployment, and its log says why")
        return
    short = args.turns > 1 and args.question + found.info["page_size"] <= most
    if short and not found.total("local", "computed_tokens"):
        found.failures.append("local: decode has computed no token of a prompt, and some were short enough")


# -------------------------------------------------------------------------------------------------------------- report


def print_report(found: Found, title: str) -> None:
    """Print the table of turns and the verdict to stdout."""
    print(f"\n{title}\n\n{report.markdown_table(*report.turns_table(found.entry))}\n")
    print("\n".join([*_lines(found), *(f"FAILED:   {failure}" for failure in found.failures)]))


def _lines(found: Found) -> Iterator[str]:
    sent = {side: found.total(side, "sent_bytes") for side in found.runs}
    less = sent["off"] / sent["on"] if sent["on"] else math.inf
    yield f"KV sent:  {_mib(sent['off'])} MiB off, {_mib(sent['on'])} MiB on: {less:.2f}x"
    least = found.total("on", "least_bytes")
    over = found.total("on", "sent_over_least")
    yield f"          on is {over:.3f} times the lower bound, {_mib(least)} MiB"
    if "local" in found.runs:
        computed, prompts = (found.total("local", f"{what}_tokens") for what in ("computed", "prompt"))
        yield (
            f"          {_mib(sent['local'])} MiB where decode computes short remainders: decode computed "
            f"{computed:.0f} of {prompts:.0f} prompt tokens"
        )
    if found.args.turns > 1:
        yield f"TTFT:     from turn 2 on, median: {_sides({s: found.total(s, 'later_ttft_p50_s') for s in found.runs})}"
    beside = f"beside {BESIDE} clients with prompts of {LONG_PROMPT} tokens"
    yield f"          {beside}, turns 2 and 3: {_sides(found.beside_s)}"
    yield f"Answers:  identical on all sides: {report.identity(found.entry)}"
    yield from (f"          {text}" for text in parted.sentences(found.entry["differences"]))
    yield from (f"Note:     {note}" for note in found.notes)


def _sides(seconds: dict[str, float]) -> str:
    return ", ".join(f"{value:.3f} s {side}" for side, value in seconds.items())


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f}"


def _setting(args: argparse.Namespace, info: dict[str, Any], options: Sequence[str], seconds: float) -> dict[str, Any]:
    return {
        "model": args.model or "pd-radix make-model",
        "backend": args.backend,
        "router": named_gateway(args.router).version,
        "device": str(info["device"]),
        "dtype": str(info["dtype"]),
        "page_size": info["page_size"],
        "engine_options": hidden(options),
        "sglang_pd_radix": __version__,
        "sglang": importlib.metadata.version("sglang"),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "seconds": round(seconds, 1),
    }


def engine_options(given: Sequence[str], made_model: bool) -> list[str]:
    """The options of all workers: the demo's defaults, overridden by the user's."""
    defaults: dict[str, str | None] = {"--enable-metrics": None, "--page-size": "16"}
    if cpu_host.active():
        pass  # the default there is float32
    elif torch_layers.wanted():
        # In float32 batches change one token in about ten thousand at most.
        defaults["--dtype"] = "float32"
        if not has_option(given, *ATTENTION_OPTIONS):
            defaults["--attention-backend"] = "triton"
    else:
        if made_model:
            defaults["--dtype"] = "bfloat16"  # the engine's own kernels for GPUs have no float32
        return with_defaults(given, defaults) + deterministic_options(given)
    return with_defaults(given, defaults)


def deterministic_options(given: Sequence[str]) -> list[str]:
    """Options that make a GPU's answers independent of the batch, unless ``given`` chooses a backend that cannot.

    These two of the engine's deterministic attention backends keep their radix cache.
    """
    backend = option_value(given, "--attention-backend")
    if backend not in (None, "fa3", "triton") or has_option(
        given, "--prefill-attention-backend", "--decode-attention-backend", "--enable-deterministic-inference"
    ):
        return []
    return ["--enable-deterministic-inference", *(["--attention-backend", "triton"] if backend is None else [])]


@contextlib.contextmanager
def _work_dir(given: Path | None) -> Iterator[Path]:
    """``given``, created if missing; otherwise a temporary directory, kept only if a run fails."""
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


def _made_model(work_dir: Path, show: Display) -> str:
    show.now("making the model")
    path = make_model(work_dir / "model")
    show.done(f"model: random weights, made in {path}")
    return str(path)


if __name__ == "__main__":
    from .cli import main

    sys.exit(main(["demo", *sys.argv[1:]]))
