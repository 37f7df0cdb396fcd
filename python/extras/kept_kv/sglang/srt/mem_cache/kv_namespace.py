"""The namespace of a worker's KV outside of it: in a PegaFlow server, a storage or a peer's memory.

Workers with the same namespace read each other's KV. Weights are not compared: the operator names them with
`--kv-namespace`, otherwise model path, revision and `--weight-version` count. An online weight update keeps the
namespace; its users stop using it then (`before_weight_update`).

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

# Options that change the KV of the same tokens and weights.
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
    """The namespace from the options. more: what else the KV depends on, such as a draft's model."""
    # Relative paths are made absolute: they differ between directories.
    path = os.path.abspath(args.model_path) if os.path.isdir(args.model_path) else args.model_path
    weights = args.kv_namespace or [path, args.revision, args.weight_version]
    told = [weights, *(getattr(args, name) for name in _OPTIONS), *more]
    digest = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:24]
    # A readable part; the digest makes it unique.
    to_read = re.sub(r"[^A-Za-z0-9._-]+", "-", args.kv_namespace or PurePosixPath(path).name).strip("-.")[:64]
    return f"{to_read or 'model'}-{digest}"
