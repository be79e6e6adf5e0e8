"""The model that is planned for: its sizes, and its step times on each kind of GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from sola_sched.errors import ConfigError
from sola_sched.plan.inputs.model_config import read_model
from sola_sched.simulator.steps.gpus import ALL_GPUS
from sola_sched.simulator.steps.measured import SUFFIX
from sola_sched.simulator.steps.profile import (
    StepProfile,
    load_step_profile,
    profile_names,
    profile_of,
)
from sola_sched.simulator.steps.roofline import MODELS, Model, corrected, profile_document

#: Where step times come from.
MEASURED_HERE, KERNELS, COMPUTED = "measured", "kernels", "computed"


@dataclass(frozen=True)
class PlannedModel:
    """A model on whatever GPUs.

    Attributes:
        name: As on the command line.
        shape: Its sizes; the longest request that is planned for is among them.
        measured: Files of `python -m sola_sched.profile`, by GPU type and degree.
    """

    name: str
    shape: Model
    measured: tuple[tuple[tuple[str, int], str], ...] = ()


def planned_for(
    name: str, max_model_len: int | None, profiles: Sequence[str]
) -> tuple[PlannedModel, tuple[str, ...]]:
    """The model that the flags name, and what is not exact about it, in sentences.

    Args:
        name: See `read_model`.
        max_model_len: Longest request; None for the model's own limit.
        profiles: Measured step times as `GPU=FILE` or `GPU:DEGREE=FILE`.

    Raises:
        ConfigError: A flag cannot be right.
        ProfileError: A file of step times cannot be used.
    """
    shape, notes = read_model(name)
    if max_model_len is not None:
        if max_model_len > shape.max_model_len:
            raise ConfigError(
                f"'--max-model-len' must be at most the model's own limit, {shape.max_model_len} "
                f"tokens for '--model {name}' (got {max_model_len}); vLLM does not start otherwise."
            )
        shape = replace(shape, max_model_len=max_model_len)
    measured = dict(map(_measured, profiles))
    notes = (*notes, *(_of_another(name, file) for file in measured.values()))
    if len(measured) < len(profiles):
        raise ConfigError("'--profile' must name each GPU type and degree once.")
    return PlannedModel(name, shape, tuple(measured.items())), tuple(filter(None, notes))


def _measured(text: str) -> tuple[tuple[str, int], str]:
    place, _, file = text.partition("=")
    gpu, _, degree = place.partition(":")
    if gpu not in ALL_GPUS or not file or not (degree.isdecimal() or not degree):
        raise ConfigError(
            f"'--profile' must be GPU=FILE or GPU:DEGREE=FILE with one of {', '.join(ALL_GPUS)} "
            f"(got {text!r})."
        )
    found = load_step_profile(file).measured_degree
    if found is not None and found != int(degree or 1):
        raise ConfigError(
            f"'--profile {place}' must be measured on {int(degree or 1)} GPU(s) (got {file}, "
            f"measured on {found}); write '{gpu}:{found}={file}' or name another file."
        )
    return (gpu, int(degree or 1)), file


def _of_another(name: str, file: str) -> str:
    """That a file may be of another model than the one that is planned for; empty if it is not."""
    found = load_step_profile(file).measured_model
    if found is None or _short(found) in _short(name) or _short(name) in _short(found):
        return ""
    return (
        f"Step times of {file} were measured with model {found!r}, and {name!r} is planned for: "
        "see that these are the same."
    )


def _short(model: str) -> str:
    """A model's name without where it lies and how that is written."""
    path = Path(model.strip())
    parts = (path.parent if path.name == "config.json" else path).parts
    # A model of the hub's cache: models--OWNER--NAME/snapshots/REVISION.
    cached = [part for part in parts if part.startswith("models--")]
    name = cached[-1].split("--")[-1] if cached else Path(*parts).resolve().name
    return name.lower()


def planned(model: str | PlannedModel) -> PlannedModel:
    """A model of the package by its name, or what is given."""
    return PlannedModel(model, MODELS[model]) if isinstance(model, str) else model


def origin(model: str | PlannedModel, gpu: str, tensor_parallel: int) -> str:
    """Where the step times of a model on so many of these GPUs come from."""
    wanted = planned(model)
    if (gpu, tensor_parallel) in dict(wanted.measured):
        return MEASURED_HERE
    own = MODELS.get(wanted.name)
    is_usual = own is not None and own.tensor_parallel == tensor_parallel
    return KERNELS if is_usual and f"{wanted.name}-{gpu}-{SUFFIX}" in profile_names() else COMPUTED


@lru_cache(maxsize=64)
def profile(model: str | PlannedModel, gpu: str, tensor_parallel: int) -> StepProfile:
    """Step times and memory of an instance.

    Raises:
        ProfileError: A measured file cannot be used.
    """
    wanted = planned(model)
    where = origin(wanted, gpu, tensor_parallel)
    if where == KERNELS:
        found = load_step_profile(f"{wanted.name}-{gpu}-{SUFFIX}")
        return replace(found, max_model_len=wanted.shape.max_model_len)
    shape = replace(wanted.shape, tensor_parallel=tensor_parallel)
    computed = profile_of(
        profile_document(f"{wanted.name}-{gpu}", shape, ALL_GPUS[gpu], corrected(gpu))
    )
    if where == COMPUTED:
        return computed
    measured = load_step_profile(dict(wanted.measured)[gpu, tensor_parallel])
    return replace(computed, name=measured.name, step_time=measured.step_time)
