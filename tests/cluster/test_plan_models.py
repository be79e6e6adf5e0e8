"""Models and GPUs that the package does not know: sizes from `config.json`, and measured times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sola_sched.cost.file import Coefficients, write_profile
from sola_sched.errors import ConfigError
from sola_sched.plan.cli import main
from sola_sched.plan.inputs.model_config import model_of, read_model
from sola_sched.plan.inputs.models import planned_for, profile
from sola_sched.plan.search.configurations import configurations, steps_said
from sola_sched.plan.search.pools import decode_profile
from sola_sched.simulator.steps.gpus import ALL_GPUS
from sola_sched.simulator.steps.roofline import MODELS, Assumptions, num_blocks
from sola_sched.simulator.steps.time import MeasuredStepTime, StepCounts

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "vocab_size": 152064, "max_position_embeddings": 32768, "sliding_window": 131072,
    "use_sliding_window": False, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": None,
    "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip
QWEN_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "tie_word_embeddings": False,
}  # fmt: skip
GEMMA = {
    "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "head_dim": 256,
    "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8,
    "vocab_size": 256000, "max_position_embeddings": 8192, "sliding_window": 4096,
}  # fmt: skip
OPT = {
    "model_type": "opt", "hidden_size": 5120, "ffn_dim": 20480, "num_hidden_layers": 40,
    "num_attention_heads": 40, "vocab_size": 50272, "max_position_embeddings": 2048,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "vocab_size": 129280, "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
MULTIMODAL = {
    "model_type": "mistral3", "vision_config": {"hidden_size": 1024, "num_hidden_layers": 24},
    "text_config": {
        "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768,
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 131072, "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
SHORT = ["--slo", "ttft:2000", "tpot:100", "--request-rate", "1", "--num-prompts", "60",
         "--disable-tqdm", "--no-check", "--no-pools", "--schedulers", "sola", "--routers",
         "least-ttft", "--max-num-seqs", "64", "--max-gpus", "8"]  # fmt: skip


def written(folder: Path, config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("config", "billions", "of_a_token", "kv_bytes"),
    [
        # What their authors say of them, and bytes of two for keys and values of all layers.
        (LLAMA, 8.03, 8.03, 2 * 2 * 32 * 8 * 128),
        (QWEN, 7.61, 7.61, 2 * 2 * 28 * 4 * 128),
        (MIXTRAL, 46.7, 12.9, 2 * 2 * 32 * 8 * 128),
        (QWEN_MOE, 30.5, 3.3, 2 * 2 * 48 * 4 * 128),
        (GEMMA, 9.24, 9.24, 2 * 2 * 42 * 8 * 256),
        (OPT, 12.85, 12.85, 2 * 2 * 40 * 40 * 128),
        (MULTIMODAL, 23.57, 23.57, 2 * 2 * 40 * 8 * 128),
    ],
    ids=["llama", "qwen", "mixtral", "qwen-moe", "gemma", "opt", "multimodal"],
)
def test_sizes_are_those_that_the_authors_name(
    config: dict, billions: float, of_a_token: float, kv_bytes: int
) -> None:
    model, _ = model_of(config, "mine", "config.json")

    assert model.num_parameters / 1e9 == pytest.approx(billions, rel=0.005)
    active = model.num_parameters - model.layer_parameters + model.token_parameters
    assert active / 1e9 == pytest.approx(of_a_token, rel=0.02)
    assert model.kv_bytes_per_token == kv_bytes


def test_a_file_of_a_model_of_the_package_gives_the_same_sizes(tmp_path: Path) -> None:
    model, notes = read_model(str(written(tmp_path, LLAMA)))

    known = MODELS["llama-3-8b"]
    own = vars(model) | {"name": known.name, "head_size": None}
    assert own == vars(known)
    assert notes == ()
    assert read_model(str(tmp_path))[0].hidden_size == 4096  # the folder


@pytest.mark.parametrize(
    ("config", "note"),
    [
        (MIXTRAL, "All experts of mine are taken to be read in every step."),
        (GEMMA, "Sliding windows of mine are counted as if they had no end."),
        (MULTIMODAL, "Of mine only the text model is counted"),
    ],
)
def test_what_is_not_exact_is_said(config: dict, note: str) -> None:
    _, notes = model_of(config, "mine", "config.json")

    assert any(note in each for each in notes)


def test_a_model_in_the_local_cache_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--me--mine"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    written(folder / "snapshots" / "abc", QWEN)

    assert read_model("me/mine")[0].num_layers == 28
    with pytest.raises(ConfigError, match=r"or a model in the local Hugging Face cache \(got 'me/"):
        read_model("me/other")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (DEEPSEEK, r"not latent ones \(MLA\) \(got 'kv_lora_rank': 512\)"),
        (LLAMA | {"quantization_config": {"quant_method": "awq"}}, "weights of 16 bits"),
        (MULTIMODAL | {"quantization_config": {"bits": 4}}, "weights of 16 bits"),
        (LLAMA | {"is_encoder_decoder": True}, "without an encoder"),
        (LLAMA | {"layer_types": ["linear_attention", "full_attention"]}, "got 'layer_types' with"),
        (LLAMA | {"mamba_d_state": 16}, "attention in every layer"),
        (QWEN_MOE | {"mlp_only_layers": [0]}, "experts in every layer or in none"),
        (QWEN_MOE | {"decoder_sparse_step": 2}, "experts in every layer or in none"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "no more experts for a token than there are"),
        ({k: v for k, v in MIXTRAL.items() if "per_tok" not in k} | {"model_type": "x"},
         "must hold 'num_experts_per_tok'"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"} | {"model_type": "x"},
         "must hold 'hidden_size', a whole number"),
        (LLAMA | {"num_hidden_layers": "32"}, "'num_hidden_layers' must be a whole number"),
        (LLAMA | {"vocab_size": 1e5}, "'vocab_size' must be a whole number"),
        (LLAMA | {"num_attention_heads": -1}, "must be a whole number"),
        (LLAMA | {"num_key_value_heads": 5}, "a multiple of those of keys and values"),
        (LLAMA | {"num_attention_heads": 24}, "must name 'head_dim'"),
        ({}, "must hold 'hidden_size'"),
    ],
)  # fmt: skip
def test_what_plan_cannot_answer_for_is_refused_by_name(config: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        model_of(config, "mine", "config.json")


def test_what_a_file_leaves_out_because_it_is_usual_is_filled_in() -> None:
    pytest.importorskip("transformers")
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
            "num_hidden_layers": 34, "sliding_window": 1024}  # fmt: skip

    model, _ = model_of({"model_type": "gemma3", "text_config": text}, "mine", "config.json")

    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (8, 4, 256)
    assert model.num_parameters / 1e9 == pytest.approx(3.88, rel=0.01)  # the text model's


@pytest.mark.parametrize("text", ["{", "[1]", '"a"'])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)

    with pytest.raises(ConfigError, match=r"config\.json must"):
        read_model(str(path))


def test_experts_are_stored_all_and_computed_in_part() -> None:
    few = profile(planned_for("llama-3-8b", None, [])[0], "h200", 1)
    model, _ = model_of(MIXTRAL, "mixtral", "config.json")

    with pytest.raises(ConfigError, match=r"1 h100: 93\.\d GB of weights on each"):
        configurations(_planned(model), {"h100": 1.0}, [1], ["sola"], [64], ["least-ttft"])
    many = profile(_planned(model), "h200", 1)
    assert many.step_time.weights_s > 5.0 * few.step_time.weights_s  # type: ignore[union-attr]
    assert many.step_time.per_token_s < 2.0 * few.step_time.per_token_s  # type: ignore[union-attr]


def _planned(model: Any) -> Any:
    from sola_sched.plan.inputs.models import PlannedModel

    return PlannedModel(model.name, model)


@pytest.mark.parametrize("gpu", sorted(ALL_GPUS))
def test_a_decode_step_of_each_gpu_takes_what_its_memory_says(gpu: str) -> None:
    found = profile("llama-3-8b", gpu, 2)  # a degree of which there are no measured kernels
    seconds = found.step_time.seconds(StepCounts(1, 100))

    reading = 2 * 7.5e9 / 2 / ALL_GPUS[gpu].hbm_bytes_per_s
    assert reading < seconds < 1.7 * reading + 2.5e-3
    assert "computed" in steps_said(
        "llama-3-8b",
        configurations("llama-3-8b", {gpu: 1.0}, [2], ["sola"], [64], ["least-ttft"]),
    )


def test_no_degree_is_rented_that_vllm_cannot_start() -> None:
    """Heads of keys and values are shared out, or each is on several GPUs; MLPs are shared out."""
    phi = LLAMA | {"num_attention_heads": 40, "num_key_value_heads": 10, "hidden_size": 5120}
    odd = LLAMA | {"intermediate_size": 14340}
    few = LLAMA | {"num_key_value_heads": 2}
    degrees = {}
    for name, config in (("phi", phi), ("odd", odd), ("few", few)):
        model, _ = model_of(config, name, "config.json")
        found = configurations(
            _planned(model), {"h200": 1.0}, [1, 2, 4, 8], ["sola"], [64], ["least-ttft"]
        )
        degrees[name] = [each.tensor_parallel for each in found]

    assert degrees == {"phi": [1, 2], "odd": [1, 2, 4], "few": [1, 2, 4, 8]}
    model, _ = model_of(phi, "phi", "config.json")
    said = "4 h200: 10 heads of keys and values cannot be shared by 4"
    with pytest.raises(ConfigError, match=said):
        configurations(_planned(model), {"h200": 1.0}, [4], ["sola"], [64], ["least-ttft"])


def test_a_longest_request_above_the_models_own_limit_is_refused() -> None:
    planned_for("llama-3-8b", 8192, [])
    with pytest.raises(ConfigError, match=r"own limit, 8192 tokens .*llama-3-8b' \(got 8193\)"):
        planned_for("llama-3-8b", 8193, [])


@pytest.mark.parametrize("more", [0, 1])
def test_memory_holds_a_longest_request_beside_the_block_that_vllm_keeps(more: int) -> None:
    wanted = LLAMA | {"max_position_embeddings": 131072}
    model, _ = model_of(wanted, "long", "config.json")
    room = 16 * (num_blocks(model, ALL_GPUS["l4"], Assumptions()) - 1)
    args = {"l4": 1.0}, [1], ["sola"], [64], ["least-ttft"]

    assert configurations(_planned(replace(model, max_model_len=room)), *args)
    with pytest.raises(ConfigError, match=f"room for {room} of {room + 1 + more} KV tokens"):
        configurations(_planned(replace(model, max_model_len=room + 1 + more)), *args)


def test_a_shorter_longest_request_keeps_the_measured_kernels() -> None:
    model, _ = planned_for("llama-3-8b", 4096, [])

    assert profile(model, "a100", 1).max_model_len == 4096
    assert type(profile(model, "a100", 1).step_time) is type(
        profile("llama-3-8b", "a100", 1).step_time
    )


def test_the_plan_of_a_file_with_measured_steps_and_a_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a GPU that the package knows nothing about but its figures."""
    written(tmp_path, LLAMA)
    steps = tmp_path / "l40s.json"
    write_profile(steps, Coefficients(0.0, 1e-9, 1e-4, 0.02, 1e-4, 1e-8, 0.02, 0.015), {})
    log = tmp_path / "log.jsonl"
    usage = {"prompt_tokens": 300, "completion_tokens": 40}
    log.write_text("".join(json.dumps({"usage": usage}) + "\n" for _ in range(80)))
    output = tmp_path / "plan.json"

    code = main([
        "--model", str(tmp_path), "--gpu", "l40s=1", "l4=0.5", "--profile", f"l40s={steps}",
        "--dataset-name", "custom", "--dataset-path", str(log), "--max-model-len", "4096",
        "--tensor-parallel-size", "1", *SHORT, "--output", str(output),
    ])  # fmt: skip

    said = capsys.readouterr().out
    assert code == 0
    assert "Step times: 1 l40s as measured by --profile; 1 l4 computed" in said
    found = json.loads(output.read_text())
    by_gpu = {row["gpu"]: row["step_times"] for row in found["configurations"]}
    assert by_gpu == {"l40s": "measured", "l4": "computed"}
    planned, _ = planned_for(str(tmp_path), 4096, [f"l40s={steps}"])
    assert isinstance(profile(planned, "l40s", 1).step_time, MeasuredStepTime)


