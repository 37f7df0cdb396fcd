"""Errors that are meant for the operator."""


class PdRadixError(Exception):
    """An error with one line that names the cause and the way out; ``pd-radix`` prints it without a traceback."""


class PatchError(PdRadixError):
    """A patch file could not be applied to the engine.

    Deliberately no ImportError: the engine treats many of its own imports as optional and would carry on half patched.
    """
