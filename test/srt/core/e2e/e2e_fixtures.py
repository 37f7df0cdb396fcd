"""Clusters for the end-to-end tests. One runs at a time: a test module asks for the one it needs, and it is shared
until a test of another cluster comes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from forked import Parents
from pd import FLAG, LOCAL, ask, base_prompt, conversations, hit_lengths

from sglang_pd_radix.patching import loader
from sglang_pd_radix.supplied import cpu_host
from sglang_pd_radix.tools.cluster import Cluster, process
from sglang_pd_radix.tools.make_model import ModelShape, make_model

COMMON = ["--enable-metrics", "--max-total-tokens", "16384", "--max-running-requests", "16"]
# On a host without a GPU: with one environment, one process forks the workers of all clusters. That nothing is compiled
# at its first call, a worker otherwise tells its processes before they import the engine. Servers that tests start with
# a command of ours start their processes as ever.
ALIKE = {"OMP_NUM_THREADS": "1", "MC_FORCE_TCP": "1", "TORCHDYNAMO_DISABLE": "1"}

BACKENDS = ["nixl", "mooncake"]
# `make test` has to end within 15 minutes on two cores, installation included. What it leaves out for that, `make
# test-all` runs: README's headline; over Mooncake, what differs only in what is decided before a backend takes part,
# and is shown over NIXL; MLA with several ranks, which has fewer cases than MHA; page sizes between which and 16
# nothing but arithmetic differs, which unit tests walk; staging buffers, whose messages have unit tests with real
# managers; and workers that are killed and restarted, which takes minutes of waiting.
THOROUGH = [
    ("test_oracle.py", {"page": 1}),
    ("test_oracle.py", {"page": 64}),
    ("test_local_prefill.py", {"backend": "mooncake"}),
    ("test_local_prefill.py", {"page": 1}),
    ("test_peers.py", {"backend": "mooncake"}),
    ("test_readme.py", {"backend": "mooncake"}),
    ("test_small_pool.py", {"backend": "mooncake"}),
    ("test_staging.py", {}),
    ("test_tensor_parallel.py", {"backend": "mooncake"}),
    ("test_tensor_parallel.py", {"cluster_and_truth": "mla"}),
    ("test_up_command.py", {"backend": "mooncake"}),
    ("test_without_extras.py", {"backend": "mooncake"}),
    ("test_dead_peers.py", {}),
    ("test_late_writes.py", {}),
    ("test_lost_prefill.py", {}),
]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    # One after the other: they have the same cluster, of six workers.
    items.sort(key=lambda item: item.path.name not in ("test_oracle.py", "test_local_prefill.py"))
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if any(item.path.name == name and cell.items() <= params.items() for name, cell in THOROUGH):
            item.add_marker("thorough")


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request):
    """The KV transfer backend of all workers of a test. All tests of one come before those of the next."""
    if request.param == "mooncake":
        # In a process of its own: the library stays in the one that has loaded it.
        command = [sys.executable, "-m", "sglang_pd_radix.supplied.mooncake_host"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=100)
        if found.returncode:
            pytest.skip(found.stderr.strip())
    return request.param


def _sent_by_prefill(decode_args):
    """Decode's options, with which prefill computes all prompts where a test does not say: most look at transfers."""
    if decode_args and not isinstance(decode_args[0], str):
        return [_sent_by_prefill(each) for each in decode_args]
    computes = FLAG in decode_args and LOCAL not in decode_args and "local_prefill" in loader.extras()
    return [*decode_args, LOCAL, "off"] if computes else decode_args


class Clusters:
    """Holds at most one running cluster."""

    def __init__(self, log_root):
        self.log_root, self.key, self.cluster, self.count = log_root, None, None, 0

    def get(self, model, **options) -> Cluster:
        if "decode_args" in options and loader.EXTRAS not in options.get("env", {}):
            options["decode_args"] = _sent_by_prefill(options["decode_args"])
        key = repr((model, sorted(options.items())))
        if key != self.key:
            self.stop()
            self.count += 1
            common = COMMON + options.pop("common_args", [])
            logs = self.log_root / str(self.count)
            self.cluster = Cluster(model, common_args=common, log_dir=logs, timeout_s=280, **options)
            self.cluster.start()
            self.key = key
        return self.cluster

    def stop(self) -> None:
        if self.cluster is not None:
            # A worker looks every 5 seconds whether it shall end.
            self.cluster.stop(grace_s=0.0)
        self.cluster = self.key = None


@pytest.fixture
def shareable():
    """Of so many tokens that decode holds of a prompt of a length, those that are of use to it; of most models, all."""
    return lambda held, length: held


@pytest.fixture(scope="session")
def clusters(tmp_path_factory):
    held, parents = Clusters(tmp_path_factory.mktemp("logs")), Parents()
    with pytest.MonkeyPatch.context() as patched:
        if not cpu_host.has_cuda_driver():
            patched.setattr(process, "subprocess", parents)
            for variable, value in ALIKE.items():
                patched.setenv(variable, value)
        yield held
        held.stop()
    parents.end()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("model") / "qwen3"))


@pytest.fixture(scope="session")
def other_model(tmp_path_factory):
    """The same shape, other weights."""
    return str(make_model(tmp_path_factory.mktemp("model") / "other", seed=1))


@pytest.fixture(scope="session")
def mla_model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("model") / "mla", ModelShape(arch="mla")))


def aggregated_answers(clusters, model, *more: str) -> dict:
    """The truth: what the engine without disaggregation says to every workload of these tests. ``more``: options."""
    cluster = clusters.get(model, aggregated=True, common_args=["--page-size", "1", *more])
    send = ask(cluster.router_url)
    answers = {"conversations": conversations(send), "long": conversations(send, 6, 1, seed=5, max_new=96)}
    for page in (1, 16, 64):
        answers["base", page] = send(base_prompt(page))["output_ids"]
        for name, prompt, _ in hit_lengths(page):
            answers[name, page] = send(prompt)["output_ids"]
    return answers


@pytest.fixture(scope="session")
def truth(clusters, model):
    return aggregated_answers(clusters, model)


@pytest.fixture(scope="session")
def mla_truth(clusters, mla_model):
    return aggregated_answers(clusters, mla_model)
