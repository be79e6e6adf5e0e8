"""Features that stay vLLM's own give the same tokens under the steered scheduler."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tiny_llama import write_adapter, write_byte_tokenizer, write_tiny_llama
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

from sola_sched.vllm_adapter.swap.plugin_swap import missing_hooks

pytestmark = pytest.mark.vllm

#: Targets around what the tiny model does on a CPU, so that requests are held and reordered.
SOLA = {"sola_sched": {"ttft_s": 0.02, "tpot_s": 0.004, "tile": 16, "log_interval_s": 0}}
NUM_REQUESTS = 24


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llama(tmp_path_factory.mktemp("features"))
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def generate(model_dir: Path) -> Callable[..., list[Any]]:
    rng = random.Random(0)
    pattern = [rng.randrange(10, 200) for _ in range(8)]
    prompts = [
        {"prompt_token_ids": [*(pattern * 20)[: rng.randrange(30, 150)], i + 20, *pattern[:3]]}
        for i in range(NUM_REQUESTS)
    ]

    def run(scheduler_cls: str | None, params: Any, loras: Any = None, **options: Any) -> list[Any]:
        llm = LLM(
            model=str(model_dir),
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            max_num_batched_tokens=256,
            kv_cache_memory_bytes=64 << 20,
            scheduler_cls=scheduler_cls,
            additional_config=SOLA if scheduler_cls else {},
            seed=0,
            **({"max_num_seqs": 8} | options),
        )
        try:
            return llm.generate(prompts, params, lora_request=loras, use_tqdm=False)
        finally:
            llm.llm_engine.engine_core.shutdown()

    return run


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_structured_output(generate: Callable[..., list[Any]]) -> None:
    grammar = r"(ab|cd){3,6}x"
    params = SamplingParams(
        temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(regex=grammar)
    )
    ours = generate("sola_sched.Scheduler", params)
    assert all(re.fullmatch(grammar, output.outputs[0].text) for output in ours)
    assert tokens(ours) == tokens(generate(None, params))


def test_several_answers_to_one_prompt(generate: Callable[..., list[Any]]) -> None:
    """`n > 1`: vLLM makes a request of each answer. With `top_k=1` all draw the likeliest token."""
    params = SamplingParams(n=3, temperature=1.0, top_k=1, max_tokens=24, ignore_eos=True)
    ours = generate("sola_sched.Scheduler", params)
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    answers = [[list(answer.token_ids) for answer in output.outputs] for output in ours]
    assert answers == [[one] * 3 for one in tokens(generate(None, greedy))]


def test_seeds_beside_more_prompts_than_a_step_takes(generate: Callable[..., list[Any]]) -> None:
    """vLLM's CPU build ends when a prompt with a seed is computed in parts, as stock does here."""
    params = [
        SamplingParams(temperature=1, seed=i, max_tokens=24, ignore_eos=True)
        for i in range(NUM_REQUESTS)
    ]
    alone = generate(None, params, max_num_seqs=1)
    assert tokens(generate("sola_sched.Scheduler", params)) == tokens(alone)
    assert len({tuple(each) for each in tokens(alone)}) == NUM_REQUESTS


def test_kv_connector(generate: Callable[..., list[Any]], tmp_path: Path) -> None:
    def connector(folder: str) -> dict[str, Any]:
        return {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / folder)},
        }

    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    stock = generate(None, params, kv_transfer_config=connector("stock"))
    ours = generate("sola_sched.Scheduler", params, kv_transfer_config=connector("ours"))
    again = generate("sola_sched.Scheduler", params, kv_transfer_config=connector("ours"))
    assert tokens(ours) == tokens(stock)
    assert tokens(again) == tokens(stock), "with KV from the connector's store"


def test_lora_adapters_never_outnumber_their_slots(
    generate: Callable[..., list[Any]], tmp_path: Path
) -> None:
    adapters = [
        LoRARequest(f"a{i}", i + 1, str(write_adapter(tmp_path / f"a{i}", i))) for i in range(3)
    ]
    loras = [adapters[i % 3] for i in range(NUM_REQUESTS)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    stock = generate(None, params, loras, **options)
    ours = generate("sola_sched.Scheduler", params, loras, **options)
    assert tokens(ours) == tokens(stock)
    assert len({tuple(t) for t in tokens(stock)}) > 3, "the adapters make a difference"


@pytest.mark.slow
def test_speculative_decoding(generate: Callable[..., list[Any]]) -> None:
    """Drafts change no token. One drafting engine: vLLM on CPUs starts no second in a process."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    drafts = {
        "method": "ngram", "num_speculative_tokens": 3,
        "prompt_lookup_max": 3, "prompt_lookup_min": 1,
    }  # fmt: skip
    ours = generate("sola_sched.Scheduler", params, speculative_config=drafts)
    assert tokens(ours) == tokens(generate(None, params))


def test_vllm_without_hooks_for_swapping_gets_no_connector(model_dir, monkeypatch):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.delattr(KVConnectorBase_V1, "has_pending_push_work", raising=False)
    arguments = EngineArgs(
        model=str(model_dir),
        scheduler_cls="sola_sched.Scheduler",
        skip_tokenizer_init=True,
        max_model_len=512,
    )
    config = arguments.create_engine_config()

    assert config.kv_transfer_config is None
    assert "KVConnectorBase_V1.has_pending_push_work" in missing_hooks()
