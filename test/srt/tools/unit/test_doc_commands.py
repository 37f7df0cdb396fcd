"""Commands on the pages: a test runs each, or it is marked as not run; parsers of the programs take their options."""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from test_docs import FENCE, GUIDES, ROOT, _name

from sglang_pd_radix.tools.cli import COMMANDS, build_parser

#: Generated: what its commands are is what the parsers say.
PAGES = [page for page in GUIDES if page.name != "reference.md"]
PROGRAMS = "pd-radix|python|make|pip|smg|curl|pytest|kubectl|find|mooncake_master|pegaflow-server"
SETTINGS = re.compile(r"(?:[A-Z_]+=\S+ )+")
INLINE = re.compile(rf"`((?:[A-Z_]+=\S+ )*(?:{PROGRAMS})(?: [^`]+))`(\s\(not run\))?")
#: How a command begins, or an option in it; the file that runs it, wherever it lies, and a part of that file.
RUN_BY = (
    ("make setup", "run", "make test"),
    ("make test", "run", "make test"),
    ("make demo", "test_readme.py", '["demo"'),
    ("make chaos", "test_chaos_run.py", "chaos"),
    ("pip install .", "test_packaging.py", '"install"'),
    ("pip install -e", "test_packaging.py", '"install"'),
    ("pip uninstall", "test_packaging.py", '"uninstall"'),
    ("pd-radix bench", "test_readme.py", "(bench .*)"),
    ("pd-radix dashboard", "test_dashboard.py", '"dashboard"'),
    ("pd-radix demo", "test_readme.py", '["demo"'),
    ("pd-radix doctor", "test_doctor.py", '"doctor"'),
    ("pd-radix drain", "test_drain_command.py", '"drain"'),
    ("pd-radix join", "rolling.py", '"join"'),
    ("pd-radix make-model", "test_up.py", '"make-model"'),
    ("pd-radix patches", "test_registry.py", '"patches"'),
    ("pd-radix reference", "test_reference.py", "as_markdown()"),
    ("pd-radix top", "test_operate.py", "top"),
    ("pd-radix trace", "test_sigterm_under_load.py", '"trace"'),
    ("pd-radix up", "test_up_command.py", '"up"'),
    ("pd-radix verify", "test_verify_command.py", '"verify"'),
    ("--kv-events-config", "test_kv_events.py", "kv"),
    ("--hicache-storage-backend", "test_host_tier.py", "--hicache-storage-backend"),
    ("--enable-hierarchical-cache", "test_host_tier.py", "--enable-hierarchical-cache"),
    ("--enable-pegaflow", "test_pegaflow_servers.py", "--enable-pegaflow"),
    ("--speculative-algorithm EAGLE3", "test_speculative_pairs.py", "EAGLE3"),
    ("--mamba-scheduler-strategy", "test_hybrid.py", "--mamba-scheduler-strategy"),
    ("python -m sglang.launch_server", "test_oracle.py", "oracle"),
    ("python -m smg launch", "rolling.py", "gateway"),
    ("smg launch", "rolling.py", "gateway"),
    ("curl -X POST http://10.0.0.3:30002/workers", "rolling.py", "/workers"),
    ("kubectl kustomize", "test_deploy_files.py", '"kustomize"'),
    ("pegaflow-server", "host_server.py", "pegaflow-server"),
    ("python -m sglang_router.launch_router", "test_up.py", "sglang-router"),
    ("mooncake_master", "mooncake_master.py", "mooncake_master"),
    ("python chat.py", "test_docs.py", "chat.py"),
    ("python benchmark/admission.py", "test_followers.py", "import admission"),
    ("python benchmark/decode_attention.py", "test_triton_shared_attention.py", "import decode_attention"),
    ("python benchmark/figures.py", "test_published.py", "figures.py"),
    ("python benchmark/modules.py", "test_modules.py", "import modules"),
    ("python benchmark/simulate.py", "test_simulate.py", "simulate"),
    ("python benchmark/step_costs.py", "test_step_costs.py", "step_costs"),
)


@dataclass(frozen=True)
class Command:
    """``complete``: in a block, to be copied; of a span in a sentence something may be left out."""

    text: str
    marked: bool
    complete: bool

    @property
    def bare(self) -> str:
        """Without variables before it."""
        return re.sub(rf"^{SETTINGS.pattern}", "", f"{self.text} ").strip()

    @property
    def words(self) -> list[str]:
        return [word for word in shlex.split(self.bare.partition(" > ")[0]) if word != "..."]


