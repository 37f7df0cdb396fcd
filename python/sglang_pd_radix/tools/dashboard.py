"""``pd-radix dashboard``: the Grafana dashboard of this package, and what Prometheus needs for it, as files.

What is printed is what is checked in beside `operate/panels.py`, of which ``--build`` makes it anew.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_pd_radix.errors import PdRadixError

from .operate.panels import SECTIONS, Panel

OPERATE = Path(__file__).parent / "operate"
DASHBOARD, RULES, SCRAPE = OPERATE / "dashboard.json", OPERATE / "alarms.yml", OPERATE / "prometheus.yml"
# Grafana's grid is 24 wide and its unit 38 lines: six lines of panels and three headings fit a screen of 1080 lines.
WIDTH, HEIGHT = 24, 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``pd-radix dashboard``."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--alarms", action="store_true", help="print the alerting rules for Prometheus instead")
    form.add_argument("--prometheus", action="store_true", help="print a configuration for Prometheus instead")
    form.add_argument(
        "--build", action="store_true", help="make the dashboard from its panels (needs grafana-foundation-sdk)"
    )
    parser.add_argument(
        "--docs-url",
        default="docs",
        metavar="URL",
        help="where you keep docs/, for the runbook_url of each alarm (default: the path in a checkout)",
    )


def run(args: argparse.Namespace) -> int:
    """Print one of the files. Returns the exit code."""
    file = RULES if args.alarms else SCRAPE if args.prometheus else DASHBOARD
    text = build() if args.build else file.read_text(encoding="utf-8")
    print(text.replace("runbook_url: docs/", f"runbook_url: {args.docs_url.rstrip('/')}/"), end="")
    return 0


def build() -> str:
    """The dashboard in Grafana's JSON. Raises PdRadixError without the SDK."""
    try:
        from grafana_foundation_sdk.builders import dashboard as builders
        from grafana_foundation_sdk.cog.encoder import JSONEncoder
        from grafana_foundation_sdk.models import dashboard as models
    except ImportError as error:
        raise PdRadixError("pip install grafana-foundation-sdk (Python 3.11 or later)") from error

    source = builders.DatasourceVariable("source").label("Prometheus").type("prometheus")
    made = (
        builders.Dashboard("PD decode prefix cache")
        .uid("pd-radix")
        .description("Is the decode-side prefix cache worth it now, what hurts, and what is broken.")
        .tags(["sglang", "pd-radix"])
        .time("now-1h", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(source)
    )
    for name, label, title in (("worker", "instance", "Worker"), ("rank", "dp_rank", "DP rank")):
        variable = (
            builders.QueryVariable(name)
            .label(title)
            .query(f"label_values(sglang:pd_requests, {label})")
            .datasource(_source())
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
        made = made.with_variable(variable)
    for title, panels in SECTIONS.items():
        made = made.with_row(builders.Row(title))
        for panel, width in zip(panels, _widths(panels), strict=True):
            made = made.with_panel(_panel(panel).span(width).height(HEIGHT))
    return JSONEncoder(sort_keys=True, indent=2).encode(made.build()) + "\n"


def _widths(panels: Sequence[Panel]) -> list[int]:
    """Of panels in lines of at most four."""
    lines = [panels[at : at + 4] for at in range(0, len(panels), 4)]
    return [WIDTH // len(line) for line in lines for _ in line]


def _source() -> Any:
    from grafana_foundation_sdk.models.dashboard import DataSourceRef

    return DataSourceRef(type_val="prometheus", uid="${source}")


def _panel(panel: Panel) -> Any:
    from grafana_foundation_sdk.builders import prometheus, stat, timeseries

    made: Any = (stat if panel.stat else timeseries).Panel()
    made.title(panel.title).description(panel.says).unit(panel.unit).datasource(_source()).min(0)
    for n, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(chr(ord("A") + n))
        made.with_target(target.datasource(_source()))
    if not panel.stat:
        made.line_width(1).fill_opacity(10)
    return made
