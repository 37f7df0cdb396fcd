"""Switches in the environment."""

from __future__ import annotations

import os

from sglang_pd_radix.errors import PdRadixError

SWITCH = "SGLANG_PD_RADIX"
#: The key of servers that are started with ``--api-key``.
API_KEY = "SGLANG_PD_RADIX_API_KEY"
#: The key of those that are started with ``--admin-api-key``, for what they let nobody else do.
ADMIN_API_KEY = "SGLANG_PD_RADIX_ADMIN_API_KEY"
#: The engine's words, in capitals or not.
YES, NO = ("1", "true", "yes", "y"), ("0", "false", "no", "n")


def switched_on(
    name: str, one: str, zero: str, otherwise: bool = False, variables: dict[str, str] | None = None
) -> bool:
    """Whether the variable says yes, in one of the engine's words; ``otherwise`` if it is empty or not there.

    one, zero: what each is for, to be said of any other value. variables: this process's environment if None. Raises
    ValueError for a value that is neither yes nor no.
    """
    value = (os.environ if variables is None else variables).get(name, "").strip()
    if value and value.lower() not in YES + NO:
        raise ValueError(f"{name} is {value!r}: give 1 {one}, 0 {zero}, or nothing, which counts as {int(otherwise)}.")
    return value.lower() in YES if value else otherwise


def patches_engine(variables: dict[str, str] | None = None) -> bool:
    """Whether the patch set is switched on, as it is without the variable. Raises PdRadixError for any other word."""
    try:
        return switched_on(SWITCH, "to run the engine with the patch set", "to run it without", True, variables)
    except ValueError as error:
        raise PdRadixError(str(error)) from error


def servers_key(admin: bool = False) -> str | None:
    """The key of the servers that are asked; None if they have none. admin: that of their admin, if there is one."""
    # As of a file: an end of a line is part of no key, and would be in the text of an error.
    found = (os.environ.get(name, "").strip() for name in ((ADMIN_API_KEY, API_KEY) if admin else (API_KEY,)))
    return next(filter(None, found), None)
