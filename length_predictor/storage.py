"""Predictor files: one file, written whole or not at all, read only if every byte is right.

    magic (8 bytes) | SHA-256 of all that follows (32) | length of header (4, little-endian)
    | header (JSON) | arrays (.npz, no pickle)

The header names format version, kind of predictor and encoder. The digest guards against damage,
not against an attacker; reading never executes anything from the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import secrets
import stat
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sola_sched.errors import PredictorFileError
from sola_sched.length_predictor.lexical.lexical import LexicalModel
from sola_sched.length_predictor.lexical.lexical_predictor import LexicalPredictor
from sola_sched.length_predictor.retrieval.decoder import Decoder

if TYPE_CHECKING:  # brings FAISS, which a lexical predictor does without
    from sola_sched.length_predictor.retrieval.predictor import Encoder, RetrievalPredictor

MAGIC = b"SOLALEN\n"
VERSION = 1
_DIGEST_BYTES = 32
_LENGTH_BYTES = 4


def write_file(path: Path, header: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
    """Write a file; readers see the old one or the new one, never a part.

    A new one has the mode that the umask leaves, and one that was there before keeps its mode.
    """
    path = real_path(path)
    packed = io.BytesIO()
    # Typed without pickles already; the stubs take the names for options of savez.
    np.savez(packed, **arrays)  # type: ignore[arg-type]
    text = json.dumps({**header, "version": VERSION}, sort_keys=True).encode()
    body = len(text).to_bytes(_LENGTH_BYTES, "little") + text + packed.getvalue()
    path.parent.mkdir(parents=True, exist_ok=True)
    # As a new file and not by `tempfile`, whose modes do not follow the umask.
    name = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(handle, "wb") as stream:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(handle, stat.S_IMODE(path.stat().st_mode))
            stream.write(MAGIC + hashlib.sha256(body).digest() + body)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise


def real_path(path: Path) -> Path:
    """Where a file lies or is to be made: behind a link, which stays a link when it is written."""
    return Path(os.path.realpath(path))


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Read what ``write_file`` wrote.

    Raises:
        PredictorFileError: The file is missing, foreign, damaged or of another version.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PredictorFileError(
            f"A predictor file must be readable (got {path}: {error.strerror}); write one with "
            "`python -m sola_sched.length_predictor build`."
        ) from error
    start = len(MAGIC) + _DIGEST_BYTES
    if data[: len(MAGIC)] != MAGIC:
        raise PredictorFileError(
            f"{path} must be a file of `python -m sola_sched.length_predictor build`, which "
            f"starts with {MAGIC!r} (it starts with {data[: len(MAGIC)]!r})."
        )
    body = data[start:]
    if hashlib.sha256(body).digest() != data[len(MAGIC) : start]:
        raise PredictorFileError(
            f"{path} is damaged: its checksum does not match its {len(data):,} bytes; "
            "build it again or restore a copy."
        )
    size = int.from_bytes(body[:_LENGTH_BYTES], "little")
    try:
        header = json.loads(body[_LENGTH_BYTES : _LENGTH_BYTES + size])
        version = header["version"]
        if version != VERSION:
            raise PredictorFileError(
                f"{path} must have format version {VERSION} (it has {version!r}); build it "
                "again with this release."
            )
        packed = io.BytesIO(body[_LENGTH_BYTES + size :])
        with np.load(packed, allow_pickle=False) as loaded:
            return header, {name: loaded[name] for name in loaded.files}
    except (ValueError, KeyError, TypeError, OSError, zipfile.BadZipFile) as error:
        if isinstance(error, PredictorFileError):
            raise
        raise PredictorFileError(f"{path} must hold a header and arrays ({error}).") from error


def read_header(path: Path) -> dict[str, Any]:
    """What a file says of itself, without its arrays and unchecked: for what is read first.

    Raises:
        PredictorFileError: The file is missing or foreign.
    """
    try:
        with path.open("rb") as stream:
            start = stream.read(len(MAGIC) + _DIGEST_BYTES + _LENGTH_BYTES)
            size = int.from_bytes(start[-_LENGTH_BYTES:], "little")
            # A damaged size must not ask for memory that the file does not fill.
            text = stream.read(min(size, path.stat().st_size))
        if start.startswith(MAGIC):
            header = json.loads(text)
            if isinstance(header, dict) and len(text) == size:
                return header
    except (OSError, ValueError, RecursionError):
        pass
    return read_file(path)[0]  # which says what is wrong


def pack(**parts: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Join the arrays of several parts under ``part/name``."""
    return {f"{part}/{name}": array for part, of in parts.items() for name, array in of.items()}


