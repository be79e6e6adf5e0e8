"""Turns one row of a public data set into prompt, output length, arrival and SLO keys."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import statistics
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from sola_sched.errors import DatasetError

_PROMPT_TOKENS = (
    "prompt_tokens", "ContextTokens", "Request tokens", "input_length", "num_prefill_tokens",
)  # fmt: skip
_OUTPUT_TOKENS = (
    "output_tokens", "GeneratedTokens", "Response tokens", "output_length", "num_decode_tokens",
    "vicuna7b_tokens", "response_tokens", "reference_tokens",
)  # fmt: skip
_PROMPT_TEXT = ("prompt",)
_OUTPUT_TEXT = ("response", "completion")
_ARRIVAL_S = ("arrival_s", "queued_s", "Timestamp")


@dataclass(frozen=True)
class Row:
    """One request of a data set; text, token counts or both.

    Attributes:
        arrival_s: Recorded arrival, seconds on the data set's own clock, or None.
        hash_ids: Ids of the prompt's blocks of 512 tokens; equal leading ids share a prefix.
    """

    prompt: str | None = None
    prompt_tokens: int | None = None
    output: str | None = None
    output_tokens: int | None = None
    arrival_s: float | None = None
    hash_ids: tuple[int, ...] = ()
    slo_class: str | None = None
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None

    @property
    def is_usable(self) -> bool:
        """Has a non-empty prompt, and an output that is not known to be empty."""
        has_prompt = bool(self.prompt) or bool(self.prompt_tokens)
        return has_prompt and self.output_tokens != 0 and self.output != ""


def read_rows(path: Path) -> Iterator[Row]:
    """Read every row of a file, or of all data files of a folder or zip archive.

    Accepts ``.json`` (a list), ``.jsonl`` and ``.csv``, each also with ``.gz``, and ``.zip``.

    Raises:
        DatasetError: The file does not exist, cannot be read or has none of the known columns.
    """
    if not path.exists():
        raise DatasetError(f"'--dataset-path' must name an existing file (got {path}).")
    try:
        for name, text in _open_all(path):
            for number, raw in enumerate(_parse(name, text)):
                if not isinstance(raw, Mapping):
                    raise DatasetError(
                        f"Each row of {name} must be an object (row {number}: {str(raw)[:80]!r})."
                    )
                yield normalise(raw, f"row {number} of {name}")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, zipfile.BadZipFile) as error:
        raise DatasetError(
            f"{path} must be readable JSON, JSON lines, CSV, gzip or zip ({error})."
        ) from error


def normalise(raw: Mapping[str, Any], where: str) -> Row:
    """Map the columns of any supported data set to a ``Row``.

    Raises:
        DatasetError: No known column holds the prompt, or a number is not one.
    """
    slo = {key: raw.get(key) for key in ("slo_class", "ttft_slo_ms", "tpot_slo_ms")}
    if "conversations" in raw:  # ShareGPT: first two turns, as in vllm bench serve
        turns = raw["conversations"]
        if len(turns) < 2:
            return Row()
        return Row(prompt=turns[0]["value"], output=turns[1]["value"])
    if "context" in raw and "answers" in raw:  # LongBench
        prompt = "\n\n".join(part for part in (raw["context"], raw.get("input", "")) if part)
        return Row(prompt=prompt, output=max(raw["answers"], key=len, default=""))
    if "instruction" in raw and "output" in raw:  # Alpaca
        prompt = "\n\n".join(part for part in (raw["instruction"], raw.get("input", "")) if part)
        return Row(prompt=prompt, output=raw["output"])
    prompt, prompt_tokens = _first(raw, _PROMPT_TEXT), _first(raw, _PROMPT_TOKENS)
    if prompt is None and prompt_tokens is None:
        raise DatasetError(
            f"A request needs a prompt: none of the columns {', '.join(_PROMPT_TEXT)}, "
            f"{', '.join(_PROMPT_TOKENS)}, conversations, context or instruction is in {where} "
            f"(it has {', '.join(map(str, raw)) or 'no columns'})."
        )
    return Row(
        prompt=prompt,
        prompt_tokens=_count(prompt_tokens, where),
        output=_first(raw, _OUTPUT_TEXT),
        output_tokens=_count(_first(raw, _OUTPUT_TOKENS), where),
        arrival_s=_arrival_s(raw, where),
        hash_ids=tuple(raw.get("hash_ids") or ()),
        **slo,
    )


def _open_all(path: Path) -> Iterator[tuple[str, io.TextIOBase]]:
    if path.is_dir():
        names = ("*.jsonl", "*.jsonl.gz", "*.json", "*.csv", "*.csv.gz")
        files = sorted(file for name in names for file in path.glob(name))
        if not files:
            raise DatasetError(f"A dataset folder must hold .jsonl, .json or .csv files ({path}).")
        for file in files:
            yield from _open_all(file)
    elif path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith((".jsonl", ".json", ".csv")) and Path(name).name[0] not in "._":
                    with archive.open(name) as member:
                        yield name, io.TextIOWrapper(member, encoding="utf-8")
    elif path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8", newline="") as stream:
            yield path.name.removesuffix(".gz"), stream
    else:
        with path.open(encoding="utf-8-sig", newline="") as text:
            yield path.name, text


def _parse(name: str, text: io.TextIOBase) -> Iterator[Any]:
    if name.endswith(".csv"):
        yield from csv.DictReader(text)
    elif name.endswith(".jsonl"):
        yield from (json.loads(line) for line in text if line.strip())
    else:
        whole = json.load(text)
        yield from whole if isinstance(whole, list) else [whole]


def _first(raw: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((raw[name] for name in names if raw.get(name) not in (None, "")), None)


def _count(value: Any, where: str) -> int | None:
    """A token count; of several (one per model or temperature) the median."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        value = statistics.median_low(value)
    try:
        count = float(value)
    except (TypeError, ValueError):
        count = math.nan
    if not (count >= 0 and count == int(count)):
        raise DatasetError(f"A token count must be a whole number >= 0 (got {value!r} in {where}).")
    return int(count)


def _arrival_s(raw: Mapping[str, Any], where: str) -> float | None:
    try:
        if "timestamp" in raw:  # Mooncake: milliseconds
            return float(raw["timestamp"]) / 1e3
        if "TIMESTAMP" in raw:  # Azure: date with up to 7 decimals
            text = re.sub(r"(\.\d{6})\d+", r"\1", raw["TIMESTAMP"])
            return datetime.fromisoformat(text).timestamp()
        value = _first(raw, _ARRIVAL_S)
        return None if value is None else float(value)
    except ValueError as error:
        raise DatasetError(
            f"An arrival time must be a number or date ({error}, {where})."
        ) from error
