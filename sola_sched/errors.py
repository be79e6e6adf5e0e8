"""The exceptions sola_sched raises, each derived from the built-in a caller would expect."""

from __future__ import annotations

from collections.abc import Iterable


class ConfigError(ValueError):
    """A configuration value breaks its rule; the message names key, value and rule."""


class SloError(ValueError):
    """A per-request SLO key has a wrong type or value; the message names key, value and rule."""


class PredictionError(ValueError):
    """A length prediction breaks its rule; the message names field, value and rule."""


class PlanError(ValueError):
    """A policy's plan cannot be carried out; the message names policy, field, value and rule."""


class ProfileError(ValueError):
    """A cost-model profile is damaged, of another format or physically impossible."""


class IncompatibleVllmError(RuntimeError):
    """The installed vLLM is outside the supported range or lacks a seam that is steered."""


class DatasetError(ValueError):
    """A benchmark dataset is missing or malformed; the message names the file and its source."""


class EncoderError(RuntimeError):
    """The sentence encoder of the length predictor is missing or of an unsupported kind."""


class PredictorFileError(ValueError):
    """A stored length predictor is damaged, of another format or made by another encoder."""


class ReportError(ValueError):
    """An instance's report of its load cannot be true; the message names field, value and rule."""


class InfeasibleError(ValueError):
    """No placement or deployment meets a constraint; the message says which and by how much."""


class DeploymentError(RuntimeError):
    """Ray Serve does not do what it was asked for; the message says what it says.

    Attributes:
        applications: Names of those that have failed.
    """

    def __init__(self, message: str, applications: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.applications = frozenset(applications)
