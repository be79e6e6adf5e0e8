"""`python -m sola_sched.plan --service ...`: several services, what it answers and refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from html_report import Report

from sola_sched.cluster.sharing.placement import Cluster, Group, Placement
from sola_sched.cluster.sharing.turns import LeastSlack
from sola_sched.errors import ConfigError
from sola_sched.plan.cli import main
from sola_sched.plan.inputs.descriptions import make_arrivals, make_service, most_tokens
from sola_sched.plan.search.fast_error import OF_SERVICES, unchecked
from sola_sched.plan.services import _numbers
from sola_sched.simulator.sharing.cluster import Setting, SharedCluster
from sola_sched.simulator.sharing.hardware import Hardware

CHAT = "name=chat,model=llama-3-8b,rate=2,ttft=1500,tpot=80,prompt=200,output=60"
CODE = "name=code,model=llama-2-7b,rate=0.2,ttft=3000,tpot=100,prompt=400,output=40"


def plan(
    tmp_path: Path, *args: str, is_checked: bool = False
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    output, config = tmp_path / "plan.json", tmp_path / "serve.json"
    check = [] if is_checked else ["--no-check"]
    code = main([*args, *check, "--output", str(output), "--serve-config", str(config)])
    read = [json.loads(path.read_text()) if path.exists() else {} for path in (output, config)]
    return code, read[0], read[1]


def names_of(config: dict[str, Any]) -> list[str]:
    return [app["name"] for app in config["applications"]]


def engines_of(config: dict[str, Any]) -> list[dict[str, Any]]:
    return [engine for app in config["applications"] for engine in app["args"]["engines"]]


def test_two_light_services_share_one_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    report = tmp_path / "plan.html"
    code, found, config = plan(
        tmp_path, "--gpu", "a100=1.5", "h100=3", "--service", CHAT, "--service", CODE,
        "--html", str(report), is_checked=True,
    )  # fmt: skip

    shown = Report(report)
    assert shown.problems == []
    assert shown.tables[0][1:] == [["0", "1", "chat, code"]]
    assert shown.tables[1][1:] == [[name, f"{x:.1%}"] for name, x in found["attained"].items()]
    assert shown.tables[2][1][:2] == ["1.50", "1 a100"]
    dots = shown.figures["figure-0"]["data"][0]
    assert dots["y"] == pytest.approx([100 * one["real_attainment"] for one in found["tried"]])
    assert found["schedulers"] == "real"
    assert "Not checked" not in capsys.readouterr().out
    assert found["tried"][0]["real_attainment"] >= 0.95
    assert (code, found["num_gpus"], found["cost_per_hour"]) == (0, 1, 1.5)
    assert found["groups"] == [{"degree": 1, "services": ["chat", "code"]}]
    assert min(found["attained"].values()) >= 0.95
    engines = engines_of(config)
    assert {engine["env"]["CUDA_VISIBLE_DEVICES"] for engine in engines} == {"0"}
    assert sum(engine["options"]["gpu_memory_utilization"] for engine in engines) <= 0.9
    groups = [e["options"]["additional_config"]["sola_sched"]["turns"] for e in engines]
    assert groups == [{"group": "node0-gpu0"}] * 2


def test_services_of_a_file_are_planned_like_those_of_flags(tmp_path: Path) -> None:
    listed = [dict(part.split("=") for part in text.split(",")) for text in (CHAT, CODE)]
    path = tmp_path / "services.json"
    path.write_text(json.dumps(listed))

    by_file = plan(tmp_path, "--gpu", "a100=1.5", "--services", str(path))
    by_flags = plan(tmp_path, "--gpu", "a100=1.5", "--service", CHAT, "--service", CODE)

    assert by_file == by_flags


def test_engine_of_a_service_gets_its_arguments(tmp_path: Path) -> None:
    listed = dict(part.split("=") for part in CHAT.split(","))
    engine = {
        "model": "/models/mine",
        "max-num-seqs": 64,
        "additional_config": {"sola_sched": {"overload": "reject"}},
    }
    path = tmp_path / "services.json"
    path.write_text(json.dumps([listed | {"engine": engine}]))

    *_, config = plan(tmp_path, "--gpu", "a100=1.5", "--services", str(path))

    (args,) = [app["args"] for app in config["applications"] if app["args"]["engines"]]
    options = args["engines"][0]["options"]
    assert args["model"] == "/models/mine"
    assert (options["max_num_seqs"], options["max_model_len"]) == (64, "auto")
    assert options["max_num_batched_tokens"] == 2048
    assert options["additional_config"]["sola_sched"] == {
        "overload": "reject", "ttft_s": 1.5, "tpot_s": 0.08,
    }  # fmt: skip


def test_engines_are_deployed_with_the_slots_and_tokens_that_were_simulated(
    tmp_path: Path,
) -> None:
    *_, config = plan(tmp_path, "--gpu", "a100=1.5", "--service", CHAT)

    (args,) = [app["args"] for app in config["applications"] if app["args"]["engines"]]
    options = args["engines"][0]["options"]
    assert (options["max_num_seqs"], options["max_num_batched_tokens"]) == (256, 2048)


def test_slots_and_tokens_that_a_service_names_are_simulated() -> None:
    given = dict(part.split("=") for part in CHAT.split(","))
    missed = {}
    for slots in (1, 256):
        engine = {"max-num-seqs": slots, "max-num-batched-tokens": 512}
        service = make_service(given | {"rate": 6, "engine": engine}, 0)
        setting = Setting.of([service], Hardware("a100"), Cluster.of(1), LeastSlack)
        placement = Placement((Group(1, ("chat",)),))
        requests = setting.requests(make_arrivals([service], 0))
        SharedCluster(setting, placement).run(requests)
        missed[slots] = setting.outcomes(requests)["chat"].num_missed
        assert setting.limits("chat") == (slots, 512)
    assert missed[1] > 10 * max(1, missed[256])


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"tensor-parallel-size": 2}, "(got 'tensor_parallel_size')"),
        ({"max-num-seqs": "many"}, "must be a whole number >= 1 (got 'many')"),
        ({"max_num_batched_tokens": 0}, "must be a whole number >= 1 (got 0)"),
        ({"max_num_batched_tokens": 64}, "(got 64 < 256, the default)"),
        ({"max-num-seqs": 4096}, "must be >= its 'max_num_seqs' (got 2048 < 4096)"),
        ({"additional_config": {"sola_sched": {"turns": {}}}}, "(got 'turns')"),
        ({"additional_config": 3}, "'additional_config' in 'engine' of service chat must be"),
    ],
)  # fmt: skip
def test_what_the_placement_decides_cannot_be_given(engine: dict[str, Any], message: str) -> None:
    given = dict(part.split("=") for part in CHAT.split(","))

    with pytest.raises(ConfigError, match=re.escape(message)):
        make_service(given | {"engine": engine}, 0)


def test_busy_service_is_served_by_several_groups(tmp_path: Path) -> None:
    busy = CHAT.replace("rate=2,", "rate=20,").replace("prompt=200", "prompt=1000")

    code, found, config = plan(tmp_path, "--gpu", "a100=1.5", "--service", busy)

    assert code == 0
    assert sum(group["degree"] for group in found["groups"]) > 1
    devices = [engine["env"]["CUDA_VISIBLE_DEVICES"] for engine in engines_of(config)]
    assert len(set(devices)) == len(devices) == len(found["groups"])


def test_prompts_that_no_engine_takes_count_as_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """opt-6.7b takes 2,048 tokens; of a lognormal around 1,000 some 15 % are longer."""
    long = "name=long,model=opt-6.7b,rate=1,ttft=9000,tpot=900,prompt=1000,output=1500"
    code, found, _ = plan(
        tmp_path, "--gpu", "a100=1.5", "--service", long, "--attainment", "0.7"
    )  # fmt: skip
    service = make_service(dict(part.split("=") for part in long.split(",")), 0)

    assert code == 0
    assert 0.1 < service.refused < 0.2
    assert max(prompt + output for prompt, output in service.lengths) == service.longest == 2048
    assert found["attained"]["long"] == pytest.approx(1.0 - service.refused, abs=0.1)
    assert found["attained"]["long"] < 0.95
    said = f"Engines refuse {service.refused:.1%} of the prompts of long, which reach 2,048 tokens"
    assert said in capsys.readouterr().out
    assert plan(tmp_path, "--gpu", "a100=1.5", "--service", long)[0] == 2
    said = f"'long': engines refuse {service.refused:.1%} of its prompts, which are too long"
    assert said in capsys.readouterr().err


def test_length_that_an_engine_takes_is_its_own_or_the_models() -> None:
    given = dict(part.split("=") for part in CHAT.split(","))
    most = {}
    for name, engine in {
        "none": {}, "less": {"max-model-len": "256"}, "more": {"max_model_len": 100_000},
        "own": {"max_model_len": 100_000, "model": "mine"}, "auto": {"max_model_len": "auto"},
        "vllm's": {"max_model_len": -1},
    }.items():  # fmt: skip
        service = make_service(given | {"engine": engine}, 0)
        most[name] = most_tokens(service.model, service.engine)

    assert most == {"none": 8192, "less": 256, "more": 8192, "own": 100_000, "auto": 8192,
                    "vllm's": 8192}  # fmt: skip
    with pytest.raises(ConfigError, match=r"must be below 150 tokens, .* \(got 200\)"):
        make_service(given | {"engine": {"max_model_len": 150}}, 0)


def test_every_number_of_gpus_of_a_node_is_tried(tmp_path: Path) -> None:
    busy = "name=a,model=llama-3-8b,rate=50,ttft=1000,tpot=40"

    code, found, config = plan(tmp_path, "--gpu", "a100=1.5", "--service", busy)

    numbers = [one["num_gpus"] for one in found["tried"]]
    assert code == 0
    assert numbers == list(range(1, found["num_gpus"] + 1))
    assert found["num_gpus"] not in (4, 8)
    devices = [engine["env"]["CUDA_VISIBLE_DEVICES"] for engine in engines_of(config)]
    assert len(set(devices)) == len(devices) == len(found["groups"])
    assert [_numbers(*each) for each in ((3, 8), (24, 8), (20, 8), (3, 1))] == [
        [1, 2, 3], [*range(1, 9), 16, 24], [*range(1, 9), 16], [1, 2, 3],
    ]  # fmt: skip


def test_added_and_removed_service_changes_the_plan_and_no_other_application(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, both = plan(tmp_path, "--gpu", "a100=1.5", "--service", CHAT, "--service", CODE)
    _, found, alone = plan(tmp_path, "--gpu", "a100=1.5", "--service", CHAT)

    # None of them was checked, and they say what they rest on.
    assert capsys.readouterr().out.splitlines().count(unchecked(OF_SERVICES)) == 2
    assert found["groups"] == [{"degree": 1, "services": ["chat"]}]
    assert names_of(both) == ["chat", "code", "chat--node0-gpu0", "code--node0-gpu0"]
    assert names_of(alone) == ["chat", "chat--node0-gpu0"]
    assert both["applications"][0] == alone["applications"][0]
    # All on one node, and nobody has asked for more.
    assert {each["args"]["host"] for each in both["applications"]} == {"127.0.0.1"}


@pytest.mark.vllm
@pytest.mark.slow
def test_the_answer_is_not_lost_in_vllms_log(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_LOGGING_LEVEL"}
    command = (sys.executable, "-P", "-m", "sola_sched.plan", "--gpu", "a100=1.5")

    done = subprocess.run(
        [*command, "--service", CHAT, "--output", str(tmp_path / "plan.json")],
        env=environment, capture_output=True, text=True, check=True, timeout=240,
    )  # fmt: skip

    assert "with the real schedulers" in done.stdout
    assert "INFO" not in done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    assert "Triton" not in done.stderr  # it is installed and of no use on a CPU


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--service", CHAT.replace("rate=2,", "rate=0,")], "rate of service chat"),
        (["--service", CHAT.replace("rate=2,", "rate=nan,")], "rate of service chat"),
        (["--service", CHAT.replace("prompt=200", "prompt=1e308")],
         "'prompt' of service chat must be from 1e-09 to 1e+07 (got 1e+308)"),
        (["--service", CHAT.replace("output=60", "output=1e12")],
         "'output' of service chat must be from"),
        (["--service", CHAT.replace("ttft=1500", "ttft=1e-322")], "'ttft' of service chat must be"),
        (["--service", CHAT.replace("llama-3-8b", "gpt-9")], "'model' must be one of"),
        (["--service", CHAT.replace("llama-3-8b", "llama3-8b")], "'llama3-8b'); write llama-3-8b."),
        (["--service", CHAT.replace("rate", "rates")], "engine (got 'rates'; write 'rate')."),
        (["--service", CHAT.replace("ttft=1500,tpot=80,", "")], "must have a target"),
        (["--service", "chat"], "takes KEY=VALUE"),
        (["--service", CHAT + ",colour=red"], "got 'colour'"),
        (["--service", CHAT + ",engine=big"], "'engine' of service chat must be an object"),
        (["--service", "name=a,model=llama-3-8b,ttft=1"], "must have 'rate'"),
        (["--service", CHAT, "--service", CHAT], "must be unique (got 'chat' twice)"),
        (["--services", "no-such-file.json"], "must be a JSON file"),
        (["--service", CHAT, "--attainment", "1.5"], "'--attainment' must be in (0, 1]"),
        (["--service", CHAT, "--gpu", "a100=-1"], "--gpu a100=-1"),
        (["--service", CHAT, "--gpu", "a100"], "(got 'a100'); write for example a100=1.5"),
        (["--service", CHAT, "--gpu", "tpu=1"], "'--gpu' must be TYPE=PRICE"),
        (["--service", CHAT.replace("llama-3-8b", "qwen1.5-72b"), "--max-gpus", "1"],
         "service 'chat' must fit on the GPUs of a node"),
        (["--service", CHAT.replace("ttft=1500", "ttft=1"), "--max-gpus", "2"],
         "service 'chat': its ttft target must be at least"),
        (["--service", CHAT.replace("ttft=1500", "ttft=1"), "--service", CODE],
         "% of the requests can meet their targets, 95.0% must: service 'chat'"),
        (["--service", CHAT.replace("rate=2,", "rate=60,"), "--max-gpus", "1"],
         "up to 1 GPUs must attain 95.0%"),
        (["--service", CHAT.replace("rate=2,", "rate=1e9,")],
         "at most 200,000 requests a minute (got 60,000,000,000)"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    prices = [] if "--gpu" in args else ["--gpu", "a100=1.5"]

    code, found, _ = plan(tmp_path, *args, *prices)

    assert (code, found) == (2, {})
    assert message in capsys.readouterr().err


@pytest.mark.ray
def test_ray_serve_and_the_application_accept_the_configuration(tmp_path: Path) -> None:
    schema = pytest.importorskip("ray.serve.schema")
    from sola_sched.serving.ray_app import ClusterArgs

    *_, config = plan(tmp_path, "--gpu", "a100=1.5", "--service", CHAT, "--service", CODE)

    deployed = schema.ServeDeploySchema.model_validate(config)
    assert [app.name for app in deployed.applications] == names_of(config)
    for application in config["applications"]:
        ClusterArgs.model_validate(application["args"])


@pytest.mark.vllm
def test_vllm_and_our_scheduler_take_the_options_of_each_engine(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from sola_sched.config.sola_config import SolaConfig
    from sola_sched.serving.engine import parse_arguments, to_arguments

    code = CODE.replace(",tpot=100", "")
    *_, config = plan(tmp_path, "--gpu", "a100=1.5", "--service", CHAT, "--service", code)

    found = {}
    for application in config["applications"]:
        for engine in application["args"]["engines"]:
            options = {"model": "m", **application["args"]["options"], **engine["options"]}
            args = parse_arguments(to_arguments(options))
            sola = SolaConfig.from_additional(args.additional_config)
            assert (args.max_model_len, args.tensor_parallel_size) == (-1, 1)
            assert sola.turns is not None
            assert sola.turns.group == "node0-gpu0"
            found[tuple(args.served_model_name)] = (sola.ttft_s, sola.tpot_s)
    assert found == {("chat",): (1.5, 0.08), ("code",): (3.0, None)}
