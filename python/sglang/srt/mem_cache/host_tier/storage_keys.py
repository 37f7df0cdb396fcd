"""What pages of KV are called in a storage below host memory, so that nobody reads another's.

A page is named by a chain of hashes of the tokens up to its end, which begins with the prompt's ``extra_key`` (salt,
adapter). All else that KV depends on is in the name of the folder: model and weights, the options that change KV, page
size, what a page is made of, and the TP rank. The engine's own names have of these only the tokens, the model's name
and the TP rank: its hierarchical cache cannot share pages with this one, nor tell two models of one name apart.

Upstream: none is known.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.pegaflow.pages import (
    KV_OPTIONS,
    NOT_FROM_FILES,
    WEIGHT_OPTIONS,
    config_by_path,
    config_file,
    config_of_folder,
    deepgemm_experts,
    experts_apart,
    first_hash,
    name_to_read,
    only_where_set,
    page_hashes,
    weights_fingerprint,
)

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

__all__ = ["first_hash", "model_folder", "page_names", "rank_folder", "weights_id"]

# Advanced when what is in a file, or how it is named, changes.
VERSION = 5
# Options by which the KV of the same tokens of the same model may differ. As they are given: a storage outlives its
# workers, and what was saved is found by the name that it had then.
_OPTIONS = (*KV_OPTIONS, *WEIGHT_OPTIONS, "hicache_mem_layout", "page_size", "speculative_algorithm")


def page_names(token_ids: Sequence[Any], page_size: int, before: bytes) -> list[bytes]:
    """A hash for each whole page of ``token_ids``, ints or, with a draft, pairs of them.

    before: the hash of the page that ends where they begin, or `first_hash`.
    """
    if token_ids and isinstance(token_ids[0], tuple):
        return page_hashes([token for pair in token_ids for token in pair], 2 * page_size, before)
    return page_hashes(token_ids, page_size, before)


# The same as with PegaFlow.
weights_id = partial(weights_fingerprint, option="--hicache-storage-backend")


def model_folder(args: ServerArgs, weights: str | None) -> str:
    """The part of a folder's name that the options tell. weights: what they are called, and a draft's with them.

    None: look at the files. Raises ValueError where they cannot be looked at, or are not those of the files.
    """
    drafts = args.speculative_algorithm is not None
    given = ""
    if args.load_format in NOT_FROM_FILES:
        given = f"--load-format {args.load_format}"
    elif drafts and args.speculative_draft_load_format is not None:
        # The engine has put it in the place of the model's, which nobody knows any more.
        given = f"--speculative-draft-load-format {args.speculative_draft_load_format}"
    if given and weights is None:
        raise ValueError(
            f"--hicache-storage-backend: with {given} the weights are others than the files', or may be. Name them "
            'with --hicache-storage-backend-extra-config \'{"weights": "NAME"}\', the same for all workers with them, '
            "or leave the storage out."
        )
    options = {name: getattr(args, name, None) for name in _OPTIONS}
    if args.load_format == "dummy":
        # These are made up at start.
        options["random_seed"] = args.random_seed
    options |= {"version": VERSION, "weights": weights or weights_id(args.model_path, args.revision, args=args)}
    config, architecture = config_of_folder(args.model_path, args.revision)
    if weights:
        # As are, in their part of a name, those of a draft. Where they lie is of no account.
        options["own_config"] = config
    # A name that is given is of these too.
    options |= experts_apart(args, lambda path: "" if weights else weights_id(path, None, "--kt-weight-path"))
    options |= only_where_set(args, bool(weights))
    if drafts:
        options["draft"] = _draft(args, weights)
    text = json.dumps(options, sort_keys=True, default=str)
    return f"{name_to_read(weights or architecture)}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def _draft(args: ServerArgs, weights: str | None) -> list[Any]:
    """What a draft's KV depends on, which lies behind the model's in each page."""
    path, revision = args.speculative_draft_model_path, args.speculative_draft_model_revision
    path_option = "--speculative-draft-model-path"
    found: list[Any] = [args.speculative_draft_model_quantization, deepgemm_experts(args, "speculative_")]
    config = getattr(args, "decrypted_draft_config_file", None)
    config = config_file(
        config,
        "--decrypted-draft-config-file",
        path or args.model_path,
        revision,
        path_option if path else "--model-path",
        bool(weights),
    )
    if config is not None:
        found.append({"config": config})
    if path in (None, args.model_path):
        return found
    # Other words in its path, another config.
    found.append(config_by_path(path))
    if weights:
        return [*found, config_of_folder(path, revision)[0]]
    return [*found, weights_id(path, revision, path_option, args)]


def rank_folder(model: str, made_of: Sequence[object], tp_rank: int | None, tp_size: int) -> str:
    """The folder of one TP rank: its part of the heads or, with ``tp_rank`` None (MLA), what all ranks have alike.

    made_of: what a page is made of (pools, their shape, layout and number format).
    """
    shape = hashlib.sha256(repr(list(made_of)).encode()).hexdigest()[:16]
    return f"{model}/{shape}-tp{'all' if tp_rank is None else tp_rank}of{1 if tp_rank is None else tp_size}"
