"""What README and docs publish is what the recorded runs say, and nothing else."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import published
import pytest
from bench_documents import a_document

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools.bench import record as records_of
from sglang_pd_radix.tools.bench import report

ROOT = Path(__file__).parents[4]
RUNS = ROOT / "benchmark" / "runs"
spec = importlib.util.spec_from_file_location("figures", ROOT / "benchmark" / "figures.py")
figures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(figures)


def a_run(side, number, turn, requests_per_s, different=0, **more):
    made = {f.key: 1.0 for f in report.FIGURES} | {"requests_per_s": requests_per_s, **more}
    return {
        "variant": side,
        "number": number,
        "turn": turn,
        "different_answers": different,
        "answers_sha256": "0",
        "figures": made,
    }


def a_record(*ratios, dtype="torch.float32", key="a", sides=("on",), **more):
    """Pairs in which on over off of requests/s is as given; off has 10, 20, ... of them, so no median is another's."""
    runs = []
    for number, ratio in enumerate(ratios, 1):
        off = 10.0 * number
        runs.append(a_run("off", number, 1 if number % 2 else 2, off, itl_mean_s=0.010))
        runs += [a_run(s, number, 2 if number % 2 else 1, off * ratio, itl_mean_s=0.02 * number) for s in sides]
    entry = {"key": key, "title": "a title", "requests": 50, "variants": ["off", *sides], "differences": []}
    setting = {"dtype": dtype, "date": "a date", "machine": "2 cores", "command": "pd-radix bench --only a"}
    return {"setting": setting, "workloads": [{**entry, "runs": runs, **more}]}


def all_records(**changed):
    demo = {"setting": {"command": "make demo"}, "workload": {"clients": 4, "turns": 5}, "identical": True}
    demo |= {"sent_bytes": {"off": 371 * 2**20, "on": 84 * 2**20}, "least_bytes": 84 * 2**20}
    records = {row.record: a_record(2.0, 3.0, key=row.key, sides=("on", "shared")) for row in published.ROWS}
    return records | {"demo": demo} | changed


# ---- the documents ----


@pytest.mark.parametrize("path", figures.FILES, ids=lambda path: path.name)
def test_the_figures_are_those_of_the_recorded_runs(path):
    """Written by `python benchmark/figures.py`."""
    text, records = path.read_text(), published.load(RUNS)
    for name, make in figures.FILES[path].items():
        assert published.replaced(text, name, make(records)) == text


def test_records_name_no_place_and_are_small():
    for path in RUNS.glob("*.json"):
        text = path.read_text()
        assert not re.search(r"(?<![\w.])/(home|work|tmp|root|data|usr|mnt|opt)\b", text), path.name
        assert len(text) < 64 * 1024
        assert records_of.as_text(json.loads(text)) == text, "written by figures.py"


# ---- how they are made ----


def test_a_row_is_one_pair_and_its_worst():
    record = a_record(3.0, 2.0, 4.0, 1.5)
    found = published.pairs(record["workloads"][0], "on")
    assert [published.over(pair, "requests_per_s") for pair in found] == [3.0, 2.0, 4.0, 1.5]
    off, on = published.median_pair(found)  # of 1.5, 2, 3 and 4 the lower of the middle two
    assert (off["number"], on["number"]) == (2, 2)
    cells = published.readme_row({"a": record}, published.Row("a", "a", "on", "what"))
    assert cells[0] == "what" and cells[1] == "20.0 → 40.0: **2.00 x (1.50)**"
    assert cells[3] == "10.0 → 40.0: 4.00 x (8.00)", "ITL of the same pair, and the worst of all"
    assert len(cells) == len(published.HEADING)


@pytest.mark.parametrize(
    ("name", "make"),
    [("g", published.benchmarks), ("demo", published.readme), ("chat-6", published.readme_chat)],
)
def test_a_row_without_its_record_is_an_error(name, make):
    records = all_records()
    records.pop(name, None)
    with pytest.raises(PdRadixError, match=rf"there is no record {name}\.json"):
        make(records)


