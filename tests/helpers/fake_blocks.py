"""Blocks as a scheduler has them, to test swapping without vLLM."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class Block:
    """A block of a pool; see `BlockPool`."""

    block_id: int
    num_refs: int = 0

    @property
    def is_null(self) -> bool:
        return self.block_id == 0


class BlockPool:
    """Blocks that are free when nobody refers to them; block 0 is the null block."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(index) for index in range(num_blocks)]

    @property
    def num_free(self) -> int:
        return sum(not block.num_refs for block in self.blocks[1:])

    def take(self, count: int) -> list[Block]:
        """Blocks with one reference each, the lowest free ones."""
        free = [block for block in self.blocks[1:] if not block.num_refs][:count]
        assert len(free) == count, "the test asks for more blocks than there are"
        self.pin(free)
        return free

    def pin(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.num_refs += 1

    def unpin(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.num_refs -= 1
            assert block.num_refs >= 0, f"block {block.block_id} was released too often"
