"""What any cache would have to send and to hold for a workload: figures of the workload, not of a system.

**Sent.** Decode keeps everything it has ever had, in whole pages, and knows it at once. Of a prompt of P tokens of
which it holds the first H full pages, ceil(P / page) - H pages have to be sent: a page that the prompt fills in part
cannot be shared, so it is sent each time. After an answer of A tokens it holds the KV of P + A - 1 tokens, as the last
token of an answer is not fed back, or of P + A where the worker overlaps its steps.

**Held.** While some requests are being answered, decode has to hold every token of their prompts and of their answers
so far, but each page that several prompts have in common only once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def kept_of_answer(answer: int, overlapped: bool) -> int:
    """Of how many tokens of an answer decode has the KV when it has ended.

    The last token is never fed back, unless the worker overlaps its steps: then the next one has been launched before
    the answer is seen to have ended. An answer of one token, which prefill makes, takes no step.
    """
    return answer if overlapped and answer > 1 else answer - 1


class PageIndex:
    """Numbers for pages, by their content and all that is before it: prompts share a page if they share its number."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}

    def pages(self, ids: Sequence[int]) -> list[int]:
        """The numbers of the full pages of ``ids``, in order."""
        page, found, before = self.page_size, [], -1
        for start in range(0, len(ids) - page + 1, page):
            key = (before, tuple(ids[start : start + page]))
            before = self._numbers.setdefault(key, len(self._numbers))
            found.append(before)
        return found


class Keeper:
    """A decode worker that forgets nothing. `send` says how many pages it lacks of a prompt.

    overlapped: whether it overlaps its steps.
    """

    def __init__(self, index: PageIndex, overlapped: bool = True) -> None:
        self._index, self._overlapped = index, overlapped
        self._held: set[int] = set()

    def send(self, prompt: Sequence[int]) -> int:
        """Pages of ``prompt`` (token ids) that have to be sent now; it holds the full ones from here on."""
        lacking = 0
        for page in self._index.pages(prompt):
            lacking += page not in self._held
            self._held.add(page)
        return lacking + (len(prompt) % self._index.page_size > 0)

    def answered(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """It has made ``answer`` (token ids) to ``prompt``, and keeps its KV."""
        self._held.update(self._index.pages([*prompt, *answer[: kept_of_answer(len(answer), self._overlapped)]]))


def pages_of(prompts: Iterable[Sequence[int]], page_size: int) -> int:
    """Pages of all ``prompts`` (token ids): what crosses when decode keeps nothing."""
    return sum(-(-len(prompt) // page_size) for prompt in prompts)


def tokens_to_hold(requests: Iterable[tuple[Sequence[int], int, int]], page_size: int) -> int:
    """Tokens that decode has to hold for requests that are being answered at one moment.

    requests: (numbers of the full pages of the prompt, its tokens, tokens of the answer so far) of each. Shared pages
    count once; the rest of a prompt behind its last full page and the answer are each request's own.
    """
    shared: set[int] = set()
    own = 0
    for pages, prompt, answer in requests:
        shared.update(pages)
        own += prompt - page_size * len(pages) + answer
    return page_size * len(shared) + own
