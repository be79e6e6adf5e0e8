"""The GPUs and models of both papers' testbeds, and engines on them: fast ones and real ones.

Step times are computed from public figures with the shares of peak that were fitted to measured
kernels (`sola_sched.simulator.steps.roofline`), not measured. GPUs without NVLink reduce over
PCIe.

The heterogeneous paper's V100 are SXM2 modules "connected over PCIe 3.0 x16". Over PCIe alone eight
instances on one GPU each would be ahead of two on four; in its Fig. 4 they are behind. With two of
the modules' NVLinks between neighbours the order is the paper's, so there are both. vLLM 0.6 has
no FlashAttention on them: its own kernel has a thread block for each query head, which reads KV for
itself, so with grouped heads KV is read once for each head of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from sola_sched.bench.backends.base import SchedulerSpec, parse_scheduler
from sola_sched.config.slo import SloTarget
from sola_sched.errors import ConfigError
from sola_sched.simulator.cluster.fast.instance import FastInstance, FastSloInstance
from sola_sched.simulator.cluster.step_model import BatchTime
from sola_sched.simulator.steps import roofline
from sola_sched.simulator.steps.gpus import GPUS, Gpu
from sola_sched.simulator.steps.profile import StepProfile
from sola_sched.simulator.steps.roofline import MODELS, Model
from sola_sched.simulator.steps.time import DecodeOnly, StepTimeModel
from sola_sched.workloads.workload import Workload

if TYPE_CHECKING:
    from sola_sched.simulator.cluster.real import RealInstance

#: Beside those of the package: Aladdin's A100 (80 GB, PCIe), which is the heterogeneous paper's
#: A800 too, and that paper's V100.
_GPUS: dict[str, Gpu] = GPUS | {
    "a100-pcie": replace(
        GPUS["a100"], name="A100-PCIE-80GB", hbm_bytes_per_s=1.935e12, link_bytes_per_s=32e9
    ),
    "v100-pcie": replace(GPUS["v100"], link_bytes_per_s=16e9),
    "v100-nvlink": replace(GPUS["v100"], link_bytes_per_s=50e9),
}
_FITTED_AS = {"a100-pcie": "a100", "v100-pcie": "v100", "v100-nvlink": "v100"}
_READS_KV_BY_QUERY_HEAD = ("v100-pcie", "v100-nvlink")
_MODELS: dict[str, Model] = MODELS | {
    "llama-2-7b": Model("Llama-2-7b", 4096, 11008, 32, 32, 32, 32000, 4096),
    "llama-2-13b": Model("Llama-2-13b", 5120, 13824, 40, 40, 40, 32000, 4096),
    "llama-2-70b": Model("Llama-2-70b", 8192, 28672, 80, 64, 8, 32000, 4096),
    "qwen2.5-14b": Model("Qwen2.5-14B", 5120, 13824, 48, 40, 8, 152064, 8192),
}
_MAX_NUM_SEQS = 256
#: Tokens of a step on an instance of a decode pool: any prompt's KV has come with it.
_WHOLE = 1 << 16


class Kind(NamedTuple):
    """Instances of one sort: ``MODEL@GPU:TP``."""

    model: str
    gpu: str
    tensor_parallel: int

    @classmethod
    def parse(cls, text: str) -> Kind:
        """Of its text."""
        model, _, place = text.partition("@")
        gpu, _, degree = place.partition(":")
        if model not in _MODELS or gpu not in _GPUS or not degree.isdigit():
            raise ConfigError(f"A kind of instances is MODEL@GPU:TP (got {text!r}).")
        return cls(model, gpu, int(degree))

    def __str__(self) -> str:
        return f"{self.model}@{self.gpu}:{self.tensor_parallel}"


def kinds(cluster: str) -> list[Kind]:
    """The instances of ``2*MODEL@GPU:TP+MODEL@GPU:TP``, in that order."""
    found = []
    for part in cluster.split("+"):
        number, _, kind = part.rpartition("*")
        found += [Kind.parse(kind)] * int(number or 1)
    return found


@lru_cache(maxsize=256)
def step_profile(kind: Kind, is_decode: bool = False) -> StepProfile:
    """Step times and memory of an instance.

    Args:
        kind: Of the instance.
        is_decode: Prompts take no time: their KV comes from a prefill pool.
    """
    gpu = _GPUS[kind.gpu]
    model = roofline.on_gpus(_MODELS[kind.model], kind.tensor_parallel)
    assumed = roofline.corrected(_FITTED_AS.get(kind.gpu, kind.gpu))
    if not roofline.fits(model, gpu, assumed):
        tokens = max(0, roofline.num_blocks(model, gpu, assumed) - 1) * 16
        raise ConfigError(
            f"{kind.model} on {kind.tensor_parallel} {kind.gpu} must have KV for one request of "
            f"{model.max_model_len} tokens (got {tokens})."
        )
    values = {name: value for name, (value, _) in roofline.step_time(model, gpu, assumed).items()}
    if kind.gpu in _READS_KV_BY_QUERY_HEAD:
        values["per_ctx_s"] *= model.gpu_heads / model.gpu_kv_heads
    step_time: Any = StepTimeModel(**values)
    if is_decode:
        step_time = DecodeOnly(step_time)
    return StepProfile(
        name=f"{kind.model}-{kind.gpu}-tp{kind.tensor_parallel}",
        step_time=step_time,
        shape={
            "hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size,
            "num_layers": model.num_layers, "num_heads": model.num_heads,
            "num_kv_heads": model.num_kv_heads, "vocab_size": model.vocab_size,
        },
        max_model_len=model.max_model_len,
        num_blocks=roofline.num_blocks(model, gpu, assumed),
        tensor_parallel=kind.tensor_parallel,
        kv_bytes_per_token=model.kv_bytes_per_token,
        pcie_bytes_per_s=gpu.pcie_bytes_per_s,
    )  # fmt: skip


def scheduler_of(name: str, is_decode: bool = False) -> SchedulerSpec:
    """A scheduler as in `python -m sola_sched.bench`, with 256 slots."""
    spec = parse_scheduler(name)
    spec.engine_args["max_num_seqs"] = _MAX_NUM_SEQS
    default = 8192 if spec.kind == "sola" else 2048
    chunk = _WHOLE if is_decode else int(spec.max_num_batched_tokens or default)
    spec.engine_args["max_num_batched_tokens"] = chunk
    return spec


def fast_instance(kind: Kind, scheduler: str, is_decode: bool = False) -> FastInstance:
    """An instance by the fast model."""
    profile, spec = step_profile(kind, is_decode), scheduler_of(scheduler, is_decode)
    assert profile.num_blocks is not None
    assert profile.max_model_len is not None
    cls = FastSloInstance if spec.kind == "sola" else FastInstance
    return cls(
        BatchTime(profile.step_time),
        kv_capacity_tokens=(profile.num_blocks - 1) * profile.block_size,
        max_num_seqs=_MAX_NUM_SEQS,
        max_num_batched_tokens=int(spec.engine_args["max_num_batched_tokens"]),
        max_model_len=profile.max_model_len,
        num_gpus=kind.tensor_parallel,
        block_size=profile.block_size,
    )


def real_instances(
    cluster: Sequence[Kind],
    scheduler: str,
    slo: SloTarget,
    workload: Workload,
    seed: int,
    is_decode: bool = False,
) -> list[RealInstance]:
    """Instances with the real scheduler inside, that have served their warm-up."""
    from sola_sched.bench.backends import environment
    from sola_sched.bench.backends.simulation import SimBackend, SimOptions
    from sola_sched.simulator.cluster.real import RealInstance, Slowed

    environment.prepare(None, is_random=True)
    made = []
    for kind in cluster:
        plain = step_profile(kind, is_decode)
        steps = Slowed(BatchTime(plain.step_time))
        stretched = replace(plain, step_time=steps)  # type: ignore[arg-type]
        backend = SimBackend(SimOptions(stretched, seed=seed))
        engine = backend.warm_engine(scheduler_of(scheduler, is_decode), slo, workload)
        made.append(RealInstance(engine, steps, num_gpus=kind.tensor_parallel))
    return made
