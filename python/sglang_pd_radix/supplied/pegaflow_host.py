"""What a PegaFlow server and its client need of this machine and environment."""

from __future__ import annotations

import ctypes
import sysconfig
from importlib import metadata
from pathlib import Path

# The server takes clients of its own version only, and the adapter was tried with this one.
VERSION = "0.25.1"
DISTRIBUTIONS = ("pegaflow-llm", "pegaflow-llm-cu13")
INSTALL = "pip install 'sglang-pd-radix[pegaflow]'"


def installed_version() -> str | None:
    """The version of the client and server in this environment, None without."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return None


def libpython() -> Path:
    """The shared library of this Python, in which the server runs what clients register."""
    directory, name = sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("INSTSONAME") or ""
    return Path(directory, name)


def trouble() -> str | None:
    """Why no server can be started here, with the way out; None if one can."""
    version = installed_version()
    if version != VERSION:
        found = f"pegaflow-llm {version} is installed, not {VERSION}" if version else "pegaflow-llm is not installed"
        return f"{found}: {INSTALL}"
    if ".so" not in libpython().name:
        return "this Python has no shared library (libpython), which the server loads: use one built with it"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "the server needs a CUDA driver (libcuda.so.1), and this machine has none"
    return None
