"""The requests that are planned for."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sola_sched.bench.plan import dataset_options, load_encode
from sola_sched.bench.values import parse_slo, parse_slo_classes
from sola_sched.config.slo import SloTarget
from sola_sched.errors import ConfigError, DatasetError
from sola_sched.simulator.cluster.engine import ClusterRequest
from sola_sched.simulator.request import VirtualRequest
from sola_sched.simulator.steps.roofline import MODELS
from sola_sched.workloads.datasets import Encode, ModelLimits, build
from sola_sched.workloads.download import PUBLIC_FILES
from sola_sched.workloads.workload import Workload, assign_classes

_MIN_REQUESTS, _MAX_REQUESTS, _SPAN_S = 400, 2000, 60.0
#: TTFT targets that the arrivals must span, for a queue to be able to outgrow one.
_LEAST_SPANS = 20.0
#: Thirty years. Later, times of a step are lost beside the time of day.
_LONGEST_S = 1e9
#: Share of the time at the start that is not counted: engines fill up first.
FILLING = 0.2


@dataclass(frozen=True)
class Load:
    """What has to be served.

    Attributes:
        workload: Requests with arrival times.
        slo: Targets of those that have none of their own.
        notes: What was changed, in sentences.
    """

    workload: Workload
    slo: SloTarget
    notes: tuple[str, ...]

    @property
    def counted_from_s(self) -> float:
        """Requests that arrive before do not count."""
        return FILLING * self.workload.requests[-1].arrival_s

    def requests(self, start_s: float = 0.0, faster: float = 1.0) -> Sequence[ClusterRequest]:
        """The requests from `start_s` on, at `faster` times the rate."""
        longest = max(request.output_tokens for request in self.workload.requests)
        return [
            ClusterRequest(
                VirtualRequest(
                    req_id=request.req_id,
                    arrival_s=start_s + request.arrival_s / faster,
                    output_len=request.output_tokens,
                    prompt_len=len(request.prompt_token_ids),
                    # No engine learns a length from its limit.
                    max_tokens=longest,
                ),
                request.slo or self.slo,
                request.slo_class,
            )
            for request in self.workload.requests
        ]


def _encode(args: argparse.Namespace) -> Encode | None:
    """Loads a tokenizer for the first text; None where there is none to load."""
    name = args.tokenizer or (None if args.model in MODELS else args.model)
    if name is None:
        return None
    if Path(name).is_file():  # the model's config.json
        name = str(Path(name).parent)

    @functools.cache
    def encode() -> Encode:
        return load_encode(name)

    return lambda text: encode()(text)


def make_load(args: argparse.Namespace, max_model_len: int, vocab_size: int) -> Load:
    """Build the requests that the flags ask for.

    A public data set that is not there and cannot be downloaded is replaced by synthetic lengths,
    unless its own arrival times are wanted.

    Raises:
        ConfigError: A flag cannot be right.
        DatasetError: The data set is unusable.
    """
    slo = parse_slo(args.slo)
    is_at_most = args.self_timed and args.num_prompts is None
    if args.num_prompts is None:
        wanted = _MAX_REQUESTS if args.self_timed else _SPAN_S * args.request_rate
        args.num_prompts = int(min(max(wanted, _MIN_REQUESTS), _MAX_REQUESTS))
    limits = ModelLimits(max_model_len, vocab_size, _encode(args), prefer_text=False)
    notes: list[str] = []
    try:
        options = replace(dataset_options(args), is_at_most=is_at_most)
        workload = build(options, limits)
    except DatasetError as error:
        if args.dataset_name not in PUBLIC_FILES or args.dataset_path or args.self_timed:
            raise
        notes.append(f"Synthetic chat lengths instead of {args.dataset_name}: {error}")
        args.dataset_name = "sharegpt-like"
        workload = build(dataset_options(args), limits)
    workload = assign_classes(workload, parse_slo_classes(args.slo_class), args.seed)
    if not args.self_timed:
        workload = workload.at_rate(args.request_rate, burstiness=args.burstiness, seed=args.seed)
    elif args.request_rate is not None:
        workload = workload.stretched_to(args.request_rate)
    arrivals = [request.arrival_s for request in workload.requests]
    if not all(math.isfinite(at) and at >= 0.0 for at in arrivals) or arrivals[-1] <= 0.0:
        raise ConfigError("Arrival times must be finite, >= 0 and not all at once.")
    if arrivals[-1] > _LONGEST_S:
        raise ConfigError(
            f"the {len(arrivals)} requests must come within {_LONGEST_S:g} s (got "
            f"{arrivals[-1]:.3g} s); raise --request-rate."
        )
    notes += workload.notes
    if arrivals[-1] < _LEAST_SPANS * slo.ttft_s < math.inf:
        enough = math.ceil(len(arrivals) * _LEAST_SPANS * slo.ttft_s / arrivals[-1])
        notes.append(
            f"The {len(arrivals)} requests come within {arrivals[-1]:.3g} s: too short for a queue "
            f"to outgrow a TTFT target of {slo.ttft_s:g} s, so that too few GPUs may seem enough; "
            f"give --num-prompts {enough} or more."
        )
    return Load(workload, slo, tuple(notes))
