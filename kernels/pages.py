"""A Triton kernel that copies blocks as they are, of all layers in one launch.

It runs on a CUDA device, and on CPU tensors with ``TRITON_INTERPRET=1`` set before Triton is
imported.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sola_sched.kernels.layout import Layers, check_table

_WORD_BYTES = 8
#: Words of one program.
_TILE = 1024


def pages_of(caches: Sequence[torch.Tensor]) -> Layers:
    """The caches as words: ``[num_blocks, words in a block]`` int64 each, in their order in memory.

    Args:
        caches: A layer each, blocks in dimension 0, any dtype.

    Raises:
        ValueError: There is none, two differ, or a block is not a whole number of words without
            a gap.
    """
    return Layers.of([_words(cache) for cache in caches])


def gather_pages(pages: Layers, block_table: torch.Tensor, out: torch.Tensor) -> None:
    """Copy blocks into one buffer.

    Runs on the current stream and does not wait for it, as does ``scatter_pages``. Neither reads
    the ids of the table to check them.

    Args:
        pages: What ``pages_of`` returned.
        block_table: ``[num_blocks]`` int32 or int64, contiguous, on the device of the caches.
        out: ``[num_layers, num_blocks, words in a block]`` int64; each layer is contiguous.

    Raises:
        TypeError, ValueError: See ``layout.check_table``; or the buffer's shape, dtype or device
            does not fit.
    """
    _copy(pages, block_table, out, is_load=False)


def scatter_pages(image: torch.Tensor, pages: Layers, block_table: torch.Tensor) -> None:
    """Copy what ``gather_pages`` left in ``image``, or some blocks of it, into other blocks.

    Args:
        image: As ``out`` of ``gather_pages``.
        pages: As in ``gather_pages``.
        block_table: As in ``gather_pages``.

    Raises:
        TypeError, ValueError: As ``gather_pages``.
    """
    _copy(pages, block_table, image, is_load=True)


def _words(cache: torch.Tensor) -> torch.Tensor:
    size = cache.element_size()
    expected = 1
    for stride, length in sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True)):
        if length > 1 and stride != expected:
            raise ValueError(
                f"blocks must have no gap in memory (got shape {list(cache.shape)}, stride "
                f"{cache.stride()})."
            )
        expected *= length
    places = (cache.storage_offset() * size, expected * size, cache.stride(0) * size)
    if any(place % _WORD_BYTES for place in places):
        raise ValueError(
            f"blocks must begin and end at multiples of {_WORD_BYTES} bytes (got {places} for the "
            "first byte, a block and the distance of two)."
        )
    start, num_words, stride = (place // _WORD_BYTES for place in places)
    words = torch.empty(0, dtype=torch.int64, device=cache.device)
    return words.set_(cache.untyped_storage(), start, (len(cache), num_words), (stride, 1))


def _copy(pages: Layers, table: torch.Tensor, image: torch.Tensor, *, is_load: bool) -> None:
    first = pages.caches[0]
    check_table(table, first.device)
    shape = (len(pages.caches), len(table), first.shape[1])
    strides = (first.shape[1], 1)
    if image.dtype != torch.int64 or tuple(image.shape) != shape or image.stride()[1:] != strides:
        raise ValueError(
            f"the image must be int64 of shape {list(shape)}, its layers contiguous (got "
            f"{image.dtype}, {list(image.shape)}, stride {image.stride()})."
        )
    if image.device != first.device:
        raise ValueError(
            f"the image must be on the device of the caches (got {image.device} and "
            f"{first.device})."
        )
    if not len(table):
        return
    grid = (len(table), triton.cdiv(first.shape[1], _TILE), len(pages.caches))
    _copy_pages_kernel[grid](
        first,
        pages.offsets,
        table,
        image,
        first.stride(0),
        image.stride(0),
        first.shape[1],
        IS_LOAD=is_load,
        TILE=_TILE,
        ALIGNMENT=pages.alignment,
    )


@triton.jit
def _copy_pages_kernel(
    cache_ptr,
    layer_offset_ptr,
    table_ptr,
    image_ptr,
    stride_block,
    stride_layer,
    num_words,
    IS_LOAD: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """image[layer, i, :] = cache[layer][table[i], :], or the other way round."""
    place = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * TILE + tl.arange(0, TILE)
    layer = tl.program_id(2).to(tl.int64)
    block = tl.load(table_ptr + place).to(tl.int64)
    page = cache_ptr + tl.multiple_of(tl.load(layer_offset_ptr + layer), ALIGNMENT)
    page += block * stride_block
    copy = image_ptr + layer * stride_layer + place * num_words
    is_word = word < num_words
    if IS_LOAD:
        tl.store(page + word, tl.load(copy + word, mask=is_word), mask=is_word)
    else:
        tl.store(copy + word, tl.load(page + word, mask=is_word), mask=is_word)
