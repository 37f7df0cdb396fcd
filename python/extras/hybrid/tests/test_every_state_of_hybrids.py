"""Of a model with states, every path gives its slot back."""

from __future__ import annotations

import pytest
from test_every_state import *  # noqa: F403
from test_every_state import KINDS

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]


@pytest.fixture(params=[f"{kind} states" for kind in KINDS])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param
