"""Structured output in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _patch_xgrammar(module: Any) -> None:
    import torch
    import wrapt

    bits = torch.arange(32, dtype=torch.int32)

    @wrapt.patch_function_wrapper(module, "XGrammarGrammar.apply_vocab_mask")
    def apply(wrapped: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The engine knows the mask's kernels for accelerators only. vocab_mask: int32 (requests, vocabulary / 32), in
        # which a bit says that a token is allowed.
        def mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
            if logits.device.type != "cpu":
                wrapped(logits, vocab_mask)
                return
            allowed = ((vocab_mask.unsqueeze(-1) >> bits) & 1).flatten(1)[:, : logits.shape[1]]
            logits[:, : allowed.shape[1]].masked_fill_(allowed == 0, float("-inf"))

        mask(*args, **kwargs)


HOOKS: dict[str, Callable[[Any], None]] = {
    "sglang.srt.constrained.xgrammar_backend": _patch_xgrammar,
}
