"""What README and docs name is there: links, anchors, options, variables, metrics. Commands: test_doc_commands."""

from __future__ import annotations

import argparse
import ast
import http.server
import importlib.util
import json
import re
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

import pytest
from code_texts import texts

from sglang_pd_radix.patching import registry, syntax
from sglang_pd_radix.tools import reference
from sglang_pd_radix.tools.cli import COMMANDS

ROOT = Path(__file__).parents[4]
DOCS = ROOT / "docs"
#: A record says what was run when it was run; of those only the links have to hold.
RECORDS = [DOCS / "evidence.md", ROOT / "benchmark" / "runs" / "README.md"]
AT_THE_TOP = [ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")]
EXTRAS = sorted(ROOT.glob("python/extras/*/README.md"))
GUIDES = [*AT_THE_TOP, *sorted({*DOCS.rglob("*.md")} - {*RECORDS}), *EXTRAS]
#: What an operator reads.
OPERATORS = [
    DOCS / f"{name}.md" for name in "quick-start deploy tuning observe upgrade security troubleshooting".split()
]
PAGES = [*GUIDES, *RECORDS]
ENGINE = Path(importlib.util.find_spec("sglang").origin).parent
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_every_row_of_the_register_says_until_when():
    """By its file's `Upstream:` line, or its own: the number of a change of the engine, or that none is known."""
    silent = {row.file for row in registry.replacements() if not re.search(r"#\d+|\bnone\b", row.upstream)}
    assert not silent, f"no `Upstream:` line with a number, or with none: {sorted(silent)}"


# ---- README ----


README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_is_short():
    words = [word for word in README.split() if re.search(r"\w", word)]
    assert len(words) <= 700, f"README has {len(words)} words"


def test_readme_says_how_large_the_patch_is():
    trees = [ROOT / "python" / "sglang", *ROOT.glob("python/extras/*/sglang")]
    lines = sum(len(path.read_text().splitlines()) for tree in trees for path in tree.rglob("*.py"))
    said = int(re.search(r"([\d,]+) lines in `python/sglang` and", README)[1].replace(",", ""))
    assert abs(lines - said) <= 500, f"{lines} lines"


class Chat(http.server.BaseHTTPRequestHandler):
    """Answers as a gateway does, with nothing cached at first."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions" and asked["model"] == "m"
        before = len(asked["messages"]) - 1
        usage = {
            "prompt_tokens": 10 * (before + 1),
            "prompt_tokens_details": {"cached_tokens": before} if before else None,
        }
        answer = {"choices": [{"message": {"role": "assistant", "content": "a"}}], "usage": usage}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass


def test_the_chat_of_the_quick_start_shows_what_is_cached(tmp_path):
    (script,) = re.findall(r"^```python\n(.*?)^```", (DOCS / "quick-start.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "chat.py").write_text(script)
    with http.server.HTTPServer(("127.0.0.1", 0), Chat) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        command = [sys.executable, "-I", str(tmp_path / "chat.py"), url, "m"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        server.shutdown()
    assert re.findall(r"cached (\d+)", shown) == ["0", "2", "4"]


def test_the_entry_of_the_next_release_is_short():
    entry = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n## ")[2].partition("\n###")[0]
    assert 5 < len(entry.splitlines()) <= 25


# ---- links ----


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    found: dict[str, int] = {}
    slugs = set()
    for heading in re.findall(r"^#{1,6} (.+)$", FENCE.sub("", text), re.MULTILINE):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip())
        slug = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")
        number = found[slug] = found.get(slug, -1) + 1
        slugs.add(f"{slug}-{number}" if number else slug)
    return slugs


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_link_leads_somewhere(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            wrong.append(f"{target}: no such file")
        elif anchor and (file.suffix != ".md" or anchor not in anchors(file.read_text(encoding="utf-8"))):
            wrong.append(f"{target}: no such heading")
    assert not wrong, "\n".join(wrong)


def test_every_page_can_be_reached():
    """From README, by links."""
    seen, left = set(), [ROOT / "README.md", *EXTRAS]
    while left:
        page = left.pop()
        if page in seen or page.suffix != ".md" or not page.is_file():
            continue
        seen.add(page)
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:", target):
                left.append((page.parent / target).resolve())
    assert {*PAGES} <= seen, [_name(page) for page in {*PAGES} - seen]


# ---- what is named in code ----


def code(page: Path) -> str:
    """What stands in backticks, fences and indented blocks of a page, a piece a line."""
    text = page.read_text(encoding="utf-8")
    fences = FENCE.findall(text)
    text = FENCE.sub("", text)
    blocks = re.findall(r"^    .*$", text, re.MULTILINE)
    return "\n".join([*fences, *blocks, *re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", text)])


@cache
def known_options() -> frozenset[str]:
    """Options of the engine's workers, the routers, `pd-radix`, and the scripts of this repository."""
    from sglang.srt.server_args import ServerArgs
    from sglang_router.router_args import RouterArgs

    parsers = [argparse.ArgumentParser(add_help=False) for _ in range(2)]
    ServerArgs.add_cli_args(parsers[0])
    RouterArgs.add_cli_args(parsers[1], use_router_prefix=False)
    found = {name for parser in parsers for action in parser._actions for name in action.option_strings}
    for command in COMMANDS:
        found |= reference.option_names(command)
    for path in [*ROOT.glob("benchmark/**/*.py"), *ROOT.glob("test/srt/*.py")]:
        for node in ast.walk(syntax.parse(path.read_text(encoding="utf-8"), path)):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("add_argument", "add_parser"):
                found |= {a.value for a in node.args if isinstance(a, ast.Constant) and str(a.value).startswith("--")}
    # What `pd-radix up` gives the routers, which of smg is all that Python knows of its options.
    gateways = ROOT / "python" / "sglang_pd_radix" / "tools" / "cluster" / "gateway.py"
    return frozenset(found | {text for text in texts(gateways) if text.startswith("--")})


#: Options of programs that are neither ours nor the engine's: Docker, kubectl, PegaFlow's server, ss, pip, openssl.
FOREIGN = {
    "--device",
    "--ulimit",
    "--addr",
    "--http-addr",
    "--devices",
    "--pool-size",
    "--use-hugepages",
    "--ssd-cache-path",
    "--language-only",
    "--pd-disaggregation",
    "--request-timeout-secs",
    "--help",
    "--target",
    "--from-file",
}


@pytest.mark.parametrize("page", GUIDES, ids=_name)
def test_every_option_is_one(page):
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", code(page)))
    unknown = named - known_options() - FOREIGN
    assert not unknown, f"nobody has the options {sorted(unknown)}"


@cache
def names() -> frozenset[str]:
    """Variables and metrics of this package, and of the engine's source."""
    found = {v.name for v in reference.VARIABLES} | {name for name, *_ in reference.metrics()}
    for path in ENGINE.rglob("*.py"):
        found.update(re.findall(r"SGLANG_[A-Z0-9_]+|sglang:\w+", path.read_text(encoding="utf-8")))
    return frozenset(found)


@pytest.mark.parametrize("page", GUIDES, ids=_name)
def test_every_variable_and_metric_is_one(page):
    named = set(re.findall(r"SGLANG_[A-Z0-9_]+[A-Z0-9]|sglang:[a-z_]+[a-z]", page.read_text(encoding="utf-8")))
    assert named <= names(), f"nobody has {sorted(named - names())}"


#: Where a path that is named may begin.
BEGINNINGS = (
    "",
    "python",
    "python/sglang",
    "python/sglang/srt",
    "python/sglang/srt/disaggregation",
    "python/sglang_pd_radix",
    "test/srt",
    "test/srt/core",
    "benchmark",
    "docs",
)
SUFFIXES = "py|md|json|svg|toml|txt|pth"


@cache
def file_names() -> frozenset[str]:
    folders = ("python", "test", "benchmark", "docs")
    return frozenset(path.name for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())


@pytest.mark.parametrize("page", GUIDES, ids=_name)
def test_every_file_is_there(page):
    named = set(re.findall(rf"(?<![\w./-])[\w][\w./-]*\.(?:{SUFFIXES})(?![\w/])", code(page)))
    missing = []
    for name in named:
        if "/" not in name and (name in file_names() or name in MADE):
            continue
        if not any((ROOT / start / name).exists() for start in BEGINNINGS) and name not in MADE:
            missing.append(name)
    assert not missing, f"no such files: {sorted(missing)}"


#: Files that commands write, or that stand for a new one.
MADE = {"report.json", "record.json", "wire.py", "conn.py", "chat.py"}


#: Pages that other files name, so that one who moves a page finds who has to know.
@pytest.mark.parametrize("folder", ["python", "benchmark", "test"])
def test_pages_named_in_code_are_there(folder):
    missing = []
    for path in [*(ROOT / folder).rglob("*.py"), ROOT / "Makefile", ROOT / "pyproject.toml"]:
        for name in re.findall(r"\bdocs/[\w./-]+\.(?:md|svg)", path.read_text(encoding="utf-8")):
            if not (ROOT / name).exists():
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert not missing, "\n".join(missing)


def words(page: Path) -> int:
    return len(page.read_text(encoding="utf-8").split())


def test_an_operator_can_read_all_of_it():
    assert sum(map(words, [*OPERATORS, ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md"])) <= 11_000


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_a_long_page_begins_with_its_contents(page):
    text = page.read_text(encoding="utf-8")
    if len(text.splitlines()) > 150:
        beginning = text.partition("\n## ")[0]
        linked = set(re.findall(r"\]\(#([\w-]+)\)", beginning))
        headings = re.findall(r"^(## .+)$", FENCE.sub("", text), re.MULTILINE)
        missing = [heading for heading in headings if not anchors(heading) <= linked]
        assert not missing


def prose(page: Path) -> int:
    """Words of a page that are more than marks of a table."""
    return sum(bool(re.search(r"[^\W_]", word)) for word in page.read_text(encoding="utf-8").split())


def test_docs_can_be_read():
    """What was measured is in git history. The reference is generated, and looked up."""
    pages = {*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("python/extras/**/README.md")} - {
        DOCS / "reference.md"
    }
    assert sum(map(prose, pages)) <= 35_000


def test_decisions_and_protocol_end():
    for page in [*(DOCS / "decisions").glob("*.md"), DOCS / "protocol.md"]:
        assert prose(page) <= (2500 if page.name == "protocol.md" else 300), page.name


@pytest.mark.parametrize("page", EXTRAS, ids=_name)
def test_the_page_of_an_extra_is_short(page):
    text = page.read_text(encoding="utf-8")
    assert len(text.split()) <= 300
    assert all(f"\n## {heading}\n" in text for heading in ("When to use it", "Options", "Limits"))
