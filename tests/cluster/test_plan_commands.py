"""The commands that a plan ends with: vLLM, the scheduler's options and the gateway take them."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

import pytest

from sola_sched.bench.values import parse_slo_class
from sola_sched.config.slo import SloTarget
from sola_sched.config.sola_config import SolaConfig
from sola_sched.plan.outputs.commands import commands, served_name
from sola_sched.plan.search.configurations import Configuration
from sola_sched.serving.cli import make_parser

SLO = SloTarget(ttft_s=1.0, tpot_s=0.06)


def chosen(number: int = 1, degree: int = 1, scheduler: str = "sola", prefill: int = 0):
    return Configuration(
        "h100", 3.0, degree, scheduler, 256, 8192, "least-ttft", number, num_prefill=prefill
    )


def flags_of(said: str) -> dict[str, str]:
    words = shlex.split(said.partition("vllm serve ")[2])
    return dict(zip(words[1::2], words[2::2], strict=True))


def test_one_engine_is_one_command_with_the_targets_that_were_planned_for() -> None:
    (said,) = commands(chosen(degree=2), "my/model", SLO, max_model_len=4096)

    assert said.startswith("To run it: vllm serve my/model ")
    flags = flags_of(said)
    assert flags["--tensor-parallel-size"] == "2"
    assert (flags["--max-num-batched-tokens"], flags["--max-num-seqs"]) == ("8192", "256")
    assert flags["--max-model-len"] == "4096"
    options = json.loads(flags["--additional-config"])["sola_sched"]
    assert options == {"ttft_s": 1, "tpot_s": 0.06}


def test_several_engines_tell_their_load_to_the_gateway_that_is_named() -> None:
    servers, gateway = commands(chosen(number=3), "m", SLO)

    assert "To run it, 3 times, on 1 GPU each and ports 8001 to 8003: " in servers
    options = json.loads(flags_of(servers)["--additional-config"])["sola_sched"]
    assert options["load_interval_s"] == 0.1
    words = shlex.split(gateway.partition("python -m sola_sched.serving ")[2])
    given = make_parser().parse_args(words)
    assert given.router == "least-ttft"
    assert [str(url) for url in given.replica] == [
        f"http://localhost:{port}" for port in (8001, 8002, 8003)
    ]


def test_classes_and_missing_targets_are_options_that_the_scheduler_takes() -> None:
    classes = [parse_slo_class("chat:0.7:500:50"), parse_slo_class("job:0.3:none:none:60000:2")]

    (said,) = commands(chosen(), "m", SloTarget(ttft_s=math.inf, tpot_s=0.05), classes)

    options = json.loads(flags_of(said)["--additional-config"])["sola_sched"]
    assert options["ttft_s"] is None
    assert options["classes"] == {
        "chat": {"ttft_s": 0.5, "tpot_s": 0.05},
        "job": {"e2e_s": 60, "weight": 2},
    }
    config = SolaConfig.from_mapping(options)
    assert config.classes["job"].e2e_s == 60.0


def test_vllms_own_scheduler_has_no_options_of_ours() -> None:
    servers, _ = commands(chosen(number=2, scheduler="stock:2048"), "m", SLO)

    assert "sola_sched" not in servers


def test_pools_are_said_to_have_no_command() -> None:
    (said,) = commands(chosen(prefill=1), "m", SLO)

    assert "no command starts them" in said


@pytest.mark.parametrize("is_file", [True, False])
def test_a_config_file_stands_for_its_folder(tmp_path: Path, is_file: bool) -> None:
    file = tmp_path / "config.json"
    file.write_text("{}")

    assert served_name(str(file if is_file else tmp_path), is_known=False) == str(tmp_path)


def test_a_name_of_the_package_stands_for_the_users_model() -> None:
    assert served_name("llama-3-8b", is_known=True) == "MODEL"
    assert served_name("meta-llama/x", is_known=False) == "meta-llama/x"
