"""The engine's options of a storage, as a decode worker reads them. Those of one backend are read beside it.

Upstream: none is known.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.mem_cache.host_tier.checks import NOTHING, Taken
from sglang.srt.mem_cache.host_tier.storage_backend import EXTRA_CONFIG
from sglang.srt.mem_cache.host_tier.storage_backends import BACKENDS
from sglang.srt.mem_cache.host_tier.storage_fetches import Limits

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

__all__ = ["StorageOptions", "options_of", "read_options", "taken_of_rank"]

# By the name in the option, of which type, and the field of `Limits`.
_LIMITS: dict[str, tuple[Any, str]] = {
    "prefetch_threshold": (int, "threshold"),
    "prefetch_timeout_base": ((int, float), "base_s"),
    "prefetch_timeout_per_ki_token": ((int, float), "per_ki_s"),
}
# Of any of them: a whole number of seconds may else be more than any time.
MOST = 10**9


class StorageOptions(NamedTuple):
    """own: what the backend reads of it."""

    limits: Limits
    own: Any = None


def options_of(args: ServerArgs) -> StorageOptions | None:
    """`read_options` of a worker, which may ask a server whether it is there; None: it has no storage."""
    if args.hicache_storage_backend is None:
        return None
    extra, policy = args.hicache_storage_backend_extra_config, args.hicache_storage_prefetch_policy
    return read_options(args.hicache_storage_backend, extra, policy)


def taken_of_rank(args: ServerArgs, options: StorageOptions | None) -> Taken:
    """What the storage of a worker takes of each of its ranks. options: `options_of` it.

    Each DP rank has a storage of its own, which its TP ranks share.
    """
    if options is None:
        return NOTHING
    tp_size = args.tp_size // (args.dp_size if args.enable_dp_attention else 1)
    return BACKENDS[args.hicache_storage_backend].memory(options.own, tp_size)


def read_options(name: str, extra: str | None, policy: str) -> StorageOptions:
    """Read ``--hicache-storage-backend-extra-config`` and ``--hicache-storage-prefetch-policy``. Raises ValueError.

    name: of the backend, whose library, and the server that it needs, have to be there. extra: JSON, or ``@`` and the
    path of a JSON, TOML or YAML file, as the engine takes it.
    """
    if policy == "wait_complete":
        raise ValueError(
            "--hicache-storage-prefetch-policy wait_complete would have requests wait for a storage that hangs. On "
            "decode give timeout, or leave it out."
        )
    given = _load(extra) if extra else {}
    if not isinstance(given, dict):
        raise ValueError(f"{EXTRA_CONFIG} is {extra!r}: give an object.")
    backend = BACKENDS[name]
    known = [*_LIMITS, *backend.options]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"{EXTRA_CONFIG} has {', '.join(unknown)}; decode knows {', '.join(known)}.")
    limits = {}
    for name, (kind, field) in _LIMITS.items():
        value = given.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 <= value <= MOST:
            raise ValueError(f"{EXTRA_CONFIG} has {name} {value!r:.80}: give a number of 0 or more, at most {MOST:g}.")
        limits[field] = value
    return StorageOptions(Limits(**limits), backend.read(given))


def _load(extra: str) -> Any:
    try:
        if not extra.startswith("@"):
            return json.loads(extra)
        path = Path(extra[1:])
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return json.loads(text)
        if path.suffix == ".toml":
            import tomllib

            return tomllib.loads(text)
        if path.suffix in (".yaml", ".yml"):
            import yaml

            return yaml.safe_load(text)
    except Exception as e:
        raise ValueError(f"{EXTRA_CONFIG} {extra!r} cannot be read: {e}.") from e
    raise ValueError(f"{EXTRA_CONFIG} {extra!r}: give a file that ends in .json, .toml or .yaml.")