@cache
def commands(page: Path) -> list[Command]:
    """Lines of indented blocks, and spans of code that begin with a program."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found = []
    for line in "\n".join(re.findall(r"^ {4,}(\S.*)$", text, re.MULTILINE)).replace("\\\n", " ").splitlines():
        command, _, comment = f" {line}".partition(" #")
        if command.strip():
            found.append(Command(" ".join(command.split()), "not run" in comment, complete=True))
    for command, marked in INLINE.findall(re.sub(r"^    .*$", "", text, flags=re.MULTILINE)):
        found.append(Command(" ".join(command.split()), bool(marked), complete=False))
    return found


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_a_test_runs_each_command_or_it_is_marked(page):
    """CONTRIBUTING.md has the mark."""
    for command in commands(page):
        run = any(command.bare.startswith(of) or (of.startswith("--") and of in command.text) for of, *_ in RUN_BY)
        named = not command.bare or command.text == "pip install" or "sglang-pd-radix[" in command.text
        assert run or command.marked or named, f"nobody runs `{command.text}`, and it is not marked"
        assert not (run and command.marked), f"`{command.text}` is marked as not run, and a test runs it"
    kinds = {fence.partition("\n")[0] for fence in FENCE.findall(page.read_text(encoding="utf-8"))}
    assert kinds <= {"```", "```text", "```python", "```mermaid"}, "commands are in indented blocks"


def test_what_runs_them_is_there():
    folders = ("test", "python/extras", ".ci")
    files = {path.name: path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()}
    for command, file, part in RUN_BY:
        assert file in files, f"{file}, which runs {command}, is not there"
        assert part in files[file].read_text(encoding="utf-8"), f"{file} does not run {command}"
    used = [command.text for page in PAGES for command in commands(page)]
    assert all(any(of in text for text in used) for of, *_ in RUN_BY)
    assert len(used) > 100


def test_parts_of_the_package_that_pages_install_are_there():
    known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    named = [re.findall(r"sglang-pd-radix\[(\w+)\]", page.read_text(encoding="utf-8")) for page in PAGES]
    assert {*sum(named, [])} <= {*known}


# ---- options ----


@cache
def worker() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return parser


@cache
def gateway() -> argparse.ArgumentParser:
    from smg.router_args import RouterArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    RouterArgs.add_cli_args(parser)
    return parser


def parse_worker(words: list[str]) -> None:
    worker().parse_args(words if "--model-path" in words else ["--model-path", "m", *words])


def parse_pd_radix(name: str, *words: str, complete: bool) -> None:
    assert name in COMMANDS, "no such command"
    parser = build_parser(name)
    (group,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for action in group.choices[name]._actions if not complete else ():
        action.required = False
        if not action.option_strings:
            action.nargs = "*"
    ours, engine = [*words], []
    if "--" in ours:
        ours, engine = ours[: ours.index("--")], ours[ours.index("--") + 1 :]
    given = vars(parser.parse_args([name, *ours]))
    engine += given.get("engine_options") or []
    for key in ("on", "compare", "common_args", "prefill_args", "decode_args"):
        for text in [given[key]] if isinstance(given.get(key), str) else given.get(key) or ():
            engine += shlex.split(str(text).partition(":")[2] if key == "compare" else str(text))
    parse_worker([word for word in engine if word not in ("ENGINE", "OPTIONS") and not SETTINGS.match(f"{word} ")])


def parse(command: Command) -> None:
    """Raises, or ends, where a parser does not take it."""
    match command.words:
        case ["pd-radix", name, *rest]:
            parse_pd_radix(name, *rest, complete=command.complete)
        case ["python", "-m", "sglang.launch_server", *rest]:
            parse_worker(rest)
        case [option, *_] if option.startswith("--"):
            parse_worker(command.words)
        case ["smg", "launch", *rest] | ["python", "-m", "smg", "launch", *rest]:
            gateway().parse_args(rest)
        case ["make", *rest]:
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            for word in rest:
                name, setting, _ = word.partition("=")
                assert re.search(rf"^{name} \?=|\$\((?:strip )?{name}\)" if setting else rf"^{name}:", makefile, re.M)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_options_are_what_the_programs_take(page, capsys):
    wrong = []
    for command in commands(page):
        try:
            parse(command)
        except (Exception, SystemExit) as error:
            wrong.append(f"{command.text}: {error} {capsys.readouterr().err}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "pd-radix down",
        "pd-radix up --model m --nope",
        "pd-radix bench --only a --on '--no-such-option 1'",
        "python -m sglang.launch_server ... --disaggregation-mode nobody",
        "--hicache-rati0 4",
        "smg launch --decode-policy nothing",
        "make nothing",
    ],
)
def test_a_wrong_command_is_found(text):
    with pytest.raises((Exception, SystemExit)):
        parse(Command(text, marked=False, complete=True))
