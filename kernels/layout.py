"""The packed form of a request's KV cache, and the argument checks both backends share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: Number of quantization steps between the smallest and the largest value of a group.
NUM_STEPS = 255
#: Largest finite fp16 value; scale and offset are stored in fp16, so values are clamped to it.
FP16_MAX = 65504.0
CACHE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TABLE_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class PackedKV:
    """Quantized KV of consecutive tokens; all three tensors are contiguous, on one device.

    For ``Layers`` each tensor has one more dimension in front, the layer, with any stride.

    Attributes:
        data: ``[num_tokens, num_kv_heads, head_dim]`` uint8, number of steps above the offset.
        scale: ``[num_groups, num_kv_heads, head_dim]`` fp16, size of one step, >= 0.
        offset: Like ``scale``; the value of step 0.
    """

    data: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens held."""
        return self.data.shape[-3]

    @property
    def num_bytes(self) -> int:
        """Bytes of all three tensors."""
        return sum(x.numel() * x.element_size() for x in (self.data, self.scale, self.offset))


@dataclass(frozen=True, slots=True)
class Layers:
    """Caches of several layers that one kernel launch can reach; make it with ``of``.

    Attributes:
        caches: The layers, equal in all but their content and address.
        offsets: ``[num_layers]`` int64 on the caches' device, elements from the first element of
            the first cache to that of each.
        alignment: Power of two up to 16 that divides every offset, so that a kernel may load
            several elements at once.
    """

    caches: tuple[torch.Tensor, ...]
    offsets: torch.Tensor
    alignment: int

    @classmethod
    def of(cls, caches: Sequence[torch.Tensor]) -> Layers:
        """Return the layers of ``caches``; waits for their device.

        Raises:
            ValueError: There is none, two differ in shape, strides, dtype or device, or their
                addresses are not a multiple of the element size apart.
        """
        if not caches:
            raise ValueError("'caches' must hold a layer (got none).")
        first = caches[0]
        offsets = []
        for cache in caches:
            if _form(cache) != _form(first):
                raise ValueError(
                    "'caches' must have one shape, stride, dtype and device (got "
                    f"{_form(first)} and {_form(cache)})."
                )
            offset, rest = divmod(cache.data_ptr() - first.data_ptr(), first.element_size())
            if rest:
                raise ValueError(
                    "'caches' must lie a multiple of their element size apart (got "
                    f"{first.element_size()} bytes an element, {rest} left over)."
                )
            offsets.append(offset)
        return cls(
            tuple(caches),
            torch.tensor(offsets, dtype=torch.int64, device=first.device),
            math.gcd(16, *offsets),
        )


def _form(
    cache: torch.Tensor,
) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]:
    return tuple(cache.shape), cache.stride(), cache.dtype, cache.device


def group_length(num_tokens: int, group_tokens: int | None) -> int:
    """Tokens that share one scale: ``group_tokens``, or the whole range for None; at least 1."""
    if group_tokens is None:
        return max(num_tokens, 1)
    if group_tokens < 1:
        raise ValueError(
            f"'group_tokens' must be >= 1 (got {group_tokens}); use None for the whole range."
        )
    return group_tokens


def allocate(
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    group_tokens: int | None,
    device: torch.device | str,
) -> PackedKV:
    """Return uninitialized buffers for ``num_tokens`` tokens."""
    num_groups = -(-num_tokens // group_length(num_tokens, group_tokens))
    return PackedKV(
        data=torch.empty(num_tokens, num_kv_heads, head_dim, dtype=torch.uint8, device=device),
        scale=torch.empty(num_groups, num_kv_heads, head_dim, dtype=torch.float16, device=device),
        offset=torch.empty(num_groups, num_kv_heads, head_dim, dtype=torch.float16, device=device),
    )


def check_arguments(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    packed: PackedKV | None,
    *,
    first_token: int,
    num_tokens: int,
    group_tokens: int | None,
    tokens: range | None = None,
) -> range:
    """Check everything that a kernel relies on, without waiting for a device.

    The ids in ``block_table`` are checked only where they are in host memory: reading them from a
    device would stall it.

    Returns:
        The packed tokens that move: ``tokens``, or all of them.

    Raises:
        TypeError: A dtype is not supported.
        ValueError: A shape, layout, device or number does not fit the others.
    """
    if cache.dtype not in CACHE_DTYPES:
        raise TypeError(f"'cache' must be one of {CACHE_DTYPES} (got {cache.dtype}).")
    if cache.dim() != 4:
        raise ValueError(
            "'cache' must be [num_blocks, block_size, num_kv_heads, head_dim] "
            f"(got shape {list(cache.shape)})."
        )
    check_table(block_table, cache.device)
    if first_token < 0 or num_tokens < 0:
        raise ValueError(
            f"'first_token' and 'num_tokens' must be >= 0 (got {first_token} and {num_tokens})."
        )
    moved = range(num_tokens) if tokens is None else tokens
    if moved.step != 1 or moved.start < 0 or moved.stop > num_tokens:
        raise ValueError(
            f"'tokens' must be consecutive and lie in the {num_tokens} packed ones (got {moved})."
        )
    num_blocks, block_size, num_kv_heads, head_dim = cache.shape
    num_slots = block_table.shape[0] * block_size
    if len(moved) and first_token + len(moved) > num_slots:
        raise ValueError(
            f"'block_table' must cover tokens {first_token} to {first_token + len(moved)} "
            f"(got {block_table.shape[0]} blocks of {block_size} tokens, {num_slots} in all)."
        )
    if block_table.device.type == "cpu" and block_table.numel():
        low, high = int(block_table.min()), int(block_table.max())
        if low < 0 or high >= num_blocks:
            raise ValueError(
                f"'block_table' must hold ids in [0, {num_blocks}) (got {low} to {high})."
            )
    length = group_length(num_tokens, group_tokens)
    if packed is not None:
        shape = (num_tokens, num_kv_heads, head_dim)
        groups = (-(-num_tokens // length), num_kv_heads, head_dim)
        _check_buffer("data", packed.data, shape, torch.uint8, cache.device)
        _check_buffer("scale", packed.scale, groups, torch.float16, cache.device)
        _check_buffer("offset", packed.offset, groups, torch.float16, cache.device)
    return moved


def check_table(block_table: torch.Tensor, device: torch.device) -> None:
    """Check all of a block table but its ids.

    Raises:
        TypeError: Its dtype is not supported.
        ValueError: It is not one contiguous row on ``device``, that of the cache.
    """
    if block_table.dtype not in TABLE_DTYPES:
        raise TypeError(f"'block_table' must be one of {TABLE_DTYPES} (got {block_table.dtype}).")
    if block_table.dim() != 1 or not block_table.is_contiguous():
        raise ValueError(
            f"'block_table' must be one contiguous row (got shape {list(block_table.shape)}, "
            f"stride {block_table.stride()})."
        )
    if block_table.device != device:
        raise ValueError(
            f"'block_table' must be on the device of 'cache' (got {block_table.device} and "
            f"{device})."
        )


def _check_buffer(
    name: str,
    buffer: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if buffer.dtype != dtype:
        raise TypeError(f"'{name}' must be {dtype} (got {buffer.dtype}).")
    if tuple(buffer.shape) != shape or not buffer.is_contiguous():
        raise ValueError(
            f"'{name}' must be contiguous with shape {list(shape)} (got shape "
            f"{list(buffer.shape)}, stride {buffer.stride()}); see sola_sched.kernels.layout."
        )
    if buffer.device != device:
        raise ValueError(f"'{name}' must be on {device}, as the cache (got {buffer.device}).")
