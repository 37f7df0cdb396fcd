"""A short chat beside clients with long prompts, as a part of ``pd-radix demo``: what a user feels of the flag."""

from __future__ import annotations

import statistics

from .bench.steady import SteadyClients
from .bench.workload import Steady, Tokens
from .chat_load import Chats, Workload
from .cluster import Cluster

#: Tokens of each long prompt.
LENGTH = 3000
#: Of a client that holds no other conversation of the demo.
_FIRST_CLIENT = 1000
#: Any model has these token ids.
_IDS = range(300, 1000)


def later_ttft_s(cluster: Cluster, clients: int, seed: int) -> float:
    """Median TTFT in seconds of the turns after the first, of two chats beside ``clients`` with long prompts.

    Raises ChatError, or PdRadixError when a server has ended or a long prompt has failed.
    """
    steady = Steady(clients, LENGTH, Tokens(_IDS, seed).take)
    workload = Workload(clients=2, turns=3, document=300, question=40, answer=16, seed=seed)
    chats = Chats(cluster.router_url, cluster.model_path, workload, _FIRST_CLIENT)
    with SteadyClients(steady, cluster.router_url, cluster.check) as others:
        turns = [chats.turn(others.check) for _ in range(workload.turns)]
        others.stop()
    return statistics.median(reply.ttft_s for turn in turns[1:] for reply in turn)


def line(clients: int, off_s: float, on_s: float, local_s: float | None) -> str:
    """What the report says of it."""
    computed = "" if local_s is None else f", {local_s:.2f} s with prompts computed on decode"
    return (
        f"Beside {clients} clients with prompts of {LENGTH} tokens, first token of turns 2 and 3, median: "
        f"{off_s:.2f} s off, {on_s:.2f} s on{computed}"
    )
