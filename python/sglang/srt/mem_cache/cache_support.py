"""Which tree a worker gets, and what is refused with it: one table.

The start-up checks, their errors and the documentation (`markdown`) are made of it. `kv_cache_builder.py` builds the
trees; here is nothing that needs the engine's caches, so options can be checked before anything is loaded.

Upstream: none: it names what has been verified here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.environ import envs

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

__all__ = [
    "DECODE",
    "FLAG",
    "KINDS",
    "CacheKind",
    "add",
    "check",
    "check_not_turned_off",
    "check_tree",
    "kinds_with",
    "markdown",
    "replace",
    "several",
    "switch",
]

FLAG = "--disaggregation-decode-enable-radix-cache"


class Rule(NamedTuple):
    """Something that is refused: what it is called, with ``{args}`` for the server's, and whether it is so."""

    name: str
    used: Callable[[ServerArgs], object]


class Refused(NamedTuple):
    """What is refused with one error, in the order in which it is looked at. error: with ``{name}`` and ``{args}``."""

    error: str
    rules: tuple[Rule, ...]


@dataclass(eq=False)
class CacheKind:
    """Workers that get one tree, in words; the class of the tree; and what is refused with it.

    An extra adds its own to `KINDS`, and changes what is refused with the others' by `add` and `replace`.
    """

    workers: str
    tree: str
    refused: tuple[Refused, ...]


def _switch(option: str) -> Rule:
    """An option that is refused where it is given."""
    return Rule(option, lambda args: getattr(args, option[2:].replace("-", "_")))


def _several(option: str, name: str) -> Rule:
    """An option, ``name`` among the server's arguments, that is refused above 1."""
    return Rule(f"{option} above 1", lambda args: getattr(args, name) > 1)


# For the rows of extras.
switch, several = _switch, _several


# Only later does the engine make an ordinary server, neither prefill nor decode, of a worker with it.
DIFFUSION = Rule("--dllm-algorithm", lambda args: args.dllm_algorithm is not None)

SPECULATION = Rule("--speculative-algorithm", lambda args: args.speculative_algorithm is not None)

DECODE = CacheKind(
    f"decode with {FLAG}, full attention in all layers",
    "DecodeRadixCache",
    (
        Refused(
            f"{FLAG} is not verified together with {{name}}. Leave one of the two out.",
            (
                _switch("--disable-radix-cache"),
                _switch("--enable-hisparse"),
                _switch("--disaggregation-decode-enable-offload-kvcache"),
                _switch("--enable-hierarchical-cache"),
                _switch("--enable-lmcache"),
                _switch("--enable-streaming-session"),
                # Decode has no step in which they would be loaded.
                _switch("--enable-lora-overlap-loading"),
                # They are noted by slot where they are computed, and what prefill sends was computed there.
                _switch("--enable-return-routed-experts"),
                DIFFUSION,
                SPECULATION,
                _several("--pipeline-parallel-size", "pp_size"),
                _several("--attention-context-parallel-size", "attn_cp_size"),
                Rule("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", lambda args: envs.SGLANG_EXPERIMENTAL_CPP_RADIX_TREE.get()),
                Rule(
                    "SGLANG_DISAGG_STAGING_BUFFER, which is Mooncake's",
                    lambda args: (
                        envs.SGLANG_DISAGG_STAGING_BUFFER.get() and args.disaggregation_transfer_backend != "mooncake"
                    ),
                ),
            ),
        ),
    ),
)

#: All there are, in the order of the documentation.
KINDS = [DECODE]


def kinds_with(layers: str) -> list[CacheKind]:
    """Those for models with such layers; none where no extra has them. Extras that do come before who asks."""
    return [kind for kind in KINDS if f"{layers} " in kind.workers]


def add(kind: CacheKind, *rules: Rule) -> None:
    """Refuse these too, last and in the words of what was last: an extra does so when it is imported."""
    *before, (error, old) = kind.refused
    kind.refused = (*before, Refused(error, (*old, *rules)))


def replace(kind: CacheKind, name: str, *rules: Rule) -> None:
    """Put ``rules`` in the place of the one called ``name``: an extra does so when it is imported."""
    found = [rule.name for refused in kind.refused for rule in refused.rules]
    if name not in found:
        raise ValueError(f"{kind.workers}: nothing called {name!r} is refused")
    kind.refused = tuple(
        Refused(error, tuple(new for rule in old for new in (rules if rule.name == name else (rule,))))
        for error, old in kind.refused
    )


def check(kind: CacheKind, args: ServerArgs) -> None:
    """Raise ValueError for the first thing that is not verified with this kind's tree."""
    for error, rules in kind.refused:
        for name, used in rules:
            if used(args):
                raise ValueError(error.format(name=name.format(args=args), args=args))


def check_not_turned_off(option: str, args: ServerArgs) -> None:
    """Raise ValueError where the engine has turned the radix cache off by itself, which ``option`` needs.

    It does so while it goes through the options, and for deterministic inference at the end: ask then too.
    """
    if not args.disable_radix_cache or args.radix_cache_is_unwanted:
        return
    backend = f"--attention-backend {args.attention_backend}"
    cause, way_out = f"for this model or {backend}, as its log says", "Take another backend if that is why"
    if args.enable_deterministic_inference and args.attention_backend == "flashinfer":
        cause, way_out = f"for deterministic inference with {backend}", "Take fa3 or triton"
    raise ValueError(
        f"{option} needs the radix cache, which the engine turns off {cause}. {way_out}, or start this worker "
        "without the option."
    )


def check_tree(option: str, tree: Any) -> None:
    """Raise ValueError for a tree of the engine that keeps nothing, which it makes for such models by itself."""
    if tree.disable:
        raise ValueError(
            f"{option} needs the radix cache, which the engine turns off for multimodal models with the Transformers "
            "backend. Start this worker without the option."
        )


class _Anyone:
    """Options for the names of rules where nobody's are meant."""

    disaggregation_mode = "another"

    def __getattr__(self, name: str) -> str:
        return "NAME"


def markdown() -> str:
    """The table in Markdown, for the documentation: workers, their tree, and what is refused at the start."""
    lines = ["| Worker | Tree | Refused at the start |", "| --- | --- | --- |"]
    for kind in KINDS:
        names = [rule.name.format(args=_Anyone()) for refused in kind.refused for rule in refused.rules]
        lines.append(f"| {kind.workers} | {kind.tree} | {'; '.join(names)} |")
    return "\n".join(lines)
