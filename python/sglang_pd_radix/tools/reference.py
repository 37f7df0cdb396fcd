"""``pd-radix reference``: every option, variable, metric, route and field, as docs/reference.md has them.

What the code says of itself (options and their help, metrics) is read from it. What it does not say (what a variable or
a field means) is written down here; `test/srt/tools/unit/test_reference.py` finds what the code has and this file does
not.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.patching import loader, syntax

Row = Sequence[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``pd-radix reference``."""
    parser.description = "Print every option, environment variable, metric, route and field, in Markdown."
    parser.add_argument("--markdown", action="store_true", help="print the page docs/reference.md (the default)")


def run(args: argparse.Namespace) -> int:
    """Print the page. Returns the exit code."""
    print(as_markdown())
    return 0


# ----------------------------------------------------------------------------------------------- what is written here


@dataclass(frozen=True)
class Variable:
    """An environment variable: whose default it has, which workers read it, and what it does."""

    name: str
    default: str
    where: str
    meaning: str


#: Of this package.
VARIABLES = (
    Variable("SGLANG_PD_RADIX", "1", "all", "0, false, no or n switches the patch set off in a process"),
    Variable(
        "SGLANG_PD_RADIX_EXTRAS",
        "all that are there",
        "all",
        "extras to load: comma-separated names, or none; `pd-radix doctor` lists them ([deploy](deploy.md#extras))",
    ),
    Variable(
        "SGLANG_PD_RADIX_API_KEY",
        "none",
        "pd-radix; prefill, decode that drain",
        "the key that `top`, `trace`, `drain` and `join` send to servers with `--api-key`; `up` takes it from the "
        "workers' options; a worker sends it, or its own key, to `SGLANG_DISAGGREGATION_GATEWAYS`",
    ),
    Variable(
        "SGLANG_PD_RADIX_ADMIN_API_KEY",
        "none",
        "pd-radix",
        "the key for `/freeze_gc` and `/flush_cache` of workers with `--admin-api-key`; `up`, `demo`, `bench` and "
        "`verify` take it from the workers' options if all have the same",
    ),
    Variable(
        "SGLANG_DISAGGREGATION_SECRET_FILE",
        "none",
        "prefill, decode",
        "a file with the secret that signs messages between prefill and decode; 16 bytes or more "
        "([security](security.md#a-secret-for-the-control-plane))",
    ),
    Variable(
        "SGLANG_DISAGGREGATION_DECODE_FREE_WATERMARK",
        "1/16",
        "decode with the flag",
        "part of the KV pool kept free of cached KV between admissions, 0 to 0.5; the first TP rank's counts "
        "([why](decisions/long-runs-of-pages.md))",
    ),
    Variable(
        "SGLANG_DISAGGREGATION_COMPARE_PROMPTS",
        "0",
        "prefill, decode with the flag",
        "1: prefill rejects a request whose tokens differ from decode's, and decode keeps no KV if only images differ; "
        "0: only lengths are compared. Decode's value counts; if prefill has it too, its tokenizer process computes "
        "the digests ([why](protocol.md#prompts-that-differ))",
    ),
    Variable(
        "SGLANG_DISAGGREGATION_DRAIN_TIMEOUT",
        "300 on decode with the flag",
        "prefill, decode",
        "seconds for running requests after SIGTERM; 0, the default on all other workers: the engine's SIGTERM "
        "([upgrade](upgrade.md#sigterm))",
    ),
    Variable(
        "SGLANG_DISAGGREGATION_GATEWAYS",
        "none",
        "prefill, decode; those that drain",
        "comma-separated URLs of gateways (smg) that remove the worker first at SIGTERM "
        "([upgrade](upgrade.md#sigterm))",
    ),
    Variable(
        "SGLANG_DISAGGREGATION_ENDED_REQUESTS",
        "0",
        "prefill, decode",
        "ended requests whose times a worker remembers ([observe](observe.md#one-request))",
    ),
    Variable(
        "SGLANG_TRITON_SHARED_PREFIX_ATTENTION",
        "0",
        "decode, aggregated; GPU, `triton` for decode",
        "1: decode attention reads shared prefixes once ([tuning](tuning.md#shared-prefixes-in-decode-attention))",
    ),
    Variable(
        "SGLANG_CPU_SHARED_PREFIX_ATTENTION",
        "1",
        "all, on CPU hosts",
        "0: decode steps stay batched, and each request reads all of its KV",
    ),
    Variable(
        "SGLANG_TORCH_LAYERS",
        "0",
        "all, GPU",
        "1: norms, rotary embeddings and activations in torch, so that float32 is exact; for checks, slower",
    ),
)

