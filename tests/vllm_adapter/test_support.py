"""What an engine is told of its support, the rows of `docs/support.md`, and their tests by name."""

from __future__ import annotations

import ast
import copy
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from virtual_model import TINY_MODEL

from sola_sched.config.sola_config import SolaConfig
from sola_sched.errors import ConfigError
from sola_sched.vllm_adapter import support
from sola_sched.vllm_adapter.support import Support, support_of

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "support.md"
ROWS = (
    "chunked prefill off",
    "prefix caching",
    "asynchronous scheduling",
    "V1 and V2 model runner",
    "LoRA",
    "structured output",
    "speculative decoding",
    "encoders, multimodal inputs",
    "pooling",
    "encoder alone (`--mm-encoder-only`)",
    "diffusion models",
    "hybrid models (Mamba)",
    "sliding window",
    "latent attention (MLA)",
    "pipeline parallel",
    "tensor parallel",
    "data parallel",
    "expert parallel",
    "KV connector, synchronous",
    "KV connector, asynchronous",
    "prefill and decode apart (P/D)",
    "pause and resume",
    "sleep mode",
    "prefix-cache reset",
    "streaming input",
    "experts returned with answers (`--enable-return-routed-experts`), with vLLM's second model "
    "runner from 0.32 on",
    "log-probabilities of prompts (`prompt_logprobs`)",
    "several answers to one prompt (`n > 1`)",
    "no targets, neither by default nor in a class (not with `alise`, `doubling`)",
    '`"steer": false`',
)


def vllm_config(**overrides: Any) -> SimpleNamespace:
    """An engine of which nothing special is known; overrides are ``part__name=value``."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            runner_type="generate",
            is_multimodal_model=False,
            is_encoder_decoder=False,
            is_hybrid=False,
        ),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True, prefill_schedule_interval=1),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1),
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
        kv_transfer_config=None,
    )
    for path, value in overrides.items():
        part, _, name = path.partition("__")
        setattr(getattr(config, part) if name else config, name or part, value)
    return config


NIXL = SimpleNamespace(kv_connector="NixlConnector")
SWAP = SimpleNamespace(kv_connector="SolaKVSwapConnector")


@pytest.mark.parametrize(
    ("overrides", "options", "expected"),
    [
        ({}, {}, Support()),
        ({"model_config__runner_type": "pooling"}, {}, Support(support.POOLING)),
        ({"is_encoder_only": True}, {}, Support(support.ENCODER_ONLY)),
        ({"is_mm_encoder_only": True}, {}, Support(support.ENCODER_ONLY)),
        ({"parallel_config__pipeline_parallel_size": 2}, {}, Support(support.PIPELINE)),
        (
            {"scheduler_config__enable_chunked_prefill": False},
            {},
            Support(limits=(support.WHOLE_PROMPTS,)),
        ),
        (
            {"model_config__is_multimodal_model": True},
            {},
            Support(limits=(support.ENCODER,)),
        ),
        ({"model_config__is_encoder_decoder": True}, {}, Support(limits=(support.ENCODER,))),
        ({"model_config__is_hybrid": True}, {}, Support()),
        (
            {"model_config__is_hybrid": True, "cache_config__mamba_cache_mode": "align"},
            {},
            Support(limits=(support.ALIGNED,)),
        ),
        ({"parallel_config__data_parallel_size": 2}, {}, Support()),
        (
            {
                "parallel_config__data_parallel_size": 2,
                "scheduler_config__prefill_schedule_interval": 4,
            },
            {},
            Support(limits=(support.THROTTLED,)),
        ),
        ({"kv_transfer_config": SWAP}, {}, Support()),
        (
            {"kv_transfer_config": NIXL},
            {},
            Support(limits=(support.CONNECTOR_LOADS.format("NixlConnector"),)),
        ),
        ({}, {"ttft_s": None, "tpot_s": None}, Support(limits=(support.NO_TARGETS,))),
        ({}, {"ttft_s": None, "tpot_s": None, "policy": "alise"}, Support()),
        (
            {},
            {"ttft_s": None, "tpot_s": None, "classes": {"chat": {"ttft_s": 1.0}}},
            Support(),
        ),
    ],
)
def test_what_becomes_of_an_engine(overrides, options, expected) -> None:
    assert support_of(vllm_config(**overrides), SolaConfig.from_mapping(options)) == expected


def test_models_with_a_scheduler_of_another_kind_are_refused() -> None:
    support.refuse_others(SimpleNamespace(is_diffusion=False, model="m"))
    with pytest.raises(ConfigError, match="'--scheduler-cls' must be left out for diffusion"):
        support.refuse_others(SimpleNamespace(is_diffusion=True, model="m"))


@pytest.mark.vllm
def test_such_a_model_is_refused_before_its_weights_are_loaded(tmp_path: Path) -> None:
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    config = TINY_MODEL | {"canvas_length": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def start(scheduler_cls: str | None) -> Any:
        """The folder has no weights."""
        options = {"skip_tokenizer_init": True, "scheduler_cls": scheduler_cls}
        return arg_utils.EngineArgs(model=str(tmp_path), **options).create_model_config()

    assert start(None).is_diffusion
    with pytest.raises(ConfigError, match="'--scheduler-cls' must be left out for diffusion"):
        start("sola_sched.Scheduler")


def test_the_sentence_says_steered_limited_or_vllms_own_order() -> None:
    assert str(Support()) == "steered"
    assert str(Support(limits=("a", "b"))) == "steered, with limits: a; b"
    assert str(Support("why")) == "not steered, vLLM's own order: why"


# The table ------------------------------------------------------------------------------------


def rows() -> list[list[str]]:
    """Cells of the table's rows."""
    tables = TABLE.read_text(encoding="utf-8").split("\n\n")
    first = next(part for part in tables if part.startswith("| feature"))
    lines = [line for line in first.splitlines() if line[:1] == "|"]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_table_has_a_row_for_each_feature() -> None:
    assert tuple(row[0] for row in rows()) == ROWS
    assert all(len(row) == 4 and all(row) for row in rows())


