"""Between paged blocks and images: contiguous bytes that hold a run of tokens, all layers.

A raw image holds the blocks of one layer after the other, byte for byte. An INT8 image holds the
scales and offsets of all layers, then their data (`sola_sched.kernels`), so that each part is
aligned for its type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from sola_sched.kernels import reference
from sola_sched.kernels.layout import Layers, PackedKV, group_length
from sola_sched.kv_swap.jobs import Piece
from sola_sched.kv_swap.tiles import TokenOrder

_FP16_BYTES = 2
#: Blocks of the kernel on the device, by their number in a block of the scheduler.
Tables = dict[int, torch.Tensor]


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
        uses_triton: Whether to take the Triton kernels, which pack equal layers in one launch;
            None takes them for caches on a CUDA device.
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
        uses_triton: bool | None = None,
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
        if uses_triton is None:
            uses_triton = bool(caches) and caches[0].device.type == "cuda"
        self._quantize, self._dequantize = _kernels(uses_triton)
        #: All layers as ``[num_blocks, block_size, num_kv_heads, channels]``, None unless equal.
        self._layers: Layers | None = None
        #: All layers as ``[num_blocks, words]``, for raw images; None unless equal.
        self._pages: Layers | None = None
        if not uses_triton:
            return
        with suppress(ValueError):  # they differ, or there is none
            if not is_int8:
                from sola_sched.kernels.pages import pages_of

                self._pages = pages_of(self._caches)
            elif order is None:
                self._layers = Layers.of([cache.transpose(1, 2) for cache in self._caches])

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

    def tables(self, pieces: Sequence[Piece]) -> list[Tables]:
        """The kernel blocks of each piece on the device; one copy to it for all of them."""
        devices = dict(zip(self._ratios, (cache.device for cache in self._caches), strict=True))
        block_ids = [block for piece in pieces for block in piece.block_ids]
        found: list[Tables] = [{} for _ in pieces]
        for ratio, device in devices.items():
            table = _table(block_ids, ratio, device)
            parts = torch.split(table, [ratio * len(piece.block_ids) for piece in pieces])
            for mine, part in zip(found, parts, strict=True):
                mine[ratio] = part
        return found

    def pack(self, piece: Piece, image: torch.Tensor, tables: Tables | None = None) -> None:
        """Fill `image` from the piece's blocks, in the order of the current stream.

        Args:
            piece: All of the image.
            image: ``[image_bytes]`` uint8, contiguous, on the caches' device.
            tables: Of this piece, from `tables`; None for one that is moved alone.
        """
        tables = tables or self.tables([piece])[0]
        if self._is_int8:
            self._pack_int8(piece, image, tables)
        else:
            self._pack_raw(piece, image, tables)

    def unpack(self, piece: Piece, image: torch.Tensor, tables: Tables | None = None) -> None:
        """Write the piece's tokens from `image` into its blocks; other tokens stay.

        Raw images restore whole blocks: slots behind `end_token` in the last one get what they
        held when the image was made. Arguments are those of `pack`.
        """
        tables = tables or self.tables([piece])[0]
        if self._is_int8:
            self._unpack_int8(piece, image, tables)
        else:
            self._unpack_raw(piece, image, tables)

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

    def _page_image(self, piece: Piece, image: torch.Tensor) -> torch.Tensor:
        """All of `_raw_views` in one, for equal layers: ``[layers, kernel blocks, words]``."""
        assert self._pages is not None
        words = image[: self.image_bytes(piece.image_tokens)].view(torch.int64)
        return words.view(len(self._caches), -1, self._pages.caches[0].shape[1])

    def _pack_raw(self, piece: Piece, image: torch.Tensor, tables: Tables) -> None:
        if self._pages is not None:
            from sola_sched.kernels import pages

            table = tables[self._ratios[0]]
            pages.gather_pages(self._pages, table, self._page_image(piece, image))
            return
        for cache, ratio, view in zip(
            self._caches, self._ratios, self._raw_views(piece, image), strict=True
        ):
            torch.index_select(cache, 0, tables[ratio], out=view)

    def _unpack_raw(self, piece: Piece, image: torch.Tensor, tables: Tables) -> None:
        skipped = (piece.first_token - piece.image_first) // self._block_size
        if self._pages is not None:
            from sola_sched.kernels import pages

            table, first = tables[self._ratios[0]], skipped * self._ratios[0]
            held = self._page_image(piece, image)[:, first : first + len(table)]
            pages.scatter_pages(held, self._pages, table)
            return
        for cache, ratio, view in zip(
            self._caches, self._ratios, self._raw_views(piece, image), strict=True
        ):
            table = tables[ratio]
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

    def _packed_layers(self, piece: Piece, image: torch.Tensor) -> PackedKV:
        """What `_packed_views` returns, for equal layers in one, the layer in dimension 0."""
        num_layers, cache = len(self._caches), self._caches[0]
        num_tokens, num_groups = piece.image_tokens, self._num_groups(piece.image_tokens)
        heads, channels = cache.shape[1], cache.shape[3]
        end = 2 * _FP16_BYTES * num_layers * num_groups * heads * channels
        parameters = image[:end].view(torch.float16)
        parameters = parameters.view(num_layers, 2, num_groups, heads, channels)
        data = image[end : end + num_layers * num_tokens * heads * channels]
        return PackedKV(
            data.view(num_layers, num_tokens, heads, channels), parameters[:, 0], parameters[:, 1]
        )

    def _pack_int8(self, piece: Piece, image: torch.Tensor, tables: Tables) -> None:
        first = piece.first_token % self._block_size
        if self._layers is not None:
            from sola_sched.kernels import int8_kv

            int8_kv.quantize_layers(
                self._layers,
                tables[self._ratios[0]],
                num_tokens=piece.image_tokens,
                group_tokens=self._group_tokens,
                first_token=first,
                out=self._packed_layers(piece, image),
            )
            return
        for cache, ratio, packed in zip(
            self._caches, self._ratios, self._packed_views(piece, image), strict=True
        ):
            table = tables[ratio]
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

    def _unpack_int8(self, piece: Piece, image: torch.Tensor, tables: Tables) -> None:
        first = piece.first_token % self._block_size
        skipped = piece.first_token - piece.image_first
        wanted = range(skipped, piece.end_token - piece.image_first)
        if self._layers is not None:
            from sola_sched.kernels import int8_kv

            int8_kv.dequantize_layers(
                self._packed_layers(piece, image),
                self._layers,
                tables[self._ratios[0]],
                group_tokens=self._group_tokens,
                first_token=first,
                tokens=wanted,
            )
            return
        for cache, ratio, packed in zip(
            self._caches, self._ratios, self._packed_views(piece, image), strict=True
        ):
            table = tables[ratio]
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


def _kernels(uses_triton: bool) -> tuple[Callable[..., PackedKV], Callable[..., None]]:
    if not uses_triton:
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
