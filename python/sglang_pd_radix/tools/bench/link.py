"""A wire that costs something: at what rates prefill and decode are joined, and what a prompt takes there.

A rate is given as tc writes it, or as ``auto:N``: the one at which the KV of one of the workload's prompts takes N
times as long to cross as prefill takes to compute it. Both are measured on the pair first, with no limit on the wire.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from typing import Any

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import netns
from sglang_pd_radix.tools.cluster import http

from .deploy import Deployment
from .stats import percentile
from .workload import Tokens, Workload

# What is told of a run over a link: what crossed it, and all that it may be made of.
FIGURES = ("link_bytes", "state_bytes", "sent_runs", "requests")
# Beside KV a request takes 3 to 4 KiB towards decode: metadata, replies, acknowledgements
# (docs/evidence.md#slow-links-2026-11-21).
REQUEST_BYTES = 16 * 1024
# Prompts that are prefilled, one at a time: the first pay for memory and kernels, the others are measured.
WARM_UP_PROMPTS, MEASURED_PROMPTS = 4, 15
# The engine's name for "there is no decode worker": prefill computes such a request and sends it nowhere.
_NO_DECODE = "2.2.2.2"


@dataclass(frozen=True)
class Rate:
    """What was asked for: ``bits_per_s``, or so many ``times_prefill``."""

    text: str
    bits_per_s: float | None = None
    times_prefill: float | None = None


def parse_rates(text: str) -> list[Rate]:
    """The rates of ``--link``, comma-separated. Raises PdRadixError."""
    return [_parse(part.strip()) for part in text.split(",")]


def _parse(text: str) -> Rate:
    if not text.startswith("auto"):
        try:
            return Rate(text, netns.bits_per_s(text))
        except PdRadixError as error:
            raise PdRadixError(f"--link {error}; or auto:N, N times a prompt's prefill") from None
    try:
        times = float(text.removeprefix("auto:"))
    except ValueError:
        times = 0.0
    if not 0.01 <= times <= 100:  # also false for what is not a number
        raise PdRadixError(f"--link {text}: write auto:N, where N, from 0.01 to 100, is how many times its prefill")
    return Rate(text, times_prefill=times)


@dataclass(frozen=True)
class Prompt:
    """A prompt of ``tokens`` tokens: the seconds that prefill takes for all of it, and the bytes of its KV."""

    tokens: int
    prefill_s: float
    kv_bytes: float

    @property
    def _bits(self) -> float:
        """On the wire, with the headers of full frames."""
        return 8 * self.kv_bytes * netns.FRAME_BYTES / netns.FRAME_PAYLOAD_BYTES

    def rate(self, asked: Rate) -> float:
        """Bits per second of the wire. Raises PdRadixError where that is no rate that it can have."""
        if asked.bits_per_s:
            return asked.bits_per_s
        assert asked.times_prefill
        rate = self._bits / (asked.times_prefill * self.prefill_s)
        if not netns.LEAST_RATE <= rate <= netns.MOST_RATE:
            raise PdRadixError(
                f"--link {asked.text} would be {netns.rate_text(rate)}, and a link has "
                f"{netns.rate_text(netns.LEAST_RATE)} to {netns.rate_text(netns.MOST_RATE)}: prefill takes "
                f"{1e3 * self.prefill_s:.0f} ms for a prompt, whose KV has {self.kv_bytes:.0f} bytes"
            )
        return rate

    def times_prefill(self, rate: float) -> float:
        """How many times as long as its prefill its KV takes at ``rate`` bits per second."""
        return self._bits / rate / self.prefill_s


def mean_prompt(workload: Workload) -> int:
    """Tokens of the workload's prompts in the mean; of a chat, with their histories."""
    lengths: list[int] = []
    history: dict[int, int] = {}
    for requests in workload.rounds:
        for request in requests:
            length = history.get(request.group, 0) + len(request.ids) if workload.chat else len(request.ids)
            history[request.group] = length + request.answer
            lengths.append(length)
    return round(sum(lengths) / len(lengths))


def measure_prompt(deployment: Deployment, tokens: Tokens, length: int) -> Prompt:
    """What prefill takes for a new prompt of ``length`` tokens when it has nothing else to do, and what it sends of it.

    Seconds are those of a whole answer of one token, from the worker itself. Raises PdRadixError if it gives none.
    """
    off = next(variant for variant in deployment.variants if not variant.radix)
    deployment.use(off)
    rooms = random.Random(os.urandom(8))

    def ask(url: str, number: int, **more: Any) -> float:
        body = {
            "input_ids": tokens.take(f"link/{length}/{number}", length),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
            **more,
        }
        started = time.perf_counter()
        status, content = http(url + "/generate", body, timeout=120)
        if status != 200:
            deployment.cluster.check()
            said = content.decode(errors="replace")[:300]
            raise PdRadixError(f"a prompt to find the link's rate with got HTTP {status} from {url}: {said}")
        return time.perf_counter() - started

    prefill = deployment.prefill_urls[0]
    times = [
        ask(prefill, number, bootstrap_host=_NO_DECODE, bootstrap_room=rooms.getrandbits(62))
        for number in range(WARM_UP_PROMPTS + MEASURED_PROMPTS)
    ][WARM_UP_PROMPTS:]
    before = deployment.counters(off)["sent_bytes"]
    ask(deployment.url(off), -1)
    return Prompt(length, percentile(times, 50), deployment.counters(off)["sent_bytes"] - before)


def problems(figures: dict[str, float]) -> list[str]:
    """What is wrong with a run whose KV should all have crossed the link, and nothing of its size beside that.

    figures: `FIGURES` of the run and its ``sent_bytes``; without a link it has none of them.
    """
    if "link_bytes" not in figures:
        return []
    sent, crossed = figures["sent_bytes"] + figures.get("state_bytes", 0), figures["link_bytes"]
    requests = figures.get("requests", 0)
    if not sent:
        return [f"no KV was counted as sent for {requests:.0f} requests: there is nothing to hold the link against"]
    if crossed < sent:
        return [
            f"{sent / 2**20:.1f} MiB of KV was sent and {crossed / 2**20:.1f} MiB crossed the link: "
            "the transfer backend has found another way"
        ]
    most = most_bytes(sent, requests)
    if crossed > most:
        return [
            f"{crossed / 2**20:.1f} MiB crossed the link and {sent / 2**20:.1f} MiB of KV was counted as sent: with "
            f"frames' headers, and {REQUEST_BYTES // 1024} KiB for the handshake of each of {requests:.0f} requests, "
            f"that would be {most / 2**20:.1f} MiB at most. Something is sent that is not counted, or is sent again"
        ]
    return []


def most_bytes(sent: float, requests: float) -> float:
    """Bytes on the link, headers included, for ``sent`` bytes of KV in the transfers of so many ``requests``."""
    return sent * netns.FRAME_BYTES / netns.FRAME_PAYLOAD_BYTES + REQUEST_BYTES * requests
