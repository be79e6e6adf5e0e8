"""The Triton kernels agree with the torch reference, natively on a GPU and interpreted on a CPU."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs Triton")

from sola_sched.kernels import int8_kv, reference  # noqa: E402  after the check for torch
from sola_sched.kernels.layout import Layers, PackedKV, allocate  # noqa: E402

DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(
            os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
        ),
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SENTINEL = 171

pytestmark = pytest.mark.parametrize("device", DEVICES)


def make_cache(
    device: str,
    dtype: torch.dtype = torch.float32,
    num_blocks: int = 24,
    block_size: int = 16,
    num_kv_heads: int = 2,
    head_dim: int = 8,
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(num_blocks, block_size, num_kv_heads, head_dim, generator=generator)
    channel_mean = 3 * torch.randn(num_kv_heads, head_dim, generator=generator)
    return (values + channel_mean).to(dtype).to(device)


def make_table(device: str, num_blocks: int = 24, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3))
    return order.to(dtype).to(device)


def make_buffers(
    device: str, num_tokens: int, group_tokens: int | None, heads: int = 2, dim: int = 8
) -> PackedKV:
    """Buffers filled with what no result may keep: a sentinel and NaN."""
    packed = allocate(num_tokens, heads, dim, group_tokens=group_tokens, device=device)
    packed.data.fill_(SENTINEL)
    packed.scale.fill_(math.nan)
    packed.offset.fill_(math.nan)
    return packed


def assert_same_round_trip(
    cache: torch.Tensor,
    table: torch.Tensor,
    *,
    num_tokens: int,
    group_tokens: int | None,
    first_token: int = 0,
) -> None:
    """Both backends pack to the same bits and unpack to the same bits, the rest untouched."""
    heads, dim = cache.shape[2:]
    device = cache.device.type
    packed = {}
    for backend in (reference, int8_kv):
        packed[backend] = backend.quantize_kv(
            cache,
            table,
            num_tokens=num_tokens,
            group_tokens=group_tokens,
            first_token=first_token,
            out=make_buffers(device, num_tokens, group_tokens, heads, dim),
        )
    for name in ("data", "scale", "offset"):
        torch.testing.assert_close(
            getattr(packed[int8_kv], name), getattr(packed[reference], name), rtol=0, atol=0
        )

    restored = {}
    for backend in (reference, int8_kv):
        restored[backend] = torch.full_like(cache, math.nan)
        backend.dequantize_kv(
            packed[reference],
            restored[backend],
            table,
            group_tokens=group_tokens,
            first_token=first_token,
        )
    if cache.dtype == torch.bfloat16 and device == "cpu":
        # Triton's interpreter cuts fp32 off to bf16 where a GPU rounds to nearest.
        exact = torch.full_like(cache, math.nan, dtype=torch.float32)
        reference.dequantize_kv(
            packed[reference], exact, table, group_tokens=group_tokens, first_token=first_token
        )
        restored[reference] = (exact.view(torch.int32) & -0x10000).view(torch.float32).bfloat16()
    torch.testing.assert_close(
        restored[int8_kv], restored[reference], rtol=0, atol=0, equal_nan=True
    )
    assert int(restored[int8_kv].isfinite().sum()) == num_tokens * heads * dim


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 63, 127])
@pytest.mark.parametrize("group_tokens", [16, 32, 64, None])
def test_both_backends_give_the_same_bits(
    device: str, dtype: torch.dtype, num_tokens: int, group_tokens: int | None
) -> None:
    assert_same_round_trip(
        make_cache(device, dtype),
        make_table(device),
        num_tokens=num_tokens,
        group_tokens=group_tokens,
    )


def test_a_range_may_start_inside_a_block(device: str) -> None:
    assert_same_round_trip(
        make_cache(device), make_table(device), num_tokens=45, group_tokens=32, first_token=13
    )


def test_odd_head_and_block_sizes(device: str) -> None:
    cache = make_cache(device, block_size=7, num_kv_heads=3, head_dim=5)

    assert_same_round_trip(cache, make_table(device), num_tokens=100, group_tokens=16)


def test_more_channels_than_one_tile_and_an_odd_group(device: str) -> None:
    cache = make_cache(device, num_kv_heads=3, head_dim=65)

    assert_same_round_trip(cache, make_table(device), num_tokens=80, group_tokens=70)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3),
        lambda x: torch.cat([x, x], dim=3)[..., : x.shape[3]],
        lambda x: torch.cat([x, x], dim=0)[::2],
        lambda x: x.transpose(2, 3),
    ],
    ids=["heads-before-tokens", "half-of-packed-kv", "every-second-block", "channels-strided"],
)
def test_strided_views(device: str, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    cache = view(make_cache(device))
    assert not cache.is_contiguous()

    assert_same_round_trip(
        cache, make_table(device, cache.shape[0]), num_tokens=63, group_tokens=32
    )


def test_block_table_of_int64(device: str) -> None:
    table = make_table(device, dtype=torch.int64)

    assert_same_round_trip(make_cache(device), table, num_tokens=63, group_tokens=32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "value", [0.0, -0.0, 65504.0, -65504.0, 1e-7, -1e-7, 0.1, 1e30, math.inf, -math.inf, math.nan]
)
def test_constant_rows(device: str, dtype: torch.dtype, value: float) -> None:
    cache = torch.full_like(make_cache(device), value).to(dtype)

    assert_same_round_trip(cache, make_table(device), num_tokens=33, group_tokens=16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_span_the_whole_fp16_range(device: str, dtype: torch.dtype) -> None:
    cache = make_cache(device, dtype)
    cache[::2] = 65504.0
    cache[1::2] = -65504.0

    assert_same_round_trip(cache, make_table(device), num_tokens=127, group_tokens=None)


def test_no_tokens(device: str) -> None:
    assert_same_round_trip(make_cache(device), make_table(device, 0), num_tokens=0, group_tokens=32)


def test_buffers_are_allocated_on_request(device: str) -> None:
    packed = int8_kv.quantize_kv(
        make_cache(device), make_table(device), num_tokens=20, group_tokens=16
    )

    assert (tuple(packed.data.shape), tuple(packed.scale.shape)) == ((20, 2, 8), (2, 2, 8))


def make_layers(
    device: str, count: int = 3, dtype: torch.dtype = torch.float32, **shape: int
) -> list[torch.Tensor]:
    """Caches in allocations of their own, heads before tokens in memory."""
    caches = [
        (make_cache(device, dtype, **shape) * (i + 1)).transpose(1, 2).contiguous().transpose(1, 2)
        for i in range(count)
    ]
    assert len({cache.untyped_storage().data_ptr() for cache in caches}) == count
    return caches


def make_layer_buffers(
    caches: list[torch.Tensor], num_tokens: int, group_tokens: int | None
) -> PackedKV:
    """Buffers of all layers, scale and offset of a layer side by side as in an image."""
    heads, dim = caches[0].shape[2:]
    one = make_buffers(caches[0].device.type, num_tokens, group_tokens, heads, dim)
    params = torch.stack([torch.stack([one.scale, one.offset])] * len(caches))
    return PackedKV(torch.stack([one.data] * len(caches)), params[:, 0], params[:, 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "group_tokens", "first_token", "tokens"),
    [
        (64, 32, 0, None),
        (45, 32, 13, range(7, 40)),
        (80, 70, 0, range(1, 80)),  # a group longer than a tile
        (33, None, 5, range(0, 20)),
        (45, 16, 0, range(3, 3)),
        (0, 16, 0, None),
    ],
)
def test_all_layers_in_one_launch_give_the_bits_of_one_after_the_other(
    device: str,
    dtype: torch.dtype,
    num_tokens: int,
    group_tokens: int | None,
    first_token: int,
    tokens: range | None,
) -> None:
    caches, table = make_layers(device, dtype=dtype), make_table(device)
    layers = Layers.of(caches)
    packed = make_layer_buffers(caches, num_tokens, group_tokens)

    int8_kv.quantize_layers(
        layers,
        table,
        num_tokens=num_tokens,
        group_tokens=group_tokens,
        first_token=first_token,
        out=packed,
    )

    singles = [
        int8_kv.quantize_kv(
            cache,
            table,
            num_tokens=num_tokens,
            group_tokens=group_tokens,
            first_token=first_token,
        )
        for cache in caches
    ]
    for name in ("data", "scale", "offset"):
        expected = torch.stack([getattr(single, name) for single in singles])
        assert torch.equal(getattr(packed, name), expected)

    expected_caches = [torch.full_like(cache, math.nan) for cache in caches]
    for single, cache in zip(singles, expected_caches, strict=True):
        int8_kv.dequantize_kv(
            single,
            cache,
            table,
            group_tokens=group_tokens,
            first_token=first_token,
            tokens=tokens,
        )
    for cache in caches:
        cache.fill_(math.nan)
    int8_kv.dequantize_layers(
        packed, layers, table, group_tokens=group_tokens, first_token=first_token, tokens=tokens
    )

    torch.testing.assert_close(caches, expected_caches, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("distance", [1, 6, 5 * 7 * 3 * 65, 24 * 7 * 3 * 65])
def test_layers_may_lie_at_any_distance_in_one_buffer(device: str, distance: int) -> None:
    """Distances that no vector load fits, in either direction, and interleaved layers."""
    shape, stride = (4, 7, 3, 65), (24 * 7 * 3 * 65 * 2, 3 * 65, 65, 1)
    buffer = torch.randn(24 * 7 * 3 * 65 * 8, generator=torch.Generator().manual_seed(1)).to(device)
    caches = [buffer.as_strided(shape, stride, distance * i) for i in (1, 0)]
    table = make_table(device, 4)
    packed = make_layer_buffers(caches, 20, 8)

    int8_kv.quantize_layers(Layers.of(caches), table, num_tokens=20, group_tokens=8, out=packed)

    for i, cache in enumerate(caches):
        single = int8_kv.quantize_kv(cache, table, num_tokens=20, group_tokens=8)
        assert torch.equal(packed.data[i], single.data)
        assert torch.equal(packed.scale[i], single.scale)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:-1],
        lambda x: x.contiguous(),
        lambda x: x.half(),
        lambda x: x.to("meta"),
    ],
    ids=["shape", "stride", "dtype", "device"],
)
def test_unequal_layers_are_refused(
    device: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    first, second = make_layers(device, 2)

    with pytest.raises(ValueError, match="must have one shape, stride, dtype and device"):
        Layers.of([first, change(second)])


def test_no_layers_and_layers_between_elements_are_refused(device: str) -> None:
    class Shifted(torch.Tensor):
        """Reports an address two bytes behind its own."""

        def data_ptr(self) -> int:
            return super().data_ptr() + 2

    first, second = make_layers(device, 2)

    with pytest.raises(ValueError, match="must hold a layer"):
        Layers.of([])
    with pytest.raises(ValueError, match="multiple of their element size apart"):
        Layers.of([first, second.as_subclass(Shifted)])


def test_buffers_that_do_not_fit_the_layers_are_refused(device: str) -> None:
    caches, table = make_layers(device, 2), make_table(device)
    layers, packed = Layers.of(caches), make_layer_buffers(caches, 20, 16)
    contiguous = PackedKV(packed.data, packed.scale.contiguous(), packed.offset)
    too_many = make_layer_buffers(caches + caches, 20, 16)

    with pytest.raises(ValueError, match="'out' must have one layer stride"):
        int8_kv.quantize_layers(layers, table, num_tokens=20, group_tokens=16, out=contiguous)
    with pytest.raises(ValueError, match="'packed' must hold 2 layers"):
        int8_kv.dequantize_layers(too_many, layers, table, group_tokens=16)
    with pytest.raises(ValueError, match="'data' must be contiguous with shape"):
        int8_kv.quantize_layers(layers, table, num_tokens=19, group_tokens=16, out=packed)


def test_cpu_tensors_are_refused_outside_the_interpreter(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device != "cpu":
        pytest.skip("about CPU tensors")
    monkeypatch.delenv("TRITON_INTERPRET")

    with pytest.raises(ValueError, match="must be on a CUDA device"):
        int8_kv.quantize_kv(make_cache("cpu"), make_table("cpu"), num_tokens=1, group_tokens=16)


@pytest.mark.gpu
def test_offsets_beyond_32_bits(device: str) -> None:
    """A cache of more than 2^31 elements, read and written in its last block."""
    if device != "cuda":
        pytest.skip("takes 4 GiB of memory and the same code path")
    cache = torch.zeros(2**31 // (16 * 8 * 128) + 8, 16, 8, 128, dtype=torch.float16, device=device)
    cache[-1] = torch.randn(16, 8, 128, device=device)
    table = torch.tensor([cache.shape[0] - 1], dtype=torch.int32, device=device)

    packed = int8_kv.quantize_kv(cache, table, num_tokens=16, group_tokens=16)
    expected = cache[-1].clone()
    cache[-1] = 0
    int8_kv.dequantize_kv(packed, cache, table, group_tokens=16)

    assert float((cache[-1] - expected).abs().max()) < 0.05
