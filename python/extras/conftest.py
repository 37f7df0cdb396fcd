"""The tests of extras have the fixtures of the unit tests."""

from unit.conftest import *  # noqa: F403
