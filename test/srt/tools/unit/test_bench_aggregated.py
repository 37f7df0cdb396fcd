"""`pd-radix bench --aggregated`: ordinary servers as a side of their own. No server is started."""

from __future__ import annotations

import contextlib
import json
import math
from types import SimpleNamespace

import pytest
from bench_documents import a_document, run_entry
from test_goodput import SHOW, Served

from sglang_pd_radix.errors import PdRadixError
from sglang_pd_radix.tools import cli
from sglang_pd_radix.tools.bench import command, deploy, measure, report, workload
from sglang_pd_radix.tools.cluster import aggregated_on, compared_on

SIDES = (deploy.OFF, deploy.ON, deploy.AGGREGATED)


def parsed(*options):
    return cli.build_parser("bench").parse_args(["bench", *options])


def a_deployment(tmp_path, options=(), sides=SIDES):
    return deploy.Deployment("m", deploy.Shape(3000, 20, 4001), list(options), "nixl", tmp_path, sides=sides)


def value(planned, option):
    return planned.command[planned.command.index(option) + 1]


# ---- options ----


def test_it_is_the_last_side_and_only_if_asked_for():
    more = ("--only", "c,i,j", "--compare", "local:--x")
    assert [side.name for side in command.chosen_sides(parsed("--aggregated", *more))] == [
        "off",
        "on",
        "local",
        "aggregated",
    ]
    assert not any(side.aggregated for side in command.chosen_sides(parsed(*more)))
    assert cli.main(["bench", "--aggregated", "--sizes"]) == 0, "it goes with every workload"


def test_it_takes_part_in_the_search_for_a_rate_that_keeps_a_promise(monkeypatch, tmp_path):
    sides = command.chosen_sides(parsed("--aggregated", "--slo", "ttft=2000,itl=30"))
    assert [side.name for side in sides] == ["off", "on", "target", "aggregated"]
    served = Served(monkeypatch, sides)
    served.deployment.info = lambda variant: {"device": "cpu", "dtype": "float32", "page_size": 16}
    monkeypatch.setattr(command, "Deployment", lambda *args, **more: contextlib.nullcontext(served.deployment))
    args = parsed("--aggregated", "--slo", "ttft=2000,itl=30", "--slo-seconds", "20", "--work-dir", str(tmp_path))
    sizes = {"e": workload.Distinct(requests=400, prompt=4, answer=40)}
    load = SimpleNamespace(wait_ready=lambda: None, words=range(400, 1900))
    document = {"workloads": []}
    command._all(args, sizes, sides, 1, "m", [], load, document, SHOW)
    (entry,) = document["workloads"]
    assert entry["goodput"]["aggregated"]["0.9"] == pytest.approx(entry["goodput"]["target"]["0.9"])
    assert any(note.startswith("aggregated: 2 ordinary servers") for note in entry["notes"])


# ---- what is started ----


