"""Command line, data sets, scores and the comparison of predictors, on small data made here."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prompts import WordEncoder, make_corpus

pytest.importorskip("faiss", reason="needs faiss-cpu")

from sola_sched.errors import DatasetError
from sola_sched.length_predictor import cli, corpus
from sola_sched.length_predictor.building import build_lexical
from sola_sched.length_predictor.corpus import Corpus, load
from sola_sched.length_predictor.evaluation.evaluation import copy_of, evaluate, make, warm_up_split
from sola_sched.length_predictor.evaluation.scoring import score
from sola_sched.length_predictor.lexical.features import describe
from sola_sched.length_predictor.lexical.lexical_predictor import LexicalPredictor
from sola_sched.length_predictor.storage import save_predictor

pytestmark = pytest.mark.usefixtures("short_training")


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line with an encoder that needs no model."""
    monkeypatch.setattr(cli, "SentenceEncoder", lambda *_, **__: WordEncoder())


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    made = make_corpus(300)
    path = tmp_path / "own.jsonl"
    with path.open("w") as stream:
        for prompt, length in zip(made.prompts, made.lengths.tolist(), strict=True):
            stream.write(json.dumps({"prompt": prompt, "response_tokens": length}) + "\n")
    return path


@pytest.mark.parametrize("kind", ["lexical", "retrieval"])
def test_built_file_predicts_and_tells_about_itself(
    words: None, own_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = tmp_path / "made.sola"

    assert cli.main(["build", str(own_file), "-o", str(path), "--kind", kind]) == 0
    assert cli.main(["info", str(path)]) == 0
    assert cli.main(["predict", str(path), "list something about bread", "write about salt"]) == 0

    out = capsys.readouterr().out
    assert f"{kind} predictor of 300 prompts" in out
    assert str(own_file) in out
    short, long = (json.loads(line) for line in out.splitlines()[-2:])
    assert short["median"] < long["median"]
    assert short["quantiles"] == sorted(short["quantiles"])


def test_eval_prints_a_row_for_each_predictor_before_and_after_live_traffic(
    words: None, own_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows_file = tmp_path / "rows" / "rows.jsonl"

    status = cli.main(["eval", "--train", str(own_file), "--json", str(rows_file)])

    assert status == 0
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    names = [row["predictor"] for row in rows]
    assert names == [
        name
        for name in ("histogram", "lexical", "decoder", "algorithm-1", "retrieval")
        for _ in range(2)
    ]
    by_name = {row["predictor"]: row for row in rows if not row["num_learned"]}
    assert by_name["lexical"]["relative_error"] < by_name["histogram"]["relative_error"]
    assert by_name["lexical"]["kendall_tau"] > 0.6
    assert "| τ |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "nowhere.jsonl", "-o", "x"], "must be one of alpaca, alpaca_eval"),
        (["info", "nowhere.sola"], "must be readable"),
        (["build", "alpaca", "-o", "x", "--data", "/nowhere"], "needs alpaca.jsonl.gz"),
        (["build", "OWN", "-o", "x", "--capacity", "0"], "'--capacity' must be >= 1"),
        (["eval", "--train", "OWN", "--limit", "2"], "must hold at least 5 prompts"),
        (["eval", "--train", "OWN", "--limit", "-2"], "'--limit' must be >= 1"),
        (["eval", "--train", "OWN", "--json", "/dev/null/x"], "'--json' must name a file that can"),
        (
            ["build", "OWN", "-o", "/dev/null/x/y"],
            "'--output' must name a file that can be written",
        ),
        (["tune", "OWN", "-o", "/dev/null/x"], "'--output' must name a folder that can be written"),
        (["tune", "OWN", "-o", "x", "--threads", "0"], "'--threads' must be >= 1"),
        (["tune", "OWN", "-o", "x", "--seconds", "0"], "'--seconds' must be a number of seconds"),
        (["tune", "OWN", "-o", "x", "--seconds", "nan"], "seconds > 0 (got nan)"),
        (["eval", "--train", "OWN", "--proxy-seconds", "-1"], "'--proxy-seconds' must be"),
        (["eval", "--train", "OWN", "--seed", "-1"], "'--seed' must be >= 0 (got -1)"),
    ],
)
def test_errors_say_what_must_hold(
    words: None,
    own_file: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    status = cli.main([str(own_file) if each == "OWN" else each for each in arguments])

    assert status == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


def test_an_empty_file_is_called_empty(
    words: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = tmp_path / "empty.jsonl", tmp_path / "made.sola"
    path.write_text("\n\n")

    assert cli.main(["build", str(path), "-o", str(output)]) == 2

    assert f"{path} must hold at least one line" in capsys.readouterr().err
    assert not output.exists()


def test_what_cannot_be_written_is_found_before_anything_is_read(
    words: None, own_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.corpora, "load", lambda *_: pytest.fail("read first"))

    for command in (["build", str(own_file), "-o"], ["eval", "--train", str(own_file), "--json"]):
        assert cli.main([*command, "/dev/null/x"]) == 2


def test_what_standard_input_holds_is_text(
    words: None,
    own_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "made.sola"
    assert cli.main(["build", str(own_file), "-o", str(path), "--kind", "lexical"]) == 0
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))

    assert cli.main(["predict", str(path)]) == 2

    assert "Standard input must be UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["lexical", "retrieval"])
def test_bytes_that_are_no_text_are_predicted_as_what_can_be_read_of_them(
    words: None,
    own_file: Path,
    tmp_path: Path,
    capsysbinary: pytest.CaptureFixture[bytes],
    kind: str,
) -> None:
    path = tmp_path / "made.sola"
    assert cli.main(["build", str(own_file), "-o", str(path), "--kind", kind]) == 0
    capsysbinary.readouterr()

    assert cli.main(["predict", str(path), "list bread \udcff", "\ud83d"]) == 0

    rows = [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == ["list bread ?", "?"]


def test_words_with_halves_of_surrogate_pairs_have_features() -> None:
    assert describe("some \ud83d words").buckets.size > 0


def test_a_reader_that_has_seen_enough_is_no_error(own_file: Path, tmp_path: Path) -> None:
    path, many = tmp_path / "made.sola", tmp_path / "many.txt"
    assert cli.main(["build", str(own_file), "-o", str(path), "--kind", "lexical"]) == 0
    many.write_text("list something about bread\n" * 5000)
    command = f"'{sys.executable}' -P -m sola_sched.length_predictor predict '{path}' | head -1"

    with many.open() as lines:
        done = subprocess.run(
            ["bash", "-c", command], stdin=lines, capture_output=True, text=True, check=True
        )

    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


def test_live_traffic_is_named_beside_what_a_file_was_built_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "made.sola"
    about = {"datasets": ["alpaca"], "num_prompts": 1040, "num_live": 40}
    save_predictor(path, LexicalPredictor(), about)

    assert cli.main(["info", str(path)]) == 0

    out = capsys.readouterr().out
    assert "built from   alpaca, live traffic" in out
    assert "prompts      1,040" in out


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["", "a"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(deadline=None)
@given(
    st.sampled_from(["", "alpaca", ":a"]),
    st.lists(
        st.fixed_dictionaries(
            {"prompt": st.text(max_size=5) | _values, "response_tokens": st.just(7) | _values},
            optional={"vicuna7b_tokens": _values},
        )
        | _values,
        max_size=3,
    ),
    st.binary(max_size=20),
)
def test_any_file_is_a_corpus_or_an_error(name: str, lines: list[Any], end: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own.jsonl"
        path.write_bytes("\n".join(map(json.dumps, lines)).encode() + b"\n" + end)
        if name == "alpaca":
            packed = Path(folder) / "alpaca.jsonl.gz"
            packed.write_bytes(gzip.compress(path.read_bytes())[: None if len(end) < 15 else -4])
        try:
            made = load(name if name == "alpaca" else f"{path}{name}", Path(folder))
        except DatasetError as error:
            assert "must" in str(error)  # noqa: PT017
        else:
            assert made.lengths.min() >= 1
            assert build_lexical(made).predict([made.prompts[0]])[0].mean > 0


def test_lengths_of_one_model_are_read_from_a_file_of_several(tmp_path: Path) -> None:
    path = tmp_path / "models.jsonl.gz"
    with gzip.open(path, "wt") as stream:
        for number in range(3):
            row = {"prompt": f"p{number}", "response_tokens": {"big": 10 + number, "small": 5}}
            stream.write(json.dumps(row) + "\n")

    assert load(f"{path}:big").lengths.tolist() == [10, 11, 12]
    with pytest.raises(DatasetError, match="it has: big, small"):
        load(f"{path}:other")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "must be readable JSON lines"),
        ("[]", "must be an object with a text 'prompt'"),
        ('{"prompt": "p"}', "must have 'output_tokens', or another of completion_tokens"),
        ('{"prompt": "p", "response_tokens": 2.5}', "must be a whole number"),
        ('{"prompt": "p", "response_tokens": "many"}', "must be a whole number"),
        ('{"prompt": "p", "response_tokens": 1e400}', "must be a whole number from 0 .*got inf"),
        ('{"prompt": "p", "response_tokens": 1e300}', "must be a whole number from 0"),
        ('{"prompt": "p", "response_tokens": NaN}', "must be a whole number from 0 .*got nan"),
        ('{"prompt": "p", "response_tokens": 0}', "at least one response token"),
        ("[" * 100_000, "must be readable JSON lines"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n")

    with pytest.raises(DatasetError, match=message):
        load(str(path))


def test_side_of_the_split_depends_on_the_prompt_alone() -> None:
    one, two = make_corpus(3000, seed=1), make_corpus(1000, seed=1)

    train, test = one.split()
    _, smaller = two.split()

    assert len(test) == pytest.approx(300, abs=60)
    assert not set(train.prompts) & set(test.prompts)
    assert set(smaller.prompts) <= set(test.prompts)


def test_warm_up_and_scored_requests_are_apart() -> None:
    first, rest = warm_up_split(make_corpus(100), seed=0)

    assert (len(first), len(rest)) == (33, 67)
    assert not set(first.prompts) & set(rest.prompts)


def test_evaluation_leaves_the_contender_as_it_was() -> None:
    train, test = make_corpus(300, seed=1), make_corpus(90, seed=2, factor=4.0, name="other")
    for name in ("histogram", "lexical", "retrieval", "algorithm-1"):
        contender = make(name, train, WordEncoder())
        before = contender.quantiles(test)

        cold, warm = evaluate(name, contender, test, trained_on=train.name)

        np.testing.assert_allclose(contender.quantiles(test), before, rtol=1e-6)
        assert (cold["num_learned"], warm["num_learned"]) == (0, 30)
        if name in ("lexical", "retrieval"):
            assert warm["relative_error"] < 0.8 * cold["relative_error"]
    assert copy_of(contender) is not contender


def test_score_of_a_hand_computed_case() -> None:
    quantiles = np.array([np.linspace(1, 10, 10), np.full(10, 50.0), np.full(10, 100.0)])

    figures = score(quantiles, np.array([5, 40, 120]))

    assert figures.mean_absolute_error == pytest.approx((0.5 + 10 + 20) / 3)
    assert figures.relative_error == pytest.approx(30.5 / 165)
    assert figures.median_relative_error == pytest.approx(1 / 6)
    assert figures.kendall_tau == pytest.approx(1.0)
    assert figures.coverage == pytest.approx(1 / 3)
    # Buckets are a fifth of the 99th percentile (118.4) wide: 5.5 and 5, 50 and 40, 100 and 120.
    assert figures.accuracy == pytest.approx(2 / 3)


def test_data_folder_follows_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(corpus.DATA_VARIABLE, str(tmp_path))

    assert corpus.data_folder() == tmp_path
    assert corpus.data_folder(Path("given")) == Path("given")


def test_public_data_sets_load_where_they_are() -> None:
    folder = corpus.data_folder()
    if folder is None or not (folder / "alpaca.jsonl.gz").is_file():
        pytest.skip("needs the public data sets")

    loaded = {name: load(name, folder) for name in (*corpus.NAMES, "alpaca:vicuna-7b")}

    assert all(isinstance(each, Corpus) and len(each) > 100 for each in loaded.values())
    assert len(loaded["alpaca"]) > len(loaded["alpaca:vicuna-7b"]) > 10_000
