"""The name under which a worker's KV is kept outside of it: in a PegaFlow server, in a storage, in a peer's memory.

Workers with the same name read each other's KV. Nothing here looks at weights: which ones are the same is what the
operator says, with `--kv-namespace`, or else the model's path and revision and `--weight-version`. An online update of
the weights changes no name; who keeps KV under one stops using it then (`before_weight_update`).

Upstream: none is known.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

__all__ = ["kv_namespace"]

# Options by which the KV of the same tokens differs with the same weights.
_OPTIONS = (
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "quantization_param_path",
    "torchao_config",
    "load_format",
    "json_model_override_args",
)


def kv_namespace(args: ServerArgs, *more: object) -> str:
    """The part of a name that the options tell. more: what else the KV depends on, as a draft's model."""
    # A directory by where it is: the same words name another one elsewhere.
    path = os.path.abspath(args.model_path) if os.path.isdir(args.model_path) else args.model_path
    weights = args.kv_namespace or [path, args.revision, args.weight_version]
    told = [weights, *(getattr(args, name) for name in _OPTIONS), *more]
    digest = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:24]
    # What a reader knows it by; the digest tells apart.
    to_read = re.sub(r"[^A-Za-z0-9._-]+", "-", args.kv_namespace or PurePosixPath(path).name).strip("-.")[:64]
    return f"{to_read or 'model'}-{digest}"
