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
