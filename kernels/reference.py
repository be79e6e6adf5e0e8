"""Torch twins of the kernels in ``int8_kv``: the definition, the CPU path and the test oracle.

Source: ALISE (Zhao and Wang, "Accelerating Large Language Model Serving with Speculative
Scheduling"), section 3.2, Eq. 8::

    x_q = round(x / lambda + z),   x = lambda (x_q - z),   lambda = (max - min) / (2^b - 1)

with b = 8, channel-wise. The paper prints ``z = floor(-2^b / (max - min))``, which does not hold
the minimum and has the wrong unit. Here ``-lambda z`` is kept instead, as a real number, the
*offset* o = min::

    x_q = floor((x - o) / lambda + 1/2),   x = lambda x_q + o

Both numbers are stored in fp16. The offset is rounded down and the scale up, so every value lies
in [o, o + 255 lambda] for the numbers as stored, nothing is clipped, and the round trip is within
``lambda / 2`` of the value (README.md has the derivation and the rounding terms).
"""

from __future__ import annotations

import torch

from sola_sched.kernels.layout import (
    FP16_MAX,
    NUM_STEPS,
    PackedKV,
    allocate,
    check_arguments,
    group_length,
)


def quantize_kv(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    *,
    num_tokens: int,
    group_tokens: int | None,
    first_token: int = 0,
    out: PackedKV | None = None,
) -> PackedKV:
    """Gather the tokens of one request from its blocks and quantize them.

    Args:
        cache: ``[num_blocks, block_size, num_kv_heads, head_dim]`` fp16, bf16 or fp32 with any
            strides; one layer's keys or values, or both side by side in the last dimension. Read
            only. Infinite values and values beyond the fp16 range become its largest value of
            that sign, and NaN becomes 0.
        block_table: ``[num_blocks_of_request]`` int32 or int64, contiguous, same device as
            ``cache``; the blocks in token order.
        num_tokens: How many tokens to take, >= 0. Slots behind the last token are not read.
        group_tokens: Tokens that share a scale and offset per channel, >= 1; the last group may
            be shorter. None makes one group of all.
        first_token: Position of the first token to take; groups are counted from it.
        out: Buffers to fill, see ``PackedKV``; None allocates them.

    Returns:
        ``out``, or the new buffers.

    Raises:
        TypeError, ValueError: See ``layout.check_arguments``.
    """
    check_arguments(
        cache,
        block_table,
        out,
        first_token=first_token,
        num_tokens=num_tokens,
        group_tokens=group_tokens,
    )
    num_kv_heads, head_dim = cache.shape[2:]
    if out is None:
        out = allocate(
            num_tokens, num_kv_heads, head_dim, group_tokens=group_tokens, device=cache.device
        )
    if out.data.numel() == 0:
        return out
    length = group_length(num_tokens, group_tokens)
    num_groups = out.scale.shape[0]
    blocks, rows = _slots(cache, block_table, first_token, num_tokens)
    values = cache[blocks, rows].float()  # [num_tokens, num_kv_heads, head_dim]
    values = values.nan_to_num(nan=0.0).clamp(-FP16_MAX, FP16_MAX)

    # The last token stands in for those the last group lacks: neither minimum nor maximum changes.
    padded = torch.arange(num_groups * length, device=cache.device).clamp(max=num_tokens - 1)
    groups = values[padded].view(num_groups, length, num_kv_heads, head_dim)
    offset = round_down_fp16(groups.amin(dim=1))
    spread = groups.amax(dim=1) - offset.float()
    # By a tensor: CUDA multiplies by the reciprocal of a number, which rounds twice.
    scale = round_up_fp16(spread / torch.full_like(spread, NUM_STEPS))

    step = torch.where(scale > 0, scale.float(), 1.0)[:, None]
    data = ((groups - offset.float()[:, None]) / step + 0.5).floor().clamp(0, NUM_STEPS)
    out.data.copy_(data.flatten(0, 1)[:num_tokens])
    out.scale.copy_(scale)
    out.offset.copy_(offset)
    return out


def dequantize_kv(
    packed: PackedKV,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    *,
    group_tokens: int | None,
    first_token: int = 0,
    tokens: range | None = None,
) -> None:
    """Write the tokens of ``packed`` into the blocks of ``cache``, converted to its dtype.

    Slots of other tokens keep their content. The result is unspecified when a block that is
    written appears twice in ``block_table``.

    Args:
        packed: What ``quantize_kv`` returned, on the device of ``cache``.
        cache: As in ``quantize_kv``; written in place, finite values only.
        block_table: The blocks that receive the request; need not be those it came from.
        group_tokens: As given to ``quantize_kv``.
        first_token: Position that receives the first token written.
        tokens: Which tokens of ``packed`` to write, consecutive; None writes all.

    Raises:
        TypeError, ValueError: See ``layout.check_arguments``.
    """
    tokens = check_arguments(
        cache,
        block_table,
        packed,
        first_token=first_token,
        num_tokens=packed.num_tokens,
        group_tokens=group_tokens,
        tokens=tokens,
    )
    if not len(tokens) or packed.data.numel() == 0:
        return
    length = group_length(packed.num_tokens, group_tokens)
    group = torch.arange(tokens.start, tokens.stop, device=cache.device) // length
    data = packed.data[tokens.start : tokens.stop].float()
    values = data * packed.scale.float()[group] + packed.offset.float()[group]
    # The step next to the largest fp16 value may lie beyond it and would become infinite.
    values = values.clamp(-FP16_MAX, FP16_MAX)
    blocks, rows = _slots(cache, block_table, first_token, len(tokens))
    cache[blocks, rows] = values.to(cache.dtype)


def round_down_fp16(x: torch.Tensor) -> torch.Tensor:
    """Return the largest fp16 value <= x, for fp32 x within the fp16 range."""
    nearest = x.half()
    bits = nearest.view(torch.int16)
    # Away from zero is one bit up; from +-0 downwards is the smallest negative number, 0x8001.
    below = torch.where(nearest > 0, bits - 1, torch.where(nearest < 0, bits + 1, -0x7FFF))
    return torch.where(nearest.float() > x, below.to(torch.int16), bits).view(torch.float16)


def round_up_fp16(x: torch.Tensor) -> torch.Tensor:
    """Return the smallest fp16 value >= x, for fp32 x >= 0 within the fp16 range."""
    nearest = x.half()
    bits = nearest.view(torch.int16)
    return torch.where(nearest.float() < x, bits + 1, bits).view(torch.float16)


def _slots(
    cache: torch.Tensor, block_table: torch.Tensor, first_token: int, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return block id and row of each token."""
    block_size = cache.shape[1]
    positions = torch.arange(first_token, first_token + num_tokens, device=cache.device)
    return block_table[positions // block_size].long(), positions % block_size
