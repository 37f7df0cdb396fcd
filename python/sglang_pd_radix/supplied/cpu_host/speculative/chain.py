"""Drafts that are chains: their mask and their verification."""

from __future__ import annotations

from typing import Any

import torch


def chain_only(topk: int) -> None:
    if topk != 1:
        raise NotImplementedError("On a CPU host drafts are chains: give --speculative-eagle-topk 1.")


def build_chain(
    parent_list: Any,
    selected_index: Any,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    num: int,
    tree_mask_mode: int,
) -> None:
    """``sgl_build_tree_kernel_efficient`` of chains: node ``j`` of a request follows node ``j - 1``.

    tree_mask: of each request ``num * (seq_len + num)`` flags, by rows, all true before.
    """
    chain_only(topk)
    if tree_mask_mode != 0:
        raise NotImplementedError(f"A tree mask of mode {tree_mask_mode} has no torch form.")
    node = torch.arange(num)
    positions.view(-1, num).copy_(seq_lens[:, None] + node)
    retrive_index.copy_(torch.arange(len(seq_lens))[:, None] * num + node)
    retrive_next_token.copy_(torch.where(node < num - 1, node + 1, -1))
    retrive_next_sibling.fill_(-1)
    at = 0
    for seq_len in seq_lens.tolist():
        size = num * (seq_len + num)
        tree_mask[at : at + size].view(num, -1)[:, seq_len:] = node <= node[:, None]
        at += size


def verify_chain(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``verify_tree_greedy_func`` of chains: a draft token counts while all before it are the target's own.

    predicts: the target's token after each accepted node, the rest untouched. accept_index: (requests, depth + 1),
    accepted nodes as indices into ``predicts``, the root first, then -1. accept_token_num: accepted draft tokens.
    """
    chain_only(topk)
    right = (candidates[:, 1:] == target_predict[:, :-1]).long().cumprod(1)
    accept_token_num.copy_(right.sum(1))
    kept = torch.arange(accept_index.shape[1]) <= accept_token_num[:, None]
    nodes = retrive_index[:, : accept_index.shape[1]]
    accept_index.copy_(torch.where(kept, nodes, -1))
    predicts[nodes[kept]] = target_predict[:, : accept_index.shape[1]][kept].to(predicts.dtype)
    return predicts, accept_index, accept_token_num


def sample_chain(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """``tree_speculative_sampling_target_only`` of chains; outputs as in `verify_chain`.

    A draft token is accepted with the target's probability for it (``target_probs``: (requests, nodes, vocabulary)).
    Where one is not, the token in its place is drawn from the others. So each token has the target's distribution.
    """
    for i, (row, index) in enumerate(zip(candidates.tolist(), retrive_index.tolist(), strict=True)):
        node = 0
        accept_index[i, 0] = index[0]
        for token in row[1 : accept_index.shape[1]]:
            probability = float(target_probs[i, node, token])
            if float(uniform_samples[i, node]) > probability / threshold_acc and probability < threshold_single:
                break
            predicts[index[node]] = token
            node += 1
            accept_index[i, node] = index[node]
        accept_token_num[i] = node
        left = target_probs[i, node].clone()
        if node + 1 < accept_index.shape[1]:
            left[row[node + 1]] = 0
        sums = left.cumsum(0)
        drawn = torch.searchsorted(sums, uniform_samples_for_final_sampling[i] * sums[-1], right=True)
        # Rounding may end beyond the last token that is possible.
        predicts[index[node]] = min(int(drawn), int(left.nonzero()[-1]))


def top_k_renorm(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """``top_k_renorm_prob``: of each row the ``top_k`` likeliest, and what is as likely as the last of these."""
    ordered = probs.sort(dim=-1, descending=True).values
    least = ordered.gather(1, top_ks.long().clamp(1, probs.shape[-1])[:, None] - 1)
    kept = torch.where(probs >= least, probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """``top_p_renorm_prob``: of each row the fewest tokens, likeliest first, that have ``top_p`` together."""
    ordered, order = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    kept = torch.where(before < top_ps[:, None], ordered, 0.0)
    kept = torch.zeros_like(probs).scatter_(1, order, kept)
    return kept / kept.sum(-1, keepdim=True)
