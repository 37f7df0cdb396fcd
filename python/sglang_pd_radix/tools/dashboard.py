"""``pd-radix dashboard``: prints the Grafana dashboard, and the files that Prometheus needs for it."""

from __future__ import annotations

import argparse
from pathlib import Path

OPERATE = Path(__file__).parent / "operate"
DASHBOARD, RULES, SCRAPE = OPERATE / "dashboard.json", OPERATE / "alarms.yml", OPERATE / "prometheus.yml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``pd-radix dashboard``."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--alarms", action="store_true", help="print the alerting rules for Prometheus instead")
    form.add_argument("--prometheus", action="store_true", help="print a configuration for Prometheus instead")
    parser.add_argument(
        "--docs-url",
        default="docs",
        metavar="URL",
        help="where you keep docs/, for the runbook_url of each alarm (default: the path in a checkout)",
    )


def run(args: argparse.Namespace) -> int:
    """Print one of the files. Returns the exit code."""
    file = RULES if args.alarms else SCRAPE if args.prometheus else DASHBOARD
    text = file.read_text(encoding="utf-8")
    print(text.replace("runbook_url: docs/", f"runbook_url: {args.docs_url.rstrip('/')}/"), end="")
    return 0
