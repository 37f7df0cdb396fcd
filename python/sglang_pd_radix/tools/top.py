"""``pd-radix top``: the current workers and requests of a deployment, in a terminal."""

from __future__ import annotations

import argparse
import json
import os

from sglang_pd_radix.errors import PdRadixError

from .arguments import add_workers
from .operate.columns import COLUMNS, LEGEND
from .operate.reading import Reader, addresses, check_listening

_EPILOG = f"""
Ctrl-C ends it.

{LEGEND}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``pd-radix top``."""
    parser.description = "Show the workers of a deployment and their requests, again and again."
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_workers(parser)
    view = parser.add_argument_group("view")
    view.add_argument("--interval", type=float, default=2.0, metavar="S", help="seconds between refreshes (default: 2)")
    view.add_argument("--sort", choices=tuple(COLUMNS), default="worker", help="the column to sort by")
    view.add_argument("--json", action="store_true", help="look once, print what was seen, and end")


def run(args: argparse.Namespace) -> int:
    """Show it. Returns the exit code: with --json 1 if a worker could not be read."""
    # Also refuses NaN.
    if not args.interval > 0:
        raise PdRadixError(f"--interval is {args.interval:g}: give a number of seconds above 0")
    if not args.json and (not os.isatty(1) or os.environ.get("TERM") == "dumb"):
        raise PdRadixError("the live view needs a terminal as its output: give --json to look once")
    urls = addresses(args.worker, args.gateway, args.deployment)
    check_listening(urls)
    reader = Reader(urls)
    if args.json:
        look = reader.look()
        print(json.dumps(look.as_dict(), indent=2))
        return int(any(rank.error for rank in look.ranks))
    from .operate.screen import watch

    try:
        watch(reader, args.interval, args.sort)
    except KeyboardInterrupt:
        pass
    return 0
