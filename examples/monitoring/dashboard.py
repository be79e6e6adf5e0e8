"""Writes the Grafana dashboard: `pip install grafana-foundation-sdk`, then run this file.

python examples/monitoring/dashboard.py > examples/monitoring/dashboard.json
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard, prometheus, timeseries
from grafana_foundation_sdk.builders.common import VizLegendOptions
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableRefresh,
)

#: What the operator chooses at the top of the page.
_MODEL = 'model_name=~"$model"'
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_RATE = "$__rate_interval"
#: Legend of an engine: each server counts its own from 0.
_ENGINE = "{{instance}} engine {{engine}}"


@dataclass(frozen=True)
class Panel:
    """One graph.

    Attributes:
        title, description: For its reader.
        unit: Of Grafana's.
        queries: PromQL by legend.
        most: Upper end of its scale; None for none.
    """

    title: str
    description: str
    unit: str
    queries: dict[str, str]
    most: float | None = None


def _quantile(q: float, name: str) -> str:
    rates = f"sum by (slo_class, le) (rate({name}_bucket{{{_MODEL}}}[{_RATE}]))"
    return f"histogram_quantile({q}, {rates})"


def _rate(name: str, by: str, matching: str = "") -> str:
    return f"sum by ({by}) (rate({name}{{{_MODEL}{matching}}}[{_RATE}]))"


def _sum(name: str) -> str:
    return f"sum({name}{{{_MODEL}}})"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Targets": (
        Panel(
            "In time",
            "Share of the requests that met all their targets; those that clients ended are left "
            "out.",
            "percentunit",
            {
                "{{slo_class}}": _rate("sola_requests_total", "slo_class", ', outcome="attained"')
                + " / "
                + _rate("sola_requests_total", "slo_class", ', outcome!="aborted"')
            },
            1.0,
        ),
        Panel(
            "Ends of requests",
            "By class and outcome.",
            "reqps",
            {"{{slo_class}} {{outcome}}": _rate("sola_requests_total", "slo_class, outcome")},
        ),
        Panel(
            "Time to first token",
            "Median and 99th percentile of the requests that have ended.",
            "s",
            {
                "{{slo_class}} p50": _quantile(0.5, "sola_ttft_seconds"),
                "{{slo_class}} p99": _quantile(0.99, "sola_ttft_seconds"),
            },
        ),
        Panel(
            "Time per output token",
            "Median and 99th percentile of the requests that have ended.",
            "s",
            {
                "{{slo_class}} p50": _quantile(0.5, "sola_tpot_seconds"),
                "{{slo_class}} p99": _quantile(0.99, "sola_tpot_seconds"),
            },
        ),
    ),
    "Engine": (
        Panel(
            "Requests",
            "Lost ones can no longer meet their targets. Held ones have a slot and sat out the "
            "latest step.",
            "short",
            {
                "running": _sum("vllm:num_requests_running"),
                "waiting": _sum("vllm:num_requests_waiting"),
                "held": _sum("sola_requests_held"),
                "lost": _sum("sola_requests_lost"),
            },
        ),
        Panel(
            "Time until the next deadline",
            "Unfinished requests that are late for it, that have less than so long, or more.",
            "short",
            {"{{slack}}": f"sum by (slack) (sola_requests_by_slack{{{_MODEL}}})"},
        ),
        Panel(
            "KV memory in use",
            "Of each engine; the engines of several servers have the same numbers.",
            "percentunit",
            {_ENGINE: f"max by (instance, engine) (vllm:kv_cache_usage_perc{{{_MODEL}}})"},
            1.0,
        ),
        Panel(
            "Tokens",
            "Of prompts, with those that were cached, and generated.",
            "short",
            {
                "prompt": f"sum(rate(vllm:prompt_tokens_total{{{_MODEL}}}[{_RATE}]))",
                "generated": f"sum(rate(vllm:generation_tokens_total{{{_MODEL}}}[{_RATE}]))",
            },
        ),
        Panel(
            "KV copied",
            "To the host's memory and back.",
            "Bps",
            {"{{direction}}": _rate("sola_swapped_bytes_total", "direction")},
        ),
    ),
    "Planning": (
        Panel(
            "Steps",
            "That followed a plan, and those in vLLM's own order by the reason.",
            "ops",
            {
                "planned": f"sum(rate(sola_steps_planned_total{{{_MODEL}}}[{_RATE}]))",
                "{{reason}}": _rate("sola_steps_unplanned_total", "reason"),
            },
        ),
        Panel(
            "Processor time of a plan",
            "Median and 99th percentile.",
            "s",
            {
                f"p{round(100 * q)}": f"histogram_quantile({q}, sum by (le) "
                f"(rate(sola_planner_seconds_bucket{{{_MODEL}}}[{_RATE}])))"
                for q in (0.5, 0.99)
            },
        ),
        Panel(
            "Error of predicted step times",
            "Mean relative error, over about 100 steps.",
            "percentunit",
            {_ENGINE: f"max by (instance, engine) (sola_step_model_error{{{_MODEL}}})"},
        ),
        Panel(
            "Options file refused",
            "1 while it says something wrong, so that the options before it hold.",
            "short",
            {
                "{{instance}} {{model_name}}": "max by (instance, model_name) "
                f"(sola_options_refused{{{_MODEL}}})"
            },
            1.0,
        ),
    ),
}


def _built(panel: Panel) -> timeseries.Panel:
    legend = (
        VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    built = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.description)
        .unit(panel.unit)
        .min(0.0)
        .fill_opacity(10)
        .legend(legend)
        .datasource(_SOURCE)
        .height(8)
        .span(12)
    )
    if panel.most is not None:
        built = built.max(panel.most)
    for place, (name, query) in enumerate(panel.queries.items()):
        target = prometheus.Dataquery().expr(query).legend_format(name).ref_id("ABCDEF"[place])
        built = built.with_target(target.range())
    return built


def build() -> str:
    """The dashboard as JSON."""
    page = (
        dashboard.Dashboard("sola_sched")
        .uid("sola-sched")
        .description("What of the requests is in time, and what the scheduler does for it.")
        .tags(["vllm"])
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("10s")
        .timezone("browser")
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("model")
            .datasource(_SOURCE)
            .query("label_values(sola_steps_planned_total, model_name)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .include_all(True)
            .multi(True)
        )
    )
    for title, panels in ROWS.items():
        page = page.with_row(dashboard.Row(title))
        for panel in panels:
            page = page.with_panel(_built(panel))
    return json.dumps(page.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    print(build(), end="")
