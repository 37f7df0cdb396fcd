"""The tests of extras have the fixtures of the unit tests, and find each other: some are of two extras together."""

import sys
from pathlib import Path

from unit.conftest import *  # noqa: F403

sys.path += sorted(map(str, Path(__file__).parent.glob("*/tests")))
