"""Step times and memory of the paper's models on its GPUs, by the roofline (SeaLLM, section 6.1).

Nothing here was measured: peaks are the vendor's, the shares of them that an engine gets were
fitted to kernels of an A100 (`simulator.steps.roofline.corrected`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from sola_sched.cluster.sharing.services import Service
from sola_sched.config.rules import nearest
from sola_sched.errors import ConfigError
from sola_sched.simulator.cluster.step_model import BatchTime
from sola_sched.simulator.steps import gpus, roofline
from sola_sched.simulator.steps.gpus import Gpu
from sola_sched.simulator.steps.roofline import Assumptions, Model
from sola_sched.simulator.steps.time import StepTimeModel

_BYTES = 2
_GIB = 2**30
_BLOCK = 16

GPUS = gpus.ALL_GPUS | {
    "a800": replace(
        gpus.GPUS["a100"],
        name="A800-SXM4-80GB",
        link_bytes_per_s=200e9,
        source="the A100's figures with NVLink 400 GB/s both directions",
    )
}
"""Those of the package, and the paper's."""

MODELS = roofline.MODELS | {
    "opt-6.7b": Model(
        "facebook/opt-6.7b", 4096, 16384, 32, 32, 32, 50272, 2048, mlp_matrices=2, is_tied=True
    ),
    "llama-2-7b": Model("meta-llama/Llama-2-7b-hf", 4096, 11008, 32, 32, 32, 32000, 4096),
    "llama-2-13b": Model("meta-llama/Llama-2-13b-hf", 5120, 13824, 40, 40, 40, 32000, 4096),
    "llama-2-70b": Model("meta-llama/Llama-2-70b-hf", 8192, 28672, 80, 64, 8, 32000, 4096),
}
"""Those of the package, and the paper's. Requests may be longer than `max_model_len`: the paper
gives prompts of 13,000 tokens to models that were trained for 4,096."""


@dataclass(frozen=True)
class Hardware:
    """Memory and times of services on groups of one kind of GPU.

    Attributes:
        gpu: A key of `GPUS`.
    """

    gpu: str = "a800"

    def __post_init__(self) -> None:
        if self.gpu not in GPUS:
            raise ConfigError(f"'gpu' must be one of {', '.join(GPUS)} (got {self.gpu!r}).")

    @property
    def _gpu(self) -> Gpu:
        return GPUS[self.gpu]

    @property
    def _assumed(self) -> Assumptions:
        return roofline.corrected("a100" if self.gpu == "a800" else self.gpu)

    def steps(self, model: str, degree: int) -> BatchTime:
        """Step times of a model on so many GPUs."""
        return _steps(self.gpu, model, degree)

    def kv_bytes(self, model: str, degree: int) -> int:
        """KV of a token on each GPU."""
        return replace(model_of(model), tensor_parallel=degree).kv_bytes_per_token

    def weights_bytes(self, model: str, degree: int) -> float:
        """Weights on each GPU."""
        return model_of(model).num_parameters * _BYTES / degree

    def room_bytes(self, degree: int, models: Sequence[str]) -> float:
        """Memory of each GPU that is left for KV beside the weights of all models; may be < 0.

        Each model has an engine, and with it activations and CUDA graphs of its own.
        """
        weights = sum(self.weights_bytes(model, degree) for model in models)
        return self._usable_bytes - weights - len(models) * self._assumed.reserved_bytes

    def fits(self, degree: int, services: Sequence[Service]) -> bool:
        """Whether the weights fit, and beside them a longest request of each service at once."""
        if any(model_of(service.model).unshared(degree) for service in services):
            return False
        room = self.room_bytes(degree, [service.model for service in services])
        return sum(self._longest_bytes(degree, service) for service in services) <= room

    def kv_split(
        self, degree: int, services: Sequence[Service], rates: Mapping[str, float]
    ) -> dict[str, float]:
        """Bytes of KV on each GPU for each service, where engines hold their own.

        Each gets room for its longest request; of the rest half goes to all alike, since a rare
        service needs room too, and half by rate.

        Args:
            degree: GPUs of the group.
            services: Those on them; they must fit.
            rates: Requests per second of each there.
        """
        needs = {service.name: self._longest_bytes(degree, service) for service in services}
        rest = self.room_bytes(degree, [service.model for service in services])
        rest -= sum(needs.values())
        total = sum(rates[name] for name in needs)
        parts = {name: 0.5 / len(needs) + 0.5 * rates[name] / total for name in needs}
        return {name: need + rest * parts[name] for name, need in needs.items()}

    def memory_shares(
        self, degree: int, services: Sequence[Service], rates: Mapping[str, float]
    ) -> dict[str, float]:
        """Share of each GPU's memory for each service's engine: vLLM's `gpu_memory_utilization`."""
        return {
            service.name: (
                self.weights_bytes(service.model, degree) + self._assumed.reserved_bytes + kv
            )
            / (self._gpu.memory_gib * _GIB)
            for service, kv in zip(
                services, self.kv_split(degree, services, rates).values(), strict=True
            )
        }

    @property
    def _usable_bytes(self) -> float:
        return self._assumed.memory_utilization * self._gpu.memory_gib * _GIB

    def _longest_bytes(self, degree: int, service: Service) -> float:
        # Whole blocks, and the one that vLLM keeps for itself.
        blocks = -(-service.longest // _BLOCK) + 1
        return self.kv_bytes(service.model, degree) * blocks * _BLOCK

    def load_s(self, model: str, degree: int, bytes_per_s: float) -> float:
        """Seconds to load a model's weights onto its GPUs, each over its own link."""
        return self.weights_bytes(model, degree) / bytes_per_s


def model_of(name: str) -> Model:
    """A model by name.

    Raises:
        ConfigError: There is none.
    """
    if name not in MODELS:
        near = nearest(name, MODELS)
        raise ConfigError(
            f"'model' must be one of {', '.join(sorted(MODELS))} (got {name!r})"
            f"{f'; write {near}' if near else ''}."
        )
    return MODELS[name]


@lru_cache(maxsize=256)
def _steps(gpu: str, model: str, degree: int) -> BatchTime:
    assumed = roofline.corrected("a100" if gpu == "a800" else gpu)
    shape = replace(model_of(model), tensor_parallel=degree)
    values = roofline.step_time(shape, GPUS[gpu], assumed)
    return BatchTime(StepTimeModel(**{name: value for name, (value, _) in values.items()}))
