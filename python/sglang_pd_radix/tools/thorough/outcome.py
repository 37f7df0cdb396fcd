"""What a part comes to: plain data that goes to JSON and comes back."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

PASSED, FAILED, UNJUDGED, SKIPPED = "PASSED", "FAILED", "NOT JUDGED", "SKIPPED"


@dataclass(frozen=True)
class Table:
    """Rows of text under a heading."""

    title: str
    heading: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """An SVG file and what it shows."""

    title: str
    svg: str


@dataclass(frozen=True)
class Outcome:
    """Of one part. why: in a line; lines: what was found, in order.

    finished: nothing of it is to be done again when the command is run again. commands: what was run, as a shell has
    it. tail: the end of its log, where that says more than ``why``. seconds: that it took.
    date: when it was done.
    """

    verdict: str
    why: str = ""
    lines: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    finished: bool = True
    commands: Sequence[str] = ()
    tail: Sequence[str] = ()
    seconds: float = 0.0
    date: str = ""

    def document(self) -> dict[str, Any]:
        """Ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, document: dict[str, Any]) -> Outcome:
        """What `document` wrote."""
        tables = [Table(**table) for table in document["tables"]]
        pictures = [Picture(**picture) for picture in document["pictures"]]
        return cls(**{**document, "tables": tables, "pictures": pictures})


def overall(verdicts: Collection[str]) -> str:
    """The word over all parts. What could not be judged is not passed; what this host lacks says nothing either way."""
    if FAILED in verdicts:
        return FAILED
    return PASSED if PASSED in verdicts and UNJUDGED not in verdicts else UNJUDGED
