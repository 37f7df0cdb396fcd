"""EAGLE on CPU hosts: the torch forms of the engine's CUDA ops, and the options that go with them."""

from __future__ import annotations

import pytest
import torch

from sglang_pd_radix.supplied.cpu_host import options
from sglang_pd_radix.supplied.cpu_host.speculative.chain import (
    build_chain,
    sample_chain,
    top_k_renorm,
    top_p_renorm,
    verify_chain,
)

NUM = 4


def test_a_chain_is_masked_as_a_tree_of_one_branch():
    """By the definition of the CUDA op's tables: each node sees the prompt, its ancestors and itself."""
    seq_lens = torch.tensor([5, 2])
    mask = torch.full((sum(NUM * (n + NUM) for n in (5, 2)),), True)
    positions = torch.empty(2 * NUM, dtype=torch.long)
    tables = torch.full((3, 2, NUM), -1)
    build_chain(None, None, seq_lens, mask, positions, *tables, 1, NUM - 1, NUM, 0)
    assert positions.tolist() == [5, 6, 7, 8, 2, 3, 4, 5]
    index, following, sibling = tables.tolist()
    assert index == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert following == [[1, 2, 3, -1]] * 2 and sibling == [[-1] * NUM] * 2
    at = 0
    for seq_len in (5, 2):
        for node in range(NUM):
            row = mask[at : at + seq_len + NUM].tolist()
            assert row == [True] * (seq_len + node + 1) + [False] * (NUM - node - 1)
            at += seq_len + NUM
    assert at == len(mask)


def test_what_is_accepted_of_a_chain():
    """Beside a walk from node to node, which is what the CUDA op does."""
    torch.manual_seed(0)
    for _ in range(50):
        target = torch.randint(0, 3, (3, NUM))
        candidates = torch.randint(0, 3, (3, NUM))
        index = torch.arange(3 * NUM).view(3, NUM)
        predicts, accepted = torch.full((3 * NUM + 1,), -7, dtype=torch.int32), torch.full((3, NUM), -1)
        counts = torch.empty(3, dtype=torch.int32)
        verify_chain(predicts, accepted, counts, candidates, index, None, None, target, 1)
        for b in range(3):
            node, path = 0, [0]
            while node + 1 < NUM and candidates[b, node + 1] == target[b, node]:
                node += 1
                path.append(node)
            assert counts[b] == node
            assert accepted[b].tolist() == [b * NUM + n for n in path] + [-1] * (NUM - len(path))
            of_request = predicts[b * NUM : (b + 1) * NUM].tolist()
            assert of_request == target[b, : len(path)].tolist() + [-7] * (NUM - len(path))


def test_sampled_tokens_have_the_target_s_distribution():
    """Of many drafts of one token: accepted or not, what comes out is distributed as the target says."""
    torch.manual_seed(0)
    count, vocab = 8000, 5
    first = torch.tensor([0.1, 0.4, 0.2, 0.25, 0.05])
    second = torch.softmax(torch.randn(vocab, vocab), -1)
    drafted = torch.randint(0, vocab, (count,))
    candidates = torch.stack((torch.zeros(count, dtype=torch.long), drafted), 1)
    target = torch.stack((first.expand(count, -1), second[drafted]), 1)
    index = torch.arange(2 * count).view(count, 2)
    predicts, accepted = torch.full((2 * count,), -7), torch.full((count, 2), -1)
    counts = torch.empty(count, dtype=torch.int32)
    coins = torch.rand(count, 2), torch.rand(count)
    sample_chain(predicts, accepted, counts, candidates, index, None, None, *coins, target, torch.zeros_like(target))
    predicts = predicts.view(count, 2)
    assert abs(float(counts.float().mean()) - 0.2) < 0.03, "a draft by chance is right one time in five"
    shares = torch.bincount(predicts[:, 0], minlength=vocab) / count
    torch.testing.assert_close(shares, first, atol=0.025, rtol=0)
    kept = counts == 1
    assert torch.equal(predicts[kept, 0], drafted[kept]) and (accepted[~kept, 1] == -1).all()
    for token in range(vocab):
        after = predicts[kept & (drafted == token), 1]
        shares = torch.bincount(after, minlength=vocab) / len(after)
        torch.testing.assert_close(shares, second[token], atol=2 * len(after) ** -0.5, rtol=0)


def test_what_top_k_and_top_p_leave():
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]] * 2)
    torch.testing.assert_close(
        top_k_renorm(probs, torch.tensor([2, 100])), torch.tensor([[0.625, 0.375, 0, 0], [0.5, 0.3, 0.15, 0.05]])
    )
    torch.testing.assert_close(
        top_p_renorm(probs, torch.tensor([0.6, 1.0])), torch.tensor([[0.625, 0.375, 0, 0], [0.5, 0.3, 0.15, 0.05]])
    )


class _Args:
    device, attention_backend, enable_torch_compile = "cpu", None, False
    speculative_algorithm, speculative_eagle_topk = "EAGLE", None
    speculative_num_steps = speculative_num_draft_tokens = None


@pytest.mark.parametrize(
    "given, named",
    [
        ({"speculative_algorithm": "NGRAM"}, "NGRAM"),
        ({"speculative_eagle_topk": 4}, "--speculative-eagle-topk 1"),
        ({"attention_backend": "torch_native"}, "--attention-backend triton"),
    ],
)
def test_what_does_not_speculate_on_a_cpu_host_says_so(given, named):
    args = _Args()
    for name, value in given.items():
        setattr(args, name, value)
    with pytest.raises(ValueError, match=named):
        options._speculates(args)


def test_speculation_chooses_its_backend_and_a_chain():
    args = _Args()
    options._speculates(args)
    assert args.attention_backend == "triton" and args.speculative_eagle_topk == 1
    assert args.speculative_num_draft_tokens == args.speculative_num_steps + 1