def test_as_many_ordinary_servers_as_a_pair_has_workers_share_its_kv_memory(tmp_path):
    planned = {p.name: p for p in a_deployment(tmp_path, ["--page-size", "8"]).cluster.plan()}
    engines = ["engine-0", "engine-1"]
    assert sorted(name for name in planned if name.startswith("engine")) == engines
    assert len({p.url for p in planned.values()}) == len(planned)
    for name in engines:
        assert not any("disaggregation" in word for word in planned[name].command)
        assert value(planned[name], "--max-total-tokens") == str((4001 + 3000) // 2)
        assert value(planned[name], "--page-size") == "8" and not planned[name].bootstrap_port
    router = planned["router-aggregated"]
    first = router.command.index("--worker-urls")
    assert router.command[first + 1 : first + 3] == [planned[name].url for name in engines]
    assert value(router, "--policy") == "cache_aware" and "--pd-disaggregation" not in router.command
    of_pair = planned["router-on"].command
    settings = [word for word in of_pair if word.startswith("--cache") or word.startswith("--disable")]
    assert settings and all(word in router.command for word in settings)
    assert "--worker-urls" not in of_pair and not any(planned[name].url in of_pair for name in engines)
    assert router.wave > planned["engine-1"].wave


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_server_is_on_the_gpus_of_a_worker_of_the_pair(gpus, ranks):
    options = ["--tp", str(ranks)]
    place, _ = compared_on(options, [[], []], gpus)
    first, other = aggregated_on(options, place, gpus)
    assert first == ["--base-gpu-id", "0"], "where prefill is"
    assert other == (place or ["--base-gpu-id", "0"])
    assert aggregated_on([*options, "--base-gpu-id", "1"], place, gpus) == [[], []]
    assert aggregated_on(options, [], 0) == [[], []]


# ---- who is paused ----


def test_only_the_workers_of_the_side_that_is_measured_are_awake(tmp_path, monkeypatch):
    made, done = a_deployment(tmp_path), []
    made.cluster.processes = made.cluster.plan()
    everybody = {p.name for p in made.cluster.processes}
    urls = {p.url: p.name for p in made.cluster.processes}
    monkeypatch.setattr(made.cluster, "resume", lambda names: done.append(("resumed", names)))
    monkeypatch.setattr(made.cluster, "pause", lambda names: done.append(("paused", names)))
    monkeypatch.setattr(deploy, "empty_caches", lambda c, given, **k: done.append([urls[url] for url in given]))
    off, on, aggregated = made.variants
    pair = {"prefill-0", "decode-1", "router-on"}
    ordinary = {"engine-0", "engine-1", "router-aggregated"}
    made.use(on)
    assert done == [("resumed", pair), ("paused", everybody - pair), ["prefill-0", "decode-1"]]
    done.clear()
    made.use(aggregated)
    assert done[:2] == [["decode-1"], ("resumed", ordinary)], "what clients have given up is ended first"
    assert done[2:] == [("paused", everybody - ordinary), ["engine-0", "engine-1"]]
    done.clear()
    made.use(off)
    assert done[0] == ["engine-0", "engine-1"] and ordinary < done[2][1] and "prefill-0" in done[1][1]


# ---- its figures ----


class Servers:
    """What ordinary servers answer: ``served`` by the end of a URL."""

    def __init__(self, monkeypatch, tmp_path, pool=None):
        self.made = a_deployment(tmp_path)
        self.made.cluster.processes = self.made.cluster.plan()
        self.variant = self.made.variants[-1]
        state = {"kv_pool": pool} if pool else {}
        counted = ('sglang:prompt_tokens_total{a="b"} 30.0', 'sglang:cached_tokens_total{cache_source="device"} 8.0')
        self.served = {
            "metrics": "\n".join(counted).encode(),
            "get_load": json.dumps([{"num_reqs": 3, "num_waiting_reqs": 1}]).encode(),
            "server_info": json.dumps({"internal_states": [state]}).encode(),
        }
        monkeypatch.setattr(deploy, "http", self.http)
        monkeypatch.setattr(measure, "http", self.http)
        monkeypatch.setattr(deploy, "idle_pools", lambda url: [dict(pool)] if pool else [])
        monkeypatch.setattr(deploy.Deployment, "_cpu_s", lambda made, urls: 2.0 * len(urls))

    def http(self, url, timeout):
        return 200, self.served[url.rpartition("/")[2]]


POOL = {"size": 100, "available": 60, "evictable": 40, "protected": 0, "idle": True, "req_slots": 4}


def test_counters_are_the_servers_own_and_what_only_a_pair_has_is_not_known(monkeypatch, tmp_path):
    servers = Servers(monkeypatch, tmp_path)
    counters = servers.made.counters(servers.variant)
    assert (counters["prompt_tokens"], counters["reused_tokens"], counters["cpu_s"]) == (60, 16, 4)
    for name in ("sent_bytes", "transferred_tokens", "blocked", "prefill_cpu_s", "decode_cpu_s"):
        assert math.isnan(counters[name])
    assert math.isnan(servers.made.used_peak(servers.variant))
    servers.served["metrics"] = b""  # a server that has had no hit, nor any request
    assert servers.made.counters(servers.variant)["reused_tokens"] == 0
    monkeypatch.setattr(deploy, "http", lambda url, timeout: (503, b""))
    with pytest.raises(PdRadixError, match="/metrics answers HTTP 503"):
        servers.made.counters(servers.variant)


@pytest.mark.parametrize("changed, said", [({}, []), ({"available": 50}, ["10 tokens of KV are lost"])])
def test_their_pools_are_checked_for_what_they_tell(monkeypatch, tmp_path, changed, said):
    servers = Servers(monkeypatch, tmp_path, POOL | {"free_req_slots": 4} | changed)
    found = servers.made.problems(servers.variant)
    assert [text.partition(": ")[2].partition(":")[0] for text in found] == said * 2
    assert Servers(monkeypatch, tmp_path).made.problems(servers.variant) == []


def a_report():
    """With an aggregated side, of which some figures are not known."""
    runs = [run_entry("off", 1, 2, 1000), run_entry("on", 1, 6, 400), run_entry("aggregated", 1, 3, math.nan)]
    for one in runs:
        one["radix"] = one["variant"] != "off"
        one["figures"] |= {"cpu_s": 0.25} | {figure.key: 0.125 for figure in report.CHAT_FIGURES}
    runs[2]["figures"] |= dict.fromkeys(("prefill_cpu_s", "decode_cpu_s", "peak_over_least"), math.nan)
    return a_document(True, runs=runs, variants=["off", "on", "aggregated"], key="c")


def test_what_it_does_not_have_is_no_win():
    document = a_report()
    (entry,) = document["workloads"]
    assert entry["page_bytes"] == 100
    heading, rows = report.table(entry)
    of = {row[0]: dict(zip(heading, row, strict=True)) for row in rows}
    assert of["KV sent, MiB"]["aggregated"] == of["KV sent, MiB"]["aggregated / off"] == "–"
    assert of["KV sent / lower bound"]["aggregated"] == of["KV sent, MiB"]["on / aggregated"] == "–"
    assert of["CPU time of all workers per request, ms"]["aggregated"] == "250.00"
    heading, rows = report.headline(document)
    cells = {row[0].rpartition(": ")[2]: dict(zip(heading, row, strict=True)) for row in rows}
    assert cells["aggregated / off"]["KV sent, on / off"] == "–"
    assert cells["aggregated / off"]["KV sent / lower bound, on"] == "–"
    assert cells["aggregated / off"]["requests/s, on / off"] == "1.5"
    assert not any("nan" in cell for row in rows for cell in row)
    assert "nan" not in report.markdown(document)


def test_every_workload_has_a_line_for_each_side():
    runs = [run_entry("off", 1, 2, 1000), run_entry("on", 1, 6, 400), run_entry("aggregated", 1, 3, math.nan)]
    for one in runs:
        one["figures"]["cpu_s"] = 0.25
    text = report.markdown(a_document(runs=runs, variants=["off", "on", "aggregated"]))
    heading = "| side | requests/s | TTFT p50 (p99), ms | ITL p50 (p99), ms | ITL mean, ms | KV sent / lower bound |"
    assert heading in text and "| aggregated | 3.00 | 1000 (1000) | 1000.0 (1000.0) | 1000.0 | – |" in text


def test_a_chat_has_a_line_for_each_side():
    (entry,) = a_report()["workloads"]
    text = report.markdown({**a_report(), "workloads": [entry]})
    heading = "| side | requests/s | TTFT of first turns p50 (p99), ms | TTFT of later turns p50 (p99), ms |"
    assert heading in text and "| aggregated | 3.00 | 125 (125) | 125 (125) |" in text
    for one in entry["runs"]:
        one["figures"]["first_ttft_p99_s"] = math.nan  # of few chats
    assert "| aggregated | 3.00 | 125 (–) | 125 (125) |" in report.markdown({**a_report(), "workloads": [entry]})
    figures = [figure.name for figure in report.figures_of(entry)]
    assert "TTFT of later turns p99, ms" in figures and "long prompts beside, answered" not in figures
