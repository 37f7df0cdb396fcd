"""What all parts have in common: the host, and what the user has asked for."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_pd_radix.supplied import torch_layers
from sglang_pd_radix.tools.cluster import ATTENTION_OPTIONS, has_option, option_value, with_defaults

from .host import Host
from .runner import Step

#: The dense model that is made for measurements on a GPU: 0.94 billion parameters, 64 KiB of KV a token in bfloat16.
BILLION = "--layers 16 --hidden 2048 --heads 32 --kv-heads 8 --head-dim 128 --intermediate 6144".split()
#: By which decode attention on a GPU may read shared prefixes once.
TRITON = "triton"
_DRAFTED = ("eagle",)


@dataclass(frozen=True)
class Setting:
    """models: a directory for made ones. model: the user's, None for a made one. router: None for the default.

    engine_options: the user's, for all workers of all parts. They go before what a part has only for want of a better
    one, and not before what makes the part what it is; those of drafts are for the user's model alone.
    """

    host: Host
    models: Path
    model: str | None = None
    backend: str = "nixl"
    router: str | None = None
    engine_options: Sequence[str] = ()

    @property
    def small(self) -> bool:
        return self.host.small

    def tool(
        self,
        name: str,
        command: str,
        *arguments: str,
        options: Mapping[str, str | None] | None = None,
        forced: Mapping[str, str] | None = None,
        exact: bool = False,
        **more: object,
    ) -> Step:
        """The step ``name``: a command of pd-radix with ``arguments`` and, for the engine, ``options``.

        forced: those that make the part what it is, whatever the user's say of them. exact: in float32 that is exact
        here, whatever the user's options say of types and attention.
        """
        router = ["--router", self.router] if self.router else []
        made = self.model is None or self.model not in arguments
        given = self.engine_options_in_float32() if exact else [*self.engine_options]
        given = without(without_drafts(given) if made else given, tuple(forced or {}))
        engine = [*with_defaults(given, options or {}), *(word for pair in (forced or {}).items() for word in pair)]
        words = [sys.executable, "-m", "sglang_pd_radix.tools.cli", command, *arguments, *router]
        return Step(name, [*words, "--", *engine] if engine else words, **more)  # type: ignore[arg-type]

    def model_of(self, arch: str) -> Path:
        """Where the made model of a kind is, once the step `making` has made it."""
        return self.models / arch

    def making(self, arch: str) -> Step:
        """The step that makes it: small, but for "billion"."""
        more = BILLION if arch == "billion" else ["--arch", arch]
        target = self.model_of(arch)
        # Written last.
        last = target / ("draft" if arch in _DRAFTED else ".") / "model.safetensors"
        words = [sys.executable, "-m", "sglang_pd_radix.tools.cli", "make-model", str(target), *more]
        return Step("make-model", words, unless=last)

    def together(self, tokens: int | None = None) -> dict[str, str | None]:
        """Options by which workers of made models on one large GPU start at once. tokens: of pools that no command
        tells."""
        if not self.host.large or self.model:
            return {}
        return {"--mem-fraction-static": "0.8", **({"--max-total-tokens": str(tokens)} if tokens else {})}

    def engine_options_in_float32(self) -> list[str]:
        """The user's, with the type and the attention of exact float32 in the place of theirs."""
        if self.small:
            return [*self.engine_options]
        given = without(self.engine_options, (*ATTENTION_OPTIONS, "--dtype"))
        return with_defaults(given, {"--attention-backend": TRITON, "--dtype": "float32"})

    def exact(self) -> tuple[tuple[str, str], ...]:
        """The environment in which float32 is exact here."""
        return () if self.small else ((torch_layers.SWITCH, "1"),)

    def triton_decodes(self) -> bool:
        """Whether the user leaves decode attention on a GPU to Triton."""
        chosen = option_value(self.engine_options, "--decode-attention-backend", "--attention-backend")
        return chosen == TRITON or not has_option(self.engine_options, *ATTENTION_OPTIONS)


def without(options: Sequence[str], names: Sequence[str]) -> list[str]:
    """``options`` less those of ``names``, each of which has a value."""
    kept: list[str] = []
    skip = False
    for word in options:
        if skip:
            skip = False
        elif word.partition("=")[0] in names:
            skip = "=" not in word
        else:
            kept.append(word)
    return kept


def without_drafts(options: Sequence[str]) -> list[str]:
    """``options`` less all that is for a draft of one model, each with as many values as it has."""
    kept: list[str] = []
    skip = False
    for word in options:
        if word.startswith("-"):
            skip = word.startswith("--speculative-")
        if not skip:
            kept.append(word)
    return kept
