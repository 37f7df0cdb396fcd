"""``pd-radix bench``: PD deployments with the decode prefix cache off and on, measured against each other.

workload.py   the requests: prompts as token ids, answer lengths, dependencies
traces.py     traces in Mooncake's format
least.py      lower bounds of what any cache has to send and hold, from the workload alone
load.py       the load generator: the engine's `sglang.bench_serving`, in its own process
deploy.py     the servers under comparison
asked.py      a request that was answered, and one that failed
measure.py    one run: send requests, sample, compute figures
steady.py     clients that send long prompts all the time, beside a chat
turns.py      all runs of a workload, with the sides in turns
goodput.py    the highest rates that keep a TTFT and ITL limit
rates.py      which rates to measure for that, and what follows from them
parted.py     answers that differ: where, and how far apart the two tokens are
stats.py      percentiles, spreads and ratios
chart.py      charts as pictures
compared.py   the table of the sides
report.py     JSON and Markdown
record.py     the short record of a report
command.py    the options, and the order of the runs
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``pd-radix bench``."""
    from . import command

    command.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and write the report. Returns the exit code."""
    from . import command

    return command.run(args)
