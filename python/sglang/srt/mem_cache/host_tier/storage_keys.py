"""What pages of KV are called in a storage below host memory, so that nobody reads another's.

A page is named by a chain of hashes of the tokens up to its end, which begins with the prompt's ``extra_key`` (salt,
adapter). All else is in the name of the folder: the namespace, what a page is made of, and the TP rank. The engine's
own names have of these only the tokens, the model's name and the TP rank: its hierarchical cache cannot share pages
with this one, nor tell two models of one name apart.

Upstream: none is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.kv_namespace import kv_namespace
from sglang.srt.mem_cache.pegaflow.pages import first_hash, page_hashes

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

__all__ = ["first_hash", "model_namespace", "page_names"]


def page_names(token_ids: Sequence[Any], page_size: int, before: bytes) -> list[bytes]:
    """A hash for each whole page of ``token_ids``, ints or, with a draft, pairs of them.

    before: the hash of the page that ends where they begin, or `first_hash`.
    """
    if token_ids and isinstance(token_ids[0], tuple):
        return page_hashes([token for pair in token_ids for token in pair], 2 * page_size, before)
    return page_hashes(token_ids, page_size, before)


def model_namespace(args: ServerArgs) -> str:
    """`kv_namespace` of the model and its draft, whose KV lies behind the model's in each page."""
    draft = None
    if args.speculative_algorithm is not None:
        draft = [args.speculative_algorithm, args.speculative_draft_model_quantization]
        if not args.kv_namespace:
            draft += [args.speculative_draft_model_path, args.speculative_draft_model_revision]
    return kv_namespace(args, draft)
