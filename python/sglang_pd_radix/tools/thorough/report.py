"""The report, of plain data: one file that needs nothing else, as HTML or as Markdown."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from .outcome import FAILED, PASSED, SKIPPED, UNJUDGED, Outcome, Table, overall


@dataclass(frozen=True)
class Document:
    """titles and outcomes: of each part, in the order of worth; of one that has not begun there is no outcome yet.

    facts: tables of names and values, by their heading. doctor: its lines. command: what was typed.
    """

    command: str
    date: str
    titles: Mapping[str, str]
    outcomes: Mapping[str, Outcome]
    facts: Mapping[str, Mapping[str, str]]
    doctor: Sequence[str]

    @property
    def outcome_of(self) -> dict[str, Outcome]:
        """Of every part."""
        return {name: self.outcomes.get(name) or Outcome(UNJUDGED, "not yet begun") for name in self.titles}

    @property
    def verdict(self) -> str:
        """The word over all."""
        return overall([outcome.verdict for outcome in self.outcome_of.values()])

    @property
    def summary(self) -> str:
        """The word and of how many parts, in a line."""
        verdicts = [outcome.verdict for outcome in self.outcome_of.values()]
        counted = {word: verdicts.count(word) for word in (PASSED, FAILED, UNJUDGED, SKIPPED)}
        can = len(verdicts) - counted[SKIPPED]
        told = [f"{counted[PASSED]} of the {can} parts that this host can show passed"]
        told += [f"{counted[FAILED]} failed"] * bool(counted[FAILED])
        told += [f"{counted[UNJUDGED]} could not be judged"] * bool(counted[UNJUDGED])
        told += [f"{counted[SKIPPED]} skipped"] * bool(counted[SKIPPED])
        return f"{self.verdict}: {', '.join(told)}"

    @property
    def overview(self) -> Table:
        """A row for each part."""
        rows = [
            [name, outcome.verdict, f"{outcome.seconds:.0f}" if outcome.seconds else "", outcome.why or title]
            for (name, outcome), title in zip(self.outcome_of.items(), self.titles.values(), strict=True)
        ]
        return Table("Parts", ["part", "verdict", "seconds", "what it says"], rows)


def text(document: Document) -> str:
    """For a terminal: the verdict, and a line for each part."""
    width = max(map(len, document.titles))
    rows = [
        f"  {name:<{width}}  {outcome.verdict:<10}  {outcome.why or document.titles[name]}"
        for name, outcome in document.outcome_of.items()
    ]
    return "\n".join([f"pd-radix verify --thorough: {document.summary}", *rows])


# ------------------------------------------------------------------------------------------------------------ Markdown


def _cell(value: str) -> str:
    return value.replace("|", "\\|").replace("\n", "<br>")


def _markdown_table(table: Table) -> str:
    lines = [table.heading, ["---"] * len(table.heading), *table.rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _fenced(lines: Sequence[str]) -> str:
    return "\n".join(["~~~~text", *lines, "~~~~"])


def _image(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def markdown(document: Document) -> str:
    """As Markdown; pictures are data URIs, which editors show and GitHub does not."""
    parts = [
        "# pd-radix verify --thorough",
        f"**{document.summary}**",
        f"{document.date}, `{document.command}`",
        _markdown_table(document.overview),
    ]
    for heading, facts in document.facts.items():
        parts += [f"## {heading}", _markdown_table(Table("", ["", ""], list(map(list, facts.items()))))]
    parts += ["## pd-radix doctor", _fenced(document.doctor)]
    for name, outcome in document.outcome_of.items():
        parts += [f"## {name}: {outcome.verdict}", document.titles[name] + "."]
        parts += [outcome.date] if outcome.date else []
        parts += [f"**{outcome.why}**"] if outcome.why else []
        parts += [_fenced(outcome.commands)] if outcome.commands else []
        parts += ["\n".join(f"- {line}" for line in outcome.lines)] if outcome.lines else []
        for table in outcome.tables:
            parts += [f"### {table.title}", _markdown_table(table)]
        parts += [f"![{picture.title}]({_image(picture.svg)})" for picture in outcome.pictures]
        parts += ["The end of its log:", _fenced(outcome.tail)] if outcome.tail else []
    return "\n\n".join(parts) + "\n"


# ---------------------------------------------------------------------------------------------------------------- HTML

_STYLE = """
:root{color-scheme:light dark;--line:#8884;--card:#8881}
body{font:15px/1.5 system-ui,sans-serif;max-width:1180px;margin:2rem auto;padding:0 1rem}
h1{margin-bottom:.2em}h2{margin-top:2em;border-bottom:1px solid var(--line)}
table{border-collapse:collapse;margin:1em 0;font-variant-numeric:tabular-nums;display:block;overflow-x:auto}
th,td{padding:.25em .7em;border-bottom:1px solid var(--line);text-align:right;vertical-align:top;white-space:pre-line}
th:first-child,td:first-child,.text td,.text th{text-align:left}
pre{background:var(--card);padding:.7em;overflow-x:auto;font-size:13px}
img{max-width:100%;background:#fff;border-radius:6px;margin:.3em}
.FAILED{color:#dc2626}.PASSED{color:#059669}.NOT{color:#d97706}.SKIPPED{opacity:.7}
"""
# Tables of words are read from the left.
_OF_WORDS = ("Parts", "")


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.heading)
    rows = "".join("<tr>" + "".join(f"<td>{_colored(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    kind = " class=text" if table.title in _OF_WORDS else ""
    return f"<table{kind}><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _colored(cell: str) -> str:
    if cell in (PASSED, FAILED, UNJUDGED, SKIPPED):
        return f"<b class={cell.split()[0]}>{cell}</b>"
    return escape(cell)


def html(document: Document) -> str:
    """As one page."""
    parts = [
        f"<p><b class={document.verdict.split()[0]}>{escape(document.summary)}</b></p>",
        f"<p>{escape(document.date)}</p><pre>{escape(document.command)}</pre>",
        _html_table(document.overview),
    ]
    for heading, facts in document.facts.items():
        parts += [f"<h2>{escape(heading)}</h2>", _html_table(Table("", ["", ""], list(map(list, facts.items()))))]
    parts += ["<h2>pd-radix doctor</h2>", f"<pre>{escape(chr(10).join(document.doctor))}</pre>"]
    for name, outcome in document.outcome_of.items():
        parts.append(f"<h2 id={name}>{escape(name)}: {_colored(outcome.verdict)}</h2>")
        parts.append(f"<p>{escape(document.titles[name])}.</p>")
        parts += [f"<p>{escape(outcome.date)}</p>"] if outcome.date else []
        parts += [f"<p><b>{escape(outcome.why)}</b></p>"] if outcome.why else []
        parts += [f"<pre>{escape(chr(10).join(outcome.commands))}</pre>"] if outcome.commands else []
        if outcome.lines:
            parts.append("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in outcome.lines) + "</ul>")
        for table in outcome.tables:
            parts += [f"<h3>{escape(table.title)}</h3>", _html_table(table)]
        parts += [f"<img alt='{escape(p.title, quote=True)}' src='{_image(p.svg)}'>" for p in outcome.pictures]
        if outcome.tail:
            parts.append(f"<p>The end of its log:</p><pre>{escape(chr(10).join(outcome.tail))}</pre>")
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>pd-radix verify --thorough</title><style>{_STYLE}</style>"
        f"<h1>pd-radix verify --thorough</h1>{''.join(parts)}</html>\n"
    )


#: How a report is written, by the end of its file's name.
FORMS = {".html": html, ".md": markdown}
