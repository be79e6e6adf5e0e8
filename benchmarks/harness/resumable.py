"""Rows in a file of JSON lines: what is there is not made again, what is made is not lost.

A file whose name ends in `.gz` is compressed.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from harness import provenance
from harness.files import replace_bytes

Row = dict[str, Any]
Item = TypeVar("Item")


def load(path: Path) -> list[Row]:
    """All rows of a file; none if it does not exist. A line that was cut off is left out."""
    if not path.exists():
        return []
    state = path.stat()
    return [dict(row) for row in _parsed(path, state.st_mtime_ns, state.st_size)]


@lru_cache(maxsize=1)
def _parsed(path: Path, mtime_ns: int, size: int) -> list[Row]:
    """Kept until the file changes: a search asks again and again."""
    return [json.loads(line) for line in _whole(path).splitlines()]


def parameters(item: Any) -> Row:
    """Fields of a dataclass as columns, those of a dataclass in it beside its own."""
    columns: Row = {}
    for field in fields(item):
        value = getattr(item, field.name)
        columns |= parameters(value) if is_dataclass(value) else {field.name: value}
    return columns


def defaults(item: Any) -> Row:
    """Values of the columns of `parameters` that rows may leave out."""
    columns: Row = {}
    for field in fields(item):
        value = getattr(item, field.name, None)
        if is_dataclass(value):
            columns |= defaults(value)
        elif field.default is not MISSING:
            columns[field.name] = field.default
    return columns


def stored(items: Iterable[Any], path: Path) -> list[Row]:
    """The rows that `path` has of the items; the last of each, by whatever source it was made.

    Args:
        items: Dataclasses of one kind; `parameters` are the columns that tell them apart.
        path: As in `run`.
    """
    return list(_stored(items, path).values())


def stored_keys(items: Iterable[Item], path: Path) -> dict[Item, str]:
    """The key of the row that `stored` gives, of each item that has one."""
    return {item: row["key"] for item, row in _stored(items, path).items() if "key" in row}


def _stored(items: Iterable[Item], path: Path) -> dict[Item, Row]:
    wanted = list(dict.fromkeys(items))
    if not wanted:
        return {}
    left_out, names = defaults(wanted[0]), list(parameters(wanted[0]))

    def key_of(columns: Mapping[str, Any]) -> tuple[Any, ...]:
        values = (columns.get(name, left_out.get(name)) for name in names)
        # JSON has no number for infinity: rows tell it as text.
        return tuple(str(each) if each == math.inf else each for each in values)

    found = {key_of(row): row for row in load(path)}
    keys = {item: key_of(parameters(item)) for item in wanted}
    return {item: found[key] for item, key in keys.items() if key in found}


def run(
    items: Iterable[Item],
    path: Path,
    key_of: Callable[[Item], str],
    make: Callable[[Item], Row],
    *,
    num_workers: int = 1,
    title: str = "runs",
    is_hidden: bool = False,
) -> list[Row]:
    """The row of each distinct item, made where `path` has none with its key.

    A row is appended as soon as it is made, with its key before and the columns of `provenance`
    behind what `make` returns.

    Args:
        items: Hashable, in any order.
        path: JSON lines; created with its folder.
        key_of: Changes with all that decides the row; asked once an item, before the first run.
        make: An item to its row; with several workers it must be picklable.
        num_workers: Processes, >= 1; with one, the rows are made in this process.
        title: Of the progress bar.
        is_hidden: No progress bar.
    """
    keys = {item: key_of(item) for item in items}
    # Rows of older files may have no key; such a row is made again.
    done = {row["key"]: row for row in load(path) if "key" in row}
    missing = [item for item, key in keys.items() if key not in done]
    num_workers = max(1, min(num_workers, len(missing)))
    columns = provenance.columns(num_workers)
    path.parent.mkdir(parents=True, exist_ok=True)
    if missing and path.exists():
        replace_bytes(path, _stored_bytes(path, _whole(path)))
    with tqdm(total=len(missing), desc=title, unit="run", disable=is_hidden) as bar:
        for item, made in _made(missing, make, num_workers):
            row = {"key": keys[item], **made, **columns}
            done[row["key"]] = row
            line = json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n"
            with path.open("ab") as out:
                out.write(_stored_bytes(path, line))
            bar.update()
    if missing and path.suffix == ".gz":  # one stream is smaller than one for each row
        replace_bytes(path, _stored_bytes(path, _whole(path)))
    return [done[key] for key in keys.values()]


def _made(
    items: Sequence[Item], make: Callable[[Item], Row], num_workers: int
) -> Iterable[tuple[Item, Row]]:
    if num_workers <= 1:
        for item in items:
            yield item, make(item)
        return
    # Spawned, since a fork of a process with threads (OpenMP, the bar) may hang.
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(make, item): item for item in items}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _whole(path: Path) -> str:
    """The text without a last line that was cut off when a run was killed."""
    data = path.read_bytes()
    text = (_decompressed(data) if path.suffix == ".gz" else data).decode()
    return text[: text.rfind("\n") + 1]


def _decompressed(data: bytes) -> bytes:
    """All streams of a gzip file one after another; of one that was cut off, what there is."""
    parts = []
    while data:
        stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        parts.append(stream.decompress(data))
        data = stream.unused_data
    return b"".join(parts)


def _stored_bytes(path: Path, text: str) -> bytes:
    data = text.encode()
    return gzip.compress(data, mtime=0) if path.suffix == ".gz" else data
