"""The tests of the tools have the fixtures of the core's."""

from core.unit.conftest import *  # noqa: F403
from fake_servers import fake  # noqa: F401
