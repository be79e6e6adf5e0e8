"""The commands that run what a plan has chosen."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sola_sched.config.slo import SloTarget
from sola_sched.plan.search.configurations import Configuration
from sola_sched.workloads.workload import SloClass

_FIRST_PORT = 8001
_TARGETS = ("ttft_s", "tpot_s", "e2e_s")
#: Seconds between two reports of an engine to the gateway.
_REPORTS_S = 0.1


def commands(
    chosen: Configuration,
    model: str,
    slo: SloTarget,
    classes: Sequence[SloClass] = (),
    max_model_len: int | None = None,
) -> list[str]:
    """What to run for this answer, a sentence or a command each.

    Args:
        model: As `vllm serve` takes it.
        slo: Targets of requests without their own.
        max_model_len: None leaves the model's own limit.
    """
    if chosen.num_prefill:
        return ["Prefill and decode pools need a KV connector of vLLM; no command starts them."]
    serve = ["vllm", "serve", model, "--tensor-parallel-size", str(chosen.tensor_parallel),
             "--max-num-batched-tokens", str(chosen.max_num_batched_tokens),
             "--max-num-seqs", str(chosen.max_num_seqs)]  # fmt: skip
    if max_model_len is not None:
        serve += ["--max-model-len", str(max_model_len)]
    is_one = chosen.num_instances == 1
    if chosen.spec.kind == "sola":
        options = _options(slo, classes) | ({} if is_one else {"load_interval_s": _REPORTS_S})
        serve += ["--scheduler-cls", "sola_sched.Scheduler",
                  "--additional-config", json.dumps({"sola_sched": options})]  # fmt: skip
    if is_one:
        return [f"To run it: {shlex.join(serve)}"]
    ports = range(_FIRST_PORT, _FIRST_PORT + chosen.num_instances)
    gateway = ["python", "-m", "sola_sched.serving", "gateway", "--router", chosen.router]
    for port in ports:
        gateway += ["--replica", f"http://localhost:{port}"]
    gpus = f"{chosen.tensor_parallel} GPU{'s' if chosen.tensor_parallel > 1 else ''}"
    return [
        f"To run it, {chosen.num_instances} times, on {gpus} each and ports {ports[0]} to "
        f"{ports[-1]}: {shlex.join([*serve, '--port', str(_FIRST_PORT)])}",
        f"and before them: {shlex.join(gateway)}",
    ]


def served_name(model: str, is_known: bool) -> str:
    """The model as `vllm serve` takes it.

    Args:
        model: As it was given: a name, a `config.json` or its folder.
        is_known: It is a name of the package, which nobody can download.
    """
    if is_known:
        return "MODEL"
    return str(Path(model).parent) if Path(model).is_file() else model


def _options(slo: SloTarget, classes: Sequence[SloClass]) -> dict[str, Any]:
    options: dict[str, Any] = {name: _number(getattr(slo, name)) for name in _TARGETS}
    if options["e2e_s"] is None:
        del options["e2e_s"]  # its default
    if classes:
        options["classes"] = {
            each.name: {
                name: _number(getattr(each.slo, name))
                for name in _TARGETS
                if math.isfinite(getattr(each.slo, name))
            }
            | ({"weight": _number(each.slo.weight)} if each.slo.weight != 1.0 else {})
            for each in classes
        }
    return options


def _number(value: float) -> float | int | None:
    """As one would write it; None for no target."""
    if math.isinf(value):
        return None
    return int(value) if value == int(value) else value
