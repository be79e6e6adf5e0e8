"""Profiles of the simulator: step times, KV capacity and link speed of a model on a GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sola_sched.cost import file as cost_file
from sola_sched.cost.model import CostModel
from sola_sched.errors import ProfileError
from sola_sched.simulator.steps.tables import SECTION, StepTables
from sola_sched.simulator.steps.time import MeasuredStepTime, StepTimeModel

FORMAT = "sola_sched.step_profile"
VERSION = 1
DEFAULT_PROFILE = "llama-3-8b-a100"

#: Profiles that come with the package.
FOLDER = Path(__file__).with_name("profiles")

_SHAPE_KEYS = (
    "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "vocab_size",
)  # fmt: skip
#: Of the coefficients, the one that a file may leave out.
_OPTIONAL = "overlap_power"
#: What a scheduler sees of a model whose shape the file does not tell.
UNKNOWN_SHAPE = dict(zip(_SHAPE_KEYS, (64, 128, 2, 4, 2, 32000), strict=True))


@dataclass(frozen=True)
class StepProfile:
    """What the virtual engine needs to know about a model on its hardware.

    Attributes:
        name: Shown in results.
        step_time: Seconds of a step.
        shape: Sizes of the model, `_SHAPE_KEYS`.
        max_model_len: Longest prompt + output, tokens; None if the file does not tell.
        num_blocks: KV blocks, the null block included; None likewise.
        block_size: Tokens of a block.
        tensor_parallel: GPUs that share each step.
        kv_bytes_per_token: KV of one token on each GPU; None if unknown.
        pcie_bytes_per_s: From host to device on each GPU, one direction; None if unknown.
        async_scheduling: Mode of the engine that was measured; None for a profile of the package.
        max_num_batched_tokens: Its token budget; None likewise.
        measured_model, measured_degree: Its model, and on how many GPUs; None likewise.
    """

    name: str
    step_time: StepTimeModel | StepTables | MeasuredStepTime
    shape: Mapping[str, int]
    max_model_len: int | None = None
    num_blocks: int | None = None
    block_size: int = 16
    tensor_parallel: int = 1
    kv_bytes_per_token: int | None = None
    pcie_bytes_per_s: float | None = None
    async_scheduling: bool | None = None
    max_num_batched_tokens: int | None = None
    measured_model: str | None = None
    measured_degree: int | None = None

    @property
    def vocab_size(self) -> int:
        """Token ids of the model."""
        return self.shape["vocab_size"]

    def model_config(self) -> dict[str, Any]:
        """A `config.json` of the model's sizes.

        The architecture is Llama's whatever the model is: a scheduler sees layers, KV heads and
        vocabulary only.
        """
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.shape["hidden_size"],
            "intermediate_size": self.shape["intermediate_size"],
            "num_hidden_layers": self.shape["num_layers"],
            "num_attention_heads": self.shape["num_heads"],
            "num_key_value_heads": self.shape["num_kv_heads"],
            "vocab_size": self.shape["vocab_size"],
            "max_position_embeddings": 1 << 20,
            "torch_dtype": "bfloat16",
        }


def profile_names() -> list[str]:
    """Names of the profiles that come with the package, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def step_profile_file(name_or_path: str) -> Path:
    """The file of a profile of the package, or the file named.

    Raises:
        ProfileError: There is no such profile.
    """
    path = FOLDER / f"{name_or_path}.json"
    if name_or_path not in profile_names():
        path = Path(name_or_path)
        if not path.is_file():
            raise ProfileError(
                f"'--profile' must be a file or one of {', '.join(profile_names())} "
                f"(got {name_or_path!r})."
            )
    return path


