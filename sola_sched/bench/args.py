"""Command line of ``python -m sola_sched.bench``. Flag names follow ``vllm bench serve``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sola_sched.bench.backends.base import BASELINES
from sola_sched.bench.backends.clock import CLOCKS
from sola_sched.bench.report.results import METRIC_NAMES
from sola_sched.config.flags import (
    base_url,
    json_object,
    natural_int,
    port,
    positive_float,
    positive_int,
    rate,
)
from sola_sched.errors import ConfigError
from sola_sched.workloads.datasets import DATASET_NAMES

#: Schedulers compared by default: vLLM at three chunk sizes, and ours.
DEFAULT_SCHEDULERS = ("stock:256", "stock:512", "stock:2048", "sola")
#: The same in virtual time, where a long chunk is what vLLM uses on large GPUs.
SIM_SCHEDULERS = ("stock:512", "stock:2048", "stock:8192", "sola")
BACKENDS = ("engine", "openai", "sim")
DEFAULT_DURATION_BUDGET_S = 180.0
#: Requests a run in virtual time, where traffic costs no waiting.
SIM_NUM_PROMPTS = 500

_DESCRIPTION = """\
Replay one workload against stock vLLM and against sola_sched.Scheduler, on the same arrivals
and seed, and compare the share of requests that meet all their latency targets (SLOs).

With no arguments: a first run of six to fifteen minutes, with a verdict in plain words. First in
virtual time, where every machine gives the same numbers; then vLLM in this process with a random
62 M parameter Llama and chat-shaped lengths, at a rate past what stock vLLM was measured to sustain
here and at one well below, in alternating blocks. No GPU and no network needed.

With arguments, on an engine: Poisson arrivals at three rates around the saturation of this machine
(one on a slow one), targets of 10 x the single-request latency, unless they say otherwise.

With --backend sim: the same comparison in virtual time. The schedulers are the real ones; how long
a step takes comes from a profile of a model on a GPU. Exactly repeatable; under two minutes.
"""
_EPILOG = """\
examples:
  python -m sola_sched.bench
  python -m sola_sched.bench --slo ttft:500 tpot:50 --request-rate 4 6 8
  python -m sola_sched.bench --model meta-llama/Llama-3.1-8B-Instruct --dataset-name sharegpt
  python -m sola_sched.bench --schedulers stock:512 stock:2048 sola sola:policy=paper
  python -m sola_sched.bench --backend openai --base-url http://localhost:8000 --request-rate 8
  python -m sola_sched.bench --backend sim --profile llama-3-70b-h100 --num-prompts 2000
  python -m sola_sched.bench --backend sim --schedulers stock sola:policy=alise \\
      sola:policy=alise,sim.predictor=oracle
