"""How near virtual time comes to real engines.

Two parts: runs on this machine's CPU (`engine_runs`), and runs recorded on GPUs, of which only
request times are known (`recorded_requests`): step times are fitted to every second request, and
errors are those of the others.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fidelity import recorded_requests as recorded
from fidelity.engine_runs import TRAFFIC, run_engine
from fidelity.report import engine_tables, request_table
from harness import provenance
from harness.setup import Outcome, Setup
from sola_sched.bench.backends import environment
from sola_sched.bench.report import results
from sola_sched.config.output_file import require_writable
from sola_sched.errors import ConfigError

Document = dict[str, Any]
REQUESTS = "requests"


def fidelity(setup: Setup) -> Outcome:
    """Both parts, or those that ``only`` names: workloads of the engine's part, and ``requests``.

    Raises:
        ConfigError: An argument cannot be right.
        DatasetError: The recorded requests cannot be read.
    """
    setup.check_only([*TRAFFIC, REQUESTS])
    if len(setup.seeds) != 1:
        raise ConfigError(f"'--seeds' must be one number here (got {len(setup.seeds)}).")
    document: Document = {}
    if setup.path.exists():
        document = json.loads(setup.path.read_text(encoding="utf-8"))
    if not setup.is_stored:
        require_writable(setup.path, "--results")
        document |= _measure(setup)
        setup.path.write_text(results.to_json(document) + "\n", encoding="utf-8")
    parts = []
    if "engine" in document:
        parts.append(f"```\n{engine_tables(document['engine'])}\n```")
    if REQUESTS in document:
        parts.append(f"```\n{request_table(document[REQUESTS])}\n```")
    if not parts:
        raise SystemExit(f"error: {setup.path} must hold results; run without --stored.")
    rows = [*document.get("engine", {}).get("runs", ()), *document.get(REQUESTS, ())]
    return Outcome([row | {"commit": document.get("commit")} for row in rows], "\n\n".join(parts))


def _measure(setup: Setup) -> Document:
    environment.prepare(None, is_random=True)
    started_s = time.monotonic()
    document: Document = {"environment": results.environment(), "seed": setup.seeds[0]}
    document["commit"] = provenance.checkout()[0]
    workloads = [name for name in TRAFFIC if not setup.only or name in setup.only]
    path = setup.data / recorded.REQUESTS_FILE if setup.data else None
    has_requests = path is not None and path.is_file()
    if REQUESTS in setup.only and not has_requests:
        raise ConfigError(
            f"'--only {REQUESTS}' needs {recorded.REQUESTS_FILE} (got no such file); name its "
            "folder with --data."
        )
    if workloads:
        document["engine"] = run_engine(setup, workloads, print)
    if path is not None and has_requests and (not setup.only or REQUESTS in setup.only):
        document[REQUESTS] = run_requests(path)
    elif not setup.only:
        print(f"Recorded requests: left out, there is no {recorded.REQUESTS_FILE}.")
    print(f"Took {time.monotonic() - started_s:.0f} s, load {os.getloadavg()[0]:.1f} at the end.")
    return document


def run_requests(path: Path) -> list[dict[str, Any]]:
    """Fit and test every recorded run; return plain data."""
    rows = []
    for (gpu, model), requests in recorded.read_requests(path).items():
        deployment = recorded.DEPLOYMENTS.get((gpu, model))
        if deployment is None:
            print(f"{gpu} {model}: left out, its engine settings are not known here.")
            continue
        is_training = np.arange(len(requests)) % 2 == 0
        fitted = recorded.fit(requests, deployment, is_training)
        rows.append(
            {
                "gpu": gpu,
                "model": model,
                "deployment": asdict(deployment),
                "step_time": asdict(fitted.step_time),
                "training": recorded.evaluate(requests, fitted, is_training),
                "test": recorded.evaluate(requests, fitted, ~is_training),
                "num_steps": fitted.simulated.num_steps,
                "num_preemptions": fitted.simulated.num_preemptions,
            }
        )
        print(f"{gpu} {model}: fitted to {int(is_training.sum())} requests.")
    return rows
