"""A server's log: start-up phase, and reason of its end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

# Messages of a start-up log, in order. The last match is the phase shown.
_PHASES = (
    ("server_args=", "starting processes"),
    ("Init torch distributed begin", "setting up"),
    ("Load weight begin", "loading weights"),
    ("Load weight end", "allocating the KV cache"),
    ("Capture cuda graph begin", "capturing CUDA graphs"),
    ("Uvicorn running on", "warming up"),
    ("ready to roll", "warmed up"),
)


def log_tail(path: Path, lines: int = 20) -> list[str]:
    """The last ``lines`` lines of a log, without reading all of it; empty if there is none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 400 * lines - 4096))
            text = log.read().decode(errors="replace")
    except OSError:
        return []
    plain = _ANSI.sub("", text)
    return [line.rstrip() for line in plain.splitlines() if line.strip()][-lines:]


_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

# The last line of a traceback, or an error of argparse or of the engine's shell.
_ERROR_LINE = re.compile(
    r"^(?:\[[^\]]*\] )?(?:[\w. -]+: error: .+|(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)\b(?:: .*)?)$"
)
# The engine's message when one of its processes ended without one.
_CRASH_LINE = re.compile(r"Subprocess \S+ .*crashed with exit code -?\d+")
# Consequences of a cause in another process of the server.
_SECONDARY = ("EOFError", "SystemExit", "KeyboardInterrupt", "BrokenPipeError", "ConnectionResetError")


def failure_reason(lines: Sequence[str]) -> str | None:
    """The log line with the cause of death: the last error that is not a consequence of another."""
    errors = [line.strip() for line in lines if _ERROR_LINE.match(line.strip())]
    causes = [line for line in errors if not line.startswith(_SECONDARY)]
    crashes = [match.group() for match in map(_CRASH_LINE.search, lines) if match]
    found = causes or crashes or errors
    return found[-1] if found else None


def describe_exit(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
        return f"was killed by {name}"
    return f"was killed by signal {-code}"


def current_phase(log_path: Path) -> str | None:
    """The start-up phase that a server's log shows."""
    text = "\n".join(log_tail(log_path, 60))
    found = None
    for marker, phase in _PHASES:
        if marker in text:
            found = phase
    return found


def obituary(name: str, code: int, log_path: Path) -> str:
    """Why server ``name`` has ended with exit status ``code``, and the end of its log, for an error message."""
    lines = log_tail(log_path, 400)
    reason = failure_reason(lines)
    message = f"{name} {describe_exit(code)}"
    if reason:
        message += f": {reason}"
    elif code == -signal.SIGKILL:
        message += "; if not by hand, the machine ran out of memory"
    if not lines:
        return f"{message}; its log {log_path} is empty"
    if reason and ": error: " in reason:
        return f"{message}\nIts log is {log_path}"  # a usage error: above it are only pages of usage
    tail = "\n".join(f"  | {line}" for line in lines[-20:])
    return f"{message}\nThe end of its log, {log_path}:\n{tail}"