def unpack(arrays: dict[str, NDArray[Any]], part: str) -> dict[str, NDArray[Any]]:
    """The arrays of one part; empty if it is not there."""
    start = f"{part}/"
    return {name[len(start) :]: array for name, array in arrays.items() if name.startswith(start)}


def _models(arrays: dict[str, NDArray[Any]], path: Path) -> tuple[LexicalModel, Decoder | None]:
    """The lexical model and, if there is one, the decoder of a file.

    Raises:
        PredictorFileError: An array is missing.
    """
    try:
        lexical = LexicalModel.from_arrays(unpack(arrays, "lexical"))
        decoder = unpack(arrays, "decoder")
        return lexical, Decoder.from_arrays(decoder) if decoder else None
    except (KeyError, ValueError) as error:
        raise PredictorFileError(
            f"{path} must hold the arrays of a predictor (missing or misshapen: {error})."
        ) from error


def save_predictor(
    path: Path, predictor: LexicalPredictor | RetrievalPredictor, about: dict[str, Any]
) -> None:
    """Write a predictor with all it has learned.

    Args:
        path: The file.
        predictor: A lexical or retrieval predictor.
        about: What it was built from; shown by ``info``.
    """
    header: dict[str, Any] = {"kind": predictor.kind, "about": about}
    if isinstance(predictor, LexicalPredictor):
        arrays = pack(
            lexical=predictor.model.to_arrays(),
            recalibration={"recent": predictor.recalibration.to_array()},
        )
    else:
        header["encoder"] = predictor.encoder.identity
        arrays = pack(
            lexical=predictor.lexical.model.to_arrays(),
            decoder=predictor.decoder.to_arrays() if predictor.decoder is not None else {},
            store=predictor.store.to_arrays(),
            recalibration={
                "recent": predictor.recalibration.to_array(),
                "of_words": predictor.lexical.recalibration.to_array(),
            },
        )
    write_file(path, header, arrays)


def load_lexical(path: Path) -> LexicalPredictor:
    """The lexical predictor of a file of either kind.

    Raises:
        PredictorFileError: As ``read_file``.
    """
    header, arrays = read_file(path)
    predictor = LexicalPredictor(_models(arrays, path)[0])
    if header.get("kind") == predictor.kind:
        _restore(predictor, arrays, path)
    else:
        _restore_words(predictor, arrays, path)
    return predictor


def load_retrieval(
    path: Path, encoder: Encoder, *, capacity: int | None = None
) -> RetrievalPredictor:
    """The retrieval predictor of a file.

    Args:
        path: The file.
        encoder: Must be the one that made the file's vectors.
        capacity: Most entries of the store; None keeps the file's.

    Raises:
        PredictorFileError: As ``read_file``, or another encoder made it, or it has no store.
    """
    from sola_sched.length_predictor.retrieval.index import NeighbourStore
    from sola_sched.length_predictor.retrieval.predictor import RetrievalPredictor

    header, arrays = read_file(path)
    _require_retrieval(header, path)
    if header.get("encoder") != encoder.identity:
        raise PredictorFileError(
            f"{path} must be made by the encoder in use (file: {header.get('encoder')!r}, in use: "
            f"{encoder.identity!r}); build it again or load its encoder."
        )
    lexical, decoder = _models(arrays, path)
    try:
        store = NeighbourStore.from_arrays(unpack(arrays, "store"), capacity=capacity)
    except (KeyError, ValueError) as error:
        raise PredictorFileError(f"{path} must hold a store of past prompts ({error}).") from error
    predictor = RetrievalPredictor(encoder, store, lexical, decoder)
    _restore(predictor, arrays, path)
    _restore_words(predictor.lexical, arrays, path)
    return predictor


