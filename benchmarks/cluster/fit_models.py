"""Fits performance models and prints their errors: `python benchmarks/cluster/fit_models.py`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from sola_sched.cluster.performance.files import FittedModel, save_performance
from sola_sched.cluster.performance.fitting import fit_performance
from sola_sched.cluster.performance.from_bench import samples_of_bench
from sola_sched.cluster.performance.from_profile import fit_profile, samples_of_profile
from sola_sched.cluster.performance.from_tables import kernel_steps
from sola_sched.cluster.performance.model import KvUse
from sola_sched.cluster.performance.static_batch_time import StaticBatchTime
from sola_sched.simulator.steps.profile import load_step_profile, profile_names

#: Errors that are printed; "kv" is over the largest request, "kv_each" over each one's own memory.
PARTS = ("kv", "kv_each", "prefill", "decode", "p1 to p4", "p5 to p8")


def of_profile(name: str) -> FittedModel:
    """The model of a step profile, with p1 to p8."""
    profile = load_step_profile(name)
    prefill, decode, _ = samples_of_profile(profile)
    fitted = fit_profile(profile)
    batch, errors = StaticBatchTime.fit(prefill, decode)
    return replace(fitted, errors={**fitted.errors, **errors}, batch=batch)


def of_tables(folder: Path) -> Iterator[FittedModel]:
    """The models of the measured kernels; memory as in the step profile of the same name."""
    for steps in kernel_steps(folder):
        memory = of_profile(f"{steps.model}-{steps.gpu}")
        model, errors = fit_performance(
            steps.name, steps.prefill, steps.decode, memory.model.kv,
            kv_capacity_bytes=memory.model.kv_capacity_bytes, num_gpus=steps.num_gpus,
        )  # fmt: skip
        batch, batch_errors = StaticBatchTime.fit(steps.prefill, steps.decode)
        of_memory = {part: memory.errors[part] for part in ("kv", "kv_each")}
        errors = {**of_memory, **errors, **batch_errors}
        origin = f"{steps.origin}; no host time; memory of profile {memory.model.name}"
        yield FittedModel(model, errors, origin, batch)


def of_bench(paths: Sequence[Path], profile_name: str) -> FittedModel:
    """The model of detailed results of `vllm bench serve`; memory as in a step profile."""
    memory = fit_profile(load_step_profile(profile_name)).model
    prefill, decode = samples_of_bench(paths)
    model, errors = fit_performance(
        paths[0].stem, prefill, decode, KvUse(memory.kv.bytes_per_token),
        kv_capacity_bytes=memory.kv_capacity_bytes, num_gpus=memory.num_gpus,
    )  # fmt: skip
    batch, batch_errors = StaticBatchTime.fit(prefill, decode)
    names = ", ".join(path.name for path in paths)
    return FittedModel(model, {**errors, **batch_errors}, f"vllm bench serve: {names}", batch)


def main(argv: Sequence[str] | None = None) -> int:
    """Fit what the arguments name; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/cluster/fit_models.py",
        description="Fit performance models for placement and print their errors.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--profile", nargs="+", metavar="NAME", help="step profiles, or 'all'")
    source.add_argument("--tables", type=Path, metavar="DIR", help="folder gpu_steps")
    source.add_argument(
        "--bench", nargs="+", type=Path, metavar="FILE",
        help="results of `vllm bench serve --save-result --save-detailed` of one engine",
    )  # fmt: skip
    parser.add_argument(
        "--memory-of", metavar="NAME", help="step profile that tells the memory, for --bench"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="write NAME.json there")
    args = parser.parse_args(argv)
    if args.profile:
        names = profile_names() if args.profile == ["all"] else args.profile
        models = [of_profile(name) for name in names]
    elif args.tables:
        models = list(of_tables(args.tables))
    elif args.memory_of is None:
        parser.error("--bench needs --memory-of: results do not tell the memory")
    else:
        models = [of_bench(args.bench, args.memory_of)]
    print(f"| model | {' | '.join(PARTS)} |")
    print("| --- " * (1 + len(PARTS)) + "|")
    for fitted in models:
        errors = [str(fitted.errors.get(part, "given")) for part in PARTS]
        print("| " + " | ".join([fitted.model.name, *errors]) + " |")
        if args.output:
            args.output.mkdir(parents=True, exist_ok=True)
            save_performance(args.output / f"{fitted.model.name}.json", fitted)
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except ValueError as error:
        sys.exit(f"error: {error}")
