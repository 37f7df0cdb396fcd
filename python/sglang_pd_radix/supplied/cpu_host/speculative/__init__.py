"""EAGLE in torch: the tree, the verification and the attention of drafts, which the engine has for GPUs only.

Speculation runs on the engine's ``triton`` attention backend, whose kernels are replaced here; `options.py` chooses it.
Drafts are chains (``--speculative-eagle-topk 1``). ``tools/unit/test_cpu_speculation.py`` has the forms of CUDA ops
beside a plain reference; ``extras/speculation/tests/e2e/test_speculative_pairs.py`` has all of them at work.

attention.py   new tokens with cached ones, with a mask; drafts
tables.py      which slots a step reads and writes
chain.py       the mask of a draft and what of it is accepted, greedily and by chance
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..allocator import TorchKernel


def _instead_of(kernel: Any, form: Any) -> Any:
    """``form``, from which `inspect.unwrap` finds the kernel that it replaces."""
    form.__wrapped__ = kernel
    return form


def _patch_extend_attention(module: Any) -> None:
    from .attention import extend_attention

    module.extend_attention_fwd = _instead_of(module.extend_attention_fwd, extend_attention)


def _patch_decode_attention(module: Any) -> None:
    from .attention import decode_attention

    module.decode_attention_fwd = _instead_of(module.decode_attention_fwd, decode_attention)


def _patch_attention_utils(module: Any) -> None:
    from .tables import kv_indices_of

    module.create_flashinfer_kv_indices_triton = TorchKernel(kv_indices_of)


def _patch_trees(module: Any) -> None:
    from .chain import build_chain, verify_chain

    module.sgl_build_tree_kernel_efficient = build_chain
    # Off CUDA the engine's returns what nobody has written.
    module.verify_tree_greedy_func = verify_chain


def _patch_sampling(module: Any) -> None:
    from . import chain

    module.tree_speculative_sampling_target_only = chain.sample_chain
    module.top_k_renorm_prob = chain.top_k_renorm
    module.top_p_renorm_prob = chain.top_p_renorm


def _patch_spec_utils(module: Any) -> None:
    from . import tables

    # Else what is to be sampled is the likeliest token, with a warning in the log.
    module.TREE_SPEC_KERNEL_AVAILABLE = True
    module.align_evict_mask_to_page_size = TorchKernel(tables.keep_page_in_use)
    module.assign_draft_cache_locs = TorchKernel(tables.draft_slots_to_table)
    module.assign_req_to_token_pool = TorchKernel(tables.table_from_flat)
    module.create_extend_after_decode_spec_info = TorchKernel(tables.extend_after_decode)
    module.generate_draft_decode_kv_indices = tables.DraftDecodeIndices()


def _patch_v2(module: Any) -> None:
    import torch

    from . import tables

    _patch_sampling(module)
    # Else it returns no slots at all: CUDA's way is the one that is a kernel, and that one is replaced.
    module._is_cuda = True
    module.assign_draft_cache_locs_page_size_1 = TorchKernel(tables.draft_slots_from_table)
    module.assign_extend_cache_locs = TorchKernel(tables.extend_slots)
    module.fill_new_verified_id = TorchKernel(tables.last_verified)
    # Streams keep memory alive for each other; there is one here.
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign, assignment]


def _patch_pool(module: Any) -> None:
    # Only drafts that are trees have KV moved; getting ready for that runs a kernel.
    module.MHATokenToKVPool._init_kv_copy_and_warmup = lambda pool: setattr(pool, "_kv_copy_config", None)


HOOKS: dict[str, Callable[[Any], None]] = {
    "sglang.srt.layers.attention.triton_ops.decode_attention": _patch_decode_attention,
    "sglang.srt.layers.attention.triton_ops.extend_attention": _patch_extend_attention,
    "sglang.srt.layers.attention.utils": _patch_attention_utils,
    "sglang.srt.mem_cache.memory_pool": _patch_pool,
    "sglang.srt.speculative.eagle_info": _patch_sampling,
    "sglang.srt.speculative.eagle_info_v2": _patch_v2,
    "sglang.srt.speculative.eagle_utils": _patch_trees,
    "sglang.srt.speculative.spec_utils": _patch_spec_utils,
}
