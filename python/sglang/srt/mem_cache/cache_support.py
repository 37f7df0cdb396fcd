"""Table of the workers that get a decode tree and the options that are refused with it.

The start-up checks, their errors and the documentation come from this table.
This module imports no cache of the engine, so options are checked before anything is loaded.

Upstream: none: it names what has been verified here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.environ import envs

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


FLAG = "--disaggregation-decode-enable-radix-cache"


class Rule(NamedTuple):
    """A refused setting: its name, which may contain ``{args}``, and its test."""

    name: str
    used: Callable[[ServerArgs], object]


class Refused(NamedTuple):
    """Rules that raise one error, checked in order. error: contains ``{name}`` and ``{args}``."""

    error: str
    rules: tuple[Rule, ...]


@dataclass(eq=False)
class CacheKind:
    """A kind of worker: its description, the name of its tree's class, and what is refused.

    An extra adds its own kinds to `KINDS`, and changes the rules of others by `add` and `replace`.
    """

    workers: str
    tree: str
    refused: tuple[Refused, ...]


def switch(option: str) -> Rule:
    """Rule: ``option`` is refused if given."""
    return Rule(option, lambda args: getattr(args, option[2:].replace("-", "_")))


def several(option: str, name: str) -> Rule:
    """Rule: ``option``, ``name`` in the server's args, is refused above 1."""
    return Rule(f"{option} above 1", lambda args: getattr(args, name) > 1)


# The engine turns such a worker into an aggregated server, but after this check.
DIFFUSION = Rule("--dllm-algorithm", lambda args: args.dllm_algorithm is not None)

SPECULATION = Rule("--speculative-algorithm", lambda args: args.speculative_algorithm is not None)

DECODE = CacheKind(
    f"decode with {FLAG}, full attention in all layers",
    "DecodeRadixCache",
    (
        Refused(
            f"{FLAG} is not verified together with {{name}}. Leave one of the two out.",
            (
                switch("--disable-radix-cache"),
                switch("--enable-hisparse"),
                switch("--disaggregation-decode-enable-offload-kvcache"),
                switch("--enable-hierarchical-cache"),
                switch("--enable-lmcache"),
                switch("--enable-streaming-session"),
                # Decode has no step that would load the adapters.
                switch("--enable-lora-overlap-loading"),
                # Experts are recorded by slot on prefill, which computed the tokens.
                switch("--enable-return-routed-experts"),
                DIFFUSION,
                SPECULATION,
                several("--pipeline-parallel-size", "pp_size"),
                several("--attention-context-parallel-size", "attn_cp_size"),
                Rule(
                    "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE",
                    lambda args: envs.SGLANG_EXPERIMENTAL_CPP_RADIX_TREE.get(),
                ),
                Rule(
                    "SGLANG_DISAGG_STAGING_BUFFER, which is Mooncake's",
                    lambda args: (
                        envs.SGLANG_DISAGG_STAGING_BUFFER.get()
                        and args.disaggregation_transfer_backend != "mooncake"
                    ),
                ),
            ),
        ),
    ),
)

#: All kinds, in the order of the documentation.
KINDS = [DECODE]


def kinds_with(layers: str) -> list[CacheKind]:
    """The kinds for models with ``layers``, from extras imported before the call."""
    return [kind for kind in KINDS if f"{layers} " in kind.workers]


def add(kind: CacheKind, *rules: Rule) -> None:
    """Append ``rules`` to the last error of ``kind``. Called when an extra is imported."""
    *before, (error, old) = kind.refused
    kind.refused = (*before, Refused(error, (*old, *rules)))


def replace(kind: CacheKind, name: str, *rules: Rule) -> None:
    """Replace the rule called ``name`` by ``rules``. Called when an extra is imported."""
    found = [rule.name for refused in kind.refused for rule in refused.rules]
    if name not in found:
        raise ValueError(f"{kind.workers}: nothing called {name!r} is refused")
    kind.refused = tuple(
        Refused(
            error, tuple(new for rule in old for new in (rules if rule.name == name else (rule,)))
        )
        for error, old in kind.refused
    )


def check(kind: CacheKind, args: ServerArgs) -> None:
    """Raise ValueError for the first rule that ``args`` break."""
    for error, rules in kind.refused:
        for name, used in rules:
            if used(args):
                raise ValueError(error.format(name=name.format(args=args), args=args))


def check_not_turned_off(option: str, args: ServerArgs) -> None:
    """Raise ValueError if the engine itself turned off the radix cache, which ``option`` needs.

    Call it after the engine's last check too: deterministic inference turns the cache off there.
    """
    if not args.disable_radix_cache or args.radix_cache_is_unwanted:
        return
    backend = f"--attention-backend {args.attention_backend}"
    cause, way_out = (
        f"for this model or {backend}, as its log says",
        "Take another backend if that is why",
    )
    if args.enable_deterministic_inference and args.attention_backend == "flashinfer":
        cause, way_out = f"for deterministic inference with {backend}", "Take fa3 or triton"
    raise ValueError(
        f"{option} needs the radix cache, which the engine turns off {cause}. {way_out}, or start "
        "this worker without the option."
    )


def check_tree(option: str, tree: Any) -> None:
    """Raise ValueError if the engine built a disabled ``tree``, as it does for some models."""
    if tree.disable:
        raise ValueError(
            f"{option} needs the radix cache, which the engine turns off for multimodal models "
            "with the Transformers backend. Start this worker without the option."
        )