def test_each_row_says_steered_limited_own_order_or_refused() -> None:
    states = [re.split("[:,;]", row[1])[0] for row in rows()]

    assert set(states) <= {"steered", "limited", "vLLM's own order", "refused"}


def test_the_table_has_the_words_of_the_log() -> None:
    text = TABLE.read_text(encoding="utf-8")
    words = (support.POOLING, support.PIPELINE, support.WHOLE_PROMPTS, support.ENCODER)
    words += (support.ALIGNED, support.THROTTLED, support.CONNECTOR_LOADS.split("{}")[1])
    words += (support.NO_TARGETS, str(Support(is_shadow=True)).split(": ")[1])

    assert [sentence for sentence in words if sentence not in text] == []


def test_each_row_names_tests_that_exist() -> None:
    for row in rows():
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", row[3])
        assert named, f"{row[0]} names no test"
        for file, test in named:
            tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
            functions = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
            assert test in functions, f"{row[0]}: {file} has no {test}"


class Pipelined:
    """A scheduler as in an engine with two pipeline stages."""

    def __init__(self, *, vllm_config: Any, **kwargs: Any) -> None:
        vllm_config.parallel_config = copy.copy(vllm_config.parallel_config)
        vllm_config.parallel_config.pipeline_parallel_size = 2
        super().__init__(vllm_config=vllm_config, **kwargs)


@pytest.mark.vllm
def test_with_pipeline_parallelism_the_schedule_is_stock_vllms_step_by_step() -> None:
    pytest.importorskip("vllm")
    from virtual_model import TINY_MODEL
    from virtual_runs import STEP_TIME, make_workload
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    import sola_sched
    from sola_sched.simulator import StepTrace, VirtualEngine

    def schedules(base: type[Any]) -> list[Any]:
        steps: list[Any] = []

        def note(trace: StepTrace) -> None:
            steps.append((trace.start_s, dict(trace.output.num_scheduled_tokens)))

        engine = VirtualEngine(
            type("Scheduler", (Pipelined, base), {}),
            model=TINY_MODEL,
            num_blocks=300,
            max_model_len=2048,
            max_num_batched_tokens=256,
            async_scheduling=True,
            step_time=STEP_TIME,
            additional_config={"sola_sched": {"ttft_s": 0.3, "tpot_s": 0.02}},
        )
        engine.run(make_workload(40, 20.0), on_step=note)
        return steps

    assert schedules(sola_sched.Scheduler) == schedules(AsyncScheduler)
