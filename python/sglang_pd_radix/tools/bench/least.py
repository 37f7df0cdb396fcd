"""Lower bounds of what any cache has to send and hold: figures of the workload, not of a system.

**Sent.** Decode is assumed to keep everything it ever had, in whole pages, and to know it at once. Of a prompt of P
tokens with the first H full pages held, ceil(P / page) - H pages have to be sent: a partial page cannot be shared.
After an answer of A tokens decode holds KV of P + A - 1 tokens, as the last token is not fed back, or of P + A with
overlapped steps.

**Held.** While requests are being answered, decode has to hold all tokens of their prompts and of their answers so far,
with each shared page counted once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def kept_of_answer(answer: int, overlapped: bool) -> int:
    """Tokens of an ended answer whose KV decode has.

    The last token is not fed back, unless steps overlap: then the next step is launched before the end is known. An
    answer of one token comes from prefill, without a step.
    """
    return answer if overlapped and answer > 1 else answer - 1


class PageIndex:
    """Numbers pages by their content and all before it: prompts share a page if they share its number."""

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
    """A decode worker that keeps everything.

    overlapped: whether its steps overlap.
    """

    def __init__(self, index: PageIndex, overlapped: bool = True) -> None:
        self._index, self._overlapped = index, overlapped
        self._held: set[int] = set()

    def send(self, prompt: Sequence[int]) -> int:
        """Pages of ``prompt`` (token ids) to send now; its full pages are held from here on."""
        lacking = 0
        for page in self._index.pages(prompt):
            lacking += page not in self._held
            self._held.add(page)
        return lacking + (len(prompt) % self._index.page_size > 0)

    def answered(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """It keeps the KV of ``answer`` (token ids) to ``prompt``."""
        self._held.update(self._index.pages([*prompt, *answer[: kept_of_answer(len(answer), self._overlapped)]]))


def pages_of(prompts: Iterable[Sequence[int]], page_size: int) -> int:
    """Pages of all ``prompts`` (token ids): what is sent if decode keeps nothing."""
    return sum(-(-len(prompt) // page_size) for prompt in prompts)


def tokens_to_hold(requests: Iterable[tuple[Sequence[int], int, int]], page_size: int) -> int:
    """Tokens that decode has to hold for requests in progress.

    requests: for each, numbers of the prompt's full pages, its tokens, and tokens of the answer so far. Shared pages
    count once; the prompt's partial last page and the answer are private.
    """
    shared: set[int] = set()
    own = 0
    for pages, prompt, answer in requests:
        shared.update(pages)
        own += prompt - page_size * len(pages) + answer
    return page_size * len(shared) + own
