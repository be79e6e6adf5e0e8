"""Turns one row of a public data set into prompt, output length, arrival and SLO keys."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sola_sched.config.log_names import (
    OUTPUT_TEXT,
    OUTPUT_TOKENS,
    PROMPT_TEXT,
    PROMPT_TOKENS,
    first,
    flat,
)
from sola_sched.config.rules import shown
from sola_sched.errors import DatasetError
from sola_sched.workloads import row_values

#: Of a data set that has both, the lengths of a model and not of the reference answers.
_MEASURED_OUTPUT_TOKENS = ("vicuna7b_tokens", *OUTPUT_TOKENS)
_ARRIVAL_S = ("arrival_s", "queued_s", "Timestamp")
#: What the readers of the formats raise: encrypted or unknown archives, nesting that is too deep,
#: numbers of too many digits (`ValueError`), cells that are too long, ends that are cut off.
_UNREADABLE = (
    OSError, EOFError, ValueError, RuntimeError, RecursionError, csv.Error, zipfile.BadZipFile,
    zlib.error,
)  # fmt: skip


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
    e2e_slo_ms: float | None = None

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
    try:
        if not path.exists():
            raise DatasetError(f"'--dataset-path' must name an existing file (got {path}).")
        for name, text in _open_all(path):
            for number, raw in enumerate(_parse(name, text)):
                if not isinstance(raw, Mapping):
                    raise DatasetError(
                        f"Each row of {name} must be an object (row {number}: {shown(raw)})."
                    )
                yield normalise(raw, f"row {number} of {name}")
    except DatasetError:
        raise
    except _UNREADABLE as error:
        raise DatasetError(
            f"{path} must be readable JSON, JSON lines, CSV, gzip or zip ({error})."
        ) from error


def normalise(raw: Mapping[str, Any], where: str) -> Row:
    """Map the columns of any supported data set to a ``Row``.

    Raises:
        DatasetError: No known column holds the prompt, or a number is not one.
    """
    if "conversations" in raw:  # ShareGPT
        prompt, answer = row_values.turns_of(raw["conversations"], where)
        return Row(prompt=prompt, output=answer)
    if "context" in raw and "answers" in raw:  # LongBench
        answer = row_values.longest_of(raw["answers"], where)
        return Row(prompt=_joined(raw, "context", where), output=answer)
    if "instruction" in raw and "output" in raw:  # Alpaca
        answer = row_values.text_of(raw["output"], "output", where)
        return Row(prompt=_joined(raw, "instruction", where), output=answer)
    raw = flat(raw)
    prompt, prompt_tokens = first(raw, PROMPT_TEXT), first(raw, PROMPT_TOKENS)
    if prompt is None and prompt_tokens is None:
        raise DatasetError(
            f"A request needs a prompt: none of the columns {', '.join(PROMPT_TEXT)}, "
            f"{', '.join(PROMPT_TOKENS)}, messages, conversations, context or instruction is in "
            f"{where} (it has {', '.join(map(str, raw)) or 'no columns'})."
        )
    return Row(
        prompt=row_values.text_of(prompt, "prompt", where),
        prompt_tokens=row_values.count_of(prompt_tokens, where),
        output=row_values.text_of(first(raw, OUTPUT_TEXT), "response", where),
        output_tokens=row_values.count_of(first(raw, _MEASURED_OUTPUT_TOKENS), where),
        arrival_s=_arrival_s(raw, where),
        hash_ids=row_values.block_ids_of(raw.get("hash_ids"), where),
        slo_class=row_values.text_of(raw.get("slo_class"), "slo_class", where) or None,
        ttft_slo_ms=row_values.target_of(raw.get("ttft_slo_ms"), "ttft_slo_ms", where),
        tpot_slo_ms=row_values.target_of(raw.get("tpot_slo_ms"), "tpot_slo_ms", where),
        e2e_slo_ms=row_values.target_of(raw.get("e2e_slo_ms"), "e2e_slo_ms", where),
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
                        yield name, io.TextIOWrapper(member, encoding="utf-8-sig")
    elif path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8-sig", newline="") as stream:
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


def _joined(raw: Mapping[str, Any], name: str, where: str) -> str:
    """The text of a column, and of 'input' where the row has one."""
    texts = (row_values.text_of(raw.get(column), column, where) for column in (name, "input"))
    return "\n\n".join(filter(None, texts))


def _arrival_s(raw: Mapping[str, Any], where: str) -> float | None:
    if raw.get("timestamp") not in (None, ""):  # Mooncake: milliseconds
        return row_values.seconds_of(raw["timestamp"], where, 1e-3)
    if raw.get("TIMESTAMP") not in (None, ""):  # Azure
        return row_values.date_of(raw["TIMESTAMP"], where)
    value = first(raw, _ARRIVAL_S)
    return None if value is None else row_values.seconds_of(value, where)
