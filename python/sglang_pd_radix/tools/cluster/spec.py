"""The description of a deployment, as plain data."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sglang_pd_radix.errors import PdRadixError

from .gateway import Gateway, named_gateway
from .options import HOST, RoleArgs, RoleEnv, api_key, option_value, per_worker, per_worker_env, refuse_owned


class Host(Protocol):
    """Another host for workers; the checkout's storms use two."""

    @property
    def address(self) -> str: ...

    def command(self, *argv: str) -> list[str]: ...

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]: ...

    def unproxied(self, environ: Mapping[str, str]) -> dict[str, str]: ...


@dataclass
class Spec:
    """``prefill`` prefill workers, ``decode`` decode workers and the router, or one ordinary engine (``aggregated``).

    Arguments are lists as for a command line. ``prefill_args``, ``decode_args`` and the two ``*_env`` are for all
    workers of the role, or one entry per worker; here they become one list (mapping) per worker. ``aggregated_args``
    are for the aggregated engine alone. Of a repeated option the later one wins: ours, ``common_args``, then the
    role's. ``env`` is added to the environment of every process.

    ``gateway`` is the program that routes (default: the first of `gateway.GATEWAYS` that is installed, which is smg, or
    sglang-router where it is not). ``routers`` starts one router per entry in the place of the single one: name to
    (indices of the decode workers that it routes to, further options for it). All route to every prefill worker. With
    no policy among its options the gateway's own defaults here apply (`Gateway.several_decode`).

    ``ordinary`` starts so many ordinary engines beside the PD workers, with ``ordinary_args``, to be measured against
    them. ``ordinary_routers``: name to options, of routers to all of these.

    ``hosts`` has the host on which the workers of a role run; by default all run on this one. The
    router always does. ``pegaflow`` has the options of a PegaFlow server to start too, None for none.

    ``executable`` is the interpreter of the servers, ``worker_executable`` that of the engines if it is another one, of
    another environment; ``commands`` replaces the arguments with which it runs a role
    ("prefill", "decode", "router", "engine"), which tests use. Raises PdRadixError for what cannot be.
    """

    model_path: str | os.PathLike[str]
    prefill: int = 1
    decode: int = 1
    common_args: Sequence[str] = ()
    prefill_args: RoleArgs = ()
    decode_args: RoleArgs = ()
    router_args: Sequence[str] = ()
    aggregated_args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    prefill_env: RoleEnv = ()
    decode_env: RoleEnv = ()
    ordinary: int = 0
    ordinary_args: RoleArgs = ()
    ordinary_routers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    backend: str = "nixl"
    host: str = HOST
    port: int | None = None
    aggregated: bool = False
    executable: str = sys.executable
    worker_executable: str = ""
    commands: Mapping[str, Sequence[str]] = field(default_factory=dict)
    gateway: Gateway = field(default_factory=lambda: named_gateway(None))
    routers: Mapping[str, tuple[Sequence[int], Sequence[str]]] = field(default_factory=dict)
    hosts: Mapping[str, Host] = field(default_factory=dict)
    pegaflow: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.prefill < 1 or self.decode < 1:
            raise PdRadixError(
                f"{self.prefill} prefill and {self.decode} decode workers: at least one of each is needed"
            )
        self.args_of = {
            "prefill": per_worker(self.prefill_args, self.prefill, "prefill_args"),
            "decode": per_worker(self.decode_args, self.decode, "decode_args"),
            "engine": [list(self.aggregated_args)]
            if self.aggregated
            else per_worker(self.ordinary_args, self.ordinary, "ordinary_args"),
        }
        self.env_of: dict[str, list[dict[str, str]]] = {
            "prefill": per_worker_env(self.prefill_env, self.prefill, "prefill_env"),
            "decode": per_worker_env(self.decode_env, self.decode, "decode_env"),
            "engine": [{} for _ in self.args_of["engine"]],
        }
        of_roles = (args for role in self.args_of.values() for args in role)
        for args in (self.common_args, self.aggregated_args, *of_roles):
            refuse_owned(args)
        routers = (*(more for _, more in self.routers.values()), *self.ordinary_routers.values())
        for args in (self.router_args, *routers):
            refuse_owned(args, ("--host", "--port", "--prefill", "--decode"), "options of the router")
        refuse_owned(self.pegaflow or (), ("--addr", "--http-addr"), "options of the PegaFlow server")
        for name, (indices, _) in self.routers.items():
            if not indices or not all(0 <= index < self.decode for index in indices):
                raise PdRadixError(
                    f"routers: {name} routes to {list(indices)}, and decode workers are 0 to {self.decode - 1}"
                )

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the engines that run, in the order in which they are laid out."""
        if self.aggregated:
            return ("engine",)
        return ("prefill", "decode", "engine") if self.ordinary else ("prefill", "decode")

    def engines(self, shared: Sequence[str] = ()) -> list[tuple[str, int, list[str]]]:
        """Role, number within the role and all options given of every engine.

        shared: options of all engines that nobody has given; they yield to the role's.
        """
        return [
            (role, index, [*self.common_args, *shared, *args])
            for role in self.roles
            for index, args in enumerate(self.args_of[role])
        ]

    @property
    def api_key(self) -> str | None:
        """The key that all engines ask for; see `options.api_key`."""
        return api_key(args for _, _, args in self.engines())

    @property
    def admin_api_key(self) -> str | None:
        """The key that all engines ask their admin for; None if they ask for none, or not for the same."""
        keys = {option_value(args, "--admin-api-key") for _, _, args in self.engines()}
        return keys.pop() if len(keys) == 1 else None

    @property
    def named_routers(self) -> dict[str, tuple[Sequence[int], Sequence[str]]]:
        """Process name of every router to the decode workers behind it and its further options."""
        if self.aggregated:
            return {}
        if not self.routers:
            return {"router": (range(self.decode), ())}
        return {f"router-{name}": behind for name, behind in self.routers.items()}

    @property
    def named_ordinary_routers(self) -> dict[str, Sequence[str]]:
        """Process name of every router to the ordinary engines to its further options."""
        return {f"router-{name}": more for name, more in self.ordinary_routers.items()}