@pytest.mark.parametrize(
    ("measured", "is_same"),
    [
        ("meta-llama/Meta-Llama-3-8B-Instruct", True),
        ("/cache/models--meta-llama--Llama-3-8B/snapshots/0a1b", True),
        ("./llama-3-8b", True),
        ("Qwen/Qwen3-14B", False),
        (None, True),
    ],
)
def test_step_times_of_another_model_are_told(
    tmp_path: Path, measured: str | None, is_same: bool
) -> None:
    steps = tmp_path / "l4.json"
    write_profile(steps, COEFFICIENTS, {} if measured is None else {"model": measured})

    _, notes = planned_for("llama-3-8b", None, [f"l4={steps}"])

    assert notes == (() if is_same else (
        f"Step times of {steps} were measured with model 'Qwen/Qwen3-14B', and 'llama-3-8b' is "
        "planned for: see that these are the same.",
    ))  # fmt: skip


def test_step_times_of_another_number_of_gpus_are_refused(tmp_path: Path) -> None:
    steps = tmp_path / "l4.json"
    write_profile(steps, COEFFICIENTS, {"tensor_parallel_size": 2})

    planned_for("llama-3-8b", None, [f"l4:2={steps}"])
    with pytest.raises(ConfigError, match=r"'--profile l4' must be .* on 1 GPU.*write 'l4:2="):
        planned_for("llama-3-8b", None, [f"l4={steps}"])