"""


class Parser(argparse.ArgumentParser):
    """Raises ``ConfigError`` instead of ending the process.

    Its texts are shown as they are written, and options must be given whole.
    """

    def __init__(self, *, prog: str, description: str | None, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> Any:
        raise ConfigError(f"{message}; see --help.")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; it raises ``ConfigError`` instead of ending the process."""
    parser = Parser(
        prog="python -m sola_sched.bench",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    _target_group(parser.add_argument_group("what is measured"))
    requests = parser.add_argument_group("requests")
    dataset_group(requests, "requests a run (default: as many as fit --duration-budget)")
    requests.add_argument(
        "--duration-budget",
        type=positive_float,
        metavar="S",
        help="seconds of traffic in all runs together, without --num-prompts "
        f"(default: {DEFAULT_DURATION_BUDGET_S:g}; with sim: {SIM_NUM_PROMPTS} requests a run)",
    )
    _traffic_group(parser.add_argument_group("traffic"))
    _engine_group(parser.add_argument_group("engine (--backend engine)"))
    _server_group(parser.add_argument_group("server (--backend openai)"))
    _sim_group(parser.add_argument_group("virtual time (--backend sim)"))
    _output_group(parser.add_argument_group("results"))
    return parser


def _target_group(group: Any) -> None:
    add = group.add_argument
    add(
        "--backend",
        default="engine",
        choices=BACKENDS,
        help="vLLM in this process, a running OpenAI-compatible server, or virtual time "
        "(default: engine)",
    )
    add(
        "--model",
        help="local folder or model name (default: a random Llama made on the spot; "
        "with openai: the first model the server lists)",
    )
    add("--tokenizer", help="folder or name, if it is not the model's own")
    add(
        "--schedulers",
        nargs="+",
        metavar="SPEC",
        help="stock[:max_num_batched_tokens] and sola[:option=value,...], each also with "
        f"engine.<argument>=<value> (default: {' '.join(DEFAULT_SCHEDULERS)}; with sim: "
        f"{' '.join(SIM_SCHEDULERS)}); with sim also {' '.join(BASELINES)}, and "
        "sola:sim.predictor=NAME with a length predictor: constant:TOKENS, oracle, noisy:SIGMA, "
        "wrong:FACTOR, recorded:FILE",
    )
    add(
        "--slo",
        "--goodput",
        nargs="+",
        metavar="METRIC:MS",
        dest="slo",
        help="targets in ms, e.g. ttft:500 tpot:50, or e2e:9000 for the whole answer "
        "(default: 10 x the latency of a request alone)",
    )
    add(
        "--slo-class",
        action="append",
        default=[],
        metavar="NAME:SHARE:TTFT_MS:TPOT_MS[:E2E_MS[:WEIGHT]]",
        help="gives a share of the requests its own targets, none for no such target, and what one "
        "that meets them is worth; repeat for more classes, "
        "e.g. --slo-class chat:0.7:500:50 --slo-class job:0.3:none:none:60000:2",
    )
    add(
        "--make-model",
        type=Path,
        metavar="DIR",
        help="write the random default model to DIR and end (to serve it with vLLM)",
    )


def dataset_group(group: Any, num_prompts_help: str) -> None:
    """Flags that say where the requests come from."""
    add = group.add_argument
    add(
        "--dataset-name",
        default="sharegpt-like",
        choices=DATASET_NAMES,
        help="sharegpt-like and random are synthetic, custom needs a path, the others are "
        "downloaded once if no path is given (default: sharegpt-like)",
    )
    add(
        "--dataset-path",
        type=Path,
        help="file (.json, .jsonl, .csv, each also .gz; .zip) or folder",
    )
    add(
        "--num-prompts",
        type=positive_int,
        help=num_prompts_help,
    )
    add(
        "--length-scale",
        type=positive_float,
        help="factor on all lengths (default: 1, or less if the model's context is too short)",
    )
    add("--disable-shuffle", action="store_true", help="take the rows of a file in order")
    add(
        "--output-len",
        "--sharegpt-output-len",
        "--custom-output-len",
        type=positive_int,
        dest="output_len",
        help="replace every output length",
    )
    add("--random-input-len", "--input-len", type=positive_int, default=1024,
        help="mean prompt length of random, tokens (default: 1024)")  # fmt: skip
    add("--random-output-len", type=positive_int, default=128,
        help="mean output length of random, tokens (default: 128)")  # fmt: skip
    add(
        "--random-range-ratio",
        type=float,
        default=0.0,
        help="lengths of random vary by this share around their mean, in [0, 1) (default: 0)",
    )
    add(
        "--random-prefix-len",
        type=natural_int,
        default=0,
        help="tokens shared by all prompts of random",
    )
    add(
        "--ignore-eos",
        action="store_true",
        help="accepted for compatibility; output lengths are always exact here",
    )


def _traffic_group(group: Any) -> None:
    add = group.add_argument
    add(
        "--request-rate",
        nargs="+",
        type=rate,
        metavar="RPS",
        help="requests per second, several for a sweep, inf for all at once "
        "(default: three rates around the measured saturation, one where it is low)",
    )
    add(
        "--burstiness",
        type=positive_float,
        default=1.0,
        help="shape of the gamma-distributed gaps; 1 is Poisson, less is burstier (default: 1)",
    )
    add(
        "--max-concurrency",
        type=positive_int,
        help="most requests in flight; the others wait at the client and their TTFT runs",
    )
    add(
        "--self-timed",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="replay recorded arrival times, stretched to --request-rate if that is given",
    )
    add(
        "--num-warmups",
        type=natural_int,
        default=8,
        help="requests before the clock starts (default: 8)",
    )
    add(
        "--stall-timeout-sec",
        type=positive_float,
        default=120.0,
        help="end a run when no token has come for this long (default: 120)",
    )
    add(
        "--time-limit",
        type=positive_float,
        default=345.0,
        metavar="S",
        help="without --num-prompts: do not begin a request rate that would end later than this "
        "after the start; what is left out is reported (default: 345)",
    )
    add("--seed", type=natural_int, default=0)


def _engine_group(group: Any) -> None:
    add = group.add_argument
    add("--dtype", help="weights and activations, as vLLM's --dtype")
    add("--load-format", help="as vLLM's; dummy gives random weights to any architecture")
    add("--max-model-len", type=positive_int)
    add("--max-num-seqs", type=positive_int)
    add(
        "--max-num-batched-tokens",
        type=positive_int,
        help="for schedulers that name none; ours takes the largest of the comparison",
    )
    add("--gpu-memory-utilization", type=float)
    add("--tensor-parallel-size", type=positive_int)
    add(
        "--enforce-eager",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="no compilation or CUDA graphs (default: only on CPUs)",
    )
    add(
        "--clock",
        default="wall",
        choices=CLOCKS,
        help="cpu measures by the engine thread's CPU time and skips idle waits: what an "
        "undisturbed core would show, for shared machines without a GPU (default: wall)",
    )
    add(
        "--engine-args",
        type=json_object,
        default={},
        metavar="JSON",
        help="any other vLLM engine arguments",
    )


def _server_group(group: Any) -> None:
    add = group.add_argument
    add("--base-url", type=base_url,
        help="e.g. http://localhost:8000; overrides --host and --port")  # fmt: skip
    add("--host", default="127.0.0.1")
    add("--port", type=port, default=8000)
    add("--endpoint", default="/v1/completions")
    add("--served-model-name", help="name in the API, if not --model")
    add("--header", nargs="*", default=[], metavar="KEY=VALUE")
    add(
        "--extra-body",
        type=json_object,
        default={},
        metavar="JSON",
        help="added to every request body",
    )
    add(
        "--send-slo",
        action="store_true",
        help="send the targets with every request, in vllm_xargs",
    )
    add(
        "--vocab-size",
        type=positive_int,
        default=32000,
        help="random prompts use ids below this if there is no --tokenizer (default: 32000)",
    )
    add(
        "--ready-check-timeout-sec",
        type=float,
        default=0.0,
        help="wait this long for the server to answer",
    )


def _sim_group(group: Any) -> None:
    group.add_argument(
        "--profile",
        metavar="NAME_OR_FILE",
        help="step times and KV memory: a name such as llama-3-8b-a100 (default; a wrong name "
        "lists all), a file like those, or one that `python -m sola_sched.profile` measured; of "
        "the engine flags, --max-model-len, --max-num-seqs, --max-num-batched-tokens and "
        "--engine-args apply",
    )
    group.add_argument(
        "--scheduling-time",
        choices=("none", "model", "measured"),
        default="none",
        help="what the scheduler's own calls take of the virtual time: nothing (default), what "
        "was measured of vLLM's and of ours on one machine, or what they take in this very run",
    )


def _output_group(group: Any) -> None:
    add = group.add_argument
    add(
        "--save-result",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="write result JSON and plots (default: yes)",
    )
    add("--save-detailed", action="store_true", help="with the per-request arrays")
    add("--append-result", action="store_true", help="append to --result-filename")
    add("--result-dir", type=Path, default=Path("bench-results"), help="(default: ./bench-results)")
    add(
        "--result-filename",
        help="one file for all runs, a JSON object a line "
        "(default: a file per run, named as vLLM names them)",
    )
    add("--label", help="prefix of the run labels")
    add(
        "--metadata",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="put at the top level of every result",
    )
    add(
        "--percentile-metrics",
        default=",".join(METRIC_NAMES),
        metavar="LIST",
        help=f"of {', '.join(METRIC_NAMES)} (default: all)",
    )
    add("--metric-percentiles", default="50,99", metavar="LIST", help="(default: 50,99)")
    add(
        "--html",
        type=Path,
        metavar="FILE",
        help="also write a report that opens in a browser (needs the extra 'html')",
    )
    add("--disable-tqdm", action="store_true", help="no progress bar")
