"""What KV swapping buys: `python benchmarks/swap/bench_swap.py fig8|alone|host|attain|...`.

All but the last in virtual time, with the real schedulers, step times and links of a profile;
`engine` by the clock on vLLM's real engine. See README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from sola_sched.bench import environment, sweep
from sola_sched.bench.backend import parse_scheduler
from sola_sched.bench.cli import main as bench_main
from sola_sched.bench.points import SYNTHETIC, Point, make_workload
from sola_sched.bench.sim_backend import SimBackend
from sola_sched.planner import alise_step
from sola_sched.planner.alise_step import AliseStep
from sola_sched.state import DECODE, StepPlan

_ROOT = Path(__file__).resolve().parents[2]
_RESULTS = _ROOT / "benchmarks" / "results" / "swap"
_DATA_VARIABLE = "SOLA_SCHED_DATA"


@dataclass(frozen=True)
class Case:
    """A point and what is changed around its run.

    Attributes:
        point: Arrivals, lengths, targets and scheduler.
        name: In tables.
        num_blocks: KV blocks; None for the profile's.
        policy: Words: ``defer`` displaces nobody, ``always`` whoever has more left, both as in the
            paper's comparison; ``alone`` computes prompts whole, in steps without decodes. Empty
            leaves the policy as it is.
    """

    point: Point
    name: str
    num_blocks: int | None = None
    policy: str = ""


@contextlib.contextmanager
def _policy(words: str) -> Iterator[None]:
    """Change the decisions in which the paper's alternatives, or its engine, differ."""
    changes: dict[str, Sequence[Any]] = {
        "defer": (mock.patch.object(AliseStep, "_gives_way", return_value=False),),
        "always": (mock.patch.object(alise_step, "_MIN_GAIN", 0.0),),
        "alone": (
            mock.patch.object(AliseStep, "_room", lambda self: self.state.max_num_tokens),
            mock.patch.object(AliseStep, "plan", _alone(AliseStep.plan)),
        ),
    }
    with contextlib.ExitStack() as stack:
        for word in words.split():
            for change in changes[word]:
                stack.enter_context(change)
        yield


def _alone(plan: Callable[[AliseStep], StepPlan]) -> Callable[[AliseStep], StepPlan]:
    """A step that computes prompts has nothing else; KV that comes from the host is no prompt."""

    def changed(self: AliseStep) -> StepPlan:
        planned, table = plan(self), self.state.table
        if planned.run is None or planned.admit is None:
            return planned
        rows = np.concatenate([planned.run, planned.admit])
        left = table.prefill_target[rows] - table.num_computed[rows]
        computes = (table.phase[rows] != DECODE) & (left > 1)
        if not computes.any():
            return planned
        self.num_settled = 0
        num_run = len(planned.run)
        return replace(
            planned,
            run=planned.run[computes[:num_run]],
            admit=planned.admit[computes[num_run:]],
            token_budget=min(int(left[computes].sum()), self.state.max_num_tokens),
        )

    return changed


def run(case: Case, data: Path | None) -> dict[str, Any]:
    """Serve the case; a row of results, latencies in seconds."""
    point = case.point
    backend = sweep.make_backend(point.profile)
    assert isinstance(backend, SimBackend)
    spec = parse_scheduler(point.scheduler)
    if case.num_blocks is not None:
        spec.engine_args["num_gpu_blocks_override"] = case.num_blocks
    engines: list[Any] = []
    build = backend._engine

    def remember(*args: Any) -> Any:
        engines.append(build(*args))
        return engines[-1]

    backend._engine = remember  # type: ignore[method-assign]
    workload = make_workload(point, backend.limits, data)
    with _policy(case.policy):
        outcome = backend.run(workload, spec, point.slo)
    ended = [r for r in outcome.records if r.completed]
    normalized = [(r.token_times_s[-1] - r.arrival_s) / len(r.token_times_s) for r in ended]
    met = [_is_met(r.token_times_s, r.arrival_s, point) for r in ended]
    scheduler = engines[-1].scheduler
    stats = scheduler.sola_stats() if hasattr(scheduler, "sola_stats") else {}
    return {
        "name": case.name,
        "num_blocks": case.num_blocks,
        "policy": case.policy,
        **asdict(point),
        "num_ended": len(ended),
        "normalized_s": float(np.mean(normalized)),
        "latency_s": float(np.mean([r.token_times_s[-1] - r.arrival_s for r in ended])),
        "normalized_p50_s": float(np.median(normalized)),
        "normalized_p90_s": float(np.quantile(normalized, 0.9)),
        "attained": sum(met) / len(outcome.records),
        "num_preemptions": outcome.scheduler.num_preemptions,
        "swap": stats.get("swap", {}),
        "notes": outcome.notes,
    }


