"""The chat of `chat_load.py` on one deployment: what the workers counted in each turn, and their pools afterwards."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from sglang_pd_radix.errors import PdRadixError

from . import chat_beside, chat_tokens
from .chat_least import Ids, Sizes
from .chat_load import ChatError, Chats, Reply, Workload
from .cluster import Cluster
from .forced import score
from .progress import Display
from .rounding import Answer
from .workers import LOCAL_COUNTERS, by_rank, empty_caches, pools_of, problems_of, server_info, summed_counters

# What a start takes, with a warm-up and the end, in turns.
START = 12
# A tree for speculation has one token less than the KV that it holds, and the last step's drafts may not be in it.
LOOSE_WITHOUT_DRAFTS, DRAFT_TOKENS = 1, 4


@dataclass
class Turn:
    """One turn of all clients. Tokens and bytes are sums over the clients, as the workers counted them."""

    prompt_tokens: int
    reused_tokens: int
    transferred_tokens: int
    sent_bytes: int
    saved_bytes: int
    replies: list[Reply]
    computed_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Median time to the first token of an answer, seconds."""
        return statistics.median(reply.ttft_s for reply in self.replies)


@dataclass
class Run:
    """The whole chat on one deployment. ``overlapped``: whether decode overlaps its steps. ``problems``: what its KV
    pools hold that they should not. ``loose``: tokens at the end of what decode has that it may be unable to reuse.

    ids: of every prompt and answer, by turn, once somebody asked for them; scores: the log-probabilities of the same
    answers from a pass of prefill, None for one whose ids are unknown. unknown: why they are not known.
    beside_ttft_s: as `chat_beside.later_ttft_s`, None where nobody asked for long prompts.
    """

    start_s: float
    page_size: int
    dtype: str
    device: str
    overlapped: bool
    turns: list[Turn] = field(default_factory=list)
    pools: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    loose: int = 0
    ids: list[list[Ids]] | None = None
    scores: list[list[Answer | None]] | None = None
    unknown: str = ""
    beside_ttft_s: float | None = None

    def total(self, name: str) -> int:
        return sum(getattr(turn, name) for turn in self.turns)

    @property
    def exact(self) -> bool:
        """Whether two right answers to one prompt are the same: in float32 no batch rounds so that a token changes."""
        return self.dtype.endswith("float32")

    @property
    def sizes(self) -> Sizes:
        """(prompt tokens, answer tokens), by turn and client."""
        return [[(reply.prompt_tokens, reply.answer_tokens) for reply in turn.replies] for turn in self.turns]

    @property
    def later_ttfts_s(self) -> list[float]:
        """TTFT of all answers from the second turn on, where there is something to reuse; seconds."""
        later = self.turns[1:] or self.turns
        return [reply.ttft_s for turn in later for reply in turn.replies]

    @property
    def later_ttft_s(self) -> float:
        """Their median, seconds."""
        return statistics.median(self.later_ttfts_s)

    def find_ids(self, workload: Workload, model_path: str) -> None:
        """Fill ``ids``, or ``unknown``."""
        if self.ids is None and not self.unknown:
            try:
                self.ids = chat_tokens.ids_of(
                    workload, [turn.replies for turn in self.turns], chat_tokens.load(model_path)
                )
            except PdRadixError as error:
                self.unknown = str(error)


