"""The engine's own classes, below all that is laid over them, and options as all of these have them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from sglang.srt.server_args import ServerArgs


def engine_class(overlaid: type) -> type:
    """The class that the engine has under the name of ``overlaid``."""
    return [one for one in overlaid.__mro__ if one.__name__ == overlaid.__name__][-1]


def args_of(**given: Any) -> Any:
    """The options of a worker, as they are by default but for those that are ``given``."""
    known = {field.name: field.default for field in dataclasses.fields(ServerArgs)}
    return SimpleNamespace(**{name: value for name, value in known.items() if value is not dataclasses.MISSING} | given)