#: Of the engine, and of libraries, where this package gives them a meaning of its own or asks to set them.
ENGINE_VARIABLES = (
    Variable("SGLANG_OLLAMA_CHAT_ROUTE", "/api/chat", "all", "a request route; a draining worker rejects it too"),
    Variable("SGLANG_OLLAMA_GENERATE_ROUTE", "/api/generate", "all", "the same"),
    Variable(
        "SGLANG_TIMEOUT_KEEP_ALIVE",
        "5",
        "all",
        "seconds after which a worker closes an idle HTTP connection; 4000 on a worker of a pair if not set "
        "([why](deploy.md#the-router))",
    ),
    Variable(
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
        "300",
        "decode, prefill",
        "seconds from decode's request for KV until the request fails on this worker. Decode keeps pages of a failed "
        "request for the larger value of both workers, unless prefill reports that it writes no more",
    ),
    Variable(
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",
        "300",
        "prefill, decode",
        "seconds: on prefill until a request that no decode worker has named fails, on decode with the flag for a "
        "handshake. Decode names waiting requests every quarter of the smaller value ([how short it may "
        "be](troubleshooting.md#how-soon-a-failure-is-reported))",
    ),
    Variable(
        "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL",
        "5.0",
        "prefill, decode",
        "on decode, seconds between health checks of a prefill; on both, this times the next row plus 2 s is the "
        "time-out of ZeroMQ's heartbeats",
    ),
    Variable(
        "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE",
        "2",
        "prefill, decode",
        "on decode, failed checks until a prefill counts as lost; on both, see the row above",
    ),
    Variable(
        "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER",
        "False",
        "prefill, decode; the same on both",
        "with context parallelism all ranks of prefill send, whole prompts only. Decode with the flag rejects a "
        "prefill with another value. Best left alone",
    ),
    Variable(
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR",
        "None",
        "decode",
        "the directory of `--hicache-storage-backend file` ([deploy](deploy.md#a-storage-below-host-memory)); without "
        "it, `/tmp/hicache`",
    ),
    Variable(
        "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH",
        "None",
        "decode",
        "a JSON file in place of `MOONCAKE_*`, unless the extra config has the value",
    ),
    Variable("MOONCAKE_MASTER", "None", "decode", "HOST:PORT of the master of `--hicache-storage-backend mooncake`"),
    Variable("MOONCAKE_LOCAL_HOSTNAME", "localhost", "decode", "address of this worker for that store's other clients"),
    Variable("MOONCAKE_GLOBAL_SEGMENT_SIZE", "4gb", "decode", "memory of a worker in that store"),
    Variable("MOONCAKE_PROTOCOL", "tcp", "decode", "transport of that store; only tcp has been run"),
    Variable("SGLANG_DISAGGREGATION_NIXL_BACKEND", "UCX", "prefill, decode", "NIXL's backend; only UCX has been run"),
    Variable(
        "SGLANG_DISAGG_STAGING_BUFFER",
        "False",
        "prefill, decode",
        "staging buffers between different TP sizes over Mooncake ([deploy](deploy.md#mooncake))",
    ),
    Variable("SGLANG_DISAGG_STAGING_BUFFER_SIZE_MB", "64", "prefill", "the size of prefill's staging buffer"),
    Variable("SGLANG_DISAGG_STAGING_POOL_SIZE_MB", "4096", "decode", "the size of decode's staging buffer"),
    Variable("SGLANG_HOST_IP", "", "prefill, decode", "address announced to peers; default: that of the default route"),
    Variable(
        "SGLANG_REQUEST_STATE_WAIT_TIMEOUT",
        "4",
        "all",
        "seconds between checks whether a client that does not stream is still connected",
    ),
    Variable("SGLANG_ENABLE_SPEC_V2", "False", "decode, prefill", "speculative decoding with overlapped steps"),
    Variable(
        "SGLANG_MAMBA_CONV_DTYPE",
        "bfloat16",
        "prefill, decode",
        "data type of the convolutions' states; the same on both",
    ),
    Variable("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "False", "decode", "refused with the flag"),
    Variable(
        "SGLANG_SCHEDULER_SKIP_ALL_GATHER", "False", "decode", "refused with --disaggregation-decode-local-prefill"
    ),
    Variable("SGLANG_USE_CPU_ENGINE", "by whether there is a CUDA driver", "all", "1: run as on a CPU host; 0: never"),
    Variable("SGLANG_CPU_OMP_THREADS_BIND", "all", "all, on CPU hosts", "cores of each TP rank, such as `0\\|1`"),
    Variable("MC_FORCE_TCP", "", "prefill, decode", "1: Mooncake uses TCP even with RDMA devices"),
)

#: What this package sets or reads and nobody else should: how its own processes tell each other.
INTERNAL_VARIABLES = ("SGLANG_PD_RADIX_TOLD", "SGLANG_PD_RADIX_KV_RECORDS")

#: Routes on a prefill's bootstrap server: method and path, who asks, what it answers.
ROUTES = {
    "/decode_prefix": (
        "GET",
        "decode",
        "capabilities of this prefill ([protocol](protocol.md#who-understands-a-prefix))",
    ),
    "/refused_room": (
        "POST",
        "decode",
        "decode has rejected this request ([protocol](protocol.md#requests-that-one-side-refuses))",
    ),
    "/computed_room": (
        "POST",
        "decode",
        "decode computes this prompt itself ([protocol](protocol.md#prompts-that-decode-computes-itself))",
    ),
    "/sample_rooms": (
        "POST",
        "decode",
        "each sample of a prompt has its own room ([protocol](protocol.md#samples-of-a-prompt))",
    ),
}

#: Statuses that this package makes, or changes the meaning of.
STATUSES = (
    ("200", "worker", "the answer; a stream whose request fails ends with `finish_reason` abort and the message"),
    (
        "400",
        "worker",
        "an option, prompt length, grammar or room that this worker cannot serve or its peer rejected; a failing logit "
        "processor; a token that the grammar rejects. The message names it",
    ),
    ("400", "bootstrap server", "the request cannot be parsed"),
    ("503", "bootstrap server", "starting: not all ranks of this prefill have registered"),
    ("401", "bootstrap server", "not signed with this prefill's secret"),
    ("404", "bootstrap server", "no such route: the engine without this package, or an older one"),
    ("500", "worker", "this request failed: transfer or peer; the message says which"),
    ("502", "router", "`prefill_server_error` or `decode_server_error`: a worker closed the connection or is gone"),
    (
        "503",
        "worker",
        "after SIGTERM ([upgrade](upgrade.md#sigterm)); too many wait ([`refuse`](tuning.md#a-bound-for-ttft)); "
        "`/health` also while starting, or if the scheduler does not answer",
    ),
    (
        "503",
        "router",
        "no worker can serve it; sglang-router's `prefix_hash` in front of a pair; smg if `model` is not the served "
        "name",
    ),
)

#: Of `GET /server_info`, under `internal_states[i].kv_pool`.
POOL_FIELDS = {
    "dp_rank": "DP rank, if there are several, in the order of their answers",
    "size": "tokens of the KV pool; with sliding windows, of the full pool, like the next three. Like these and "
    "`used_peak`, missing on prefill with a hierarchical cache, hybrid models or windows, and on decode with windows "
    "without the flag",
    "available": "free tokens",
    "evictable": "tokens in the tree that no request holds",
    "protected": "tokens in the tree that requests hold",
    "requests": "requests by state: on decode handshake, waiting (for memory or its turn), held_back (for another's "
    "transfer), transfer, local, received, running, retracted, quarantined; on prefill bootstrap, waiting, "
    "running, sending",
    "oldest": "the five oldest: rid, state, seconds, prompt_tokens, decode_prefix (tokens that decode held), "
    "output_tokens",
    "used_peak": "most tokens held by requests since the last flush; decode only, also without the flag",
    "longest_queue_step_s": "longest step of decode's queues since then, without waits for a core",
    "computes_up_to": "longest remainder that decode computes itself; only with local prefill",
    "itl": "with an ITL target: mean time of the last steps, predicted time, requests that wait for it, how often it "
    "throttled the next request, and the parts of a step",
    "ttft": "with a TTFT target: time from admission to first token, late requests that wait, and late requests that "
    "were admitted",
    "ttft_refusal": "with a TTFT target and `refuse`: milliseconds between two first tokens, and refused requests",
    "idle": "no request and nothing in quarantine",
    "free_req_slots": "free request slots",
    "req_slots": "all of them",
    "metadata_buffers": "buffers for the metadata of transfers",
    "free_metadata_buffers": "free ones",
    "rooms": (
        "rooms in each table of the transfer backend; when idle, only rooms that decode asked for and whose requests "
        "have not arrived here, for up to `SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT`"
    ),
    "locks_taken": "locks taken on the tree; with the flag",
    "locks_released": "locks released; the same number when idle",
    "audit": "when idle, with the flag: inconsistencies found in tree and pools",
    "host": "with `--enable-hierarchical-cache` on decode, tokens of host memory: size, available, evictable, "
    "protected, saving; since the start saved, loaded, dropped for lack of space, evicted before they were "
    "saved; under `storage` those written to and read from a storage",
    "window_size": "tokens of the sliding-window pool",
    "window_available": "free tokens of it; all of them when idle",
    "state_slots": "slots for states (linear attention, Mamba2)",
    "free_state_slots": "free ones; when idle, all but those in the tree of a prefill worker",
}

#: Of `meta_info.cached_tokens_details` of an answer of decode, beside the engine's `device` and `host`.
DETAIL_FIELDS = {
    "decode_prefix": "tokens of the prompt that decode held",
    "decode_host": "of these, from host memory (`--enable-hierarchical-cache` on decode)",
    "decode_storage": "of these, fetched for this request (`--hicache-storage-backend` too)",
    "transferred": "tokens that prefill sent",
    "decode_computed": "tokens that decode computed; only with local prefill",
    "transferred_bytes": "bytes sent, over all TP ranks",
    "saved_bytes": "bytes not sent, over all TP ranks",
}

#: Values that this package adds to options of the engine.
ADDED_VALUES = (
    (
        "--load-balance-method",
        "longest_prefix",
        "decode with the flag and DP ranks: the rank with most of the prompt ([why](decisions/data-parallel-ranks.md))",
    ),
    (
        "--attention-backend",
        "torch_batched",
        "CPU hosts, and their default: decode steps in a few calls, shared prefixes read once "
        "([why](decisions/shared-prefixes-on-cpu-hosts.md))",
    ),
)

# ------------------------------------------------------------------------------------------------- what the code says


def engine_options() -> list[Row]:
    """(names, default, help) of each option of a worker that this package adds. Raises PdRadixError if it is off."""
    from sglang.srt.server_args import ServerArgs

    base = ServerArgs.__mro__[-2]
    if base is ServerArgs:
        raise PdRadixError("the patch set is not active in this process: see pd-radix doctor")
    known = {name for action in _parser(base)._actions for name in action.option_strings}
    return [row for row, names in _options(_parser(ServerArgs)) if not known.intersection(names)]


def _parser(args_class: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    args_class.add_cli_args(parser)
    return parser


def command_options(command: str) -> list[Row]:
    """(names, default, help) of each option of a ``pd-radix`` command."""
    return [row for row, names in _options(_command_parser(command)) if "--help" not in names]


def _command_parser(command: str) -> argparse.ArgumentParser:
    from .cli import build_parser

    (commands,) = (a for a in build_parser(command)._actions if isinstance(a, argparse._SubParsersAction))
    return commands.choices[command]


def option_names(command: str) -> set[str]:
    """Every spelling of every option of a ``pd-radix`` command."""
    return {name for action in _command_parser(command)._actions for name in action.option_strings}


def _options(parser: argparse.ArgumentParser) -> Iterator[tuple[Row, Sequence[str]]]:
    formatter = parser._get_formatter()
    for action in parser._actions:
        names = action.option_strings or [str(action.metavar or action.dest)]
        if action.help is argparse.SUPPRESS:
            continue
        shown = ", ".join(f"`{name}`" for name in names)
        if action.choices is not None:
            shown += f" ({', '.join(map(str, action.choices))})"
        elif action.option_strings and action.nargs != 0:
            shown += f" {action.metavar or action.dest.upper()}"
        text = _sentence(formatter._expand_help(action) if action.help else "")
        text, default = _apart(text)
        yield (shown, default or _default(action.default), text), names


def _apart(text: str) -> tuple[str, str]:
    """A help text without what it says of the default, and that."""
    said = re.search(r"[ ,;.]*(?:\(default: ([^()]*)\)|Default: (\S+))$", text)
    return (text[: said.start()], said.group(1) or said.group(2)) if said else (text, "")


def _default(value: Any) -> str:
    return "" if value in (None, "", argparse.SUPPRESS) or isinstance(value, (bool, list)) else f"`{value}`"


def _sentence(text: str) -> str:
    return " ".join(text.split()).rstrip(".")


class _AnyArgs:
    """Args for the names of rules."""

    disaggregation_mode = "another"

    def __getattr__(self, name: str) -> str:
        return "NAME"


def _trees() -> str:
    from sglang.srt.mem_cache.cache_support import KINDS

    args = _AnyArgs()
    rows = []
    for kind in KINDS:
        names = [rule.name.format(args=args) for refused in kind.refused for rule in refused.rules]
        rows.append((kind.workers, kind.tree, "; ".join(names)))
    return _table(("Worker", "Tree", "Refused at the start"), rows)


#: Metrics that a decode worker writes without the flag too. It does not export the others, or they stay 0.
WITHOUT_FLAG = (
    *("decode_prompt_tokens", "decode_transferred_tokens"),
    *("pd_requests", "pd_oldest_request_seconds", "pd_pool_size", "pd_pool_free"),
)


def metrics(root: Path | None = None) -> list[Row]:
    """(name, worker, kind, help) of each Prometheus metric, from the calls that make them.

    The ``_total`` of a counter's name is the exporter's.
    """
    found: dict[tuple[str, str, str], str] = {}
    root = root or loader.patch_root()
    for path in sorted(path for path in root.rglob("*.py") if "tests" not in path.relative_to(root).parts):
        for node in ast.walk(syntax.parse(path.read_text(encoding="utf-8"), path)):
            if isinstance(node, ast.If):
                only = "prefill" if "prefill" in ast.unparse(node.test) else "decode"
                found |= dict.fromkeys(_made(node.body), only) | dict.fromkeys(_made(node.orelse), "decode")
            elif isinstance(node, ast.FunctionDef):
                found |= dict.fromkeys(_made(node.body), "prefill, decode")
    ends = {"counter": "_total", "gauge": ""}
    return [
        (
            f"sglang:{name}{ends[kind]}",
            worker if name in WITHOUT_FLAG else worker.replace("decode", "decode with the flag"),
            kind,
            _sentence(text),
        )
        for (kind, name, text), worker in found.items()
    ]


def _made(body: Iterable[ast.stmt]) -> Iterator[tuple[str, str, str]]:
    for statement in body:
        call = statement.value if isinstance(statement, ast.Assign) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ("counter", "gauge"):
            name, text = (ast.literal_eval(argument) for argument in call.args)
            yield call.func.id, name, text


@cache
def _code() -> dict[str, str]:
    """The code of each extra, and under "" what runs in a worker without any."""
    root = loader.patch_root()
    folders = {name: [root / "extras" / name / "sglang"] for name in loader.known_extras()}
    folders[""] = [root / "sglang", Path(__file__).parents[1] / "supplied"]
    files = {name: sorted(path for at in places for path in at.rglob("*.py")) for name, places in folders.items()}
    return {name: "\n".join(path.read_text(encoding="utf-8") for path in paths) for name, paths in files.items()}


def extra_of(name: str, before: str = "") -> str:
    """A link to the page of the extra whose code alone has the text ``name``; "" of the core."""
    having = [extra for extra, code in _code().items() if re.search(f'{before}"{name}"', code)]
    return "" if "" in having else ", ".join(f"[{extra}](../python/extras/{extra}/README.md)" for extra in having)


def _by_extra(rows: Iterable[Row], before: str = "") -> list[Row]:
    """The rows with the extra that each belongs to behind its name, the core's first."""
    keys = ((re.findall(r"`(?:sglang:)?(.+?)(?:_total)?`", name)[0], name, rest) for name, *rest in rows)
    return sorted(((name, extra_of(key, before), *rest) for key, name, rest in keys), key=lambda row: row[1])


# ------------------------------------------------------------------------------------------------------------ the page


def as_markdown() -> str:
    """The page."""
    from .cli import COMMANDS

    parts = [
        "# Reference",
        "Made by `pd-radix reference --markdown`. Use: [deploy](deploy.md), [tuning](tuning.md); messages: "
        "[troubleshooting](troubleshooting.md). Names of an [extra](../python/extras/README.md) work only while "
        "it is loaded.",
        "## Options of a worker",
        "Added to `python -m sglang.launch_server`. The flag is the first.",
        _table(
            ("option", "extra", "default", "meaning"), _by_extra(engine_options(), r"(?:add_argument\(|OPTION =)\s*")
        ),
        "Values added to options of the engine:",
        _table(("option", "value", "meaning"), [(f"`{o}`", f"`{v}`", text) for o, v, text in ADDED_VALUES]),
        "## Trees",
        "The tree of each worker, and what it refuses ([why](supported.md#what-is-refused-and-why)).",
        _trees(),
        "## Environment variables",
        "Read by workers when they start.",
        _variables(VARIABLES),
        "Of the engine and Mooncake:",
        _variables(ENGINE_VARIABLES),
        "## Metrics",
        "`GET /metrics` of a worker with `--enable-metrics`. Requests and their tokens are counted on the first TP "
        "rank; bytes, runs, digests and lost peers are summed over TP ranks. Gauges show the last write of a TP "
        "rank; faults, quarantine, free memory and ages the worst. DP ranks have the label `dp_rank`. Without "
        'the flag, metrics of "decode with the flag" are missing or 0. The engine\'s '
        "`sglang:cached_tokens_total` includes tokens that decode with the flag held, as `device`.",
        _table(
            ("metric", "extra", "worker", "kind", "meaning"), _by_extra((f"`{n}`", *rest) for n, *rest in metrics())
        ),
        "## Fields of `/server_info`",
        "`GET /server_info`, under `internal_states[i].kv_pool`; tokens unless stated otherwise.",
        _fields(POOL_FIELDS),
        "With `--enable-pegaflow` also [`internal_states[i].pegaflow`](pegaflow.md#when-something-fails).",
        "## Fields of an answer",
        "`meta_info.cached_tokens` and `usage.prompt_tokens_details.cached_tokens` are the larger of prefill's and "
        "decode's hit; without the flag, prefill's. `meta_info.cached_tokens_details` has prefill's as `device` "
        "and `host`, and from decode with the flag the fields below. OpenAI's endpoints pass on `device` and "
        "`host` only (`sglext.cached_tokens_details`).",
        _fields(DETAIL_FIELDS),
        "## Statuses",
        _table(("status", "from", "meaning"), STATUSES),
        "## Routes",
        "On the HTTP server of prefill's `--disaggregation-bootstrap-port`, not for clients.",
        _table(
            ("route", "asked by", "says"),
            [(f"`{method} {path}`", who, text) for path, (method, who, text) in sorted(ROUTES.items())],
        ),
        "On each worker with one tokenizer process, for `pd-radix trace` and `pd-radix bench --breakdown`: `GET "
        "/ended_requests?rid=RID`, `?room=ROOM` or `?last=N`.",
        "## Commands",
        "Exit codes: 0 fine, 1 a problem, 2 bad usage. Engine options follow `--` where a command starts workers.",
    ]
    for command, summary in COMMANDS.items():
        parts.append(f"### `pd-radix {command}`")
        parts.append(summary[0].upper() + summary[1:] + ".")
        parts.append(_table(("option", "default", "meaning"), command_options(command)))
    headings = [part[3:] for part in parts if part.startswith("## ")]
    links = (f"[{name}](#{re.sub(r'[^a-z_ -]', '', name.lower()).replace(' ', '-')})" for name in headings)
    parts.insert(2, f"* {', '.join(links)}")
    return "\n\n".join(part for part in parts if part)


def _variables(variables: Sequence[Variable]) -> str:
    rows = _by_extra((f"`{v.name}`", v.default or "–", v.where, v.meaning) for v in variables)
    return _table(("variable", "extra", "default", "read by", "meaning"), rows)


def _fields(fields: Mapping[str, str]) -> str:
    return _table(("field", "meaning"), [(f"`{name}`", text) for name, text in fields.items()])


def _table(heading: Sequence[str], rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    lines = [
        heading,
        ["---"] * len(heading),
        *([cell.replace("|", "\\|").replace("\\\\|", "\\|") for cell in row] for row in rows),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
