"""``pd-radix demo``: the same chat with the decode prefix cache off, on, and with decode computing what is short."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sglang_pd_radix import __version__
from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.supplied import cpu_host, torch_layers

from . import chat_local
from .arguments import hidden
from .chat_judge import compare
from .chat_load import Workload
from .chat_report import as_document, print_report
from .chat_run import START, Run, count, hold
from .cluster import (
    ATTENTION_OPTIONS,
    RADIX_FLAG,
    Cluster,
    Progress,
    add_router_option,
    has_option,
    named_gateway,
    option_value,
    with_defaults,
)
from .engine_options import check as check_engine_options
from .make_model import make_model
from .progress import Display
from .up import check_json, check_may_switch, check_model, check_page_size, write_json

_EPILOG = """
Engine options for all workers follow after --, for example:

  pd-radix demo --model Qwen/Qwen3-0.6B -- --page-size 64 --tp 2

Exit code: 0 the cache saved what it can and changed no answer, 1 something was wrong (it says what).
"""


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
    add_router_option(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured there")
    parser.add_argument(
        "--local-prefill",
        default="auto",
        metavar="WHICH",
        help=f"{chat_local.LOCAL_FLAG} of a third run, auto is its default; off: no third run (default: auto)",
    )
    parser.add_argument(
        "--work-dir", type=Path, metavar="DIR", help="for the made model and the logs (default: a new temporary one)"
    )
    parser.add_argument(
        "--beside",
        type=int,
        default=2,
        metavar="N",
        help="clients with long prompts beside a second, short chat; 0: no such chat (default: 2)",
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


def run(args: argparse.Namespace) -> int:
    """Do the runs and print the comparison. Returns the exit code."""
    workload = Workload(args.clients, args.turns, args.document, args.question, args.answer, args.seed)
    workload.check()
    chat_local.check_asked(args.local_prefill)
    if args.beside < 0:
        raise PdRadixError(f"--beside {args.beside}: give 0 clients or more")
    check_json(args.json)
    check_may_switch("the demo", args.engine_options)
    check_page_size(args.engine_options)
    check_engine_options(args.engine_options, "engine options")
    model = check_model(args.model) if args.model else None
    started = time.monotonic()
    runs = 2 + (args.local_prefill != "off")
    with _work_dir(args.work_dir) as work_dir, Display(work=runs * (START + workload.turns)) as show:
        model = model or _made_model(work_dir, show)
        options = engine_options(args.engine_options, workload, made_model=not args.model)
        sides = {"off": [], "on": [RADIX_FLAG, chat_local.LOCAL_FLAG, "off"]}
        if args.local_prefill != "off":
            sides["on-local"] = [RADIX_FLAG, chat_local.LOCAL_FLAG, args.local_prefill]
        off, on, *more = (
            _held(args, name, decode_args, model, options, work_dir, workload, show)
            for name, decode_args in sides.items()
        )
        local = chat_local.judge(off, on, more[0]) if more else None
        comparison = compare(off, on)
        if comparison.failures and not on.ids:
            # It may be the template, and not the cache, to which the bytes are due: then the ids tell.
            show.now("comparing the tokens of the chat")
            on.find_ids(workload, model)
            comparison = compare(off, on)
    size = f"{count(workload.clients, 'client')}, {count(workload.turns, 'turn')}"
    title = (
        f"{size} over {args.backend}, {off.device} {off.dtype}, pages of {off.page_size} tokens "
        f"({_kib(comparison.page_bytes / off.page_size)} KiB of KV per token)"
    )
    print_report(comparison, title, local, args.beside)
    if args.json:
        setting = _setting(args, comparison.off, options, time.monotonic() - started)
        write_json(args.json, as_document(comparison, workload, setting, local))
    return 1 if comparison.failures or (local and local.failures) else 0


def _held(
    args: argparse.Namespace,
    name: str,
    decode_args: Sequence[str],
    model: str,
    options: Sequence[str],
    work_dir: Path,
    workload: Workload,
    show: Display,
) -> Run:
    """The run ``name`` on a deployment of its own."""

    def progress(step: Progress) -> None:
        show.now(f"flag {name}: {step}")

    cluster = Cluster(
        model,
        common_args=options,
        decode_args=decode_args,
        backend=args.backend,
        gateway=named_gateway(args.router),
        log_dir=work_dir / name,
        on_progress=progress,
    )
    return hold(cluster, name, workload, show, args.beside)


def _setting(args: argparse.Namespace, off: Run, options: Sequence[str], seconds: float) -> dict[str, Any]:
    return {
        "model": args.model or "pd-radix make-model",
        "backend": args.backend,
        "router": named_gateway(args.router).version,
        "device": off.device,
        "dtype": off.dtype,
        "page_size": off.page_size,
        "engine_options": hidden(options),
        "sglang_pd_radix": __version__,
        "sglang": importlib.metadata.version("sglang"),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "seconds": round(seconds, 1),
    }


def engine_options(given: Sequence[str], workload: Workload, made_model: bool) -> list[str]:
    """The options of all workers: what the demo needs, unless the user's say otherwise."""
    defaults: dict[str, str | None] = {"--enable-metrics": None, "--page-size": "16"}
    if cpu_host.active():
        if not has_option(given, "--max-total-tokens", "--mem-fraction-static"):
            # Room for every conversation twice, since words may take more than one token. More costs start-up time.
            tokens = max(16384, -(-2 * workload.clients * workload.words // 1024) * 1024)
            defaults["--max-total-tokens"] = str(tokens)
    elif torch_layers.wanted():
        # In float32 another batch changes a token in some ten thousand at most.
        defaults["--dtype"] = "float32"
        if not has_option(given, *ATTENTION_OPTIONS):
            defaults["--attention-backend"] = "triton"
    else:
        if made_model:
            defaults["--dtype"] = "bfloat16"  # the engine's own kernels for GPUs have no float32
        return with_defaults(given, defaults) + deterministic_options(given)
    return with_defaults(given, defaults)


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


def _made_model(work_dir: Path, show: Display) -> str:
    show.now("making the model")
    path = make_model(work_dir / "model")
    show.done(f"model: random weights, made in {path}")
    return str(path)


if __name__ == "__main__":
    from .cli import main

    sys.exit(main(["demo", *sys.argv[1:]]))
