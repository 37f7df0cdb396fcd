"""The routes that a patched prefill's bootstrap server adds to the engine's.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged) on both workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import requests
from sglang.srt.disaggregation.decode_radix.prefix import DECODE_PREFIX_VERSION
from sglang.srt.environ import envs

logger = logging.getLogger(__name__)

# In each rank's registration, beside the timeouts.
RANK_VERSION = "decode_prefix_version"
#: Further values, of extras: called on the scheduler's thread; None is left out.
ADDED_BY_RANKS: dict[str, Callable[[], Any]] = {}


def _own_timeouts() -> dict[str, int]:
    """The timeouts of this process, in seconds."""
    return {
        "waiting_timeout": envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get(),
        "bootstrap_timeout": envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get(),
    }


class BootstrapRequests:
    """The module ``requests`` for the engine's code: a rank that registers adds its version."""

    def __getattr__(self, name: str) -> Any:
        return getattr(requests, name)

    def put(self, url: str, **kwargs: Any) -> requests.Response:
        """Wraps ``requests.put``, which the engine uses only to register ranks."""
        kwargs["json"] = {**kwargs["json"], RANK_VERSION: DECODE_PREFIX_VERSION, **_own_timeouts()}
        kwargs["json"] |= {k: v for k, own in ADDED_BY_RANKS.items() if (v := own()) is not None}
        return requests.put(url, **kwargs)


class RegisteredRanks:
    """The ranks that registered with this bootstrap server, and their registrations, by name.

    Ranks must all be patched or all unpatched. An unpatched rank answers a request for the end of a
    prompt with its start, and takes no part in the patched ranks' exchange of failures.
    """

    def __init__(self) -> None:
        self._ranks: dict[str, Mapping[str, Any]] = {}
        # By name, why a rank was refused; removed when the rank registers successfully.
        self._refused: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def refusal(self, rank: Mapping[str, Any]) -> str | None:
        """Why this rank must not register, logged; None if it has the version of the first one."""
        name = _name(rank)
        version = rank.get(RANK_VERSION, "none")
        others = {r.get(RANK_VERSION, "none") for other, r in self._ranks.items() if other != name}
        if not others or version in others:
            return None
        self._refused[name] = (
            f"Rank {name} at {rank['rank_ip']}:{rank['rank_port']} is not taken into this prefill, "
            f"which will serve nothing: it says version {version} of the "
            "decode prefix, and those that came before it "
            f"{', '.join(sorted(map(str, others)))}. Start all ranks with the same "
            "sglang-pd-radix, or all with SGLANG_PD_RADIX=0."
        )
        logger.error("%s", self._refused[name])
        return self._refused[name]

    def note(self, rank: Mapping[str, Any]) -> None:
        """Record the registration of an accepted rank."""
        name = _name(rank)
        self._ranks[name] = rank
        self._refused.pop(name, None)
        if rank.get(RANK_VERSION) != DECODE_PREFIX_VERSION:
            logger.warning(
                "Rank %s at %s:%s takes no decode prefix, so that this prefill sends whole "
                "prompts: it runs without sglang-pd-radix, or with another version of it. Start "
                "all ranks with the same.",
                name,
                rank["rank_ip"],
                rank["rank_port"],
            )

    @property
    def complaint(self) -> str | None:
        """Why this prefill serves nothing; None if no rank was refused."""
        return next(iter(self._refused.values()), None)

    @property
    def take_prefix(self) -> bool:
        """Whether all ranks understand the decode prefix version of this process."""
        return all(reg.get(RANK_VERSION) == DECODE_PREFIX_VERSION for reg in self._ranks.values())

    def timeouts(self) -> dict[str, int]:
        """The longest waiting and shortest bootstrap timeout in seconds; this process's if none."""
        own, worst = _own_timeouts(), {"waiting_timeout": max, "bootstrap_timeout": min}
        said = {name: [v for v in self.said(name) if type(v) is int and v > 0] for name in own}
        return {name: worst[name](said[name] or [own[name]]) for name in own}

    def said(self, name: str) -> list[Any]:
        """Each rank's value of ``name``."""
        return [rank.get(name) for rank in self._ranks.values()]


def _name(rank: Mapping[str, Any]) -> str:
    dp_rank = rank["attn_dp_rank"] if rank["system_dp_size"] == 1 else rank["system_dp_rank"]
    return f"DP{dp_rank} CP{rank['attn_cp_rank']} TP{rank['attn_tp_rank']} PP{rank['pp_rank']}"


def capabilities(version: int, cp_size: int, said_by_ranks: Mapping[str, Any]) -> dict[str, Any]:
    """What this prefill reports to decode about its features.

    version: the decode prefix version that the transfer backend and all ranks understand. cp_size:
    of attention. said_by_ranks: includes `RegisteredRanks.timeouts`.
    """
    # Every context-parallel rank holds all KV; normally the first one sends it. If all send, the
    # engine splits a chunk by page number as if its pages were consecutive, and some are never
    # sent.
    all_send = cp_size != 1 and envs.SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER.get()
    # Decode keeps pages while this worker may write, and contacts it before its timeout.
    answer = {"version": 0 if all_send else version, "state": 1, "prompts": 2, **said_by_ranks}
    return answer if cp_size == 1 else {**answer, "all_cp_ranks": int(all_send)}