def _is_met(times_s: Sequence[float], arrival_s: float, point: Point) -> bool:
    decode_s = times_s[-1] - times_s[0]
    return times_s[0] - arrival_s <= point.ttft_s and (
        len(times_s) < 2 or decode_s / (len(times_s) - 1) <= point.tpot_s
    )


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


#: Of `engine`: blocks of 128 tokens for the bench's random model, which has 256 otherwise; rate,
#: and targets in ms.
_ENGINE_BLOCKS, _ENGINE_RATE, _ENGINE_SLO = 48, 2.3, ("ttft:2400", "tpot:140")


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
    path = args.results / f"engine{'-quick' if args.quick else ''}.jsonl"
    rows = {(r["name"], r["seed"], r["num_prompts"]): r for r in sweep.load(path)}
    path.parent.mkdir(parents=True, exist_ok=True)
    for seed, (name, (scheduler, policy)) in itertools.product(args.seeds, variants.items()):
        key = name, seed, args.num_requests
        if key not in rows:
            rows[key] = {"name": name, "seed": seed} | _on_engine(
                scheduler, policy, seed, args.num_requests
            )
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[key]) + "\n")
    lines = ["| | latency/token, ms | latency, s | attained | output tokens/s | preemptions |",
             "| --- | ---: | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for name in variants:
        found = [rows[name, seed, args.num_requests] for seed in args.seeds]
        cells = [
            f"{np.mean([row[column] for row in found]):.{digits}f}"
            for column, digits in (("normalized_ms", 0), ("latency_s", 2), ("attained", 3),
                                   ("tokens_per_s", 0), ("num_preemptions", 0))
        ]  # fmt: skip
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return (
        f"vLLM's engine on a CPU, random Llama of 62 M parameters, {_ENGINE_BLOCKS} KV blocks of "
        f"128 tokens, {args.num_requests} requests of `sharegpt-like` at {_ENGINE_RATE:g}/s, "
        f"targets {' and '.join(_ENGINE_SLO)} ms; means of seeds "
        f"{', '.join(map(str, args.seeds))}.\n\n" + "\n".join(lines)
    )


def _on_engine(scheduler: str, policy: str, seed: int, num_prompts: int) -> dict[str, Any]:
    """One run of `python -m sola_sched.bench`, in this process."""
    with tempfile.TemporaryDirectory() as folder, _policy(policy):
        status = bench_main([
            "--clock", "wall", "--seed", str(seed), "--num-prompts", str(num_prompts),
            "--request-rate", str(_ENGINE_RATE), "--slo", *_ENGINE_SLO,
            "--schedulers", scheduler, "--max-num-batched-tokens", "2048",
            "--engine-args", json.dumps({"num_gpu_blocks_override": _ENGINE_BLOCKS}),
            "--result-dir", folder, "--result-filename", "run.json",
        ])  # fmt: skip
        if status:
            raise SystemExit(status)
        result = json.loads((Path(folder) / "run.json").read_text(encoding="utf-8"))
    return {
        "scheduler": scheduler,
        "policy": policy,
        "num_prompts": num_prompts,
        "completed": result["completed"],
        "normalized_ms": result["mean_normalized_latency_ms"],
        "latency_s": 1e-3 * result["mean_e2el_ms"],
        "attained": result["attainment"],
        "tokens_per_s": result["output_throughput"],
        "num_preemptions": result["scheduler"]["num_preemptions"],
        "cpu_share": result.get("cpu_share"),
    }


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
    """A row per case, those of a former run taken from the file."""
    path = args.results / f"{name}{'-quick' if args.quick else ''}.jsonl"
    stored = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            stored[_key(row)] = row
    rows = []
    path.parent.mkdir(parents=True, exist_ok=True)
    for case in cases:
        key = _key({"name": case.name, "num_blocks": case.num_blocks, "policy": case.policy,
                    **asdict(case.point)})  # fmt: skip
        if key not in stored:
            environment.prepare(None, is_random=True)
            stored[key] = run(case, args.data)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(stored[key]) + "\n")
            row = stored[key]
            print(f"{row['name']:28s} {row['rate_per_s']:6.2f}/s seed {row['seed']}: "
                  f"{1e3 * row['normalized_s']:8.1f} ms/token, {100 * row['attained']:5.1f} %, "
                  f"{row['num_preemptions']} preemptions", flush=True)  # fmt: skip
        row = dict(stored[key])
        row["refused"] = row["swap"].get("num_refused", 0)
        rows.append(row)
    return rows


def _key(row: dict[str, Any]) -> str:
    names = ("name", "num_blocks", "policy", *Point.__dataclass_fields__)
    return json.dumps([row[name] for name in names])


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
    path = Path(named) if named else _ROOT.parent / "shared" / "data"
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
