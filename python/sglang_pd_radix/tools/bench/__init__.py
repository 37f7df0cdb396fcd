"""``pd-radix bench``: PD deployments with the decode prefix cache off and on, measured against each other.

workload.py   what is asked: prompts as token ids, answer lengths, who waits for whom
traces.py     traces in Mooncake's format
least.py      what any cache would have to send and hold for it, from the workload alone
load.py       asks it: the engine's `sglang.bench_serving`, in a process of its own
deploy.py     the servers that are compared
asked.py      a request that was answered, and one that was not
measure.py    one run: ask, watch, and take the figures
steady.py     clients that send long prompts all the time, beside a chat
turns.py      all runs of a workload, the sides in turns
goodput.py    the rates at which requests keep a promised TTFT and ITL
rates.py      which rates are measured for that, and what is known from them
parted.py     answers that are not the same: where they part, and how far apart the two tokens are
stats.py      percentiles, spreads and ratios
chart.py      charts as pictures
compared.py   the table of the sides
report.py     JSON, Markdown and pictures
record.py     what is kept of a report
command.py    the options, and the order in which things are run
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
