"""One request's copy on the host: segments in token order, an image per KV cache group in each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import not_
from typing import TypeVar

from sola_sched.kv_swap.geometry import Geometry
from sola_sched.kv_swap.jobs import Piece

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Image:
    """Consecutive tokens of one group in host slots; see `Piece`."""

    group: int
    first_token: int
    num_tokens: int
    slots: tuple[int, ...]

    def blocks(self, geometry: Geometry) -> slice:
        """Places of the image's blocks in the request's blocks of the group."""
        block_size = geometry.block_sizes[self.group]
        end_token = self.first_token + self.num_tokens
        return slice(self.first_token // block_size, -(-end_token // block_size))

    def piece(
        self,
        block_ids: Iterable[int],
        first_token: int | None = None,
        end_token: int | None = None,
    ) -> Piece:
        """The job of moving the image, or only its tokens `first_token` to `end_token`."""
        end = self.first_token + self.num_tokens
        return Piece(
            self.group,
            self.first_token,
            self.num_tokens,
            self.slots,
            self.first_token if first_token is None else first_token,
            end if end_token is None else end_token,
            tuple(block_ids),
        )


@dataclass(slots=True, eq=False)
class Segment:
    """Tokens that were copied together.

    Attributes:
        first_token, end_token: Positions covered; fewer than the images hold once it was cut.
        images: One per group; a group with a window may have less, or none.
        is_saved: The copy to the host has ended.
        is_dropped: Of no more use; the slots go when nobody uses them.
        num_users: Jobs under way that read or write the slots.
    """

    first_token: int
    end_token: int
    images: tuple[Image, ...]
    is_saved: bool = False
    is_dropped: bool = False
    num_users: int = 0

    def is_whole(self, num_groups: int) -> bool:
        """Whether every group has all of the tokens."""
        return len(self.images) == num_groups and all(
            image.first_token <= self.first_token for image in self.images
        )

    def load_pieces(
        self, geometry: Geometry, first_token: int, end_token: int, ids: Sequence[Sequence[int]]
    ) -> Iterator[Piece]:
        """Pieces that restore some of the tokens into blocks `ids`, 0 where none is wanted."""
        for image in self.images:
            own, block_size = ids[image.group], geometry.block_sizes[image.group]
            start = first_held(first_token, end_token, block_size, own, not_)
            if start >= end_token:
                continue
            assert start >= image.first_token, (
                f"token {start} of group {image.group} is needed, the host has "
                f"{image.first_token} to {end_token}"
            )
            blocks = own[start // block_size : -(-end_token // block_size)]
            yield image.piece(blocks, start, end_token)


@dataclass(slots=True)
class HostCopy:
    """Segments of one request.

    Attributes:
        segments: In token order. In raw mode a segment may begin in the last block of the one
            before it, and then replaces that block.
        min_tokens: Fewest tokens that can be restored: groups with a window lack what had left
            it when they were saved.
    """

    segments: list[Segment] = field(default_factory=list)
    min_tokens: int = 0

    @property
    def end_token(self) -> int:
        """Position behind the last token, copies under way included."""
        return self.segments[-1].end_token if self.segments else 0

    @property
    def num_saved(self) -> int:
        """Tokens, from the first on, whose copies have ended."""
        end = 0
        for segment in self.segments:
            if not segment.is_saved:
                break
            end = segment.end_token
        return end

    def usable(self, num_there: int, limit: int) -> int:
        """Of so many tokens that are there, those that a load of `limit` at most can restore."""
        num_tokens = min(num_there, limit)
        return num_tokens if num_tokens >= self.min_tokens else 0


def first_held(
    first_token: int,
    end_token: int,
    block_size: int,
    blocks: Sequence[T],
    is_null: Callable[[T], bool],
) -> int:
    """First position from `first_token` on that is not in a null block; may pass `end_token`.

    Args:
        blocks: Of the request, from its first token on; only those that are wanted are looked at.
        is_null: Whether a block is such.
    """
    index = first_token // block_size
    while index * block_size < end_token and is_null(blocks[index]):
        index += 1
    return max(first_token, index * block_size)
