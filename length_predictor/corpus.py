"""Prompts with the output lengths of one model: public data sets by name, or a file of your own."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sola_sched.config.log_names import OUTPUT_TOKENS, first, flat
from sola_sched.errors import DatasetError

#: Folder of the data sets; without it `../shared/data` beside the repository is tried.
DATA_VARIABLE = "SOLA_SCHED_DATA"
#: Models whose lengths are taken where a data set has several and none is named.
DEFAULT_MODELS = {
    "alpaca_eval": "Meta-Llama-3-8B-Instruct",
    "arena": "o3-mini-2025-01-31",
}
#: A data set with fewer prompts is tested on as a whole when another was trained on.
SMALL = 5000
_MAX_LENGTH = 2**31 - 1
_MAX_SHOWN = 80
#: What reading raises: ends that are cut off, nesting that is too deep, too many digits.
_UNREADABLE = (OSError, EOFError, ValueError, RecursionError, zlib.error)
_TEST_SHARE = 0.1
_SPLIT_SALT = b"sola_sched split 1"


@dataclass(frozen=True, eq=False)
class Corpus:
    """Prompts and output lengths.

    Attributes:
        name: Data set and model, e.g. ``alpaca_eval:Meta-Llama-3-8B-Instruct``.
        prompts: Texts [n].
        lengths: Output tokens [n], >= 1.
    """

    name: str
    prompts: tuple[str, ...]
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, chosen: NDArray[Any], name: str | None = None) -> Corpus:
        """A part, by mask or places."""
        places = np.arange(len(self))[chosen]
        prompts = tuple(self.prompts[place] for place in places.tolist())
        return Corpus(name or self.name, prompts, self.lengths[places])

    def split(self, test_share: float = _TEST_SHARE) -> tuple[Corpus, Corpus]:
        """Training and test part; a prompt is on the same side in every data set and run."""
        is_test = np.array([_place(prompt) < test_share for prompt in self.prompts], dtype=bool)
        return self.take(~is_test), self.take(is_test)


def _place(prompt: str) -> float:
    data = prompt.encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(data, digest_size=8, salt=_SPLIT_SALT[:16]).digest()
    return float(int.from_bytes(digest, "big") / 2.0**64)


def data_folder(given: Path | None = None) -> Path | None:
    """The folder of the public data sets: given, ``$SOLA_SCHED_DATA``, ``../shared/data``."""
    if given is not None:
        return given
    if named := os.environ.get(DATA_VARIABLE):
        return Path(named)
    beside = Path.cwd().parent / "shared" / "data"
    return beside if beside.is_dir() else None


def _alpaca(row: Mapping[str, Any]) -> Mapping[str, Any]:
    lengths = {"reference": row["response_tokens"]}
    at_temperatures = row.get("vicuna7b_tokens")
    if isinstance(at_temperatures, list) and at_temperatures:  # the first is at temperature 0
        lengths["vicuna-7b"] = at_temperatures[0]
    return lengths


def _one(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"": row["response_tokens"]}


def _per_model(row: Mapping[str, Any]) -> Mapping[str, Any]:
    lengths = first(row, OUTPUT_TOKENS)
    return lengths if isinstance(lengths, Mapping) else {"": lengths}


_PUBLIC: dict[str, tuple[str, Callable[[Mapping[str, Any]], Mapping[str, Any]], str]] = {
    "alpaca": ("alpaca.jsonl.gz", _alpaca, "reference"),
    "alpaca_eval": (
        "alpaca_eval_lengths.jsonl.gz", _per_model, DEFAULT_MODELS["alpaca_eval"]
    ),
    "arena": ("arena_lengths.jsonl.gz", _per_model, DEFAULT_MODELS["arena"]),
    "sharegpt": ("sharegpt_pairs.jsonl.gz", _one, ""),
}  # fmt: skip
NAMES = tuple(_PUBLIC)


def load(name: str, data: Path | None = None) -> Corpus:
    """Load a data set.

    Args:
        name: ``alpaca`` (reference answers), ``alpaca:vicuna-7b``, ``alpaca_eval[:MODEL]``,
            ``arena[:MODEL]``, ``sharegpt``, or a file: JSON lines with ``prompt`` and
            ``output_tokens``, by any name of `config.log_names` (a number, or one for each model,
            then ``FILE:MODEL``), also with ``.gz``.
        data: Folder of the public ones, see ``data_folder``.

    Raises:
        DatasetError: It is missing, unusable or has no such model; the message lists what there is.
    """
    head, _, model = name.partition(":")
    if head in _PUBLIC:
        file, lengths_of, default = _PUBLIC[head]
        folder = data_folder(data)
        if folder is None or not (folder / file).is_file():
            raise DatasetError(
                f"Data set {head!r} needs {file} in the data folder (looked in "
                f"{folder or '../shared/data'}); pass --data DIR or set ${DATA_VARIABLE}."
            )
        path, model = folder / file, model or default
    else:
        path, lengths_of = Path(name), _per_model
        if not path.is_file() and model:
            path = Path(name.rpartition(":")[0])
            model = name.rpartition(":")[2]
        elif path.is_file():
            model = ""
        if not path.is_file():
            raise DatasetError(
                f"A data set must be one of {', '.join(NAMES)} or a file of JSON lines "
                f"(got {name!r})."
            )
    return _read(name, path, model, lengths_of)


def _read(
    name: str,
    path: Path,
    model: str,
    lengths_of: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> Corpus:
    prompts, lengths, num_rows = [], [], 0
    known: dict[str, int] = {}
    for number, given in _rows(path):
        where = f"line {number} of {path}"
        row = flat(given) if isinstance(given, Mapping) else {}
        if not isinstance(row.get("prompt"), str):
            raise DatasetError(f"Each line must be an object with a text 'prompt' ({where}).")
        if first(row, OUTPUT_TOKENS) is None:
            raise DatasetError(
                f"Each line must have 'output_tokens', or another of "
                f"{', '.join(OUTPUT_TOKENS[1:])} ({where})."
            )
        num_rows += 1
        by_model = lengths_of(row)
        for each in by_model:
            known[each] = known.get(each, 0) + 1
        length = by_model.get(model)
        if length is None:
            continue
        if isinstance(length, bool) or not isinstance(length, int | float) or not _is_count(length):
            raise DatasetError(
                f"An output length must be a whole number from 0 to {_MAX_LENGTH:,} "
                f"(got {str(length)[:_MAX_SHOWN]}, {where})."
            )
        if length >= 1 and row["prompt"]:
            # Halves of surrogate pairs, which JSON may hold, are in no text.
            prompts.append(row["prompt"].encode("utf-8", "replace").decode())
            lengths.append(int(length))
    if not num_rows:
        raise DatasetError(
            f"{path} must hold at least one line with 'prompt' and 'output_tokens' (it is empty)."
        )
    if not prompts and model in known:
        raise DatasetError(
            f"{path} must hold a line with a prompt and at least one response token (got "
            f"{num_rows:,} lines without)."
        )
    if not prompts:
        models = ", ".join(sorted(known)) or "none"
        raise DatasetError(
            f"{path} must hold lengths of the model asked for (got {model or 'no model'!r}); it "
            f"has: {models}. Name one as {name.partition(':')[0]}:MODEL."
        )
    return Corpus(name, tuple(prompts), np.array(lengths, dtype=np.int64))


def _is_count(length: int | float) -> bool:
    return 0 <= length <= _MAX_LENGTH and length == int(length)


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield number, json.loads(line)
    except _UNREADABLE as error:
        raise DatasetError(f"{path} must be readable JSON lines ({error}).") from error
