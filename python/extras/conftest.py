"""The tests of extras have the fixtures of the core's, and find each other: some are of two extras together."""

import sys
from pathlib import Path

# Those with servers are run where they are named, together with the core's.
collect_ignore_glob = ["*/tests/e2e"]
folders = Path(__file__).parent
servers = any("e2e" in Path(arg).parts for arg in sys.argv)
# Of two modules with one name, the one with servers, where these are run.
sys.path += sorted(map(str, [*folders.glob("*/tests"), *folders.glob("*/tests/e2e")]), reverse=servers)

if not servers:
    # It sets variables that servers would inherit.
    from core.unit.conftest import *  # noqa: F403
