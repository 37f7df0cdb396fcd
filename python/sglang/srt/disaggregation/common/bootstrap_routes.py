"""What a patched prefill's bootstrap server answers beside the engine's questions.

Upstream: a release with the flag (0.5.11; sgl-project/sglang#19746, merged) on both workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import requests
from aiohttp import web
from sglang.srt.disaggregation.decode_radix.prefix import DECODE_PREFIX_VERSION
from sglang.srt.environ import envs

logger = logging.getLogger(__name__)

# What a rank adds to its registration: the version of the decode prefix that it understands, its own time-outs, and
# what extras add.
RANK_VERSION = "decode_prefix_version"
_added: dict[str, Callable[[], Any]] = {}
# Where ranks differ, which each node's environment may have them do: which decode has to go by to be right for all.
_WORST = {"waiting_timeout": max, "bootstrap_timeout": min}


def add_to_registration(name: str, own: Callable[[], Any]) -> None:
    """Have each rank register with what ``own`` says, on the scheduler's thread; None to leave that out."""
    _added[name] = own


def _own_timeouts() -> dict[str, int]:
    """Of this process, in seconds."""
    return {
        "waiting_timeout": envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get(),
        "bootstrap_timeout": envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get(),
    }


class BootstrapRequests:
    """Stands for the module ``requests`` where bootstrap servers are asked; a rank that registers says its version."""

    def __getattr__(self, name: str) -> Any:
        return getattr(requests, name)

    def put(self, url: str, **kwargs: Any) -> requests.Response:
        """As ``requests.put``, with which the engine registers ranks and does nothing else."""
        kwargs["json"] = {**kwargs["json"], RANK_VERSION: DECODE_PREFIX_VERSION, **_own_timeouts()}
        kwargs["json"] |= {name: said for name, own in _added.items() if (said := own()) is not None}
        return requests.put(url, **kwargs)


class RegisteredRanks:
    """The ranks of a prefill, by name, that have registered with the front of this process, and what they have said.

    One may be the bare engine, which answers a request for the end of a prompt with its start, and does not meet the
    patched ones where these tell each other why a request has failed.
    """

    def __init__(self) -> None:
        self._said: dict[str, Mapping[str, Any]] = {}
        # Why one may not register that has not come again since, by name.
        self._refused: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._said)

    def refusal(self, rank: Mapping[str, Any]) -> str | None:
        """Why a rank may not register, which is logged; None if it may. rank: its registration.

        All must be alike, whichever comes first: bare ones alone serve as ever.
        """
        name = _name(rank)
        others = {said.get(RANK_VERSION) for other, said in self._said.items() if other != name}
        if not others or rank.get(RANK_VERSION) in others:
            return None
        self._refused[name] = (
            f"Rank {name} at {rank['rank_ip']}:{rank['rank_port']} is not taken into this prefill, which will serve "
            f"nothing: it says version {_version(rank.get(RANK_VERSION))} of the decode prefix, and those that came "
            f"before it {', '.join(sorted(map(_version, others)))}. Start all ranks with the same sglang-pd-radix, or "
            "all with SGLANG_PD_RADIX=0."
        )
        logger.error("%s", self._refused[name])
        return self._refused[name]

    def note(self, rank: Mapping[str, Any]) -> None:
        """Note one that may register."""
        name = _name(rank)
        self._said[name] = rank
        self._refused.pop(name, None)
        if rank.get(RANK_VERSION) != DECODE_PREFIX_VERSION:
            logger.warning(
                "Rank %s at %s:%s takes no decode prefix, so that this prefill sends whole prompts: it runs without "
                "sglang-pd-radix, or with another version of it. Start all ranks with the same.",
                name,
                rank["rank_ip"],
                rank["rank_port"],
            )

    @property
    def complaint(self) -> str | None:
        """Why this prefill serves nothing, if one of them may not register."""
        return next(iter(self._refused.values()), None)

    @property
    def take_prefix(self) -> bool:
        """Whether all of them understand the decode prefix of this process."""
        return all(said.get(RANK_VERSION) == DECODE_PREFIX_VERSION for said in self._said.values())

    def timeouts(self) -> dict[str, int]:
        """In seconds, by which decode goes: of ranks that differ, the longest of writes and the shortest of silence.

        Each rank has them from the environment of its node. Those of this process where none says them.
        """
        found = {}
        for name, own in _own_timeouts().items():
            said = self.said(name)
            found[name] = _WORST[name]([one for one in said if type(one) is int and one > 0] or [own])
        return found

    def said(self, name: str) -> list[Any]:
        """What each of them has said under ``name``."""
        return [rank.get(name) for rank in self._said.values()]


def _name(rank: Mapping[str, Any]) -> str:
    dp_rank = rank["attn_dp_rank"] if rank["system_dp_size"] == 1 else rank["system_dp_rank"]
    return f"DP{dp_rank} CP{rank['attn_cp_rank']} TP{rank['attn_tp_rank']} PP{rank['pp_rank']}"


def _version(said: Any) -> str:
    return "none" if said is None else str(said)


async def capabilities(
    version: int,
    cp_size: int | None,
    said_by_ranks: Mapping[str, Any],
) -> dict[str, Any]:
    """What this prefill can do, as it tells decode.

    version: of the decode prefix that its transfer backend and all its ranks understand. cp_size: of attention, None
    before they have all registered. said_by_ranks: with `RegisteredRanks.timeouts`. Raises HTTPServiceUnavailable
    before that.
    """
    if cp_size is None:
        # Decode would take what it is told for good, and one that is to come may be the bare engine.
        raise web.HTTPServiceUnavailable(text="not all ranks of this prefill have registered yet")
    # Of context-parallel ranks, which all have all KV, the first sends. Where all do, the engine shares a chunk out
    # among them by the numbers of its pages, as if these were one run, and what is not in that run nobody sends.
    shared_out = cp_size != 1 and envs.SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER.get()
    answer: dict[str, Any] = {"version": 0 if shared_out else version, "state": 1, "prompts": 2}
    # Decode keeps pages for as long as this worker may write to them, and speaks of what waits before that is over.
    answer |= said_by_ranks
    if cp_size != 1:
        answer["all_cp_ranks"] = int(shared_out)
    return answer
