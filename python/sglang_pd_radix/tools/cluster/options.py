"""Command-line options of a deployment's processes: given ones, defaults, and reserved ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from sglang_pd_radix.errors import PdRadixError

HOST = "127.0.0.1"
RADIX_FLAG = "--disaggregation-decode-enable-radix-cache"
#: The options that choose an attention backend.
ATTENTION_OPTIONS = ("--attention-backend", "--prefill-attention-backend", "--decode-attention-backend")

#: Names of the rank options in the engine; unambiguous abbreviations count too.
TP_OPTIONS = ("--tp", "--tp-size", "--tensor-parallel", "--tensor-parallel-size")
PP_OPTIONS = ("--pp-size", "--pipeline-parallel", "--pipeline-parallel-size")
DP_OPTIONS = ("--dp", "--dp-size", "--data-parallel", "--data-parallel-size")

#: Options of one role: one list for all its workers, or one per worker.
RoleArgs = Sequence[str] | Sequence[Sequence[str]]
RoleEnv = Mapping[str, str] | Sequence[Mapping[str, str]]

# Options that the cluster sets, since its parts have to agree on them.
OWNED_OPTIONS = (
    "--model-path",
    "--model",
    "--host",
    "--port",
    "--disaggregation-mode",
    "--disaggregation-bootstrap-port",
    "--disaggregation-transfer-backend",
)


def ports_named(args: Sequence[str]) -> set[int]:
    """All numbers in ``args`` that may be ports."""
    return {int(number) for arg in args for number in re.findall(r"(?<!\d)\d{4,5}(?!\d)", arg)}


def has_option(args: Sequence[str], *names: str) -> bool:
    """Whether one of the options ``names`` is in ``args``, as ``--name value`` or ``--name=value``."""
    return any(arg.split("=", 1)[0] in names for arg in args)


def option_value(args: Sequence[str], *names: str) -> str | None:
    """The last value of option ``names`` in ``args``; None if absent."""
    found = None
    for i, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name in names:
            found = value if equals else (args[i + 1] if i + 1 < len(args) else None)
    return found


def api_key(workers: Iterable[Sequence[str]]) -> str | None:
    """The API key of all these workers; None without one.

    Raises PdRadixError if keys differ: clients, such as a router, have one.
    """
    keys = {option_value(args, "--api-key") for args in workers}
    if len(keys) > 1:
        raise PdRadixError("--api-key: the router has one key for all workers; give all of them the same, or none")
    return keys.pop() if keys else None


def with_defaults(given: Sequence[str], defaults: Mapping[str, str | None]) -> list[str]:
    """``given``, followed by missing ``defaults`` (None: a flag without a value)."""
    options = [*given]
    for name, value in defaults.items():
        if not has_option(given, name):
            options += [name] if value is None else [name, value]
    return options


def per_worker(args: RoleArgs, count: int, what: str) -> list[list[str]]:
    """One argument list per worker, from one list or a list of lists. Raises PdRadixError on a wrong count."""
    if not args or all(isinstance(arg, str) for arg in args):
        return [[str(arg) for arg in args] for _ in range(count)]
    if len(args) != count or any(isinstance(arg, str) for arg in args):
        raise PdRadixError(f"{what}: give one list of options for all, or {count} lists, one per worker")
    return [list(arg) for arg in args]


def per_worker_env(env: RoleEnv, count: int, what: str) -> list[dict[str, str]]:
    if isinstance(env, Mapping):
        return [dict(env) for _ in range(count)]
    if env and len(env) != count:
        raise PdRadixError(f"{what}: give one mapping for all, or {count}, one per worker")
    return [dict(entry) for entry in env] or [{} for _ in range(count)]


def refuse_owned(args: Sequence[str], owned: Sequence[str] = OWNED_OPTIONS, where: str = "engine options") -> None:
    for option in owned:
        if has_option(args, option):
            raise PdRadixError(f"{option} is set by the cluster itself: remove it from the {where}")


def connectable(host: str) -> str:
    """An address by which a server that listens on ``host`` is reachable from here."""
    host = host.strip("[]")
    return HOST if host in ("0.0.0.0", "") else "[::1]" if host == "::" else f"[{host}]" if ":" in host else host


def bracketed(host: str) -> str:
    """A listen address in the routers' format: IPv6 in brackets."""
    host = host.strip("[]")
    return f"[{host}]" if ":" in host else host
