"""What a chat has to send, by hand, by the sizes of its conversations and by their token ids."""

from __future__ import annotations

from sglang_pd_radix.tools.chat_least import (
    Bounds,
    Ids,
    Reach,
    bounds,
    kept_of_answer,
    least_pages,
    pages_of_prompts,
    reach_by_ids,
    reach_by_sizes,
)


def test_least_pages_by_hand() -> None:
    # 10 tokens are 3 pages of 4. Then decode holds 10 + 5 - 1 = 14 tokens, 3 whole pages, of the 19 (5 pages) after.
    assert least_pages([[(10, 5)], [(19, 5)]], 4, False) == 3 + 2
    assert pages_of_prompts([[(10, 5)], [(19, 5)]], 4) == 3 + 5
    # With 16 + 5 - 1 = 20 held, a page-aligned prompt of 20 needs nothing more.
    assert least_pages([[(16, 5)], [(20, 5)]], 4, False) == 4
    assert least_pages([[(10, 5), (7, 5)], [(19, 5), (13, 5)]], 1, False) == 10 + 7 + 5 + 2
    assert least_pages([], 4, False) == 0


def test_overlapped_steps_keep_one_token_more_of_each_answer() -> None:
    # 11 + 5 = 16 tokens are 4 whole pages; without the last token of the answer they would be 3.
    assert least_pages([[(11, 5)], [(19, 5)]], 4, True) == 3 + 1
    assert least_pages([[(11, 5)], [(19, 5)]], 4, False) == 3 + 2
    # Prefill makes the first token: an answer of one takes no step.
    assert kept_of_answer(1, True) == kept_of_answer(1, False) == 0


def test_each_part_of_what_is_kept_has_its_pages() -> None:
    # 10 tokens, an answer of 6, 19 tokens: 5 pages of 4. Of prompts 8 tokens are whole pages, with the answer 16.
    first, second = bounds(reach_by_sizes([[(10, 6)], [(19, 6)]], True), 4)
    assert first == Bounds(least=3, due=3, without_answers=3, without_prompts=3)
    assert second == Bounds(least=1, due=1, without_answers=3, without_prompts=5)


def test_what_a_tree_for_speculation_may_leave_out_is_not_due() -> None:
    (_, (reach,)) = reach_by_sizes([[(10, 6)], [(19, 6)]], True, loose=5)
    assert reach == Reach(prompt=19, by_prompts=10, surely=11, at_most=16)
    assert bounds([[reach]], 4) == [Bounds(least=1, due=3, without_answers=3, without_prompts=5)]


def _chat(*turns: tuple[list[int], list[int] | None]) -> tuple[list[list[Ids]], list[list[tuple[int, int]]]]:
    """A conversation of these (prompt, answer); an answer of None has 6 tokens."""
    ids = [[Ids(tuple(prompt), None if answer is None else tuple(answer))] for prompt, answer in turns]
    return ids, [[(len(prompt), 6 if answer is None else len(answer))] for prompt, answer in turns]


FIRST, ANSWER, MORE = list(range(10)), list(range(50, 56)), [90, 91, 92]


def test_by_ids_a_plain_chat_reaches_as_far_as_by_sizes() -> None:
    for overlapped in (True, False):
        for loose in (0, 5):
            chat, sizes = _chat((FIRST, ANSWER), ([*FIRST, *ANSWER, *MORE], ANSWER))
            assert reach_by_ids(chat, sizes, overlapped, loose) == reach_by_sizes(sizes, overlapped, loose)


def test_a_rewritten_answer_is_reached_until_it_differs() -> None:
    chat, sizes = _chat((FIRST, ANSWER), ([*FIRST, *ANSWER[:2], 70, *MORE], ANSWER))
    assert reach_by_ids(chat, sizes, True)[1] == [Reach(prompt=16, by_prompts=10, surely=12, at_most=12)]


def test_a_rewritten_prompt_is_no_more_reached_by_prompts() -> None:
    chat, sizes = _chat((FIRST, ANSWER), ([*FIRST[:7], 70, *ANSWER, *MORE], ANSWER))
    assert reach_by_ids(chat, sizes, True)[1] == [Reach(prompt=17, by_prompts=7, surely=7, at_most=7)]


def test_an_answer_of_unknown_ids_may_be_reached_and_is_not_due() -> None:
    chat, sizes = _chat((FIRST, None), ([*FIRST, *ANSWER, *MORE], ANSWER))
    assert reach_by_ids(chat, sizes, True)[1] == [Reach(prompt=19, by_prompts=10, surely=10, at_most=16)]


def test_a_guessed_answer_may_be_another() -> None:
    """As where a tokenizer leaves out the space before the first word: the count alone cannot show it."""
    chat, sizes = _chat((FIRST, [70, *ANSWER[1:]]), ([*FIRST, *ANSWER, *MORE], ANSWER))
    assert reach_by_ids(chat, sizes, True)[1] == [Reach(prompt=19, by_prompts=10, surely=10, at_most=10)]
    guessed = [[Ids(ids.prompt, ids.answer, guessed=True) for ids in turn] for turn in chat]
    assert reach_by_ids(guessed, sizes, True)[1] == [Reach(prompt=19, by_prompts=10, surely=10, at_most=16)]


def test_an_older_turn_may_be_the_longest_that_is_there() -> None:
    """A template that drops the last answer but one: the turn before is of no more use than the first."""
    chat, sizes = _chat((FIRST, ANSWER), ([70, *MORE], ANSWER), ([*FIRST, *ANSWER, 1], ANSWER))
    assert reach_by_ids(chat, sizes, True)[2] == [Reach(prompt=17, by_prompts=10, surely=16, at_most=16)]
