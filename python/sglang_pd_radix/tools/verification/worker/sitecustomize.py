"""Installs recording in the workers of ``pd-radix verify``; on no other process's path."""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

from sglang_pd_radix.tools.verification import kv_record

HERE = Path(__file__).resolve().parent

if os.environ.get(kv_record.DIRECTORY):
    kv_record.install()

# The environment's own sitecustomize, which this one hides.
hidden = PathFinder.find_spec("sitecustomize", [p for p in sys.path if Path(p or ".").resolve() != HERE])
if hidden and hidden.loader:
    hidden.loader.exec_module(module_from_spec(hidden))
