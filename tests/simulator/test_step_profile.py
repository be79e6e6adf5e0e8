"""The profiles of the package: where their numbers come from, and files of the user."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from sola_sched.cost.file import Coefficients, write_profile
from sola_sched.errors import ProfileError
from sola_sched.simulator.steps import roofline
from sola_sched.simulator.steps.gpus import GPUS
from sola_sched.simulator.steps.measured import SUFFIX
from sola_sched.simulator.steps.profile import (
    DEFAULT_PROFILE,
    FOLDER,
    load_step_profile,
    profile_names,
)
from sola_sched.simulator.steps.roofline import MODELS, Assumptions
from sola_sched.simulator.steps.time import MeasuredStepTime, StepTimeModel

ROOT = Path(__file__).resolve().parents[2]
#: Files hold four significant digits.
ROUNDING = 5e-4
COMPUTED = [name for name in profile_names() if not name.endswith(SUFFIX)]


def test_files_of_the_package_are_what_the_derivation_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert roofline.main(["--output", str(tmp_path)]) == 0

    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {f"{name}.json": (FOLDER / f"{name}.json").read_text() for name in COMPUTED}
    assert "llama-3-70b-v100, qwen1.5-72b-v100" in capsys.readouterr().out


def test_package_data_names_the_profiles() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]

    assert "profiles/*.json" in data["package-data"]["sola_sched.simulator.steps"]


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.55),
        ("qwen1.5-14b", 14.17),
        ("qwen1.5-72b", 72.29),
        ("opt-13b", 12.85),
        ("vicuna-7b-16k", 6.74),
    ],
)
def test_number_of_parameters_is_the_published_one(model: str, billions: float) -> None:
    assert MODELS[model].num_parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_llama_3_8b_on_one_a100_by_hand() -> None:
    profile = load_step_profile("llama-3-8b-a100")

    flops, hbm = 312e12 * 0.55, 2.039e12 * 0.80
    layers = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336)
    output = 4096 * 128256
    expected = StepTimeModel(
        base_s=0.5e-3 + 32 * 20e-6,
        per_decode_s=2 * output / flops,
        per_ctx_s=131072 / hbm,
        per_prefill_token_s=0.0,
        per_prefill_attn_s=4 * 32 * 4096 / flops,
        weights_s=2 * (layers + output) / hbm,
        per_token_s=2 * layers / flops,
    )
    for name in StepTimeModel.__slots__:
        assert getattr(profile.step_time, name) == pytest.approx(
            getattr(expected, name), rel=ROUNDING
        )
    weights = 2 * (layers + 2 * output)
    room = 0.9 * 79.25 * 2**30 - weights - 3e9
    assert profile.num_blocks == int(room // (131072 * 16))
    assert (profile.max_model_len, profile.block_size, profile.tensor_parallel) == (8192, 16, 1)
    assert (profile.kv_bytes_per_token, profile.pcie_bytes_per_s) == (131072, 32e9)


def test_corrected_files_keep_out_of_the_package_and_load(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        roofline.main(["--corrected"])
    assert roofline.main(["--corrected", "--output", str(tmp_path)]) == 0

    profile = load_step_profile(str(tmp_path / "llama-3-8b-v100.json"))

    step_time = profile.step_time
    assert isinstance(step_time, StepTimeModel)
    hbm = 0.9e12 * (0.71 + 0.84) / 2
    # Norms 8 x 4096, rotary 2 x 40 heads, KV 4 x 8 heads, activation 3 x 14336, of two bytes.
    elementwise = 32 * 2 * (8 * 4096 + 2 * 40 * 128 + 4 * 8 * 128 + 3 * 14336) / hbm
    assert step_time.per_prefill_token_s == pytest.approx(elementwise, rel=ROUNDING)
    assert step_time.overlap_power == 2.0
    document = json.loads((tmp_path / "llama-3-8b-v100.json").read_text())
    assert "fitted" in document["assumptions"]["compute_efficiency"]["from"]


def test_tensor_parallelism_shares_weights_and_kv_and_pays_for_all_reduces() -> None:
    profile = load_step_profile("llama-3-70b-h100")

    layers = 80 * (2 * 8192 * (8192 + 1024) + 3 * 8192 * 28672)
    all_reduce = 160 * 1.5 * 2 * 8192 / (450e9 * 0.75)
    assert profile.tensor_parallel == 4
    assert profile.kv_bytes_per_token == 80 * 2 * 2 * 128 * 2  # two of eight KV heads
    step_time = profile.step_time
    assert isinstance(step_time, StepTimeModel)
    assert step_time.per_prefill_token_s == pytest.approx(all_reduce, rel=ROUNDING)
    assert step_time.base_s == pytest.approx(0.5e-3 + 80 * 20e-6 + 160 * 10e-6, rel=ROUNDING)
    assert step_time.per_token_s == pytest.approx(2 * layers / 4 / (989.4e12 * 0.55), rel=ROUNDING)


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_holds_a_request_of_full_length_and_says_where_it_is_from(name: str) -> None:
    profile = load_step_profile(name)
    document = json.loads((FOLDER / f"{name}.json").read_text())

    assert profile.name == name
    assert profile.num_blocks is not None
    assert profile.max_model_len is not None
    assert profile.num_blocks * profile.block_size > profile.max_model_len
    if name in COMPUTED:
        assert "computed and not measured" in document["origin"]
        assert all(entry["from"] for entry in document["step_time"].values())
    else:
        assert "measured by others" in document["origin"]
        assert all(source["licence"] and source["by"] for source in document["sources"])
    assert all(
        "assumed" in e["from"] or "vLLM" in e["from"] for e in document["assumptions"].values()
    )
    assert document["hardware"]["from"].startswith("NVIDIA")


def test_models_that_do_not_fit_have_no_profile() -> None:
    names = profile_names()

    assert DEFAULT_PROFILE in names
    assert len(COMPUTED) == len(MODELS) * len(GPUS) - 2
    assert not roofline.fits(MODELS["llama-3-70b"], GPUS["v100"], Assumptions())


def test_profile_of_a_live_engine_is_a_step_time(tmp_path: Path) -> None:
    path = tmp_path / "mine.sola.json"
    coefficients = Coefficients(0.0, 0.0, 0.01, 1.0, 0.1, 0.001, 1.0, 1.0)
    write_profile(path, coefficients, {"async_scheduling": False, "max_num_batched_tokens": 512})

    profile = load_step_profile(str(path))

    assert profile.name == "mine"
    assert isinstance(profile.step_time, MeasuredStepTime)
    assert profile.step_time.cost.coefficients == coefficients
    assert (profile.async_scheduling, profile.max_num_batched_tokens) == (False, 512)
    assert profile.num_blocks is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, "'format' must be"),
        ({"version": 9}, "'version' must be 1"),
        ({"model": None}, "'model' must be an object"),
        ({"engine": {}}, r"'engine\.max_model_len' must be a whole number"),
        ({"step_time": {"base_s": 1.0}}, "'step_time' must hold base_s"),
    ],
)
def test_damaged_profile_names_the_file_and_the_rule(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.json"
    document = roofline.make_profile("opt-13b", "a100")
    path.write_text(json.dumps(document | change))

    with pytest.raises(ProfileError, match=message) as caught:
        load_step_profile(str(path))

    assert "mine.json" in str(caught.value)


def test_negative_time_and_text_that_is_no_json_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    document = roofline.make_profile("opt-13b", "a100")
    document["step_time"]["base_s"] = -1.0
    path.write_text(json.dumps(document))
    with pytest.raises(ProfileError, match=r"'step_time\.base_s' must be seconds"):
        load_step_profile(str(path))
    document["step_time"]["base_s"], document["step_time"]["overlap_power"] = 1.0, 0.5
    path.write_text(json.dumps(document))
    with pytest.raises(ProfileError, match=r"'step_time\.overlap_power' must be 0 or >= 1"):
        load_step_profile(str(path))
    path.write_text("{")
    with pytest.raises(ProfileError, match="must be a JSON file"):
        load_step_profile(str(path))


def test_unknown_profile_lists_the_known_ones() -> None:
    with pytest.raises(ProfileError, match=r"one of llama-3-70b-a100, .* \(got 'gpt-5'\)"):
        load_step_profile("gpt-5")
