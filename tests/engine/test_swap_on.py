"""`--scheduler-cls` alone turns swapping on; engines that cannot swap say why and work."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_harness import STOCK, make_workload, run
from needs import NEEDS_SWAPPING
from vllm.config import KVTransferConfig

from sola_sched.config.swap import CONNECTOR, SwapConfig
from sola_sched.kv_swap.support import reason_against, without_int8
from sola_sched.vllm_adapter.swap.plugin_swap import _choose_connector, _reason_against

pytestmark = [pytest.mark.vllm, NEEDS_SWAPPING]

OURS = "sola_sched.Scheduler"


def connector_of(model_dir: Path, **options: Any) -> str | None:
    from vllm.engine.arg_utils import EngineArgs

    arguments = {
        "scheduler_cls": OURS,
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        **options,
    }
    config = EngineArgs(model=str(model_dir), **arguments).create_engine_config()
    transfer = config.kv_transfer_config
    return None if transfer is None else transfer.kv_connector


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, CONNECTOR),
        ({"additional_config": {"sola_sched": {"swap": {"mode": "int8"}}}}, CONNECTOR),
        ({"additional_config": {"sola_sched": {"swap": {"mode": "off"}}}}, None),
        ({"scheduler_cls": STOCK}, None),
        ({"scheduler_cls": None}, None),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "ExampleConnector",
        ),
    ],
    ids=["default", "int8", "off", "stock", "none", "another connector"],
)
def test_which_connector_an_engine_gets(options, expected, model_dir):
    assert connector_of(model_dir, **options) == expected


@pytest.mark.parametrize(("mode", "swaps"), [("auto", False), ("raw", True), ("int8", True)])
def test_a_device_without_a_test_swaps_only_when_told_to(mode, swaps, monkeypatch):
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    args = SimpleNamespace(
        additional_config={"sola_sched": {"swap": {"mode": mode}}}, kv_transfer_config=None
    )
    reason = _reason_against(args, SimpleNamespace(runner_type="generate"))
    assert (reason is None) == swaps
    if not swaps:
        assert reason is not None
        assert "set it to 'raw' or 'int8' to swap" in reason


def test_an_unknown_option_is_refused_at_start(model_dir):
    with pytest.raises(ValueError, match=r"Unknown option 'mod' \(write 'mode'\) in 'swap'"):
        connector_of(model_dir, additional_config={"sola_sched": {"swap": {"mod": "raw"}}})


def test_the_connector_can_be_named_with_its_own_options(model_dir):
    result = run(
        OURS,
        make_workload(30),
        model_dir,
        num_blocks=20,
        additional_config={"sola_sched": {"ttft_s": None, "tpot_s": None}},
        kv_transfer_config={
            "kv_connector": CONNECTOR,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"mode": "int8", "group_tokens": 16, "always": True},
        },
    )

    assert result.stats["swap"]["mode"] == "int8"
    assert result.num_preemptions >= 20
    assert result.num_recomputed == 0
    assert (result.num_leaked_blocks, result.swap_problems) == (0, [])


def make_args(**values: Any) -> Any:
    defaults = {"additional_config": None, "kv_transfer_config": None, "kv_offloading_size": None}
    return SimpleNamespace(**defaults | values)


def make_model(**values: Any) -> Any:
    return SimpleNamespace(runner_type="generate", **values)


@pytest.mark.parametrize(
    ("args", "model", "reason"),
    [
        (make_args(), make_model(), None),
        (make_args(), make_model(is_encoder_decoder=True), "an encoder-decoder model"),
        (make_args(), make_model(is_hybrid=True), "a model with Mamba layers"),
        (make_args(), make_model(is_attention_free=True), "a model without attention"),
        (make_args(kv_offloading_size=4.0), make_model(), "--kv-offloading-size"),
        (make_args(use_replayssm=True), make_model(), "--use-replayssm"),
        (
            make_args(aux_output_config=SimpleNamespace(enabled=True)),
            make_model(),
            "--enable-return-routed-experts",
        ),
        (make_args(aux_output_config=SimpleNamespace(enabled=False)), make_model(), None),
        (
            make_args(kv_transfer_config={"kv_connector": "NixlConnector"}),
            make_model(),
            "--kv-transfer-config selects NixlConnector",
        ),
    ],
)
def test_engines_that_cannot_swap_say_why(args, model, reason):
    found = _reason_against(args, model)

    assert found is None if reason is None else reason in found, found


def test_expandable_segments_are_left_alone(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

    assert "expandable_segments" in str(_reason_against(make_args(), make_model()))
    assert _reason_against(make_args(), make_model(enable_cumem_allocator=True)) is None


def make_spec(kind: str, **values: Any) -> Any:
    return type(kind, (), {"block_size": 16, "dtype": "torch.bfloat16", **values})()


def make_groups(*specs: Any) -> Any:
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["a"]) for spec in specs]
    )


def make_config(**parallel: int) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(scheduler_cls=OURS),
        parallel_config=SimpleNamespace(**parallel),
    )


@pytest.mark.parametrize(
    ("config", "groups", "reason"),
    [
        (make_config(), make_groups(make_spec("FullAttentionSpec")), None),
        (make_config(), make_groups(make_spec("MLAAttentionSpec")), None),
        (
            make_config(),
            make_groups(make_spec("FullAttentionSpec"), make_spec("SlidingWindowSpec")),
            None,
        ),
        (make_config(), make_groups(make_spec("MambaSpec")), "layers with MambaSpec"),
        (
            make_config(),
            make_groups(
                make_spec(
                    "UniformTypeKVCacheSpecs", kv_cache_specs={"a": make_spec("CrossAttentionSpec")}
                )
            ),
            "layers with CrossAttentionSpec",
        ),
        (
            make_config(),
            make_groups(make_spec("FullAttentionSpec", tokens_per_state=4)),
            "layers that keep one state",
        ),
        (
            make_config(decode_context_parallel_size=2),
            make_groups(make_spec("FullAttentionSpec")),
            "decode_context_parallel_size is 2",
        ),
        (
            make_config(pipeline_parallel_size=2),
            make_groups(make_spec("FullAttentionSpec")),
            "pipeline_parallel_size is 2, which is not tested",
        ),
        (make_config(), make_groups(), "the model has no KV cache"),
    ],
)
def test_caches_that_cannot_be_swapped_are_named(config, groups, reason):
    found = reason_against(config, groups, SwapConfig())

    assert found is None if reason is None else found.startswith(reason), found


def test_auxiliary_outputs_are_not_swapped_either_where_the_operator_names_the_connector():
    """vLLM keeps them by whole blocks, and ends when a request resumes within one."""
    config, groups = make_config(), make_groups(make_spec("FullAttentionSpec"))
    config.aux_output_config = SimpleNamespace(enabled=True)

    assert "--enable-return-routed-experts" in str(reason_against(config, groups, SwapConfig()))


@pytest.mark.parametrize(
    ("values", "num_engines"),
    [
        ({}, 1),
        ({"data_parallel_size": 4}, 4),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2}, 2),
        ({"data_parallel_size": 4, "data_parallel_rank": 1}, 1),
        ({"data_parallel_size": 4, "data_parallel_external_lb": True}, 1),
    ],
)
@pytest.mark.parametrize("is_named", [False, True], ids=["chosen", "named"])
def test_workers_are_told_how_many_share_their_host(is_named, values, num_engines):
    """vLLM has each rank of a model without experts forget the others."""
    from sola_sched.kv_swap.connector import swap_options, workers_on_host

    args = make_args(**values)
    if is_named:
        args.kv_transfer_config = {"kv_connector": CONNECTOR, "kv_role": "kv_both"}
    _choose_connector(args, make_model())
    transfer = args.kv_transfer_config
    config = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(**transfer) if is_named else transfer,
        additional_config={"sola_sched": {"swap": {"host_gib": 3}}},
        parallel_config=SimpleNamespace(local_world_size=2, data_parallel_size_local=1),
    )

    assert workers_on_host(config) == 2 * num_engines
    assert swap_options(config).host_gib == 3


def test_quantized_caches_are_swapped_as_raw_bytes():
    fp8 = make_groups(make_spec("FullAttentionSpec", dtype="torch.float8_e4m3fn"))

    assert "the cache holds torch.float8_e4m3fn" in str(without_int8(fp8))
    assert without_int8(make_groups(make_spec("FullAttentionSpec"))) is None
