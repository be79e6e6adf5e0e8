"""Between paged blocks and images: contiguous bytes that hold a run of tokens, all layers.

A raw image holds the blocks of one layer after the other, byte for byte. An INT8 image holds the
scales and offsets of all layers, then their data (`sola_sched.kernels`), so that each part is
aligned for its type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sola_sched.kernels import reference
from sola_sched.kernels.layout import PackedKV, group_length
from sola_sched.kv_swap.jobs import Piece
from sola_sched.kv_swap.tiles import TokenOrder

_FP16_BYTES = 2


class Packer:
    """Packs and unpacks the layers of one KV cache group on one worker.

    Args:
        caches: The layers' KV, each with kernel blocks in dimension 0, any strides. INT8 needs
            ``[num_blocks, num_kv_heads, block_size, channels]`` fp16, bf16 or fp32.
        num_blocks: Blocks of the scheduler; kernel blocks may be a fraction of their size.
        block_size: Tokens in a block of the scheduler.
        is_int8: Whether images are quantized.
        group_tokens: Tokens that share a scale, None for one group an image.
        order: Where the cache keeps each token and channel of a block, None for the plain
            order of the shape above.
    """

    def __init__(
        self,
        caches: Sequence[torch.Tensor],
        num_blocks: int,
        block_size: int,
        *,
        is_int8: bool,
        group_tokens: int | None,
        order: TokenOrder | None = None,
    ) -> None:
        # Wider elements first: pages of all layers then start aligned for their type.
        self._caches = sorted(caches, key=lambda cache: -cache.element_size())
        self._block_size = block_size
        self._ratios = [cache.shape[0] // num_blocks for cache in self._caches]
        self._is_int8 = is_int8
        self._group_tokens = group_tokens
        self._order = order
        if is_int8:
            self._caches = [_four_dims(cache) for cache in self._caches]
        on_cuda = bool(caches) and caches[0].device.type == "cuda"
        self._quantize, self._dequantize = _kernels(on_cuda)

    def image_bytes(self, num_tokens: int) -> int:
        """Bytes of an image of so many tokens."""
        if not self._is_int8:
            num_blocks = -(-num_tokens // self._block_size)
            return sum(
                num_blocks * ratio * _page_bytes(cache)
                for cache, ratio in zip(self._caches, self._ratios, strict=True)
            )
        num_groups = self._num_groups(num_tokens)
        return sum(
            channels * (num_tokens + 2 * _FP16_BYTES * num_groups)
            for channels in map(_num_channels, self._caches)
        )

    def pack(self, piece: Piece, image: torch.Tensor) -> None:
        """Fill `image` from the piece's blocks, in the order of the current stream.

        Args:
            piece: All of the image.
            image: ``[image_bytes]`` uint8, contiguous, on the caches' device.
        """
        if self._is_int8:
            self._pack_int8(piece, image)
        else:
            self._pack_raw(piece, image)

    def unpack(self, piece: Piece, image: torch.Tensor) -> None:
        """Write the piece's tokens from `image` into its blocks; other tokens stay.

        Raw images restore whole blocks: slots behind `end_token` in the last one get what they
        held when the image was made.
        """
        if self._is_int8:
            self._unpack_int8(piece, image)
        else:
            self._unpack_raw(piece, image)

    # Raw ------------------------------------------------------------------------------------

    def _raw_views(self, piece: Piece, image: torch.Tensor) -> list[torch.Tensor]:
        """The part of each layer in the image: ``[kernel blocks, ...]`` of the cache's dtype."""
        num_blocks = -(-piece.image_tokens // self._block_size)
        views, start = [], 0
        for cache, ratio in zip(self._caches, self._ratios, strict=True):
            end = start + num_blocks * ratio * _page_bytes(cache)
            part = image[start:end].view(cache.dtype)
            views.append(part.view(num_blocks * ratio, *cache.shape[1:]))
            start = end
        return views

    def _pack_raw(self, piece: Piece, image: torch.Tensor) -> None:
        for cache, ratio, view in zip(
            self._caches, self._ratios, self._raw_views(piece, image), strict=True
        ):
            torch.index_select(cache, 0, _table(piece.block_ids, ratio, cache.device), out=view)

    def _unpack_raw(self, piece: Piece, image: torch.Tensor) -> None:
        skipped = (piece.first_token - piece.image_first) // self._block_size
        for cache, ratio, view in zip(
            self._caches, self._ratios, self._raw_views(piece, image), strict=True
        ):
            table = _table(piece.block_ids, ratio, cache.device)
            first = skipped * ratio
            cache.index_copy_(0, table, view[first : first + len(table)])

    # INT8 -----------------------------------------------------------------------------------

    def _num_groups(self, num_tokens: int) -> int:
        return -(-num_tokens // group_length(num_tokens, self._group_tokens))

    def _packed_views(self, piece: Piece, image: torch.Tensor) -> list[PackedKV]:
        num_tokens, num_groups = piece.image_tokens, self._num_groups(piece.image_tokens)
        parameters, start = [], 0
        for cache in self._caches:
            pair = []
            for _ in range(2):
                end = start + _FP16_BYTES * num_groups * _num_channels(cache)
                part = image[start:end].view(torch.float16)
                pair.append(part.view(num_groups, cache.shape[1], cache.shape[3]))
                start = end
            parameters.append(pair)
        packed = []
        for cache, (scale, offset) in zip(self._caches, parameters, strict=True):
            end = start + num_tokens * _num_channels(cache)
            data = image[start:end].view(num_tokens, cache.shape[1], cache.shape[3])
            packed.append(PackedKV(data, scale, offset))
            start = end
        return packed

    def _pack_int8(self, piece: Piece, image: torch.Tensor) -> None:
        first = piece.first_token % self._block_size
        for cache, ratio, packed in zip(
            self._caches, self._ratios, self._packed_views(piece, image), strict=True
        ):
            table = _table(piece.block_ids, ratio, cache.device)
            if self._order is None:
                source = cache.transpose(1, 2)
            else:
                source = self._order.gather(cache, table)
                table = torch.arange(len(table))
            self._quantize(
                source,
                table,
                num_tokens=piece.image_tokens,
                group_tokens=self._group_tokens,
                first_token=first,
                out=packed,
            )

    def _unpack_int8(self, piece: Piece, image: torch.Tensor) -> None:
        first = piece.first_token % self._block_size
        skipped = piece.first_token - piece.image_first
        wanted = range(skipped, piece.end_token - piece.image_first)
        for cache, ratio, packed in zip(
            self._caches, self._ratios, self._packed_views(piece, image), strict=True
        ):
            table = _table(piece.block_ids, ratio, cache.device)
            if self._order is None:
                self._dequantize(
                    packed,
                    cache.transpose(1, 2),
                    table,
                    group_tokens=self._group_tokens,
                    first_token=first,
                    tokens=wanted,
                )
                continue
            restored = self._order.gather(cache, table)
            self._dequantize(
                packed,
                restored,
                torch.arange(len(table)),
                group_tokens=self._group_tokens,
                first_token=first,
                tokens=wanted,
            )
            self._order.scatter(restored, cache, table)


def _kernels(on_cuda: bool) -> tuple[Callable[..., PackedKV], Callable[..., None]]:
    if not on_cuda:
        return reference.quantize_kv, reference.dequantize_kv
    from sola_sched.kernels import int8_kv

    return int8_kv.quantize_kv, int8_kv.dequantize_kv


def _table(block_ids: Sequence[int], ratio: int, device: torch.device) -> torch.Tensor:
    """Kernel blocks of the scheduler's blocks, int64, on `device`."""
    table = torch.tensor(block_ids, dtype=torch.int64)
    if ratio > 1:
        table = (table[:, None] * ratio + torch.arange(ratio)).flatten()
    if device.type == "cpu":
        return table
    return table.pin_memory().to(device, non_blocking=True)


def _page_bytes(cache: torch.Tensor) -> int:
    return cache[0].numel() * cache.element_size()


def _num_channels(cache: torch.Tensor) -> int:
    return cache.shape[1] * cache.shape[3]


def _four_dims(cache: torch.Tensor) -> torch.Tensor:
    """``[blocks, heads, tokens, channels]``; a latent cache has one head."""
    return cache.unsqueeze(1) if cache.dim() == 3 else cache
