"""Marks nodes of decode's tree whose prefix a prefill has computed, or seen in a prompt whose delta it sent.

What decode computed itself, answers and short deltas, no prefill has: it recomputes that when asked for a later part.
If a node is marked, so are all above it.

Upstream: none is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.decode_radix_cache import DecodeRadixCache, is_warmup

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.prefix_reader import PrefixPeek
    from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

__all__ = ["KnowingRadixCache", "is_known", "is_plain", "note_known", "unknown_to_prefill"]

_NAME = "known_to_prefill"


def is_known(node: TreeNode) -> bool:
    """Whether a prefill has, or had, this node's KV."""
    return getattr(node, _NAME, False)


def note_known(node: TreeNode | None) -> None:
    """A prefill has sent what ends with ``node``. Cost: the unmarked nodes above it."""
    while node is not None and node.parent is not None and not is_known(node):
        setattr(node, _NAME, True)
        node = node.parent


def unknown_to_prefill(found: PrefixPeek) -> int:
    """Tokens at the end of a match that no prefill has. Cost: their nodes."""
    tokens, span = 0, found.in_last
    for i in range(len(found.path) - 1, -1, -1):
        if is_known(found.path[i]):
            break
        tokens += span
        span = len(found.path[i - 1].key.token_ids) if i else 0
    return tokens


def is_plain(req: Req) -> bool:
    """Whether a request needs no whole prefill: no prompt logprobs or hidden states, and tokens only."""
    in_prompt = req.return_logprob and 0 <= req.logprob_start_len < len(req.origin_input_ids)
    extra = in_prompt or req.return_hidden_states or req.return_routed_experts or req.is_prefill_only
    other = req.input_embeds is not None or req.multimodal_inputs is not None or req.session is not None
    return not (extra or other or req.token_type_ids is not None or is_warmup(req))


class KnowingRadixCache(DecodeRadixCache):
    """Layer of each decode tree: a split keeps the mark on both parts."""

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        upper = super()._split_node(key, child, split_len)
        if is_known(child):
            setattr(upper, _NAME, True)
        return upper
