"""A third run of the chat, in which decode computes short remainders of prompts itself, against the other two."""

from __future__ import annotations

from sglang_pd_radix.errors import PdRadixError

from .chat_judge import (
    MOST_OVER_LEAST,
    Comparison,
    bounds_of,
    differences,
    judge_answers,
    page_bytes_of,
    ratio,
)
from .chat_run import Run, mib

LOCAL_FLAG = "--disaggregation-decode-local-prefill"


def check_asked(asked: str) -> None:
    """Raise PdRadixError for what a decode worker would refuse only after the runs before its own."""
    if asked not in ("off", "auto") and not (asked.isdecimal() and int(asked)):
        raise PdRadixError(f"--local-prefill {asked}: give off, auto or 1 token or more")


def judge(off: Run, on: Run, local: Run) -> Comparison:
    """Hold ``local`` against ``off`` by its answers, and by what is sent against ``on``.

    Where that had other prompts, what is sent is held against ``local``'s own bounds.
    """
    result = Comparison(off, local, page_bytes_of(off), bounds_of(local), differences(off, local))
    judge_answers(result)
    result.failures += local.problems
    computed, prompts = local.total("computed_tokens"), local.total("prompt_tokens")
    told = local.total("reused_tokens") + local.total("transferred_tokens") + computed
    if told != prompts:
        result.failures.append(f"reused, transferred and computed tokens are {told}, and the prompts have {prompts}")
    if not any("computes_up_to" in pool for name, pool in local.pools.items() if name.startswith("decode")):
        result.notes.append("decode computes no prompts on this deployment, and its log says why")
    elif not computed and _short(local):
        result.failures.append("decode has computed no token of a prompt, and some were short enough")
    if on.sizes == local.sizes and (on.ids is None or local.ids is None or on.ids == local.ids):
        if result.later_sent > sum(turn.sent_bytes for turn in on.turns[1:]):
            result.failures.append("from turn 2 on, more KV was sent than without it")
    elif result.later_over_due > MOST_OVER_LEAST:  # Where the type rounds, an answer may be another one.
        result.failures.append(
            f"{result.later_over_due:.3f} times the least possible was sent from turn 2 on, above {MOST_OVER_LEAST}"
        )
    result.failures = [f"with {LOCAL_FLAG}: {failure}" for failure in result.failures]
    return result


def _short(local: Run) -> bool:
    """Whether a prompt's remainder, of all that came after the last one, was what decode would compute."""
    most = max((pool.get("computes_up_to", 0) for pool in local.pools.values()), default=0)
    pairs = zip(local.sizes, local.sizes[1:], strict=False)
    return any(
        new - old - answer + local.page_size <= most
        for before, turn in pairs
        for (old, answer), (new, _) in zip(before, turn, strict=True)
    )


def lines(result: Comparison) -> list[str]:
    """What the report says of it."""
    local, answers = result.on, sum(len(turn.replies) for turn in result.on.turns)
    since = "from turn 2 on, " if len(local.turns) > 1 else ""
    faster = ratio(result.off.later_ttft_s, local.later_ttft_s)
    return [
        f"With short remainders of prompts computed on decode ({LOCAL_FLAG}, auto by default):",
        f"KV sent:  {since}{mib(result.later_sent)} MiB; decode computed {local.total('computed_tokens')} of "
        f"{local.total('prompt_tokens')} prompt tokens",
        f"TTFT:     {since}median {result.off.later_ttft_s:.3f} s off, {local.later_ttft_s:.3f} s so: {faster:.2f}x",
        f"Answers:  {answers - len(result.differences)} of {answers} identical with the flag off and on",
        *(f"          {line}" for line in result.differences),
        *(f"Note:     {note}" for note in result.notes),
        *(f"FAILED:   {failure}" for failure in result.failures),
    ]
