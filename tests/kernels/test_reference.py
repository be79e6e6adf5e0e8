"""The reference keeps its error bound, touches only its own slots and checks its arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="needs torch")

from sola_sched.kernels import reference  # noqa: E402  after the check for torch
from sola_sched.kernels.layout import FP16_MAX, NUM_STEPS, PackedKV, allocate  # noqa: E402

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
#: Largest relative error of rounding to the dtype, 2^-p for p significant bits, ...
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
#: ... and the absolute error below its smallest normal number (half the smallest subnormal).
SUBNORMAL = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-126, torch.float32: 2.0**-126}
#: (x - o) / s and "+ 1/2" in fp32 are off by at most 3 roundings of a number <= 255.5.
FP32_STEPS = 3 * 256 * 2.0**-24


def error_bound(packed: PackedKV, length: int, values: torch.Tensor) -> torch.Tensor:
    """Largest error of a round trip per element, see kernels/README.md.

    Half a step of the scale as stored; fp32 arithmetic; the sum rounded to fp32 (one rounding of
    the restored value, whose magnitude is at most that of the value plus one step); the output
    dtype's own rounding.
    """
    group = torch.arange(packed.num_tokens) // length
    step = packed.scale.double()[group, 0]
    magnitude = values.double().abs() + step
    rounding = ROUNDING[values.dtype] + ROUNDING[torch.float32]
    return step * (0.5 + FP32_STEPS) + magnitude * rounding + SUBNORMAL[values.dtype]


def round_trip(
    values: torch.Tensor, group_tokens: int | None
) -> tuple[torch.Tensor, PackedKV, torch.Tensor]:
    """Return restored values, the packed form and the error, for ``[num_tokens, C]`` values."""
    num_tokens, num_channels = values.shape
    block_size = 16
    num_blocks = -(-num_tokens // block_size)
    cache = torch.full((num_blocks, block_size, 1, num_channels), math.nan, dtype=values.dtype)
    cache.view(-1, num_channels)[:num_tokens] = values
    table = torch.arange(num_blocks)
    packed = reference.quantize_kv(cache, table, num_tokens=num_tokens, group_tokens=group_tokens)
    restored = torch.full_like(cache, math.nan)
    reference.dequantize_kv(packed, restored, table, group_tokens=group_tokens)
    result = restored.view(-1, num_channels)[:num_tokens]
    return result, packed, (result.double() - values.double()).abs()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 63, 127])
@pytest.mark.parametrize("group_tokens", [16, 32, 64, None])
@pytest.mark.parametrize("mean", [0.0, -30.0, 1000.0])
def test_round_trip_is_within_half_a_step(
    dtype: torch.dtype, num_tokens: int, group_tokens: int | None, mean: float
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    values = (mean + torch.randn(num_tokens, 40, generator=generator)).to(dtype)

    _, packed, error = round_trip(values, group_tokens)

    bound = error_bound(packed, group_tokens or num_tokens, values)
    assert bool((error <= bound).all())


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    raw=st.lists(
        st.floats(min_value=-FP16_MAX, max_value=FP16_MAX, width=32), min_size=1, max_size=40
    ),
    dtype=st.sampled_from(DTYPES),
    group_tokens=st.sampled_from([1, 3, 16, None]),
)
def test_any_finite_values_keep_the_bound(
    raw: list[float], dtype: torch.dtype, group_tokens: int | None
) -> None:
    values = torch.tensor(raw, dtype=torch.float32).clamp(-65280, 65280).to(dtype)[:, None]

    result, packed, error = round_trip(values, group_tokens)

    assert bool(result.isfinite().all())
    assert bool((error <= error_bound(packed, group_tokens or len(raw), values)).all())


def test_stored_scale_is_close_to_the_exact_one() -> None:
    """Directed rounding costs at most one fp16 step of the scale and one of the offset."""
    values = 5 + torch.randn(512, 64, generator=torch.Generator().manual_seed(0))

    _, packed, _ = round_trip(values, None)

    spread = values.double().amax(0) - values.double().amin(0)
    widest = (spread + 2.0**-10 * values.double().amin(0).abs()) / NUM_STEPS * (1 + 2.0**-10)
    assert bool((packed.scale[0, 0].double() >= spread / NUM_STEPS * (1 - 2.0**-20)).all())
    assert bool((packed.scale[0, 0].double() <= widest * (1 + 2.0**-20)).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [0.0, 1.5, -2048.0])
def test_constant_channel_is_restored_exactly(dtype: torch.dtype, value: float) -> None:
    result, packed, _ = round_trip(torch.full((33, 4), value, dtype=dtype), 16)

    assert (result == value).all()
    assert (packed.scale == 0).all()


@pytest.mark.parametrize(
    ("value", "stored"), [(1e30, FP16_MAX), (-math.inf, -FP16_MAX), (math.nan, 0.0)]
)
def test_values_without_an_fp16_form_are_replaced_as_documented(
    value: float, stored: float
) -> None:
    result, _, _ = round_trip(torch.full((3, 4), value), 16)

    assert (result == stored).all()


def test_huge_rows_stay_finite() -> None:
    values = torch.tensor([[-FP16_MAX], [FP16_MAX]], dtype=torch.float16)

    result, _, _ = round_trip(values, None)

    assert result.isfinite().all()


def test_one_outlier_channel_does_not_cost_the_others_precision() -> None:
    values = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    _, before, _ = round_trip(values, 64)
    values[:, 3] *= 1000

    _, after, _ = round_trip(values, 64)

    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(before.scale[..., others], after.scale[..., others])


def test_slots_of_other_tokens_keep_their_content() -> None:
    cache = torch.randn(4, 16, 2, 8)
    before = cache.clone()
    table = torch.tensor([2, 0])
    packed = reference.quantize_kv(cache, table, num_tokens=9, group_tokens=4, first_token=11)

    reference.dequantize_kv(packed, cache, table, group_tokens=4, first_token=11)

    written = torch.zeros(4, 16, dtype=torch.bool)
    written[2, 11:], written[0, :4] = True, True
    assert torch.equal(cache[~written], before[~written])
    assert not torch.equal(cache[written], before[written])


def test_blocks_may_move_between_pack_and_unpack() -> None:
    cache = torch.randn(6, 16, 2, 8)
    packed = reference.quantize_kv(cache, torch.tensor([4, 1]), num_tokens=32, group_tokens=16)
    same, moved = cache.clone(), torch.zeros_like(cache)

    reference.dequantize_kv(packed, same, torch.tensor([4, 1]), group_tokens=16)
    reference.dequantize_kv(packed, moved, torch.tensor([0, 3]), group_tokens=16)

    assert torch.equal(moved[[0, 3]], same[[4, 1]])


def test_parts_packed_alone_equal_the_whole() -> None:
    """With parts of whole groups, which lets a running request be saved piece by piece."""
    cache, table = torch.randn(6, 16, 2, 8), torch.tensor([5, 0, 3])

    whole = reference.quantize_kv(cache, table, num_tokens=48, group_tokens=8)
    parts = [
        reference.quantize_kv(cache, table, num_tokens=n, group_tokens=8, first_token=first)
        for first, n in [(0, 24), (24, 24)]
    ]

    assert torch.equal(whole.data, torch.cat([x.data for x in parts]))
    assert torch.equal(whole.scale, torch.cat([x.scale for x in parts]))


def test_attention_output_moves_no_more_than_the_errors_allow() -> None:
    """One decode step over 256 tokens: the effect where it counts.

    With |dK| <= e_K per element, each logit moves by at most d = |q|_1 e_K / sqrt(D), so each
    weight by a factor within exp(+-2d); with |dV| <= e_V, the output moves by at most
    (exp(2d) - 1) max|V| + e_V.
    """
    generator = torch.Generator().manual_seed(2)
    keys, values = torch.randn(2, 256, 64, generator=generator)
    query = torch.randn(64, generator=generator)
    packed_keys, _, key_error = round_trip(keys, 64)
    packed_values, _, value_error = round_trip(values, 64)

    def attend(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(k.double() @ query.double() / 8.0, dim=0) @ v.double()

    moved = (attend(packed_keys, packed_values) - attend(keys, values)).abs().max()

    logit = float(query.abs().sum() * key_error.max() / 8.0)
    limit = math.expm1(2 * logit) * float(values.abs().max()) + float(value_error.max())
    assert float(moved) <= limit
    assert float(moved) < 0.01  # the bound is loose; random errors mostly cancel


@pytest.mark.parametrize(
    ("x", "down", "up"),
    [
        (0.0, 0.0, 0.0),
        (1.0, 1.0, 1.0),
        (1.0001, 1.0, 1.0 + 2**-10),
        (1e-9, 0.0, 2.0**-24),
        (65503.0, 65472.0, 65504.0),
    ],
)
def test_directed_rounding_to_fp16(x: float, down: float, up: float) -> None:
    value = torch.tensor([x], dtype=torch.float32)

    assert float(reference.round_down_fp16(value)) == down
    assert float(reference.round_up_fp16(value)) == up
    assert float(reference.round_down_fp16(-value)) == -up


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cache": torch.zeros(4, 16, 2, 8, dtype=torch.int8)}, TypeError, "'cache' must be"),
        ({"cache": torch.zeros(4, 16, 8)}, ValueError, r"\[num_blocks, block_size"),
        ({"block_table": torch.zeros(2)}, TypeError, "'block_table' must be"),
        ({"block_table": torch.tensor([[0, 1]])}, ValueError, "one contiguous row"),
        ({"block_table": torch.tensor([0, 4])}, ValueError, r"ids in \[0, 4\) \(got 0 to 4\)"),
        ({"block_table": torch.tensor([-1, 0])}, ValueError, r"got -1 to 0"),
        ({"num_tokens": 33}, ValueError, "got 2 blocks of 16 tokens, 32 in all"),
        ({"num_tokens": -1}, ValueError, "must be >= 0"),
        ({"group_tokens": 0}, ValueError, "'group_tokens' must be >= 1"),
        (
            {"out": allocate(9, 2, 8, group_tokens=16, device="cpu")},
            ValueError,
            r"'data' must be contiguous with shape \[10, 2, 8\]",
        ),
    ],
)
def test_bad_arguments_are_named(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {
        "cache": torch.zeros(4, 16, 2, 8),
        "block_table": torch.tensor([0, 1]),
        "num_tokens": 10,
        "group_tokens": 16,
    }

    with pytest.raises(error, match=message):
        reference.quantize_kv(**(arguments | change))