COEFFICIENTS = Coefficients(0.0, 1e-9, 1e-4, 0.02, 1e-4, 1e-8, 0.02, 0.015)


def test_measured_steps_serve_a_pool_that_only_decodes(tmp_path: Path) -> None:
    steps = tmp_path / "l4.json"
    write_profile(steps, Coefficients(0.0, 1e-9, 1e-4, 0.02, 1e-4, 1e-8, 0.02, 0.015), {})
    planned, _ = planned_for("llama-3-8b", None, [f"l4={steps}"])

    pool = decode_profile(profile(planned, "l4", 1)).step_time

    assert pool.seconds(StepCounts(3, 1000)) == pytest.approx(0.02 + 3e-4 + 1e-5)
    # A prompt comes with its KV: one more decode.
    assert pool.seconds(StepCounts(3, 1000, 1, 500)) == pytest.approx(0.02 + 4e-4 + 1.5e-5)
    assert profile(planned, "l4", 1).step_time.seconds(StepCounts(0, 0, 1, 1000, 5e5)) == (
        pytest.approx(0.02 + 0.1 + 1e-3)
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--profile", "x100=f"], "'--profile' must be GPU=FILE or GPU:DEGREE=FILE"),
        (["--profile", "l4"], "'--profile' must be GPU=FILE or GPU:DEGREE=FILE"),
        (["--profile", "l4:x=f"], "'--profile' must be GPU=FILE or GPU:DEGREE=FILE"),
        (["--profile", "l4=/no/such"], "'--profile' must be a file or one of"),
        (["--model", "/no/such/config.json"], "'--model' must be one of llama-3-70b, llama-3-8b"),
        (["--model", "llama3-8b"], "(got 'llama3-8b'); write llama-3-8b, or download its"),
        (["--model", "not a name!"], "'--model' must be one of"),
    ],
)
def test_flags_that_cannot_be_right_are_named(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "plan.json")
    argv = ["--model", "llama-3-8b", "--gpu", "l4=1", *SHORT, "--output", output, *flags]

    assert main(argv) == 2
    assert said in capsys.readouterr().err


def test_texts_of_a_log_are_counted_by_the_models_own_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    from sola_sched.bench.backends.model import write_model

    folder = write_model(tmp_path / "tiny")
    log = tmp_path / "log.jsonl"
    message = {"role": "user", "content": "word " * 20}
    row = json.dumps({"messages": [message], "completion_tokens": 5})
    log.write_text(f"{row}\n" * 60)
    argv = ["--gpu", "l4=1", *SHORT, "--dataset-name", "custom", "--dataset-path", str(log),
            "--tensor-parallel-size", "1", "--output", str(tmp_path / "plan.json")]  # fmt: skip

    assert main(["--model", str(folder), *argv]) == 0
    assert main(["--model", "llama-3-8b", *argv]) == 2
    assert "pass --tokenizer" in capsys.readouterr().err
