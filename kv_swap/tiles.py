"""Blocks that keep tokens and channels in an order of their own, as vLLM's CPU attention does.

There, keys lie transposed in tiles of 32 tokens, or in pairs for AMX; quantizing per channel
needs the plain order. Which element is where is found out by writing numbers through the
engine's own kernel and reading them back, so that no layout is written down here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

#: Numbers written in one pass: every float type holds integers below it exactly.
_BASE = 128

#: Writes keys and values ``[tokens, heads, head_dim]`` into blocks of ``[1, heads, tokens, 2 x
#: head_dim]``, from the first slot on.
Writer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class TokenOrder:
    """Maps a block's memory to ``[tokens, heads, channels]``, keys before values.

    Args:
        page: One block, ``[1, heads, tokens, 2 x head_dim]``; overwritten.
        write: The engine's kernel.

    Raises:
        RuntimeError: The kernel does not write each element to one place of the block.
    """

    def __init__(self, page: torch.Tensor, write: Writer) -> None:
        _, num_heads, num_tokens, channels = page.shape
        self._shape = (num_tokens, num_heads, channels)
        count = page[0].numel()
        number = torch.arange(count).view(num_tokens, num_heads, channels)
        found = torch.zeros(count, dtype=torch.int64)
        weight = 1
        while weight < count:
            digit = (number // weight % _BASE).to(page.dtype)
            page.zero_()
            key, value = digit.chunk(2, dim=2)
            write(key.contiguous(), value.contiguous(), page)
            found += page.flatten().long() * weight
            weight *= _BASE
        if not torch.equal(found.sort().values, torch.arange(count)):
            raise RuntimeError(
                "the attention kernel must write each element of a block to a place of its own "
                f"(got {len(set(found.tolist()))} places for {count} elements); use swap mode "
                "'raw'."
            )
        self._from_memory = found.argsort()  # place of each element, plain order
        self._to_memory = found  # element at each place

    def gather(self, cache: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Blocks `table` in plain order: ``[len(table), tokens, heads, channels]``."""
        pages = cache.index_select(0, table).flatten(1)
        return pages[:, self._from_memory].view(len(table), *self._shape)

    def scatter(self, plain: torch.Tensor, cache: torch.Tensor, table: torch.Tensor) -> None:
        """Write blocks in plain order back to `table`."""
        pages = plain.flatten(1)[:, self._to_memory]
        cache.index_copy_(0, table, pages.view(len(table), *cache.shape[1:]))
