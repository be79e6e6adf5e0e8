"""Performance models as readable JSON files with units, origin and errors; some ship."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sola_sched.cluster.performance.fitting import FitError
from sola_sched.cluster.performance.model import (
    UNITS,
    DecodeTime,
    KvUse,
    PerformanceModel,
    PrefillTime,
)
from sola_sched.cluster.performance.static_batch_time import StaticBatchTime
from sola_sched.errors import ProfileError

FORMAT = "sola_sched.performance_model"
VERSION = 1

#: Models that come with the package, fitted to public measurements.
FOLDER = Path(__file__).with_name("models")


@dataclass(frozen=True)
class FittedModel:
    """A performance model and where it comes from.

    Attributes:
        model: The coefficients.
        errors: Of the fits, under ``kv``, ``kv_each``, ``prefill`` and ``decode`` (see `fitting`);
            of `batch` under ``p1 to p4`` and ``p5 to p8``.
        origin: What it was fitted to: source and its licence.
        batch: p1 to p8 of the same instance; None if not fitted.
    """

    model: PerformanceModel
    errors: Mapping[str, FitError] = field(default_factory=dict)
    origin: str = ""
    batch: StaticBatchTime | None = None


def performance_names() -> list[str]:
    """Names of the models that come with the package, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def save_performance(path: Path, fitted: FittedModel) -> None:
    """Write a model; the folder must exist."""
    path.write_text(json.dumps(_to_json(fitted), indent=1) + "\n", encoding="utf-8")


def load_performance(name_or_path: str | Path) -> FittedModel:
    """Read a model of the package by name, or a file that `save_performance` wrote.

    Raises:
        ProfileError: There is none, or the file breaks a rule; the message names it.
    """
    path = FOLDER / f"{name_or_path}.json"
    if str(name_or_path) not in performance_names():
        path = Path(name_or_path)
        if not path.is_file():
            raise ProfileError(
                f"A performance model must be a file or one of {', '.join(performance_names())} "
                f"(got {str(name_or_path)!r})."
            )
    try:
        return _of_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ProfileError(f"Performance model {str(path)!r}: {error}") from error


def _to_json(fitted: FittedModel) -> dict[str, Any]:
    model = fitted.model
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "name": model.name,
        "origin": fitted.origin,
        "num_gpus": model.num_gpus,
        "kv_capacity_bytes": model.kv_capacity_bytes,
    }
    for part, units in UNITS.items():
        values = asdict(getattr(model, part))
        document[part] = {
            name: {"value": _short(values[name]), "unit": unit} for name, unit in units.items()
        }
    if fitted.batch is not None:
        document["batch"] = {
            "prefill": [_short(p) for p in fitted.batch.prefill],
            "decode": [_short(p) for p in fitted.batch.decode],
        }
    document["errors"] = {name: asdict(error) for name, error in fitted.errors.items()}
    return document


def _of_json(document: Any) -> FittedModel:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise ProfileError(f"'format' must be {FORMAT!r} (got {found!r}).")
    if document.get("version") != VERSION:
        raise ProfileError(f"'version' must be {VERSION} (got {document.get('version')!r}).")
    try:
        parts = {part: _part(document, part) for part in UNITS}
        model = PerformanceModel(
            name=str(document["name"]),
            kv=KvUse(**parts["kv"]),
            prefill=PrefillTime(**parts["prefill"]),
            decode=DecodeTime(**parts["decode"]),
            kv_capacity_bytes=float(document["kv_capacity_bytes"]),
            num_gpus=int(document["num_gpus"]),
        )
        errors = {name: FitError(**error) for name, error in document["errors"].items()}
        batch = document.get("batch")
        return FittedModel(
            model, errors, str(document["origin"]), None if batch is None else _batch(batch)
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ProfileError(
            f"It must be as `save_performance` writes it ({type(error).__name__}: {error})."
        ) from error


def _part(document: Mapping[str, Any], part: str) -> dict[str, float]:
    values = {}
    for name, unit in UNITS[part].items():
        entry = document[part][name]
        if entry["unit"] != unit:
            raise ProfileError(f"'{part}.{name}' must be in {unit} (got {entry['unit']!r}).")
        values[name] = float(entry["value"])
    return values


def _batch(stored: Mapping[str, Any]) -> StaticBatchTime:
    p1, p2, p3, p4 = (float(p) for p in stored["prefill"])
    p5, p6, p7, p8 = (float(p) for p in stored["decode"])
    if min(p1, p2, p3, p4, p5, p6, p7, p8) < 0.0:
        raise ProfileError(f"'batch' must hold numbers >= 0 (got {stored!r}).")
    return StaticBatchTime((p1, p2, p3, p4), (p5, p6, p7, p8))


def _short(value: float) -> float:
    return float(f"{value:.6g}")
