"""Sizes that the scheduler and all workers must agree on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a request's tokens are cut into images and host slots.

    Attributes:
        block_sizes: Tokens in a block of each KV cache group.
        is_int8: Images are quantized and start and end at any token; raw images hold whole
            blocks.
        group_tokens: Tokens that share a scale in INT8 images; None for one group an image.
        segment_tokens: Most tokens in an image, a multiple of `alignment`.
        slot_tokens: Tokens of one group that a host slot holds.
    """

    block_sizes: tuple[int, ...]
    is_int8: bool
    group_tokens: int | None
    segment_tokens: int
    slot_tokens: int

    @classmethod
    def of(
        cls,
        block_sizes: Sequence[int],
        *,
        is_int8: bool,
        group_tokens: int | None,
        segment_tokens: int,
    ) -> Geometry:
        """Sizes for groups with these blocks; `segment_tokens` is rounded up."""
        blocks = math.lcm(*block_sizes)
        if is_int8:
            unit = group_tokens or 1
            slot_tokens = -(-blocks // unit) * unit
        else:
            slot_tokens = blocks
        unit = math.lcm(blocks, (group_tokens or 1) if is_int8 else 1)
        return cls(
            tuple(block_sizes),
            is_int8,
            group_tokens if is_int8 else None,
            -(-segment_tokens // unit) * unit,
            slot_tokens,
        )

    @property
    def alignment(self) -> int:
        """Tokens at whose multiples a copy may end without a partial block or group."""
        return math.lcm(*self.block_sizes, self.group_tokens or 1)

    @property
    def block_alignment(self) -> int:
        """Tokens at whose multiples blocks of all groups begin."""
        return math.lcm(*self.block_sizes)

    def num_slots(self, num_tokens: int) -> int:
        """Host slots that an image of so many tokens fills."""
        return -(-num_tokens // self.slot_tokens)
