"""The combined placement beside both papers' own and the simple routers, over load and clusters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cluster.cases import Case, file_of, mean_by, rows_of
from cluster.fast_error import error_of
from harness.markdown import markdown
from harness.parts import chosen
from harness.resumable import Row
from harness.setup import Outcome, Setup


@dataclass(frozen=True)
class Scene:
    """A cluster, a workload, and the rates looked at.

    Attributes:
        dataset: Key of `cases.DATASETS`.
        chunk: Of vLLM, its best on this workload among 512, 2048 and 8192.
    """

    cluster: str
    dataset: str
    ttft_s: float
    tpot_s: float
    rates_per_s: tuple[float, ...]
    arrivals: str = "poisson"
    chunk: int = 2048


SCENES = {
    "equal": Scene("4*llama-3-8b@a100:1", "azure-conv", 1.0, 0.06, (40.0, 52.0)),
    "recorded": Scene(
        "4*llama-3-8b@a100:1", "azure-conv", 1.0, 0.06, (36.0, 48.0), arrivals="recorded"
    ),
    "bursts": Scene(
        "4*llama-3-8b@a100:1", "azure-conv", 1.0, 0.06, (36.0, 48.0), arrivals="gamma:0.2"
    ),
    "mixed GPUs": Scene(
        "1*llama-3-8b@h100:1+2*llama-3-8b@v100:1", "azure-conv", 1.0, 0.06, (34.0, 40.0)
    ),
    "long prompts": Scene(
        "2*llama-3-8b@a100:1+1*llama-3-8b@h100:1", "arxiv", 2.0, 0.06, (18.0, 24.0)
    ),
    "tight TPOT": Scene("4*llama-2-13b@a100-pcie:1", "sharegpt", 0.6, 0.03, (3.0, 5.0), chunk=512),
}
ROUTERS = (
    "shortest-queue", "power-of-two", "aladdin", "workload", "least-ttft", "combined",
)  # fmt: skip
_PAPERS = ("aladdin", "workload")
_LENGTHS = {
    "histogram": "histogram",
    "retrieval": "recorded:benchmarks/results/alise/predictions-arena-retrieval.json",
    "true": "oracle",
}
_REQUESTS = 400


def combined(setup: Setup) -> Outcome:
    """Attainment of each router on each scene, with vLLM and with ours in the engines."""
    names = chosen(setup, SCENES)
    cases = [
        _case(setup, SCENES[name], engine, router, rate, seed)
        for name in names
        for rate in _rates(setup, SCENES[name])
        for engine in _engines(SCENES[name])
        for router in ROUTERS
        for seed in setup.seeds
    ]
    rows = rows_of(setup, cases, "placements")
    attained = mean_by(rows, ("cluster", "arrivals", "scheduler", "rate_per_s", "router"))
    lines, below = [], []
    for name in names:
        scene = SCENES[name]
        for engine in _engines(scene):
            for rate in _rates(setup, scene):
                at = (scene.cluster, scene.arrivals, engine, rate)
                if any((*at, router) not in attained for router in ROUTERS):
                    continue  # with --stored, of rows that are not there
                each = {router: attained[(*at, router)] for router in ROUTERS}
                gains = [each["combined"] - each[other] for other in (*_PAPERS, "least-ttft")]
                below += [gain for gain in gains[:2] if gain < 0.0]
                label = "vLLM" if engine.startswith("stock") else "sola_sched"
                lines.append([
                    name, label, f"{rate:g}", *(f"{100 * each[r]:.1f}" for r in ROUTERS),
                    f"{100 * gains[2]:+.1f}",
                ])  # fmt: skip
    head = ["workload", "engines", "req/s", *ROUTERS, "against least-ttft, points"]
    verdict = (
        "Combined placement is below neither of the papers' own in any line."
        if not below
        else f"Combined placement is below one of the papers' own {len(below)} times of "
        f"{2 * len(lines)}, by {100 * max(-gain for gain in below):.1f} points at most."
    )
    about = "Requests that met both targets, %; mean of the seeds."
    return Outcome(rows, f"{about} {verdict} {error_of(setup)}\n\n{markdown(head, lines, 3)}")


def predictions(setup: Setup) -> Outcome:
    """What knowing output lengths is worth to a router."""
    names = [name for name in chosen(setup, SCENES) if name in ("equal", "tight TPOT")]
    routers = ("aladdin", "workload", "combined")
    cases = [
        replace(_case(setup, SCENES[name], engine, router, rate, seed), lengths=lengths)
        for name in names
        for rate in SCENES[name].rates_per_s[-2:-1]
        for engine in _engines(SCENES[name])
        for router in routers
        for lengths in _LENGTHS.values()
        for seed in setup.seeds
    ]
    rows = rows_of(setup, cases, "predictions")
    attained = mean_by(rows, ("cluster", "scheduler", "router", "lengths"))
    lines = [
        [
            name, "vLLM" if engine.startswith("stock") else "sola_sched",
            f"{SCENES[name].rates_per_s[-2]:g}", router,
            *(
                f"{100 * attained[SCENES[name].cluster, engine, router, lengths]:.1f}"
                for lengths in _LENGTHS.values()
            ),
        ]
        for name in names
        for engine in _engines(SCENES[name])
        for router in routers
    ]  # fmt: skip
    about = (
        "Requests that met both targets, %, by what routers know of output lengths: the histogram "
        "of what has ended, the errors of the retrieval predictor, the truth."
    )
    head = ["workload", "engines", "req/s", "router", *_LENGTHS]
    return Outcome(rows, f"{about} {error_of(setup)}\n\n{markdown(head, lines, 4)}")


def checked(setup: Setup) -> Outcome:
    """Some points of `combined` with the real schedulers in the engines."""
    points = [("equal", 52.0), ("tight TPOT", 5.0)]
    routers = ("aladdin", "workload", "least-ttft", "combined")
    seeds = setup.seeds[:2] if setup.is_quick else setup.seeds
    cases = [
        replace(_case(setup, SCENES[name], engine, router, rate, seed), is_real=is_real,
                num_requests=300)
        for name, rate in (points[:1] if setup.is_quick else points)
        for engine in _engines(SCENES[name])
        for router in routers
        for is_real in (False, True)
        for seed in seeds
    ]  # fmt: skip
    rows = rows_of(setup, cases, "checked")
    attained = mean_by(rows, ("cluster", "scheduler", "router", "is_real"))
    lines = []
    for name, rate in points[:1] if setup.is_quick else points:
        for engine in _engines(SCENES[name]):
            label = "vLLM" if engine.startswith("stock") else "sola_sched"
            cells = []
            for router in routers:
                real, fast = (
                    attained[SCENES[name].cluster, engine, router, is_real]
                    for is_real in (True, False)
                )
                cells.append(f"{100 * real:.1f} ({100 * fast:.1f})")
            cells += [_gain(rows, SCENES[name].cluster, engine, other) for other in routers[:-1]]
            lines.append([name, label, f"{rate:g}", *cells])
    about = (
        "Requests that met both targets, %, with real schedulers; by the fast model in brackets. "
        f"Means of {len(seeds)} seeds; what combined placement gains with real schedulers, "
        "in points, with the standard error over the seeds."
    )
    gains = (f"against {router}" for router in routers[:-1])
    head = ["workload", "engines", "req/s", *routers, *gains]
    return Outcome(rows, f"{about}\n\n{markdown(head, lines, 3)}")


def _gain(rows: Sequence[Row], cluster: str, engine: str, other: str) -> str:
    """Points by which combined placement is ahead of another, seed by seed, real schedulers."""
    mine, its = (
        np.array(
            [
                100.0 * row["attainment"]
                for row in sorted(rows, key=lambda row: row["seed"])
                if row["is_real"]
                and (row["cluster"], row["scheduler"], row["router"]) == (cluster, engine, router)
            ]
        )
        for router in ("combined", other)
    )
    gains = mine - its
    error = gains.std(ddof=1) / len(gains) ** 0.5 if len(gains) > 1 else float("nan")
    return f"{gains.mean():+.1f} ± {error:.1f}"


def _engines(scene: Scene) -> tuple[str, str]:
    return f"stock:{scene.chunk}", "sola:8192"


def _rates(setup: Setup, scene: Scene) -> tuple[float, ...]:
    return scene.rates_per_s[:1] if setup.is_quick else scene.rates_per_s


def _case(setup: Setup, scene: Scene, engine: str, router: str, rate: float, seed: int) -> Case:
    return Case(
        scene.cluster, engine, router, file_of(setup, scene.dataset), rate, scene.ttft_s,
        scene.tpot_s, arrivals=scene.arrivals if setup.data is not None else "poisson",
        num_requests=_REQUESTS, seed=seed,
    )  # fmt: skip
