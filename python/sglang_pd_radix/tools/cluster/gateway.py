"""Gateways that route requests to workers, and their command lines."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_pd_radix.errors import PdRadixError

from .options import HOST, has_option


@dataclass(frozen=True)
class Gateway:
    """A gateway. ``distribution``: its name on PyPI. ``module``: interpreter arguments that run it.

    ``several_decode``: default options for a choice among several decode workers. ``settings``: options for any
    deployment, each with user options that replace it. ``asks_nobody``: options that turn off its queries to workers.
    """

    distribution: str
    module: tuple[str, ...]
    package: str
    several_decode: tuple[str, ...]
    asks_nobody: tuple[str, ...]
    settings: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = ()

    def __str__(self) -> str:
        return self.distribution

    @property
    def installed(self) -> bool:
        """Whether this interpreter can run it."""
        return importlib.util.find_spec(self.package) is not None

    @property
    def version(self) -> str:
        """Name and release, for reports."""
        return f"{self} {importlib.metadata.version(self.distribution)}"


_OVERLOAD = ("--worker-overload-protection", "--worker-overload-waiting-requests", "--worker-overload-token-usage")
# It knows each worker's prefixes, so clients need no routing key.
SMG = Gateway(
    "smg",
    ("-m", "smg", "launch"),
    "smg",
    ("--decode-policy", "cache_aware"),
    ("--disable-health-check",),
    (
        # It would skip workers with 8 or more waiting requests. On decode, requests in transfer count as waiting: a
        # busy worker always has as many, and its prefixes would be sent to others.
        (("--disable-worker-overload-protection",), _OVERLOAD),
        # A decode worker that refuses connections also counts against the prefill worker of each attempt: after two
        # requests with retries no prefill would be left.
        (("--disable-circuit-breaker",), ("--cb-failure-threshold", "--cb-timeout-duration-secs")),
        # Any prefix match decides: below the threshold workers are chosen by throughput, which is highest on the
        # busiest one. No worker may exceed 1.1 times the mean load plus 4 requests.
        (("--cache-threshold", "0.0"), ("--cache-match-threshold",)),
        (("--balance-rel-threshold", "1.1"), ("--spill-rel-threshold",)),
        (("--balance-abs-threshold", "4"), ("--spill-abs-threshold",)),
    ),
)
# Its cache_aware never learns of PD workers: requests with the same X-SMG-Routing-Key go to one worker.
SGLANG_ROUTER = Gateway(
    "sglang-router",
    ("-m", "sglang_router.launch_router"),
    "sglang_router",
    ("--decode-policy", "manual", "--assignment-mode", "min_load"),
    ("--disable-health-check",),
)
# The first installed one is the default.
GATEWAYS = {gateway.distribution: gateway for gateway in (SMG, SGLANG_ROUTER)}


def add_router_option(parser: argparse._ActionsContainer) -> None:
    """Declare ``--router``, see `named_gateway`."""
    parser.add_argument(
        "--router",
        choices=tuple(GATEWAYS),
        help="the gateway that routes requests (default: smg, or sglang-router where smg is not installed)",
    )


def named_gateway(name: str | None) -> Gateway:
    """The gateway of this distribution (None: the first installed one). Raises PdRadixError if it is missing."""
    if name is None:
        found = next((gateway for gateway in GATEWAYS.values() if gateway.installed), None)
        if found is None:
            raise PdRadixError("no gateway is installed: pip install smg")
        return found
    gateway = GATEWAYS[name]
    if not gateway.installed:
        raise PdRadixError(f"--router {name}: it is not installed; pip install {name}")
    return gateway


def check_options(gateway: Gateway, given: Sequence[str]) -> None:
    """Raise PdRadixError for options ``given`` that the gateway does not take: it starts last."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    importlib.import_module(f"{gateway.package}.router_args").RouterArgs.add_cli_args(parser)
    try:
        _, unknown = parser.parse_known_args([*given])
    except argparse.ArgumentError as error:
        raise PdRadixError(f"--router-args: {error}") from error
    if unknown:
        command = f"python {' '.join(gateway.module)} --help"
        raise PdRadixError(f"--router-args: {gateway} has no option {unknown[0]}: see {command}")


def options(
    gateway: Gateway,
    prefill: Sequence[tuple[str, int]],
    decode: Sequence[str],
    given: Sequence[str],
    metrics_port: int,
    ordinary: Sequence[str] = (),
) -> list[str]:
    """Options of a router, except its own address.

    prefill: URL and bootstrap port of each worker. decode: URLs. given: the user's options, which win. ordinary: URLs
    of ordinary engines, if it routes to these.
    """
    options = ["--worker-urls", *ordinary] if ordinary else ["--pd-disaggregation"]
    for url, bootstrap_port in prefill:
        options += ["--prefill", url, str(bootstrap_port)]
    for url in decode:
        options += ["--decode", url]
    # By default it logs four lines per request, and all routers use one metrics port.
    for option, value in (
        ("--log-level", "warn"),
        ("--worker-startup-check-interval", "1"),
        ("--prometheus-port", str(metrics_port)),
        ("--prometheus-host", HOST),
    ):
        if not has_option(given, option):
            options += [option, value]
    for setting, instead in gateway.settings:
        if not has_option(given, setting[0], *instead):
            options += setting
    if len(decode) > 1 and not has_option(given, "--policy", "--decode-policy"):
        options += gateway.several_decode
    return [*options, *given]
