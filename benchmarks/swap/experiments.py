"""What KV swapping buys.

All but the last in virtual time, with the real schedulers, step times and links of a profile;
`engine` by the clock on vLLM's real engine. See README.md.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from harness import resumable, sweep
from harness.points import SYNTHETIC, Point
from harness.resumable import Row
from harness.setup import Outcome, Setup
from sola_sched.bench.backends.simulation import SimBackend
from swap import engine_cases
from swap.cases import Case, run
from swap.engine_cases import EngineCase

_FOLDER = Path(__file__).resolve().parent


# Experiments --------------------------------------------------------------------------------


class _Fig8Case(NamedTuple):
    """Profile, lengths, KV blocks (None for the profile's) and rates of Fig. 8."""

    profile: str
    dataset: str
    num_blocks: int | None
    rates: tuple[float, ...]


_FIG8_CASES = (
    _Fig8Case("opt-13b-v100", "alpaca.jsonl.gz", None, (5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 16.0)),
    _Fig8Case("llama-3-8b-a100", "sharegpt_lengths_llama2.csv.gz", 1500, (2.0, 2.5, 3.0)),
)


def fig8(setup: Setup) -> Outcome:
    """ALISE Fig. 8: what becomes of displaced KV, normalized latency over the rate."""
    alise = "sola:policy=alise,sim.predictor=oracle"
    ample = "swap.host_gib=256"
    variants = {
        "swap, raw": (f"{alise},swap.mode=raw,{ample}", ""),
        "swap, INT8": (f"{alise},swap.mode=int8,{ample}", ""),
        "recompute, where it pays": (alise, ""),
        "recompute, as in the paper": (alise, "always"),
        "defer": (alise, "defer"),
        "vLLM": ("stock", ""),
    }
    found: list[Row] = []
    parts = []
    for case in _FIG8_CASES:
        base, rates, rows = _fig8_rows(setup, case, variants)
        found += rows
        table = _table(rows, list(variants), rates, "normalized_s", lambda v: f"{1e3 * v:.0f}")
        latency = _table(rows, list(variants), rates, "latency_s", lambda v: f"{v:.2f}")
        over = {
            column: ", ".join(_over_swapping(rows, name, rates, column) for name in others)
            for column, others in (
                ("normalized_s", list(variants)[2:]), ("latency_s", list(variants)[2:])
            )
        }  # fmt: skip
        blocks = f", {case.num_blocks} KV blocks" if case.num_blocks else ""
        parts.append(
            f"Normalized latency, ms a token, {base.profile}, {base.dataset}{blocks}, lengths "
            f"known.\n\n{table}\n\nOver raw swapping: {over['normalized_s']}.\n\n"
            f"Mean latency, s:\n\n{latency}\n\nOver raw swapping: {over['latency_s']}."
        )
    return Outcome(found, "\n\n".join(parts))


def alone(setup: Setup) -> Outcome:
    """Fig. 8 in an engine like the paper's, which computes prompts in steps of their own."""
    alise = "sola:policy=alise,sim.predictor=oracle"
    variants = {
        "swap, raw": (f"{alise},swap.mode=raw,swap.host_gib=256", "alone"),
        "recompute": (alise, "alone always"),
        "defer": (alise, "alone defer"),
    }
    base, rates, rows = _fig8_rows(setup, _FIG8_CASES[0], variants)
    table = _table(rows, list(variants), rates, "normalized_s", lambda v: f"{1e3 * v:.0f}")
    counts = _table(rows, list(variants), rates, "num_preemptions", lambda v: f"{v:.0f}")
    over = ", ".join(
        _over_swapping(rows, name, rates, "normalized_s") for name in list(variants)[1:]
    )
    return Outcome(
        rows,
        f"Normalized latency, ms a token, {base.profile}, {base.dataset}, lengths known, prompts "
        f"computed alone.\n\n{table}\n\nOver raw swapping: {over}.\n\nPreemptions:\n\n{counts}",
    )


def _fig8_rows(
    setup: Setup,
    case: _Fig8Case,
    variants: dict[str, tuple[str, str]],
) -> tuple[Point, Sequence[float], list[Row]]:
    """What all points have in common, the rates, and a row per rate, seed and variant."""
    rates = case.rates[:2] if setup.is_quick else case.rates
    base = Point(case.profile, _dataset(setup, case.dataset), 1.0, 60.0, 1.0, "stock",
                 num_requests=setup.num_requests)  # fmt: skip
    rows = _rows(setup, [
        Case(replace(base, rate_per_s=rate, scheduler=text, seed=seed), label, case.num_blocks, how)
        for rate in rates for seed in setup.seeds for label, (text, how) in variants.items()
    ])  # fmt: skip
    return base, rates, rows


def _over_swapping(rows: Sequence[Row], name: str, rates: Sequence[float], column: str) -> str:
    ratios = [
        _mean(rows, name, rate, column) / _mean(rows, "swap, raw", rate, column) for rate in rates
    ]
    return f"{name} {min(ratios):.2f}x to {max(ratios):.2f}x"


def host(setup: Setup) -> Outcome:
    """INT8 against raw at equal host memory and equal bandwidth."""
    alise = "sola:policy=alise,sim.predictor=oracle"
    base = Point("opt-13b-v100", _dataset(setup, "alpaca.jsonl.gz"), 7.0, 60.0, 1.0, "stock",
                 num_requests=setup.num_requests)  # fmt: skip
    rates = (7.0,) if setup.is_quick else (7.0, 12.0)
    sizes = (0.25, 1.0) if setup.is_quick else (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
    names = ("raw", "int8")
    found: list[Row] = []
    parts = []
    for rate in rates:
        rows = _rows(setup, [
            Case(
                replace(
                    base,
                    rate_per_s=rate,
                    scheduler=f"{alise},swap.mode={mode},swap.host_gib={size:g},"
                    "swap.group_tokens=16",
                    seed=seed,
                    ttft_s=60.0 + size,  # tells the sizes apart; nothing reads it
                ),
                mode,
            )
            for size in sizes for seed in setup.seeds for mode in names
        ])  # fmt: skip
        found += rows
        for row in rows:
            row["rate_per_s"] = row["ttft_s"] - 60.0
        lost = _table(rows, names, sizes, "refused", lambda v: f"{v:.0f}", "GiB")
        speed = _table(rows, names, sizes, "normalized_s", lambda v: f"{1e3 * v:.1f}", "GiB")
        parts.append(
            f"{base.profile}, {base.dataset} at {rate:g} requests/s, groups of 16 tokens.\n\n"
            f"Tokens that found no room on the host and were computed again:\n\n{lost}\n\n"
            f"Normalized latency, ms a token:\n\n{speed}"
        )
    return Outcome(found, "\n\n".join(parts))


def attain(setup: Setup) -> Outcome:
    """`policy="attain"` with KV memory cut to a third and to a twentieth.

    The last part has prompts of 20 tokens and outputs of 340: requests are displaced many times.
    """
    chat = Point("llama-3-8b-a100", _dataset(setup, "azure_conv_2023.csv.gz"), 1.0, 0.8, 0.12,
                 "stock", num_requests=setup.num_requests)  # fmt: skip
    short = replace(
        chat,
        dataset=_dataset(setup, "alpaca.jsonl.gz"),
        outputs_from="" if setup.data is None else "sharegpt_lengths_llama2.csv.gz",
        ttft_s=1.0,
        tpot_s=0.1,
    )
    scarce = 1500
    found: list[Row] = []
    parts = []
    loads: tuple[tuple[Point, int, tuple[float, ...]], ...] = (
        (chat, _third_of_blocks(chat.profile), (5.0, 6.0, 7.0, 8.0, 10.0)),
        (chat, scarce, (3.0, 4.0, 5.0, 6.0, 8.0)),
        (short, scarce, (10.0, 14.0, 18.0)),
    )
    for base, num_blocks, rates in loads:
        rates = rates[:2] if setup.is_quick else rates
        rows, met, speed = _attain_tables(setup, base, rates, num_blocks, {"vLLM": "stock"})
        found += rows
        outputs = f" with outputs of {base.outputs_from}" if base.outputs_from else ""
        parts.append(
            f"Llama-3-8B on one A100 with {num_blocks} KV blocks of 16 tokens, {base.dataset}"
            f"{outputs}, TTFT {base.ttft_s:g} s, TPOT {base.tpot_s:g} s. Requests within both:\n\n"
            f"{met}\n\nNormalized latency, ms a token:\n\n{speed}"
        )
    return Outcome(found, "\n\n".join(parts))


#: Lengths, targets and the rate that stock vLLM sustains, as in `load` of benchmarks/simulation.
_LOADS = (
    ("sharegpt_lengths_llama2.csv.gz", 1.96, 0.105, 3.0),
    ("azure_conv_2023.csv.gz", 0.97, 0.104, 6.3),
    ("azure_code_2023.csv.gz", 1.94, 0.105, 4.02),
    ("arxiv_summarization_lengths_llama2.csv.gz", 2.26, 0.106, 2.97),
    ("mooncake_conversation.jsonl.gz", 0.991, 0.104, 6.1),
)


def third(setup: Setup) -> Outcome:
    """`policy="attain"` on the loads of `benchmarks/simulation`, with a third of the KV memory."""
    shares = (1.0,) if setup.is_quick else (0.75, 1.0, 1.25, 1.5, 2.0)
    chunks = {f"vLLM, {size}": f"stock:{size}" for size in (512, 1024, 2048, 8192)}
    found: list[Row] = []
    parts = []
    for file, ttft_s, tpot_s, rate in _LOADS[:1] if setup.is_quick else _LOADS:
        base = Point("llama-3-8b-a100", _dataset(setup, file), 1.0, ttft_s, tpot_s, "stock",
                     num_requests=setup.num_requests)  # fmt: skip
        num_blocks = _third_of_blocks(base.profile)
        rates = [float(f"{share * rate:.3g}") for share in shares]
        rows, met, speed = _attain_tables(setup, base, rates, num_blocks, chunks)
        found += rows
        parts.append(
            f"Llama-3-8B on one A100 with {num_blocks} KV blocks of 16 tokens, {base.dataset}, "
            f"TTFT {ttft_s:g} s, TPOT {tpot_s:g} s. Requests within both:\n\n{met}\n\n"
            f"Normalized latency, ms a token:\n\n{speed}"
        )
    return Outcome(found, "\n\n".join(parts))


def engine(setup: Setup) -> Outcome:
    """The ways of Fig. 8, and `attain`, on vLLM's real CPU engine with little KV memory."""
    variants = {
        "swap, raw": ("sola:policy=alise,swap.mode=raw", ""),
        "swap, INT8": ("sola:policy=alise,swap.mode=int8", ""),
        "recompute, where it pays": ("sola:policy=alise,swap.mode=off", ""),
        "recompute, as in the paper": ("sola:policy=alise,swap.mode=off", "always"),
        "defer": ("sola:policy=alise,swap.mode=off", "defer"),
        "vLLM, 512": ("stock:512", ""),
        "vLLM, 2048": ("stock:2048", ""),
        "attain": ("sola:swap.mode=off", ""),
        "attain, swap": ("sola:swap.mode=raw", ""),
    }
    cases = [
        EngineCase(name, seed, scheduler, policy, setup.num_requests)
        for seed, (name, (scheduler, policy)) in itertools.product(setup.seeds, variants.items())
    ]
    rows = setup.rows_of(cases, engine_key, engine_cases.run, "engine")
    lines = ["| | latency/token, ms | latency, s | attained | output tokens/s | preemptions |",
             "| --- | ---: | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for name in variants:
        found = [row for row in rows if row["name"] == name]
        cells = [
            f"{np.mean([row[column] for row in found]):.{digits}f}"
            for column, digits in (("normalized_ms", 0), ("latency_s", 2), ("attained", 3),
                                   ("tokens_per_s", 0), ("num_preemptions", 0))
        ]  # fmt: skip
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return Outcome(
        rows,
        "vLLM's engine on a CPU, random Llama of 62 M parameters, "
        f"{engine_cases.NUM_BLOCKS} KV blocks of 128 tokens, {setup.num_requests} requests of "
        f"`sharegpt-like` at {engine_cases.RATE_PER_S:g}/s, targets "
        f"{' and '.join(engine_cases.SLO)} ms; means of seeds "
        f"{', '.join(map(str, setup.seeds))}.\n\n" + "\n".join(lines),
    )


def _attain_tables(
    setup: Setup,
    base: Point,
    rates: Sequence[float],
    num_blocks: int,
    stock: dict[str, str],
) -> tuple[list[Row], str, str]:
    """The rows; attained shares and normalized latencies of vLLM and of ours, a line a rate."""
    variants = stock | {"attain": "sola", "attain, swap": "sola:swap.mode=raw,swap.host_gib=64"}
    rows = _rows(setup, [
        Case(replace(base, rate_per_s=rate, scheduler=text, seed=seed), label, num_blocks)
        for rate in rates for seed in setup.seeds for label, text in variants.items()
    ])  # fmt: skip
    return (
        rows,
        _table(rows, list(variants), rates, "attained", lambda v: f"{100 * v:.1f} %"),
        _table(rows, list(variants), rates, "normalized_s", lambda v: f"{1e3 * v:.0f}"),
    )


def _third_of_blocks(profile: str) -> int:
    backend = sweep.make_backend(profile)
    assert isinstance(backend, SimBackend)
    return (backend.options.profile.num_blocks or 3000) // 3


# Rows and tables ----------------------------------------------------------------------------


def _rows(setup: Setup, cases: Sequence[Case]) -> list[Row]:
    """A row per case."""
    rows = setup.rows_of(cases, case_key, functools.partial(run, data=setup.data), "swap")
    if len(rows) < len(set(cases)):
        raise SystemExit(
            f"error: {setup.path} must hold a row for each of {len(set(cases))} runs (got "
            f"{len(rows)}); leave --stored out."
        )
    return [row | {"refused": row["swap"].get("num_refused", 0)} for row in rows]


def case_key(case: Case) -> str:
    """Changes with all that decides the row."""
    point = case.point
    return sweep.make_key(resumable.parameters(case), point.scheduler, point.profile,
                          scripts=[_FOLDER / "cases.py"])  # fmt: skip


def engine_key(case: EngineCase) -> str:
    """Changes with all that decides the row."""
    return sweep.make_key(resumable.parameters(case), case.scheduler,
                          scripts=[_FOLDER / "engine_cases.py"])  # fmt: skip


def _mean(rows: Sequence[Row], name: str, rate: float, column: str) -> float:
    values = [r[column] for r in rows if r["name"] == name and r["rate_per_s"] == rate]
    return float(np.mean(values))


def _table(
    rows: Sequence[Row],
    names: Sequence[str],
    rates: Sequence[float],
    column: str,
    show: Callable[[float], str],
    unit: str = "req/s",
) -> str:
    lines = [f"| {unit} | " + " | ".join(names) + " |", "| ---: |" + " ---: |" * len(names)]
    for rate in rates:
        cells = [show(_mean(rows, name, rate, column)) for name in names]
        lines.append(f"| {rate:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _dataset(setup: Setup, name: str) -> str:
    return SYNTHETIC if setup.data is None else name
