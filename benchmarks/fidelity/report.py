"""Tables of `fidelity`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fidelity.engine_steps import ATTAINMENT_TARGET, STEP_TARGET
from fidelity.recording import PARTS

Row = dict[str, Any]

_SLOWER = ("3% longer: points", "TTFT", "TPOT")
_NO_HOST = ("no host time: points", "TTFT", "TPOT")


def engine_tables(report: Row) -> str:
    """Runs, repeats, parts of a cycle, forms of the step time, and the verdict."""
    runs = [row for row in report["runs"] if not row["is_repeat"]]
    return "\n\n".join(
        [
            _table(
                ["workload", "scheduler", "steps", "error", "total", "noise", "attained", "sim",
                 "diff", "TTFT ms", "sim", "diff", "TPOT ms", "sim", "diff"],
                [_run(row) for row in runs],
            ),
            "The same run twice on the real engine, second against first:\n"
            + _table(
                ["workload", "scheduler", "attained", "again", "diff", "TTFT", "TPOT"],
                _repeats(report["runs"]),
            ),
            "Diagnosis, no prediction: simulated at the speed of the test run itself (step times "
            "over 1 + total):\n"
            + _table(
                ["workload", "scheduler", "attained", "sim", "diff", "TTFT", "TPOT"],
                [_own_speed(row) for row in runs],
            ),
            "Where the time of a step goes, ms:\n"
            + _table(
                ["workload", "scheduler", *(part.removesuffix("_s") for part in PARTS)],
                [
                    [row["workload"], row["scheduler"],
                     *(f"{row['parts'][part] * 1e3:.2f}" for part in PARTS)]
                    for row in runs
                ],
            ),
            "What an error of the step time does to a run, against the simulation above:\n"
            + _table(
                ["workload", "scheduler", *_SLOWER, *_NO_HOST],
                [_sensitivity(row) for row in runs],
            ),
            "Step times fitted to the training steps, against the held-out whole steps:\n"
            + _table(
                ["form", "error", "total"],
                [
                    [name, f"{row['mean_abs_error']:.1%}", f"{row['total_error']:+.1%}"]
                    for name, row in report["forms"].items()
                ],
            ),
            "\n".join(verdict(report)),
        ]
    )  # fmt: skip


def verdict(report: Row) -> list[str]:
    """One line for each target: what must hold, and pass or fail with the number."""
    runs = [row for row in report["runs"] if not row["is_repeat"]]
    num_steps = sum(row["steps"]["num_steps"] for row in runs)
    error = (
        sum(row["steps"]["mean_abs_error"] * row["steps"]["num_steps"] for row in runs) / num_steps
    )
    differences = [abs(_difference(row)) for row in runs]
    num_far = sum(difference > ATTAINMENT_TARGET for difference in differences)
    pairs = sum(row["num_pairs"] for row in report["ranking"].values())
    right = sum(row["num_right"] for row in report["ranking"].values())
    return [
        f"Mean absolute error of a step <= {STEP_TARGET:.0%}: {_word(error <= STEP_TARGET)} "
        f"({error:.1%} over {num_steps:,} held-out steps).",
        f"Attainment within {ATTAINMENT_TARGET * 100:.0f} points: {_word(not num_far)} "
        f"(largest difference {max(differences) * 100:.1f} points; {num_far} of {len(runs)} runs "
        "beyond).",
        f"Ranking of the schedulers: {_word(right == pairs)} ({right} of {pairs} pairs that differ "
        f"by more than {ATTAINMENT_TARGET * 100:.0f} points).",
    ]


def request_table(rows: Sequence[Row]) -> str:
    """One row a recorded run, errors over its test requests."""
    table = []
    for row in rows:
        test = row["test"]
        table.append([row["gpu"], row["model"], str(test["num_requests"])])
        for name in ("ttft", "tpot"):
            table[-1] += [
                f"{test[f'real_mean_{name}_ms']:.4g}",
                f"{test[f'simulated_mean_{name}_ms']:.4g}",
                f"{test[f'mean_{name}_error']:+.1%}",
                f"{test[f'{name}_correlation']:.3f}",
                f"{test[f'p50_abs_{name}_error']:.0%}",
                f"{test[f'p90_abs_{name}_error']:.0%}",
            ]
    return _table(
        ["GPU", "model", "requests", "TTFT ms", "sim", "diff", "corr", "p50", "p90", "TPOT ms",
         "sim", "diff", "corr", "p50", "p90"],
        table,
    )  # fmt: skip


def _run(row: Row) -> list[str]:
    real, simulated, steps = row["real"], row["simulated"], row["steps"]
    cells = [
        row["workload"],
        row["scheduler"],
        str(steps["num_steps"]),
        f"{steps['mean_abs_error']:.1%}",
        f"{steps['total_error']:+.1%}",
        f"{row['repeat_noise']:.1%}",
        f"{real['attainment']:.1%}",
        f"{simulated['attainment']:.1%}",
        f"{_difference(row) * 100:+.1f}",
    ]
    for name in ("mean_ttft_s", "mean_tpot_s"):
        cells += [
            f"{real[name] * 1e3:.4g}",
            f"{simulated[name] * 1e3:.4g}",
            f"{simulated[name] / real[name] - 1.0:+.1%}",
        ]
    return cells


def _own_speed(row: Row) -> list[str]:
    real, simulated = row["real"], row["simulated_own_speed"]
    return [
        row["workload"],
        row["scheduler"],
        f"{real['attainment']:.1%}",
        f"{simulated['attainment']:.1%}",
        f"{(simulated['attainment'] - real['attainment']) * 100:+.1f}",
        *(f"{simulated[key] / real[key] - 1.0:+.1%}" for key in ("mean_ttft_s", "mean_tpot_s")),
    ]


def _sensitivity(row: Row) -> list[str]:
    cells = [row["workload"], row["scheduler"]]
    for name in ("simulated_slower", "simulated_without_host"):
        before, after = row["simulated"], row[name]
        cells += [
            f"{(after['attainment'] - before['attainment']) * 100:+.1f}",
            *(f"{after[key] / before[key] - 1.0:+.1%}" for key in ("mean_ttft_s", "mean_tpot_s")),
        ]
    return cells


def _repeats(rows: Sequence[Row]) -> list[list[str]]:
    first = {
        (row["workload"], row["scheduler"]): row["real"] for row in rows if not row["is_repeat"]
    }
    table = []
    for row in rows:
        if not row["is_repeat"]:
            continue
        before, again = first[row["workload"], row["scheduler"]], row["real"]
        table.append(
            [
                row["workload"],
                row["scheduler"],
                f"{before['attainment']:.1%}",
                f"{again['attainment']:.1%}",
                f"{(again['attainment'] - before['attainment']) * 100:+.1f}",
                f"{again['mean_ttft_s'] / before['mean_ttft_s'] - 1.0:+.1%}",
                f"{again['mean_tpot_s'] / before['mean_tpot_s'] - 1.0:+.1%}",
            ]
        )
    return table


def _difference(row: Row) -> float:
    return float(row["simulated"]["attainment"] - row["real"]["attainment"])


def _word(holds: bool) -> str:
    return "pass" if holds else "FAIL"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the first left-aligned."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
