"""Predictor files: what goes in comes out, and nothing damaged or foreign is read."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prompts import WordEncoder, make_corpus

pytest.importorskip("faiss", reason="needs faiss-cpu")

from sola_sched.errors import PredictorFileError
from sola_sched.length_predictor.building import build_lexical, build_retrieval
from sola_sched.length_predictor.calibration import Recalibration
from sola_sched.length_predictor.storage import (
    MAGIC,
    load_lexical,
    load_retrieval,
    read_file,
    read_header,
    save_predictor,
    write_file,
)

pytestmark = pytest.mark.usefixtures("short_training")

CORPUS = make_corpus(120)


@pytest.fixture(scope="module")
def lexical_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lexical") / "words.sola"
    save_predictor(path, build_lexical(CORPUS), {"datasets": ["made up"], "num_prompts": 120})
    return path


@pytest.fixture(scope="module")
def retrieval_file(short_training: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("retrieval") / "past.sola"
    predictor = build_retrieval(CORPUS, WordEncoder(), capacity=200)
    _, pending = predictor.consider(CORPUS.prompts[:40])
    predictor.learn(pending, [500] * 40, [False] * 40)
    save_predictor(path, predictor, {"datasets": ["made up"], "num_prompts": 120})
    return path


def test_loaded_predictor_answers_as_the_saved_one(tmp_path: Path) -> None:
    predictor = build_retrieval(CORPUS, WordEncoder(), capacity=200)
    _, pending = predictor.consider(CORPUS.prompts[:30])
    predictor.learn(pending, [700] * 30, [False] * 30)
    save_predictor(tmp_path / "a.sola", predictor, {})

    loaded = load_retrieval(tmp_path / "a.sola", WordEncoder())

    loaded.store.check_integrity()
    prompts = ["list something about rivers and salt", *CORPUS.prompts[:5]]
    for mine, theirs in zip(predictor.predict(prompts), loaded.predict(prompts), strict=True):
        # Vectors are kept as half floats in the file and the store alike.
        np.testing.assert_allclose(mine.quantiles, theirs.quantiles, rtol=1e-3)
        assert mine.source == theirs.source


def test_retrieval_file_serves_as_lexical_one_too(retrieval_file: Path) -> None:
    assert load_lexical(retrieval_file).predict(["name something"])[0].source == "lexical"


def test_lexical_file_has_no_store(lexical_file: Path) -> None:
    with pytest.raises(PredictorFileError, match="must hold a retrieval predictor"):
        load_retrieval(lexical_file, WordEncoder())


def test_file_of_another_encoder_is_refused(retrieval_file: Path) -> None:
    other = WordEncoder()
    other.identity = "words-33"

    with pytest.raises(PredictorFileError, match="must be made by the encoder in use"):
        load_retrieval(retrieval_file, other)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=st.floats(0.0, 1.0, exclude_max=True), bit=st.integers(0, 7))
def test_every_flipped_bit_is_refused(
    retrieval_file: Path, tmp_path: Path, place: float, bit: int
) -> None:
    data = bytearray(retrieval_file.read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    damaged = tmp_path / "damaged.sola"
    damaged.write_bytes(data)

    with pytest.raises(PredictorFileError):
        read_file(damaged)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(keep=st.floats(0.0, 1.0, exclude_max=True))
def test_every_shortened_file_is_refused(lexical_file: Path, tmp_path: Path, keep: float) -> None:
    data = lexical_file.read_bytes()
    damaged = tmp_path / "short.sola"
    damaged.write_bytes(data[: int(keep * len(data))])

    with pytest.raises(PredictorFileError):
        read_file(damaged)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(body=st.binary(max_size=200))
def test_right_checksum_of_nonsense_is_refused(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "nonsense.sola"
    path.write_bytes(MAGIC + hashlib.sha256(body).digest() + body)

    with pytest.raises(PredictorFileError):
        read_file(path)


def test_foreign_files_and_pickles_are_refused(tmp_path: Path) -> None:
    for data in (b"", b"PK\x03\x04", pickle.dumps({"weights": [1]}), b"{}"):
        path = tmp_path / "foreign"
        path.write_bytes(data)
        with pytest.raises(PredictorFileError, match="must be a file of"):
            read_file(path)
    with pytest.raises(PredictorFileError, match="must be readable"):
        read_file(tmp_path / "missing")


def test_arrays_of_objects_are_never_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "objects.sola"
    write_file(path, {"kind": "lexical"}, {"lexical/weights": np.array([{"a": 1}], dtype=object)})

    with pytest.raises(PredictorFileError, match="allow_pickle"):
        read_file(path)


def test_file_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "later.sola"
    write_file(path, {"kind": "lexical"}, {})
    data = path.read_bytes()
    body = data[len(MAGIC) + 32 :].replace(b'"version": 1', b'"version": 9')
    path.write_bytes(MAGIC + hashlib.sha256(body).digest() + body)

    with pytest.raises(PredictorFileError, match=r"must have format version 1 \(it has 9\)"):
        read_file(path)


def test_missing_arrays_are_named(tmp_path: Path) -> None:
    path = tmp_path / "empty.sola"
    write_file(path, {"kind": "lexical"}, {})

    with pytest.raises(PredictorFileError, match="must hold the arrays"):
        load_lexical(path)


def test_failed_write_leaves_the_old_file(lexical_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "kept.sola"
    path.write_bytes(lexical_file.read_bytes())

    with pytest.raises(TypeError):
        write_file(path, {"kind": json}, {})

    assert path.read_bytes() == lexical_file.read_bytes()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_new_file_has_the_mode_that_the_umask_leaves(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "new.sola"
    before = os.umask(umask)
    try:
        write_file(path, {"kind": "lexical"}, {})
    finally:
        os.umask(before)

    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_a_file_that_is_written_again_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "kept.sola"
    write_file(path, {"kind": "lexical"}, {})
    path.chmod(mode)

    write_file(path, {"kind": "lexical"}, {})

    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_link_stays_one_when_its_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "real.sola", tmp_path / "link.sola"
    write_file(target, {"kind": "lexical"}, {})
    link.symlink_to(target)

    write_file(link, {"kind": "lexical", "about": {"num_prompts": 7}}, {})

    assert link.is_symlink()
    assert read_file(target)[0]["about"] == {"num_prompts": 7}


def test_header_is_read_alone_and_a_bad_file_as_before(lexical_file: Path, tmp_path: Path) -> None:
    assert read_header(lexical_file) == read_file(lexical_file)[0]
    path = tmp_path / "bad.sola"
    for data, message in (
        (b"foreign", "must be a file of"),
        (MAGIC + bytes(32) + b"\xff\xff\xff\xff{}", "is damaged"),
        (MAGIC, "is damaged"),
    ):
        path.write_bytes(data)
        with pytest.raises(PredictorFileError, match=message):
            read_header(path)
    with pytest.raises(PredictorFileError, match="must be readable"):
        read_header(tmp_path / "missing")


def test_a_retrieval_file_keeps_the_recalibration_of_its_words(
    retrieval_file: Path, tmp_path: Path
) -> None:
    predictor = load_retrieval(retrieval_file, WordEncoder())
    _, pending = predictor.lexical.consider(CORPUS.prompts[:40])
    predictor.lexical.learn(pending, [2000] * 40, [False] * 40)
    save_predictor(tmp_path / "a.sola", predictor, {})
    prompts = list(CORPUS.prompts[40:50])
    expected = [each.median for each in predictor.lexical.predict(prompts)]

    again = load_retrieval(tmp_path / "a.sola", WordEncoder()).lexical
    alone = load_lexical(tmp_path / "a.sola")

    for loaded in (again, alone):
        assert [each.median for each in loaded.predict(prompts)] == pytest.approx(expected)
    assert predictor.lexical.recalibration.shift != 0.0


def test_a_retrieval_file_of_before_has_no_recalibration_of_words(
    retrieval_file: Path, tmp_path: Path
) -> None:
    header, arrays = read_file(retrieval_file)
    del arrays["recalibration/of_words"]
    write_file(tmp_path / "old.sola", header, arrays)

    assert load_lexical(tmp_path / "old.sola").recalibration.shift == 0.0
    assert load_retrieval(tmp_path / "old.sola", WordEncoder()).lexical.recalibration.shift == 0.0


def test_recalibration_forgets_the_oldest_first_also_after_a_save() -> None:
    quantiles = np.linspace(1.0, 2.0, 10)
    one, two = Recalibration(memory=8), Recalibration(memory=8)
    for number in range(11):
        one.observe(quantiles, float(number))
    two.restore(one.to_array())
    for each in (one, two):
        for _ in range(4):
            each.observe(quantiles, 100.0)

    assert sorted(one.to_array()[:, 0]) == sorted(two.to_array()[:, 0])
    assert two.to_array()[0, 0] == pytest.approx(7.0 - 1.5)
