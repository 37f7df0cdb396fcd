"""Which weights the KV of a worker's tree is of."""

from __future__ import annotations

from types import SimpleNamespace

from namespaces import options
from sglang.srt.disaggregation.kv_weights import KvWeights, know_weights, weights_of
from sglang.srt.managers.scheduler_update_weights_mixin import SchedulerUpdateWeightsMixin


def weights(**given: object) -> KvWeights:
    manager = know_weights(SimpleNamespace(), SimpleNamespace(server_args=options(**given)))
    return weights_of(manager)


def test_workers_of_one_name_have_one_number():
    number = weights().current()
    assert number == weights().current() != weights(weight_version="2").current()
    assert number is not None and 0 <= number < 2**63


def test_nothing_is_known_after_an_update():
    """Nor after one that has failed."""
    one = weights()
    one.changing()
    assert one.current() is None
    assert weights_of(None).current() is None


def test_the_scheduler_says_that_they_change():
    scheduler = SchedulerUpdateWeightsMixin()
    manager = know_weights(SimpleNamespace(), SimpleNamespace(server_args=options()))
    scheduler.kv_manager = lambda: manager
    assert weights_of(manager).current() is not None
    scheduler.weights_changing()
    assert weights_of(manager).current() is None
