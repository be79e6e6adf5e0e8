"""One launch for all layers makes and restores the images that one launch a layer does."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs Triton")

from sola_sched.kernels import int8_kv, pages  # noqa: E402  after the check for torch
from sola_sched.kv_swap.jobs import Piece  # noqa: E402
from sola_sched.kv_swap.packing import Packer  # noqa: E402

NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, CHANNELS = 12, 2, 8, 6

pytestmark = pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            "cpu",
            marks=pytest.mark.skipif(
                os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
            ),
        ),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)


def make_caches(
    device: str, *, num_layers: int = 3, heads_first: bool = True, is_latent: bool = False
) -> list[torch.Tensor]:
    """Random KV ``[blocks, heads, tokens, channels]`` of layers allocated one by one, fp16."""
    generator = torch.Generator().manual_seed(0)
    caches = []
    for _ in range(num_layers):
        shape = (NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, CHANNELS)
        cache = torch.randn(shape, generator=generator).half().to(device).transpose(1, 2)
        if is_latent:
            cache = cache[:, 0].contiguous()
        caches.append(cache.contiguous() if heads_first else cache)
    return caches


def make_packer(
    caches: list[torch.Tensor],
    *,
    block_size: int = BLOCK_SIZE,
    group: int | None = 5,
    is_int8: bool = True,
    **kw: Any,
) -> Packer:
    num_blocks = NUM_BLOCKS * BLOCK_SIZE // block_size
    return Packer(caches, num_blocks, block_size, is_int8=is_int8, group_tokens=group, **kw)


def image_for(packer: Packer, num_tokens: int, device: str) -> torch.Tensor:
    size = packer.image_bytes(num_tokens)
    return torch.full((size,), 171, dtype=torch.uint8, device=device)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("is_latent", [False, True])
@pytest.mark.parametrize("group", [5, None])
@pytest.mark.parametrize("block_size", [BLOCK_SIZE, 2 * BLOCK_SIZE])
def test_one_launch_packs_and_restores_like_a_launch_a_layer(
    device: str, heads_first: bool, is_latent: bool, group: int | None, block_size: int
) -> None:
    caches = make_caches(device, heads_first=heads_first, is_latent=is_latent)
    saved = Piece(0, 5, 30, (), 5, 35, (3, 1, 4, 0, 5)[: -(-35 // block_size)])
    # Back without the first block, which a prefix hit already holds.
    skipped = -(-saved.first_token // block_size) * block_size
    loaded = Piece(0, 5, 30, (), skipped, 33, (2, 0, 4, 1)[: -(-(33 - skipped) // block_size)])
    images, restored = [], []
    for uses_triton in (True, False):
        options: dict[str, Any] = {
            "group": group,
            "block_size": block_size,
            "uses_triton": uses_triton,
        }
        packer = make_packer(caches, **options)
        images.append(image_for(packer, 30, device))
        packer.pack(saved, images[-1])
        restored.append([torch.zeros_like(cache) for cache in caches])
        make_packer(restored[-1], **options).unpack(loaded, images[-1])

    assert torch.equal(*images)
    torch.testing.assert_close(*restored, rtol=0, atol=0)
    assert all(cache.any() for cache in restored[0])


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("is_latent", [False, True])
@pytest.mark.parametrize("block_size", [BLOCK_SIZE, 2 * BLOCK_SIZE])
def test_one_launch_copies_raw_blocks(
    device: str, heads_first: bool, is_latent: bool, block_size: int
) -> None:
    caches = make_caches(device, heads_first=heads_first, is_latent=is_latent)
    restored = [torch.zeros_like(cache) for cache in caches]
    options: dict[str, Any] = {"is_int8": False, "block_size": block_size, "uses_triton": True}
    packer = make_packer(caches, **options)
    image = image_for(packer, 32, device)
    away, home = (3, 1, 4, 0)[: 32 // block_size], (2, 5, 1, 3)[: 32 // block_size]
    # The first block is not wanted back.
    last = Piece(0, 0, 32, (), block_size, 32, home[1:])

    with (
        mock.patch.object(pages, "gather_pages", wraps=pages.gather_pages) as gather,
        mock.patch.object(pages, "scatter_pages", wraps=pages.scatter_pages) as scatter,
    ):
        packer.pack(Piece(0, 0, 32, (), 0, 32, away), image)
        make_packer(restored, **options).unpack(last, image)

    assert (gather.call_count, scatter.call_count) == (1, 1)
    ratio = block_size // BLOCK_SIZE
    moved = {
        target * ratio + part: source * ratio + part
        for source, target in zip(away[1:], home[1:], strict=True)
        for part in range(ratio)
    }
    for before, after in zip(caches, restored, strict=True):
        for block in range(NUM_BLOCKS):
            expected = before[moved[block]] if block in moved else torch.zeros_like(before[0])
            assert torch.equal(after[block], expected)


def test_raw_layers_that_differ_take_a_copy_each(device: str) -> None:
    wider = make_caches(device, num_layers=1)[0].float()
    # Of the second a block is every other row of a larger one, so that it has gaps.
    gaps = make_caches(device, num_layers=2)[1].repeat_interleave(2, dim=2)[:, :, ::2]
    for caches in ([*make_caches(device, num_layers=1), wider], [gaps, gaps.clone()]):
        packer = make_packer(caches, is_int8=False, uses_triton=True)
        image = image_for(packer, 16, device)
        before = [cache.clone() for cache in caches]
        with mock.patch.object(pages, "gather_pages") as gather:
            packer.pack(Piece(0, 0, 16, (), 0, 16, (3, 1)), image)
        gather.assert_not_called()

        for cache in caches:
            cache[[3, 1]] = 0
        packer.unpack(Piece(0, 0, 16, (), 0, 16, (3, 1)), image)

        assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))


def test_equal_layers_take_one_launch(device: str) -> None:
    packer = make_packer(make_caches(device), uses_triton=True)
    image = image_for(packer, 10, device)
    moved = Piece(0, 0, 10, (), 0, 10, (3, 1))

    with (
        mock.patch.object(int8_kv, "quantize_layers", wraps=int8_kv.quantize_layers) as quantize,
        mock.patch.object(int8_kv, "dequantize_layers", wraps=int8_kv.dequantize_layers) as restore,
    ):
        packer.pack(moved, image)
        packer.unpack(moved, image)

    assert (quantize.call_count, restore.call_count) == (1, 1)


def test_unequal_layers_take_a_launch_each(device: str) -> None:
    """A layer with its tokens before its heads in memory, and one that is wider."""
    caches = [
        *make_caches(device, num_layers=1),
        *make_caches(device, num_layers=1, heads_first=False),
        make_caches(device, num_layers=1)[0].float(),
    ]
    images = []
    for uses_triton in (True, False):
        packer = make_packer(caches, uses_triton=uses_triton)
        images.append(image_for(packer, 10, device))
        with mock.patch.object(int8_kv, "quantize_layers") as quantize:
            packer.pack(Piece(0, 0, 10, (), 0, 10, (3, 1)), images[-1])
        quantize.assert_not_called()

    assert torch.equal(*images)


def test_a_packer_without_layers_is_refused_nothing(device: str) -> None:
    assert make_packer([], uses_triton=True).image_bytes(10) == 0
