"""What KV swapping buys: `python benchmarks/swap/bench_swap.py fig8|alone|host|attain|...`.

All but the last in virtual time, with the real schedulers, step times and links of a profile;
`engine` by the clock on vLLM's real engine. See README.md.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import engine_cases
import numpy as np
from cases import Case, run
from engine_cases import EngineCase

from sola_sched.bench.backends.simulation import SimBackend
from sola_sched.bench.research import resumable, sweep
from sola_sched.bench.research.points import SYNTHETIC, Point

_FOLDER = Path(__file__).resolve().parent
_RESULTS = _FOLDER.parent / "results" / "swap"
_DATA_VARIABLE = "SOLA_SCHED_DATA"


# Experiments --------------------------------------------------------------------------------


class _Fig8Setup(NamedTuple):
    """Profile, lengths, KV blocks (None for the profile's) and rates of Fig. 8."""

    profile: str
    dataset: str
    num_blocks: int | None
    rates: tuple[float, ...]


_FIG8_SETUPS = (
    _Fig8Setup("opt-13b-v100", "alpaca.jsonl.gz", None, (5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 16.0)),
    _Fig8Setup("llama-3-8b-a100", "sharegpt_lengths_llama2.csv.gz", 1500, (2.0, 2.5, 3.0)),
)


def fig8(args: argparse.Namespace) -> str:
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
    parts = []
    for setup in _FIG8_SETUPS:
        base, rates, rows = _fig8_rows(args, "fig8", setup, variants)
        table = _table(rows, list(variants), rates, "normalized_s", lambda v: f"{1e3 * v:.0f}")
        latency = _table(rows, list(variants), rates, "latency_s", lambda v: f"{v:.2f}")
        over = {
            column: ", ".join(_over_swapping(rows, name, rates, column) for name in others)
            for column, others in (
                ("normalized_s", list(variants)[2:]), ("latency_s", list(variants)[2:])
            )
        }  # fmt: skip
        blocks = f", {setup.num_blocks} KV blocks" if setup.num_blocks else ""
        parts.append(
            f"Normalized latency, ms a token, {base.profile}, {base.dataset}{blocks}, lengths "
            f"known.\n\n{table}\n\nOver raw swapping: {over['normalized_s']}.\n\n"
            f"Mean latency, s:\n\n{latency}\n\nOver raw swapping: {over['latency_s']}."
        )
    return "\n\n".join(parts)


def alone(args: argparse.Namespace) -> str:
    """Fig. 8 in an engine like the paper's, which computes prompts in steps of their own."""
    alise = "sola:policy=alise,sim.predictor=oracle"
    variants = {
        "swap, raw": (f"{alise},swap.mode=raw,swap.host_gib=256", "alone"),
        "recompute": (alise, "alone always"),
        "defer": (alise, "alone defer"),
    }
    base, rates, rows = _fig8_rows(args, "alone", _FIG8_SETUPS[0], variants)
    table = _table(rows, list(variants), rates, "normalized_s", lambda v: f"{1e3 * v:.0f}")
    counts = _table(rows, list(variants), rates, "num_preemptions", lambda v: f"{v:.0f}")
    over = ", ".join(
        _over_swapping(rows, name, rates, "normalized_s") for name in list(variants)[1:]
    )
    return (
        f"Normalized latency, ms a token, {base.profile}, {base.dataset}, lengths known, prompts "
        f"computed alone.\n\n{table}\n\nOver raw swapping: {over}.\n\nPreemptions:\n\n{counts}"
    )


def _fig8_rows(
    args: argparse.Namespace,
    name: str,
    setup: _Fig8Setup,
    variants: dict[str, tuple[str, str]],
) -> tuple[Point, Sequence[float], list[dict[str, Any]]]:
    """What all points have in common, the rates, and a row per rate, seed and variant."""
    rates = setup.rates[:2] if args.quick else setup.rates
    base = Point(setup.profile, _dataset(args, setup.dataset), 1.0, 60.0, 1.0, "stock",
                 num_requests=args.num_requests)  # fmt: skip
    rows = _rows(args, name, [
        Case(replace(base, rate_per_s=rate, scheduler=text, seed=seed), label, setup.num_blocks,
             how)
        for rate in rates for seed in args.seeds for label, (text, how) in variants.items()
    ])  # fmt: skip
    return base, rates, rows


def _over_swapping(
    rows: Sequence[dict[str, Any]], name: str, rates: Sequence[float], column: str
) -> str:
    ratios = [
        _mean(rows, name, rate, column) / _mean(rows, "swap, raw", rate, column) for rate in rates
    ]
    return f"{name} {min(ratios):.2f}x to {max(ratios):.2f}x"


def host(args: argparse.Namespace) -> str:
    """INT8 against raw at equal host memory and equal bandwidth."""
    alise = "sola:policy=alise,sim.predictor=oracle"
    base = Point("opt-13b-v100", _dataset(args, "alpaca.jsonl.gz"), 7.0, 60.0, 1.0, "stock",
                 num_requests=args.num_requests)  # fmt: skip
    rates = (7.0,) if args.quick else (7.0, 12.0)
    sizes = (0.25, 1.0) if args.quick else (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
    names = ("raw", "int8")
    parts = []
    for rate in rates:
        rows = _rows(args, "host", [
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
            for size in sizes for seed in args.seeds for mode in names
        ])  # fmt: skip
        for row in rows:
            row["rate_per_s"] = row["ttft_s"] - 60.0
        lost = _table(rows, names, sizes, "refused", lambda v: f"{v:.0f}", "GiB")
        speed = _table(rows, names, sizes, "normalized_s", lambda v: f"{1e3 * v:.1f}", "GiB")
        parts.append(
            f"{base.profile}, {base.dataset} at {rate:g} requests/s, groups of 16 tokens.\n\n"
            f"Tokens that found no room on the host and were computed again:\n\n{lost}\n\n"
            f"Normalized latency, ms a token:\n\n{speed}"
        )
    return "\n\n".join(parts)


def attain(args: argparse.Namespace) -> str:
    """`policy="attain"` with KV memory cut to a third and to a twentieth.

    The last part has prompts of 20 tokens and outputs of 340: requests are displaced many times.
    """
    chat = Point("llama-3-8b-a100", _dataset(args, "azure_conv_2023.csv.gz"), 1.0, 0.8, 0.12,
                 "stock", num_requests=args.num_requests)  # fmt: skip
    short = replace(
        chat,
        dataset=_dataset(args, "alpaca.jsonl.gz"),
        outputs_from="" if args.data is None else "sharegpt_lengths_llama2.csv.gz",
        ttft_s=1.0,
        tpot_s=0.1,
    )
    scarce = 1500
    parts = []
    for base, num_blocks, rates in (
        (chat, _third_of_blocks(chat.profile), (5.0, 6.0, 7.0, 8.0, 10.0)),
        (chat, scarce, (3.0, 4.0, 5.0, 6.0, 8.0)),
        (short, scarce, (10.0, 14.0, 18.0)),
    ):
        rates = rates[:2] if args.quick else rates
        met, speed = _attain_tables(args, "attain", base, rates, num_blocks, {"vLLM": "stock"})
        outputs = f" with outputs of {base.outputs_from}" if base.outputs_from else ""
        parts.append(
            f"Llama-3-8B on one A100 with {num_blocks} KV blocks of 16 tokens, {base.dataset}"
            f"{outputs}, TTFT {base.ttft_s:g} s, TPOT {base.tpot_s:g} s. Requests within both:\n\n"
            f"{met}\n\nNormalized latency, ms a token:\n\n{speed}"
        )
    return "\n\n".join(parts)


#: Lengths, targets and the rate that stock vLLM sustains, as in `load` of benchmarks/simulation.
_LOADS = (
    ("sharegpt_lengths_llama2.csv.gz", 1.96, 0.105, 3.0),
    ("azure_conv_2023.csv.gz", 0.97, 0.104, 6.3),
    ("azure_code_2023.csv.gz", 1.94, 0.105, 4.02),
    ("arxiv_summarization_lengths_llama2.csv.gz", 2.26, 0.106, 2.97),
    ("mooncake_conversation.jsonl.gz", 0.991, 0.104, 6.1),
)


def third(args: argparse.Namespace) -> str:
    """`policy="attain"` on the loads of `benchmarks/simulation`, with a third of the KV memory."""
    shares = (1.0,) if args.quick else (0.75, 1.0, 1.25, 1.5, 2.0)
    chunks = {f"vLLM, {size}": f"stock:{size}" for size in (512, 1024, 2048, 8192)}
    parts = []
    for file, ttft_s, tpot_s, rate in _LOADS[:1] if args.quick else _LOADS:
        base = Point("llama-3-8b-a100", _dataset(args, file), 1.0, ttft_s, tpot_s, "stock",
                     num_requests=args.num_requests)  # fmt: skip
        num_blocks = _third_of_blocks(base.profile)
        rates = [float(f"{share * rate:.3g}") for share in shares]
        met, speed = _attain_tables(args, "third", base, rates, num_blocks, chunks)
        parts.append(
            f"Llama-3-8B on one A100 with {num_blocks} KV blocks of 16 tokens, {base.dataset}, "
            f"TTFT {ttft_s:g} s, TPOT {tpot_s:g} s. Requests within both:\n\n{met}\n\n"
            f"Normalized latency, ms a token:\n\n{speed}"
        )
    return "\n\n".join(parts)


def engine(args: argparse.Namespace) -> str:
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
        EngineCase(name, seed, scheduler, policy, args.num_requests)
        for seed, (name, (scheduler, policy)) in itertools.product(args.seeds, variants.items())
    ]
    rows = _stored_or_run(
        args, "engine", cases, engine_key, engine_cases.run,
        [field.name for field in fields(EngineCase)],
    )  # fmt: skip
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
    return (
        "vLLM's engine on a CPU, random Llama of 62 M parameters, "
        f"{engine_cases.NUM_BLOCKS} KV blocks of 128 tokens, {args.num_requests} requests of "
        f"`sharegpt-like` at {engine_cases.RATE_PER_S:g}/s, targets "
        f"{' and '.join(engine_cases.SLO)} ms; means of seeds "
        f"{', '.join(map(str, args.seeds))}.\n\n" + "\n".join(lines)
    )


def _attain_tables(
    args: argparse.Namespace,
    name: str,
    base: Point,
    rates: Sequence[float],
    num_blocks: int,
    stock: dict[str, str],
) -> tuple[str, str]:
    """Attained shares and normalized latencies of vLLM and of ours, a line a rate."""
    variants = stock | {"attain": "sola", "attain, swap": "sola:swap.mode=raw,swap.host_gib=64"}
    rows = _rows(args, name, [
        Case(replace(base, rate_per_s=rate, scheduler=text, seed=seed), label, num_blocks)
        for rate in rates for seed in args.seeds for label, text in variants.items()
    ])  # fmt: skip
    return (
        _table(rows, list(variants), rates, "attained", lambda v: f"{100 * v:.1f} %"),
        _table(rows, list(variants), rates, "normalized_s", lambda v: f"{1e3 * v:.0f}"),
    )


def _third_of_blocks(profile: str) -> int:
    backend = sweep.make_backend(profile)
    assert isinstance(backend, SimBackend)
    return (backend.options.profile.num_blocks or 3000) // 3


EXPERIMENTS: dict[str, Callable[[argparse.Namespace], str]] = {
    "alone": alone,
    "attain": attain,
    "engine": engine,
    "fig8": fig8,
    "host": host,
    "third": third,
}


# Rows and tables ----------------------------------------------------------------------------


def _rows(args: argparse.Namespace, name: str, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """A row per case."""
    names = ["name", "num_blocks", "policy", *Point.__dataclass_fields__]
    rows = _stored_or_run(
        args, name, cases, case_key, functools.partial(run, data=args.data), names
    )
    return [row | {"refused": row["swap"].get("num_refused", 0)} for row in rows]


def _stored_or_run(
    args: argparse.Namespace,
    name: str,
    cases: Sequence[Any],
    key_of: Callable[[Any], str],
    make: Callable[[Any], dict[str, Any]],
    names: Sequence[str],
) -> list[dict[str, Any]]:
    """A row per case, run where it is missing; with ``--stored`` the last one there is, found by
    the columns `names`, by whatever source it was made."""
    path = args.results / f"{name}{'-quick' if args.quick else ''}.jsonl"
    if not args.stored:
        return resumable.run(cases, path, key_of, make, title=name)
    found = {json.dumps([row.get(name) for name in names]): row for row in resumable.load(path)}
    wanted = [json.dumps([parameters(case)[name] for name in names]) for case in cases]
    missing = sum(key not in found for key in wanted)
    if missing:
        raise SystemExit(f"{path} must hold a row for every run ({missing} of {len(wanted)} are "
                         "missing); leave --stored out.")  # fmt: skip
    return [found[key] for key in wanted]


def parameters(case: Case | EngineCase) -> dict[str, Any]:
    """All parameters as columns of one row."""
    columns = asdict(case)
    return columns | columns.pop("point", {})


def case_key(case: Case) -> str:
    """Changes with all that decides the row."""
    point = case.point
    return sweep.make_key(parameters(case), point.scheduler, point.profile,
                          scripts=[_FOLDER / "cases.py"])  # fmt: skip


def engine_key(case: EngineCase) -> str:
    """Changes with all that decides the row."""
    return sweep.make_key(parameters(case), case.scheduler,
                          scripts=[_FOLDER / "engine_cases.py"])  # fmt: skip


def _mean(rows: Sequence[dict[str, Any]], name: str, rate: float, column: str) -> float:
    values = [r[column] for r in rows if r["name"] == name and r["rate_per_s"] == rate]
    return float(np.mean(values))


def _table(
    rows: Sequence[dict[str, Any]],
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


def _dataset(args: argparse.Namespace, name: str) -> str:
    return SYNTHETIC if args.data is None else name


def _data(given: Path | None) -> Path | None:
    named = given or os.environ.get(_DATA_VARIABLE)
    path = Path(named) if named else _FOLDER.parents[2] / "shared" / "data"
    return path if path.is_dir() else None


def main(argv: Sequence[str] | None = None) -> int:
    """Run an experiment, print its table and store it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(EXPERIMENTS))
    parser.add_argument("--data", type=Path, help=f"data sets (default: ${_DATA_VARIABLE}, else "
                        "../shared/data; without one, synthetic lengths)")  # fmt: skip
    parser.add_argument("--results", type=Path, default=_RESULTS, metavar="DIR")
    parser.add_argument("--num-requests", type=int, default=None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--quick", action="store_true", help="few, small runs: does it work?")
    parser.add_argument("--stored", action="store_true",
                        help="the table of the rows there are; run nothing")  # fmt: skip
    args = parser.parse_args(argv)
    args.data = _data(args.data)
    args.num_requests = args.num_requests or (60 if args.quick else 1000)
    table = EXPERIMENTS[args.name](args)
    path = args.results / f"{args.name}{'-quick' if args.quick else ''}.md"
    path.write_text(table + "\n", encoding="utf-8")
    print(f"\n{table}\n\nTable in {path}.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
