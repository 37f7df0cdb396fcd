"""The programs that route requests to the workers, and their command lines."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_pd_radix.errors import PdRadixError

from .options import HOST, has_option


@dataclass(frozen=True)
class Gateway:
    """One such program. ``distribution``: its name on PyPI. ``module``: arguments with which an interpreter runs it.

    ``several_decode``: options that choose among several decode workers where none are given.
    """

    distribution: str
    module: tuple[str, ...]
    package: str
    several_decode: tuple[str, ...]

    def __str__(self) -> str:
        return self.distribution

    @property
    def installed(self) -> bool:
        """Whether this interpreter can run it."""
        return importlib.util.find_spec(self.package) is not None


# Where it knows which worker holds what, a client need not say where its conversation is.
SMG = Gateway("smg", ("-m", "smg", "launch"), "smg", ("--decode-policy", "cache_aware"))
# Its cache_aware never learns of a PD deployment's workers: the same worker for all requests of one X-SMG-Routing-Key.
SGLANG_ROUTER = Gateway(
    "sglang-router",
    ("-m", "sglang_router.launch_router"),
    "sglang_router",
    ("--decode-policy", "manual", "--assignment-mode", "min_load"),
)
GATEWAYS = {gateway.distribution: gateway for gateway in (SMG, SGLANG_ROUTER)}


# The whole test suite goes through this one.
DEFAULT = SGLANG_ROUTER


def named_gateway(name: str | None) -> Gateway:
    """The gateway of this distribution, or the one that is used by default. Raises PdRadixError if it is missing."""
    if name is None:
        return DEFAULT
    gateway = GATEWAYS[name]
    if not gateway.installed:
        raise PdRadixError(f"--router {name}: it is not installed; pip install {name}")
    return gateway


def options(
    gateway: Gateway,
    prefill: Sequence[tuple[str, int]],
    decode: Sequence[str],
    policy: str | None,
    given: Sequence[str],
    metrics_port: int,
) -> list[str]:
    """Options of a router, but for its own address.

    prefill: URL and bootstrap port of each worker. decode: URLs. given: the user's options, which win.
    """
    options = ["--pd-disaggregation"]
    for url, bootstrap_port in prefill:
        options += ["--prefill", url, str(bootstrap_port)]
    for url in decode:
        options += ["--decode", url]
    # By default it writes four lines per request, and every router of a machine wants the same metrics port.
    for option, value in (
        ("--log-level", "warn"),
        ("--worker-startup-check-interval", "1"),
        ("--prometheus-port", str(metrics_port)),
        ("--prometheus-host", HOST),
    ):
        if not has_option(given, option):
            options += [option, value]
    if policy:
        options += ["--policy", policy]
    elif len(decode) > 1 and not has_option(given, "--policy", "--decode-policy"):
        options += gateway.several_decode
    return [*options, *given]
