"""Each alarm fires when it should and not otherwise, by promtool, and docs/observe.md says what to do."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from sglang_pd_radix.tools import cli
from sglang_pd_radix.tools.dashboard import RULES, SCRAPE

CASES = Path(__file__).parent / "alarms" / "cases.yml"
PAGE = (Path(__file__).parents[4] / "docs" / "observe.md").read_text(encoding="utf-8")
ALARMS = {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool: apt-get install prometheus")


def promtool(folder: Path, *command: str) -> subprocess.CompletedProcess:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *command], cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.fixture
def folder(tmp_path):
    for file in (RULES, SCRAPE, CASES):
        shutil.copy(file, tmp_path)
    return tmp_path


@needs_promtool
def test_the_rules_can_be_read(folder):
    done = promtool(folder, "check", "rules", RULES.name)
    assert done.returncode == 0 and f"{len(ALARMS)} rules found" in done.stdout, done.stdout + done.stderr


@needs_promtool
def test_the_configuration_can_be_read(folder):
    done = promtool(folder, "check", "config", SCRAPE.name)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_each_fires_when_it_should(folder):
    done = promtool(folder, "test", "rules", CASES.name)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize(("written", "spoilt"), [(" > 0", " > 100000"), (" > 0", " >= 0"), ("for: 2m", "for: 0m")])
def test_a_spoilt_rule_is_found(folder, written, spoilt):
    text = RULES.read_text(encoding="utf-8")
    assert written in text
    (folder / RULES.name).write_text(text.replace(written, spoilt), encoding="utf-8")
    assert promtool(folder, "test", "rules", CASES.name).returncode != 0


@pytest.mark.parametrize("alarm", ALARMS)
def test_each_has_a_case_in_which_it_fires(alarm):
    cases = [case for test in yaml.safe_load(CASES.read_text())["tests"] for case in test["alert_rule_test"]]
    assert any(case.get("exp_alerts") for case in cases if case["alertname"] == alarm)


def sections() -> dict[str, str]:
    """The sections on alarms, by the alarm."""
    found = re.findall(r"^### (PdRadix\w+)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return dict(found)


def test_each_has_its_section():
    assert [*sections()] == [*ALARMS]
    for alarm, text in sections().items():
        for part in ("**Means.**", "**Look at.**", "**Do.**"):
            assert part in text, f"{alarm}: {part}"
        rule = ALARMS[alarm]
        assert rule["annotations"]["runbook_url"] == f"docs/observe.md#{alarm.lower()}"
        assert rule["labels"]["severity"] in ("page", "warn", "info") and rule["annotations"]["summary"]


def test_runbooks_lead_where_the_operator_keeps_the_docs(capsys):
    assert cli.main(["dashboard", "--alarms", "--docs-url", "https://example.org/docs/"]) == 0
    rules = yaml.safe_load(capsys.readouterr().out)["groups"][0]["rules"]
    pages = {rule["annotations"]["runbook_url"].partition("#")[0] for rule in rules}
    assert pages == {"https://example.org/docs/observe.md"}
