"""Which weights the KV of a worker's tree is of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.disaggregation.kv_weights import know_weights, sum_of_weights

TYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.float64)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        for i, dtype in enumerate(TYPES):
            data = (torch.randn(6, 4) * 8).to(dtype)
            # As of layers whose kernel wants it the other way round.
            data = data.T if i % 2 else data
            self.register_parameter(f"w{i}", torch.nn.Parameter(data, requires_grad=False))
        self.scale = torch.nn.Parameter(torch.tensor(2.0), requires_grad=False)


def found(model: Model) -> int:
    return sum_of_weights(model.named_parameters())


def test_the_same_weights_have_the_same_sum():
    assert found(Model()) == found(Model()) and 0 <= found(Model()) < 2**63


@pytest.mark.parametrize("name", [*(f"w{i}" for i in range(len(TYPES))), "scale"])
def test_one_bit_of_one_parameter_makes_another(name: str):
    model, bits = Model(), {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    data = getattr(model, name).data
    data.view(bits[data.element_size()])[(0,) * data.dim()] ^= 1
    assert found(model) != found(Model())


def test_names_shapes_and_types_count():
    ones = torch.ones(4, dtype=torch.int32)
    told = [("w", ones), ("v", ones), ("w", ones.reshape(2, 2)), ("w", ones.to(torch.int64))]
    assert len({sum_of_weights([one]) for one in told}) == 4


@pytest.mark.parametrize("first", range(1, 9))
def test_every_byte_counts_wherever_it_lies(first: int):
    """As of a parameter that is a part of another; and of the last bytes, which make no whole word."""
    memory = torch.zeros(64, dtype=torch.uint8)
    data = memory[first : first + 27]
    sums = {sum_of_weights([("w", data)])}
    for i in range(27):
        data[i] += 1
        sums.add(sum_of_weights([("w", data)]))
        data[i] -= 1
    # Of words those with the same bit of the same byte are alike: 8 of whole words, 3 bytes of the rest with one sum.
    assert len(sums) == 1 + 8 + 1


def test_the_pass_makes_no_copy_of_a_parameter():
    """Nor of one whose kernel wants it transposed: a GPU's memory is full when it is made."""
    data = torch.ones(1024, 512, dtype=torch.bfloat16)
    for parameter in (data, data.T):
        with torch.profiler.profile(profile_memory=True) as made:
            sum_of_weights([("w", parameter)])
        assert max(event.cpu_memory_usage for event in made.key_averages()) < 1024


def test_nothing_is_known_of_weights_without_data():
    """As where the engine keeps layers elsewhere until they are computed."""
    assert sum_of_weights([("v", torch.ones(4)), ("w", torch.ones(4, device="meta"))]) is None
    assert sum_of_weights([]) == sum_of_weights([]) != sum_of_weights([("w", torch.ones(0))])


def test_weights_that_cannot_be_summed_up_are_not_known(caplog):
    """And end nobody: prefill reads nothing then, and it is said once."""
    manager, model = SimpleNamespace(), Model()
    model.w0.__dict__["detach"] = lambda: torch.ones(4).to_sparse()
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    weights = know_weights(manager, SimpleNamespace(tp_worker=worker)).kv_weights
    assert weights.current() is None and weights.current() is None
    assert [record.message for record in caplog.records] == [
        "The weights cannot be summed up: prefill reads nothing from decode"
    ]


def test_an_update_counts_from_the_flush_after_it():
    """Of the tree's KV some is of the weights before; as after one that has failed, of which nobody knows."""
    model, manager = Model(), SimpleNamespace()
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    weights = know_weights(manager, SimpleNamespace(tp_worker=worker)).kv_weights
    before = weights.current()
    assert before == found(model)
    weights.changing()
    assert weights.current() is None
    model.scale.data += 1
    weights.flushed()
    assert weights.current() == found(model) != before
    # A flush of its own.
    weights.flushed()
    assert weights.current() == found(model)