def check_file(path: Path, kind: str, *, is_written: bool = False) -> None:
    """Find out whether a predictor of a kind can be had from a file, without its encoder.

    Args:
        path: The file.
        kind: ``lexical`` or ``retrieval``.
        is_written: Whether the file is written too: it need not be there yet.

    Raises:
        PredictorFileError: As ``read_file``, or the file is of another kind, or its folder cannot
            be written.
    """
    if is_written:
        folder = next(each for each in real_path(path).parents if each.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise PredictorFileError(
                f"The folder of a predictor file that is saved must be writable (got {path}: no "
                f"file can be made in {folder}); choose another 'predictor_path'."
            )
        if not path.exists():
            return
        require_same_kind(path, kind)
    header, arrays = read_file(path)
    if kind == "retrieval":
        _require_retrieval(header, path)
    _models(arrays, path)


def check_encoder(path: Path, folder: Path) -> None:
    """Find out whether the model in a folder made a retrieval file's vectors, without loading it.

    Raises:
        PredictorFileError: As ``read_header``, or it did not.
    """
    from sola_sched.length_predictor.retrieval.embed import digest_of, parts_of

    made_by, in_use = parts_of(read_header(path).get("encoder"))[0], digest_of(folder)
    if made_by != in_use:
        raise PredictorFileError(
            f"{path} must be made by the encoder in use (file: {made_by!r}, in use: {in_use!r} of "
            f"{folder}); build it again, or name its encoder as 'predictor_encoder'."
        )


def require_same_kind(path: Path, kind: str) -> dict[str, Any]:
    """The header of a file that a predictor of this kind may be saved over.

    A retrieval file serves a lexical predictor too, which would leave nothing of the rest of it.

    Raises:
        PredictorFileError: As ``read_header``, or the file is of another kind.
    """
    header = read_header(path)
    if header.get("kind") != kind:
        raise PredictorFileError(
            f"A predictor is saved only over a file of its own kind (got {path} with a "
            f"{header.get('kind')!r} predictor, 'predictor': {kind!r}): name another "
            "'predictor_path', or read the file only, without 'predictor_save_s', or set "
            f"'predictor': {header.get('kind')!r}."
        )
    return header


def _require_retrieval(header: dict[str, Any], path: Path) -> None:
    if header.get("kind") != "retrieval":
        raise PredictorFileError(
            f"{path} must hold a retrieval predictor (it holds {header.get('kind')!r}); build "
            "one with `build --kind retrieval`."
        )


def _restore(
    predictor: LexicalPredictor | RetrievalPredictor, arrays: dict[str, NDArray[Any]], path: Path
) -> None:
    try:
        predictor.recalibration.restore(unpack(arrays, "recalibration")["recent"])
    except (KeyError, IndexError, ValueError) as error:
        raise PredictorFileError(f"{path} must hold a recalibration ({error}).") from error


def _restore_words(
    predictor: LexicalPredictor, arrays: dict[str, NDArray[Any]], path: Path
) -> None:
    """The lexical part of a retrieval predictor; older files have no recalibration of it."""
    state = unpack(arrays, "recalibration").get("of_words")
    if state is None:
        return
    try:
        predictor.recalibration.restore(state)
    except (IndexError, ValueError) as error:
        raise PredictorFileError(f"{path} must hold a recalibration ({error}).") from error
