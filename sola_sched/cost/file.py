"""The coefficients, and the profile file that keeps them: readable JSON with units and origin."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sola_sched.errors import ProfileError

FORMAT = "sola_sched.cost.model"
VERSION = 1

#: Name and unit of each coefficient, in the order of the file.
COEFFICIENT_UNITS = {
    "a0": "s/token^2",
    "b0": "s/token^2",
    "c0": "s/token",
    "d0": "s",
    "a1": "s/request",
    "b1": "s/token",
    "c1": "s",
    "overlap": "s",
}

#: Within these limits is the time of the shortest step: one decode, or one token of a prompt.
MIN_SHORTEST_STEP_S, MAX_SHORTEST_STEP_S = 1e-6, 30.0
#: Most that a prompt of a thousand tokens may take at once.
MAX_PROMPT_S = 3600.0
_PROMPT_TOKENS = 1000


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Coefficients of Eq. 3 and 4, finite and >= 0.

    Attributes:
        a0: Seconds per prefill token and token already computed.
        b0: Seconds per squared prefill token.
        c0: Seconds per prefill token.
        d0: Seconds of a step with prefill, constant.
        a1: Seconds per decode.
        b1: Seconds per decode KV token.
        c1: Seconds of a step with decode, constant.
        overlap: The part of ``d0`` and ``c1`` that a mixed step pays once, seconds.

    Raises:
        ProfileError: A value is negative or not finite, or ``overlap`` exceeds a constant.
    """

    a0: float
    b0: float
    c0: float
    d0: float
    a1: float
    b1: float
    c1: float
    overlap: float

    def __post_init__(self) -> None:
        for name in COEFFICIENT_UNITS:
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0.0 <= value < math.inf:
                raise ProfileError(
                    f"Coefficient '{name}' must be finite and >= 0 (got {value!r}); "
                    f"run `python -m sola_sched.profile` again."
                )
        if self.overlap > min(self.d0, self.c1) * (1.0 + 1e-9):
            raise ProfileError(
                f"'overlap' must not exceed 'd0' or 'c1' (got {self.overlap!r}, {self.d0!r} and "
                f"{self.c1!r}); run `python -m sola_sched.profile` again."
            )

    @classmethod
    def from_fit(
        cls, row: NDArray[np.float64], *, has_prefill: bool, has_decode: bool
    ) -> Coefficients:
        """Read the coefficients off a fit.

        Args:
            row: From ``fit_coefficients``, in the order of `sola_sched.cost.fit.FEATURES`.
            has_prefill: Whether a fitted step had prefill.
            has_decode: Whether a fitted step had decodes.
        """
        a0, b0, c0, a1, b1, shared, own_prefill, own_decode = row.tolist()
        # A phase that never occurred has an unknown price per token; the other's is the guess.
        return cls(
            a0=a0,
            b0=b0,
            c0=c0 if has_prefill else a1,
            d0=shared + own_prefill,
            a1=a1 if has_decode else c0,
            b1=b1,
            c1=shared + own_decode,
            overlap=shared,
        )

    def as_fit(self) -> NDArray[np.float64]:
        """The row of a fit that `from_fit` would read these coefficients off."""
        own_prefill, own_decode = self.d0 - self.overlap, self.c1 - self.overlap
        row = (self.a0, self.b0, self.c0, self.a1, self.b1, self.overlap, own_prefill, own_decode)
        return np.maximum(row, 0.0)


def write_profile(
    path: str | os.PathLike[str], coefficients: Coefficients, meta: Mapping[str, Any]
) -> None:
    """Write a profile atomically: readers see the old file or the new one, never a part.

    Args:
        path: File to create or replace; its folder must exist.
        coefficients: What to store.
        meta: Plain JSON data on machine, model, versions, command and fit error.
    """
    values = asdict(coefficients)
    document = {
        "format": FORMAT,
        "version": VERSION,
        "coefficients": {
            name: {"value": values[name], "unit": unit} for name, unit in COEFFICIENT_UNITS.items()
        },
        "meta": dict(meta),
    }
    text = json.dumps(document, indent=2) + "\n"
    target = Path(path)
    # A temporary file in the same folder, so that the rename stays on one file system.
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            # mkstemp makes files private; a profile is meant to be shared.
            os.fchmod(file.fileno(), 0o644)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def read_profile(path: str | os.PathLike[str]) -> tuple[Coefficients, dict[str, Any]]:
    """Read and check a profile.

    Returns:
        The coefficients and the stored ``meta``.

    Raises:
        ProfileError: The file is unreadable, damaged, foreign, of an unknown version or
            physically impossible; the message names the file and the reason.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProfileError(f"Profile {str(path)!r} must be a JSON file: {error}.") from error
    try:
        return _parse(document)
    except ProfileError as error:
        raise ProfileError(f"Profile {str(path)!r}: {error}") from error


def _parse(document: Any) -> tuple[Coefficients, dict[str, Any]]:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise ProfileError(
            f"'format' must be {FORMAT!r} (got {found!r}); "
            f"write the file with `python -m sola_sched.profile`."
        )
    if document.get("version") != VERSION:
        raise ProfileError(
            f"'version' must be {VERSION} (got {document.get('version')!r}); "
            f"write the file again with this release's `python -m sola_sched.profile`."
        )
    stored = document.get("coefficients")
    if not isinstance(stored, dict) or set(stored) != set(COEFFICIENT_UNITS):
        found = sorted(stored) if isinstance(stored, dict) else stored
        raise ProfileError(
            f"'coefficients' must hold {', '.join(COEFFICIENT_UNITS)} (got {found!r})."
        )
    values: dict[str, Any] = {}
    for name, unit in COEFFICIENT_UNITS.items():
        entry = stored[name]
        if not isinstance(entry, dict) or entry.get("unit") != unit:
            raise ProfileError(f"Coefficient '{name}' must be in {unit} (got {entry!r}).")
        values[name] = entry.get("value")
    meta = document.get("meta", {})
    if not isinstance(meta, dict):
        raise ProfileError(f"'meta' must be an object (got {meta!r}).")
    coefficients = Coefficients(**values)
    check_possible(coefficients)
    return coefficients, meta


def check_possible(coefficients: Coefficients) -> None:
    """Refuse step times that no machine has.

    Raises:
        ProfileError: A limit of this module is broken; the message names the step and its time.
    """
    c, prompt = coefficients, _PROMPT_TOKENS
    times = (
        ("one decode", c.a1 + c.b1 + c.c1, MIN_SHORTEST_STEP_S, MAX_SHORTEST_STEP_S),
        ("one prompt token", c.b0 + c.c0 + c.d0, MIN_SHORTEST_STEP_S, MAX_SHORTEST_STEP_S),
        (
            f"a prompt of {prompt:,} tokens",
            prompt * (prompt * c.b0 + c.c0) + c.d0,
            MIN_SHORTEST_STEP_S,
            MAX_PROMPT_S,
        ),
    )
    for what, time_s, least_s, most_s in times:
        if not least_s <= time_s <= most_s:
            raise ProfileError(
                f"A step with {what} must take {least_s:g} to {most_s:g} s (got {time_s:g} s); "
                "run `python -m sola_sched.profile` again."
            )