def hold(cluster: Cluster, name: str, workload: Workload, show: Display, beside: int = 0) -> Run:
    """Start ``cluster``, hold the chat, look at the pools and stop it. Raises PdRadixError.

    beside: how many clients with long prompts there are beside another short chat after it.
    """
    started = time.monotonic()
    show.now(f"flag {name}: starting", START)
    with cluster:
        run = _described(server_info(cluster.decode_urls[0]), time.monotonic() - started)
        show.done(f"flag {name}: serving after {run.start_s:.0f} s")
        try:
            # The first long prompt of a process pays for memory and kernels that are set up once.
            show.now(f"flag {name}: warming up")
            warm_up = Workload(1, 1, workload.document, 1, workload.answer, workload.seed)
            Chats(cluster.router_url, cluster.model_path, warm_up, first_client=-1).turn(cluster.check)
            empty_caches(cluster, (*cluster.prefill_urls, *cluster.decode_urls))
            _chat(cluster, name, workload, show, run)
            if beside:
                show.now(f"flag {name}: a chat beside {count(beside, 'client')} with long prompts")
                run.beside_ttft_s = chat_beside.later_ttft_s(cluster, beside, workload.seed)
                show.done(f"flag {name}: beside {count(beside, 'client')} with long prompts: {run.beside_ttft_s:.2f} s")
        except ChatError as error:
            cluster.check()  # a worker that died says more than the request it took along
            raise PdRadixError(f"flag {name}: {error}. Logs are in {cluster.log_dir}") from None
        pools = pools_of(cluster)
        run.pools = by_rank(pools)
        for worker, found in pools.items():
            run.problems += problems_of(worker, found, keeps_tree=name != "off" and worker.startswith("decode"))
        if not run.exact:
            show.now(f"flag {name}: what prefill says of the same answers, since {run.dtype} rounds")
            _score(cluster, workload, run)
        show.now(f"flag {name}: stopping")
    return run


def _described(info: dict[str, Any], start_s: float) -> Run:
    """A run that has no turn yet. info: what its decode worker says of itself."""
    drafts = info.get("speculative_num_draft_tokens") or DRAFT_TOKENS
    return Run(
        start_s,
        info["page_size"],
        str(info["dtype"]),
        str(info["device"]),
        overlapped=not info["disable_overlap_schedule"],
        loose=LOOSE_WITHOUT_DRAFTS + drafts if info.get("speculative_algorithm") else 0,
    )


def _chat(cluster: Cluster, name: str, workload: Workload, show: Display, run: Run) -> None:
    chats = Chats(cluster.router_url, cluster.model_path, workload, logprobs=not run.exact)
    before = summed_counters(cluster.prefill_urls, cluster.decode_urls, LOCAL_COUNTERS)
    for number in range(1, workload.turns + 1):
        show.now(f"flag {name}: turn {number} of {workload.turns}, {count(workload.clients, 'client')}", 1)
        replies = chats.turn(cluster.check)
        after = summed_counters(cluster.prefill_urls, cluster.decode_urls, LOCAL_COUNTERS)
        turn = Turn(**{key: after[key] - before[key] for key in after}, replies=replies)
        before = after
        run.turns.append(turn)
        show.done(
            f"flag {name}: turn {number} of {workload.turns}: {turn.prompt_tokens} prompt tokens, "
            f"{turn.reused_tokens} reused on decode, "
            + (f"{turn.computed_tokens} computed there, " if turn.computed_tokens else "")
            + f"{mib(turn.sent_bytes)} MiB sent, "
            f"median TTFT {turn.ttft_s:.2f} s"
        )


def _score(cluster: Cluster, workload: Workload, run: Run) -> None:
    """Fill ``scores``, or say in ``unknown`` why not. All caches are emptied first: prefill computes prompts anew.

    Prefill is asked alone: decode has no part in it, and a router does not hand on which tokens were the likeliest.
    """
    run.find_ids(workload, cluster.model_path)
    if run.ids is None:
        return
    empty_caches(cluster, (*cluster.prefill_urls, *cluster.decode_urls))

    prefill = cluster.prefill_urls[0]

    def scored(ids: Ids) -> Answer | None:
        return None if ids.answer is None else score(prefill, ids.prompt, ids.answer, top=1, prefill_alone=True)

    try:
        with ThreadPoolExecutor(workload.clients) as pool:
            run.scores = [list(pool.map(scored, turn)) for turn in run.ids]
    except PdRadixError as error:
        cluster.check()
        run.unknown = str(error)


def mib(size: float) -> str:
    return f"{size / 2**20:.1f}"


def count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)
