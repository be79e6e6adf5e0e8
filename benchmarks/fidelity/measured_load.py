"""Stock vLLM at every chunk size against `sola`, around the knee, on measured and computed steps.

The experiment `load` of `benchmarks/simulation` in short: how far its conclusions hang on the step
times.
"""

from __future__ import annotations

from harness.markdown import markdown
from harness.points import Point
from harness.setup import Outcome, Setup
from simulation.setups import at_stock_rate, datasets, grid, multiples, single_request_slo

PROFILES = ("llama-3-8b-a100-measured", "llama-3-8b-h100-measured")
DATASETS = ("sharegpt", "azure-conv", "arxiv")
CHUNKS = (512, 1024, 2048, 4096, 8192)
LOADS = (0.8, 1.0, 1.25)


def measured_load(setup: Setup) -> Outcome:
    """Attained % of each, means of the seeds."""
    schedulers = [*(f"stock:{size}" for size in CHUNKS), "sola"]
    setup.check_only(PROFILES)
    rows, lines = [], []
    for profile in setup.only or PROFILES:
        for file in datasets(setup, DATASETS):
            slo = single_request_slo(profile, file, 10.0, setup.data)
            base = Point(profile, file, 0.0, slo.ttft_s, slo.tpot_s, "stock")
            base = at_stock_rate(setup, base)
            for load, rate in zip(LOADS, multiples(base.rate_per_s, LOADS), strict=True):
                points = grid(base, rate_per_s=(rate,), seed=setup.seeds, scheduler=schedulers)
                found = setup.rows(points, f"{profile}, {file}, load {load:g}")
                rows += found
                of = [[r["attainment"] for r in found if r["scheduler"] == s] for s in schedulers]
                shares = [f"{100 * sum(each) / len(each):.1f}" for each in of]
                lines.append([profile, file.split(".")[0], f"{load:g}", f"{rate:g}", *shares])
    columns = ["profile", "data", "load", "requests/s", *map(str, CHUNKS), "sola"]
    return Outcome(rows, markdown(columns, lines, 2))