def load_step_profile(name_or_path: str) -> StepProfile:
    """Read a profile of the package by name, or a file.

    A file is one like those of the package, or a cost model that `python -m sola_sched.profile`
    measured on a live engine; the latter has no KV capacity and no context length.

    Raises:
        ProfileError: There is no such profile, or the file breaks a rule; the message names it.
    """
    path = step_profile_file(name_or_path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProfileError(f"Profile {str(path)!r} must be a JSON file: {error}.") from error
    if isinstance(document, dict) and document.get("format") == cost_file.FORMAT:
        return _measured(path)
    try:
        return profile_of(document)
    except ProfileError as error:
        raise ProfileError(f"Profile {str(path)!r}: {error}") from error


def _measured(path: Path) -> StepProfile:
    cost = CostModel.load(path)
    budget, mode = cost.meta.get("max_num_batched_tokens"), cost.meta.get("async_scheduling")
    model, degree = cost.meta.get("model"), cost.meta.get("tensor_parallel_size")
    return StepProfile(
        name=path.name.removesuffix(".json").removesuffix(".sola"),
        step_time=MeasuredStepTime(cost),
        shape=UNKNOWN_SHAPE,
        async_scheduling=mode if isinstance(mode, bool) else None,
        max_num_batched_tokens=budget if isinstance(budget, int) else None,
        measured_model=model if isinstance(model, str) else None,
        measured_degree=degree if isinstance(degree, int) else None,
    )


def profile_of(document: Any) -> StepProfile:
    """The profile that a file like those of the package holds.

    Raises:
        ProfileError: It breaks a rule.
    """
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise ProfileError(
            f"'format' must be {FORMAT!r} or {cost_file.FORMAT!r} (got {found!r}); copy a profile "
            "of the package, or measure one with `python -m sola_sched.profile`."
        )
    if document.get("version") != VERSION:
        raise ProfileError(
            f"'version' must be {VERSION} (got {document.get('version')!r}); "
            "copy a profile of this release."
        )
    shape = _section(document, "model")
    engine = _section(document, "engine")
    return StepProfile(
        name=str(document.get("name")),
        step_time=(
            StepTables.from_json(document[SECTION])
            if SECTION in document
            else StepTimeModel(**_step_time(_section(document, "step_time")))
        ),
        shape={key: _count(shape, "model", key) for key in _SHAPE_KEYS},
        max_model_len=_count(engine, "engine", "max_model_len"),
        num_blocks=_count(engine, "engine", "num_blocks"),
        block_size=_count(engine, "engine", "block_size"),
        tensor_parallel=_count(engine, "engine", "tensor_parallel"),
        kv_bytes_per_token=_count(engine, "engine", "kv_bytes_per_token"),
        pcie_bytes_per_s=float(_count(engine, "engine", "pcie_bytes_per_s")),
    )


def _step_time(section: Mapping[str, Any]) -> dict[str, float]:
    known = [field.name for field in fields(StepTimeModel)]
    if set(section) | {_OPTIONAL} != set(known):
        raise ProfileError(f"'step_time' must hold {', '.join(known)} (got {', '.join(section)}).")
    values = {}
    for name in section:
        value = _value(section, name)
        if not (isinstance(value, int | float) and 0.0 <= value < math.inf):
            raise ProfileError(
                f"'step_time.{name}' must be seconds, finite and >= 0 (got {value!r}); correct it."
            )
        values[name] = float(value)
    if 0.0 < values.get(_OPTIONAL, 0.0) < 1.0:
        raise ProfileError(
            f"'step_time.{_OPTIONAL}' must be 0 or >= 1 (got {values[_OPTIONAL]!r}); correct it."
        )
    return values


def _section(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = document.get(name)
    if not isinstance(section, dict):
        raise ProfileError(f"'{name}' must be an object (got {section!r}).")
    return section


def _count(section: Mapping[str, Any], where: str, name: str) -> int:
    value = _value(section, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ProfileError(f"'{where}.{name}' must be a whole number >= 1 (got {value!r}).")
    return value


def _value(section: Mapping[str, Any], name: str) -> Any:
    """A value, which may stand alone or beside its unit and origin."""
    entry = section.get(name)
    return entry.get("value") if isinstance(entry, dict) else entry
