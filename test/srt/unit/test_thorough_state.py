"""`pd-radix verify --thorough`: what is kept from run to run, by whom, and what comes with how it was started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import cli
from sglang_pd_radix.tools.doctor import Check
from sglang_pd_radix.tools.thorough import child, command, facts, report, runner
from sglang_pd_radix.tools.thorough.host import Host
from sglang_pd_radix.tools.thorough.outcome import PASSED, Outcome
from sglang_pd_radix.tools.thorough.runner import Part, Step
from sglang_pd_radix.tools.thorough.setting import Setting


def part(name: str, code: str = "") -> Part:
    steps = [Step("only", [sys.executable, "-c", code])]
    return Part(
        name, f"the part {name}", 1, 0, lambda: "", lambda directory, seconds: steps, lambda done: Outcome(PASSED)
    )


@pytest.fixture
def handlers() -> Iterator[None]:
    signums = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(signum) for signum in signums]
    yield
    for signum, handler in zip(signums, before, strict=True):
        signal.signal(signum, handler)


def thorough(monkeypatch: pytest.MonkeyPatch, file: Path, *parts: Part, more: tuple[str, ...] = ()) -> int:
    monkeypatch.setattr(command.parts, "parts", lambda setting, names: parts)
    monkeypatch.setattr(command.doctor, "diagnose", lambda: [Check("device", "ok", "CPU", "")])
    return cli.main(["verify", "--thorough", "--minutes", "1", "--report", str(file), *more])


def test_one_run_at_a_time(tmp_path, monkeypatch, handlers, capsys):
    state = tmp_path / "r.parts"
    with runner.alone(state):
        with pytest.raises(PdRadixError, match="another run is at work in .*: wait for it, or give another --report"):
            with runner.alone(state):
                pytest.fail("two are in it")
        assert thorough(monkeypatch, tmp_path / "r.md", part("one")) == 1
        assert "another run is at work" in capsys.readouterr().err and not (tmp_path / "r.md").exists()
    assert thorough(monkeypatch, tmp_path / "r.md", part("one")) == 0
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").touch()
    with runner.alone(tmp_path / "theirs"), pytest.raises(PdRadixError, match="holds other files"):
        runner.open_state(tmp_path / "theirs", {})
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == ["file"]
    (tmp_path / "file").touch()
    with pytest.raises(PdRadixError, match="give another --report"), runner.alone(tmp_path / "file"):
        pass


@pytest.mark.parametrize("kept", ["[]", "1", "{", ""])
def test_a_setting_that_no_run_has_written(kept, tmp_path):
    (tmp_path / runner.SETTING).write_text(kept)
    with pytest.raises(PdRadixError, match="remove"):
        runner.open_state(tmp_path, {"model": "m"})


def test_parts_are_of_the_same_options_and_versions(monkeypatch):
    def found_with(*options: str) -> dict:
        return command._found_with(Setting(Host(True), Path("/m"), engine_options=options))

    name = "--speculative-draft-model-path"
    first, second = found_with(name, "/data/v1/draft"), found_with(name, "/data/v2/draft")
    assert first != second and first == found_with(name, "/data/v1/draft") and "/data" not in str(first)
    assert "s3cret" not in str(found_with("--api-key", "s3cret"))
    assert found_with("--a", "b c") != found_with("--a", "b", "c")
    for versions in ({"sglang": "0.5.9"}, {"sglang": "0.5.10", "checkout": "abc"}, {"torch": "2.9"}):
        monkeypatch.setattr(facts, "versions", lambda host, router, versions=versions: versions)
        assert found_with() != first
        first = found_with()
    monkeypatch.setattr(command.host, "ask_driver", lambda *fields: [["580.1"]])
    assert found_with() != first and found_with()["driver"] == ["580.1"]


def test_parts_are_of_the_same_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SGLANG_")]:
        monkeypatch.delenv(name)

    def found_with() -> dict:
        return command._found_with(Setting(Host(True), Path("/m")))

    told = [found_with()]
    for name, value in (
        ("SGLANG_TRITON_SHARED_PREFIX_ATTENTION", "1"),
        ("SGLANG_TRITON_SHARED_PREFIX_ATTENTION", "s3cret"),
        ("CUDA_VISIBLE_DEVICES", "1,2"),
    ):
        monkeypatch.setenv(name, value)
        assert found_with() not in told and "s3cret" not in str(found_with())
        told.append(found_with())
    monkeypatch.setenv("HOME", "/elsewhere")
    assert found_with() == told[-1]


def test_parts_are_of_the_same_model(tmp_path):
    def found_with(model: str | None = None) -> dict:
        return command._found_with(Setting(Host(True), Path("/m"), model or str(tmp_path)))

    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights.write_bytes(b"1"), config.write_text("{}")
    told = [found_with()]
    assert found_with() == told[0]
    before = config.stat()
    config.write_text("[]")
    os.utime(config, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert found_with() not in told, "another config"
    told.append(found_with())
    before = weights.stat()
    weights.write_bytes(b"12")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert found_with() not in told, "more weights"
    told.append(found_with())
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert found_with() not in told, "others of the same size"
    assert found_with("org/model") == found_with("org/model")


@pytest.mark.parametrize("place", ["package", "package/supplied/cpu_host", "sglang/srt"])
def test_parts_are_of_the_same_build(tmp_path, monkeypatch, place):
    """The patch tree is beside the package where that is installed to be edited."""
    monkeypatch.setattr(facts, "_INSTALLED", tmp_path / "package")
    monkeypatch.setattr(facts.loader, "patch_root", lambda: tmp_path)
    (tmp_path / place).mkdir(parents=True)
    told = []
    for content in ("right = 1\n", "right = 2\n"):
        (tmp_path / place / "kernel.py").write_text(content)
        told.append(facts.versions(Host(True, checkout=None), None)["files of the package"])
    assert told[0] != told[1]


def test_parts_are_of_the_same_engine(tmp_path, monkeypatch):
    """One that was edited by hand has the version that it had."""
    engine = tmp_path / "sglang"
    (engine / "srt").mkdir(parents=True)
    monkeypatch.setattr(facts.loader, "engine_root", lambda: engine)
    told = []
    for content in ("right = 1\n", "right = 2\n", "right = 2\n"):
        (engine / "srt" / "decode.py").write_text(content)
        told.append(command._found_with(Setting(Host(True), Path("/m"))))
    assert told[0] != told[1] == told[2]
    (engine / "srt" / "decode.py").rename(engine / "decode.py")
    assert command._found_with(Setting(Host(True), Path("/m"))) != told[1]
    monkeypatch.setattr(facts.loader, "engine_root", lambda: None)
    assert "files of the engine" not in facts.versions(Host(True, checkout=None), None)


def test_parts_are_of_the_same_code(tmp_path, monkeypatch):
    def git(*words: str) -> None:
        named = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *named, *words], check=True, capture_output=True)

    def checkout() -> str:
        return facts.versions(Host(True, checkout=tmp_path), None)["checkout"]

    kernel, more = tmp_path / "kernel.py", tmp_path / "more.py"
    git("init")
    kernel.write_text("right = 1\n")
    git("add", ".")
    git("commit", "-m", "first")
    clean = checkout()
    assert "dirty" not in clean
    kernel.write_text("right = 2\n")
    told = [clean, checkout()]
    assert told[1].startswith(f"{clean}-dirty (changes ") and checkout() == told[1]
    for file, content in ((kernel, "right = 3\n"), (more, "x = 1\n"), (more, "x = 2\n"), (kernel, "\udcff")):
        file.write_text(content, errors="surrogateescape")
        assert checkout() not in told
        told.append(checkout())
    # What a run leaves behind, in the checkout itself.
    (tmp_path / "r.parts").mkdir()
    (tmp_path / "r.parts" / "setting.json").write_text("{}")
    assert checkout() == told[-1]
    git("checkout", "kernel.py")
    assert checkout() not in told, "a file that git does not know is code too"


@pytest.mark.parametrize("form", report.FORMS.values(), ids=report.FORMS)
def test_each_part_has_its_date(form, tmp_path):
    outcome = runner.run_part(part("one"), tmp_path / "one", 60)
    assert outcome.date[:2] == "20" and runner.earlier([part("one")], tmp_path)["one"].date == outcome.date
    page = form(report.Document("c", "now", {"one": "a part"}, {"one": Outcome(PASSED, date="of last week")}, {}, []))
    assert "of last week" in page


def test_a_signal_that_is_ignored_stays_ignored(tmp_path, monkeypatch, handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    hang_up = f"import os, signal, time; os.kill({os.getpid()}, signal.SIGHUP); time.sleep(0.5)"
    assert thorough(monkeypatch, tmp_path / "r.md", part("one", hang_up)) == 0


def test_a_command_heeds_an_interrupt_that_this_process_does_not(tmp_path, handlers):
    """As a shell starts what is in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('told')"
    ended = child.run([sys.executable, "-c", code], {}, tmp_path / "log", 2, grace_s=3)
    assert ended.stopped and ended.code == 0 and "told" in (tmp_path / "log").read_text()


def test_nobody_to_tell_is_no_reason_to_end(tmp_path, monkeypatch, handlers):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        monkeypatch.setattr(sys, "stdout", gone)
        assert thorough(monkeypatch, tmp_path / "r.md", part("one")) == 0
        monkeypatch.undo()
    assert "one: PASSED" in (tmp_path / "r.md").read_text()


def test_a_command_line_that_is_not_utf_8_is_in_the_report(tmp_path, monkeypatch, handlers):
    monkeypatch.setattr(sys, "argv", ["pd-radix", "verify", "--report", "m\udcff.md"])
    for name in ("r.md", "r.html"):
        (tmp_path / name[2:]).mkdir()
        file = tmp_path / name[2:] / name
        assert thorough(monkeypatch, file, part("one"), more=("--json", str(tmp_path / "r.json"))) == 0
        assert "m\\udcff.md" in file.read_text()


def test_one_file_is_not_both(tmp_path, monkeypatch, capsys):
    file = tmp_path / "r.md"
    assert thorough(monkeypatch, file, part("one"), more=("--json", str(file))) == 2
    assert "--json and --report are both" in capsys.readouterr().err and not file.exists()