def test_what_became_of_the_answers_is_said():
    records = all_records()
    exact = len({row.record for row in published.ROWS})
    assert f"All {exact * 6 * 50:,} answers of the runs in float32 are the same." in published.benchmarks(records)
    records["h100"]["setting"]["dtype"] = "torch.bfloat16"
    assert f"All {(exact - 1) * 6 * 50:,} answers" in published.benchmarks(records)
    (entry,) = records["g"]["workloads"]
    entry["runs"][1]["different_answers"] = 1
    note = {"request": 1, "prompt_tokens": 9, "first": ["off", 1], "seen": [["on", 1]], "token": 4}
    entry["differences"] = [{**note, "asked_again": {"on": {"token": 1, "logprobs": [-2.0, -2.000004]}}}]
    said = published.benchmarks(records)
    assert f"answers in float32, {(exact - 1) * 6 * 50 - 1:,} are those" in said and "at most 4e-06 nats apart" in said
    entry["differences"] = [{**note, "asked_again": {"on": {"token": 1, "logprobs": [-2.0, -2.3]}}}]
    assert "rounding does not explain all of the others" in published.benchmarks(records)


def test_a_record_has_the_figures_and_not_the_rest(tmp_path):
    document = a_document()
    document["setting"]["command"] = "pd-radix bench --only a --work-dir r --runs 2 --work-dir=r"
    record = records_of.compact(document)
    assert record["setting"]["command"] == "pd-radix bench --only a --runs 2"
    (entry,) = record["workloads"]
    assert [run["turn"] for run in entry["runs"]] == [1, 2, 2, 1]
    assert "rounds" not in json.dumps(record) and entry["runs"][1]["figures"]["sent_over_least"] == 1.0
    path = records_of.write(document, tmp_path)
    assert json.loads(path.read_text()) == record
    lines = [line for line in path.read_text().splitlines() if '"variant":' in line]
    assert len(lines) == len(entry["runs"]), "a line for each run"


def test_only_what_is_between_the_marks_is_made_anew():
    mark, end = published._MARK.format("runs"), published._END.format("runs")
    text = f"before\n{mark}\nold\n{end}\nafter\n"
    made = published.replaced(text, "runs", "new")
    assert made == f"before\n{mark}\n\nnew\n\n{end}\nafter\n" and published.replaced(made, "runs", "new") == made
    with pytest.raises(PdRadixError, match="between which the figures belong"):
        published.replaced("nothing", "runs", "new")


def test_every_picture_is_made_of_records_and_shown():
    drawn = published.charts(published.load(RUNS))
    assert {f"{name}.svg" for name in drawn} == {path.name for path in figures.PICTURES.iterdir()}
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")))
    for name, chart in drawn.items():
        assert f"report/{name}.svg)" in pages
        assert all(word in chart.note for word in ("4 clients, 6 turns", "make-model", "2 cores", "n = 10 runs"))
        texts = re.findall(r">([^<>]+)</text>", (figures.PICTURES / f"{name}.svg").read_text(encoding="utf-8"))
        assert {chart.title, *(line.name for line in chart.lines)} <= {*texts}


def test_a_record_is_taken(tmp_path, monkeypatch):
    document = a_document()
    (tmp_path / "a").mkdir()
    records_of.write(document, tmp_path / "a")
    docs = tmp_path / "docs"
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "RUNS", docs.parent / "benchmark" / "runs")
    figures.take(f"a={tmp_path / 'a'}")
    assert published.load(docs.parent / "benchmark" / "runs") == {"a": records_of.compact(document)}
    demo = {
        "setting": {"backend": "nixl", "engine_options": ["/tmp/x"], "seconds": 1},
        "runs": {name: {"totals": {"sent_bytes": 5}} for name in ("off", "on")},
        "workload": {},
        "least_bytes": 5,
        "identical": True,
    }
    (tmp_path / "demo.json").write_text(json.dumps(demo))
    figures.take(f"demo={tmp_path / 'demo.json'}")
    record = published.load(docs.parent / "benchmark" / "runs")["demo"]
    assert record["sent_bytes"] == {"off": 5, "on": 5} and record["setting"] == {
        "command": "make demo",
        "backend": "nixl",
    }
    for bad in ("a", f"a={tmp_path / 'none'}"):
        with pytest.raises(PdRadixError, match=f"--take {re.escape(bad)}"):
            figures.take(bad)
