"""``pd-radix bench``: PD deployments with the decode prefix cache off and on, measured against each other.

workload.py   what is asked: prompts as token ids, answer lengths, who waits for whom
least.py      what any cache would have to send and hold for it, from the workload alone
load.py       asks it: the engine's `sglang.bench_serving`, in a process of its own
deploy.py     the servers that are compared
measure.py    one run: ask, watch, and take the figures
turns.py      all runs of a workload, the sides in turns
order.py      which side goes first, and whether that makes a difference
parted.py     answers that are not the same: where they part, and how far apart the two tokens are
stats.py      percentiles, spreads and ratios
chart.py      charts, interactive and as pictures
report.py     JSON, Markdown and HTML
published.py  records of runs, and the tables of README and docs that are made of them
command.py    the options, and the order in which things are run
"""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
