"""The model that is planned for: its sizes, and its step times on each kind of GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

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
        shape = replace(shape, max_model_len=max_model_len)
    measured = dict(map(_measured, profiles))
    if len(measured) < len(profiles):
        raise ConfigError("'--profile' must name each GPU type and degree once.")
    return PlannedModel(name, shape, tuple(measured.items())), notes


def _measured(text: str) -> tuple[tuple[str, int], str]:
    place, _, file = text.partition("=")
    gpu, _, degree = place.partition(":")
    if gpu not in ALL_GPUS or not file or not (degree.isdecimal() or not degree):
        raise ConfigError(
            f"'--profile' must be GPU=FILE or GPU:DEGREE=FILE with one of {', '.join(ALL_GPUS)} "
            f"(got {text!r})."
        )
    load_step_profile(file)
    return (gpu, int(degree or 1)), file


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
