"""Triton kernels that move KV between paged blocks and a packed INT8 form.

Same functions, arguments and results as ``reference``, which holds the definition, and both for all
layers in one launch. They run on a CUDA device, and on CPU tensors with ``TRITON_INTERPRET=1`` set
before Triton is imported.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from sola_sched.kernels.layout import (
    FP16_MAX,
    NUM_STEPS,
    Layers,
    PackedKV,
    allocate,
    check_arguments,
    group_length,
)

#: Tokens and channels of a tile, the fastest of those tried on H100 and H200 (see README.md).
_QUANTIZE_TILE = (16, 64)
_DEQUANTIZE_TILE = (16, 256)
#: A group's minimum and maximum are taken across threads: one warp is faster than several.
_QUANTIZE_WARPS = 1


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

    Arguments, result and errors are those of ``reference.quantize_kv``. Runs on the current
    stream and does not wait for it.
    """
    return _quantize(
        cache,
        None,
        block_table,
        out,
        num_tokens=num_tokens,
        group_tokens=group_tokens,
        first_token=first_token,
    )


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

    Arguments and errors are those of ``reference.dequantize_kv``. Runs on the current stream and
    does not wait for it.
    """
    _dequantize(
        packed,
        cache,
        None,
        block_table,
        group_tokens=group_tokens,
        first_token=first_token,
        tokens=tokens,
    )


def quantize_layers(
    layers: Layers,
    block_table: torch.Tensor,
    *,
    num_tokens: int,
    group_tokens: int | None,
    first_token: int = 0,
    out: PackedKV,
) -> None:
    """Do for every layer what ``quantize_kv`` does for one, in one launch.

    Args:
        layers: The caches, each as in ``quantize_kv``.
        block_table: As in ``quantize_kv``, the same for all layers.
        num_tokens: As in ``quantize_kv``.
        group_tokens: As in ``quantize_kv``.
        first_token: As in ``quantize_kv``.
        out: Buffers to fill: data ``[num_layers, num_tokens, num_kv_heads, head_dim]``, scale and
            offset ``[num_layers, num_groups, num_kv_heads, head_dim]``. Each layer is contiguous;
            scale and offset have the same stride from layer to layer.

    Raises:
        TypeError, ValueError: See ``layout.check_arguments``; or ``out`` does not fit ``layers``.
    """
    _quantize(
        layers.caches[0],
        layers,
        block_table,
        out,
        num_tokens=num_tokens,
        group_tokens=group_tokens,
        first_token=first_token,
    )


def dequantize_layers(
    packed: PackedKV,
    layers: Layers,
    block_table: torch.Tensor,
    *,
    group_tokens: int | None,
    first_token: int = 0,
    tokens: range | None = None,
) -> None:
    """Do for every layer what ``dequantize_kv`` does for one, in one launch.

    Args:
        packed: What ``quantize_layers`` filled.
        layers: The caches, each as in ``dequantize_kv``.
        block_table: As in ``dequantize_kv``, the same for all layers.
        group_tokens: As in ``dequantize_kv``.
        first_token: As in ``dequantize_kv``.
        tokens: As in ``dequantize_kv``.

    Raises:
        TypeError, ValueError: See ``layout.check_arguments``; or ``packed`` does not fit
            ``layers``.
    """
    _dequantize(
        packed,
        layers.caches[0],
        layers,
        block_table,
        group_tokens=group_tokens,
        first_token=first_token,
        tokens=tokens,
    )


def _first_layer(name: str, packed: PackedKV, layers: Layers) -> PackedKV:
    """The first layer of ``packed``; the others follow at one stride, as the kernels expect."""
    parts = (packed.data, packed.scale, packed.offset)
    if any(part.dim() != 4 or part.shape[0] != len(layers.caches) for part in parts):
        raise ValueError(
            f"'{name}' must hold {len(layers.caches)} layers in dimension 0 of 4 (got shapes "
            f"{[list(part.shape) for part in parts]})."
        )
    if packed.scale.stride(0) != packed.offset.stride(0):
        raise ValueError(
            f"'{name}' must have one layer stride for scale and offset (got "
            f"{packed.scale.stride(0)} and {packed.offset.stride(0)})."
        )
    return PackedKV(packed.data[0], packed.scale[0], packed.offset[0])


def _quantize(
    cache: torch.Tensor,
    layers: Layers | None,
    block_table: torch.Tensor,
    out: PackedKV | None,
    *,
    num_tokens: int,
    group_tokens: int | None,
    first_token: int,
) -> PackedKV:
    """Quantize ``cache``, or ``layers`` of which it is the first."""
    check_arguments(
        cache,
        block_table,
        _first_layer("out", out, layers) if layers and out else out,
        first_token=first_token,
        num_tokens=num_tokens,
        group_tokens=group_tokens,
    )
    _check_device(cache.device)
    num_kv_heads, head_dim = cache.shape[2:]
    if out is None:
        out = allocate(
            num_tokens, num_kv_heads, head_dim, group_tokens=group_tokens, device=cache.device
        )
    if out.data.numel() == 0:
        return out
    length = group_length(num_tokens, group_tokens)
    num_channels = num_kv_heads * head_dim
    block_t, block_c = _tile(_QUANTIZE_TILE, length, num_channels)
    num_layers = len(layers.caches) if layers else 1
    grid = (out.scale.shape[-3], triton.cdiv(num_channels, block_c), num_layers)
    _quantize_kv_kernel[grid](
        cache,
        layers.offsets if layers else block_table,
        block_table,
        out.data,
        out.scale,
        out.offset,
        out.data.stride(0) if layers else 0,
        out.scale.stride(0) if layers else 0,
        first_token,
        num_tokens,
        length,
        cache.shape[1],
        head_dim,
        num_channels,
        *cache.stride(),
        LIMIT=FP16_MAX,
        NUM_STEPS=NUM_STEPS,
        BLOCK_T=block_t,
        BLOCK_C=block_c,
        HAS_LAYERS=layers is not None,
        ALIGNMENT=layers.alignment if layers else 1,
        num_warps=_QUANTIZE_WARPS,
    )
    return out


def _dequantize(
    packed: PackedKV,
    cache: torch.Tensor,
    layers: Layers | None,
    block_table: torch.Tensor,
    *,
    group_tokens: int | None,
    first_token: int,
    tokens: range | None,
) -> None:
    """Restore ``cache``, or ``layers`` of which it is the first."""
    tokens = check_arguments(
        cache,
        block_table,
        _first_layer("packed", packed, layers) if layers else packed,
        first_token=first_token,
        num_tokens=packed.num_tokens,
        group_tokens=group_tokens,
        tokens=tokens,
    )
    _check_device(cache.device)
    if not len(tokens) or packed.data.numel() == 0:
        return
    head_dim = cache.shape[3]
    num_channels = cache.shape[2] * head_dim
    block_t, block_c = _tile(_DEQUANTIZE_TILE, len(tokens), num_channels)
    num_layers = len(layers.caches) if layers else 1
    grid = (triton.cdiv(len(tokens), block_t), triton.cdiv(num_channels, block_c), num_layers)
    _dequantize_kv_kernel[grid](
        packed.data,
        packed.scale,
        packed.offset,
        packed.data.stride(0) if layers else 0,
        packed.scale.stride(0) if layers else 0,
        cache,
        layers.offsets if layers else block_table,
        block_table,
        first_token,
        tokens.start,
        len(tokens),
        group_length(packed.num_tokens, group_tokens),
        cache.shape[1],
        head_dim,
        num_channels,
        *cache.stride(),
        LIMIT=FP16_MAX,
        BLOCK_T=block_t,
        BLOCK_C=block_c,
        HAS_LAYERS=layers is not None,
        ALIGNMENT=layers.alignment if layers else 1,
    )


def _check_device(device: torch.device) -> None:
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"'cache' must be on a CUDA device (got {device}); use sola_sched.kernels.reference "
            "there, or TRITON_INTERPRET=1 in a test."
        )


def _tile(limit: tuple[int, int], num_tokens: int, num_channels: int) -> tuple[int, int]:
    tokens, channels = map(triton.next_power_of_2, (num_tokens, num_channels))
    return min(int(tokens), limit[0]), min(int(channels), limit[1])


@triton.jit
def _load_tokens(
    cache_ptr,
    table_ptr,
    tokens,
    is_token,
    channel_offset,
    is_channel,
    block_size,
    stride_block,
    stride_row,
    LIMIT: tl.constexpr,
):
    """values[t, c] = cache[table[t // block_size], t % block_size, c] as finite fp32."""
    block = tl.load(table_ptr + tokens // block_size, mask=is_token, other=0).to(tl.int64)
    row = block * stride_block + (tokens % block_size) * stride_row  # [BLOCK_T]
    values = tl.load(
        cache_ptr + row[:, None] + channel_offset[None, :],
        mask=is_token[:, None] & is_channel[None, :],
        other=0.0,
    ).to(tl.float32)  # [BLOCK_T, BLOCK_C]
    values = tl.where(values == values, values, 0.0)
    return tl.minimum(tl.maximum(values, -LIMIT), LIMIT)


@triton.jit
def _quantize_kv_kernel(
    cache_ptr,
    layer_offset_ptr,
    table_ptr,
    data_ptr,
    scale_ptr,
    offset_ptr,
    data_stride,
    param_stride,
    first_token,
    num_tokens,
    group_tokens,
    block_size,
    head_dim,
    num_channels,
    stride_block,
    stride_row,
    stride_head,
    stride_channel,
    LIMIT: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_LAYERS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """o = down(min x), s = up((max x - o) / 255), data = floor((x - o) / s + 1/2), per channel.

    One program per group of tokens, tile of channels and layer; it reads the group twice.
    """
    if HAS_LAYERS:
        layer = tl.program_id(2).to(tl.int64)
        cache_ptr += tl.multiple_of(tl.load(layer_offset_ptr + layer), ALIGNMENT)
        data_ptr += layer * data_stride
        scale_ptr += layer * param_stride
        offset_ptr += layer * param_stride
    group = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channel < num_channels
    channel_offset = (channel // head_dim) * stride_head + (channel % head_dim) * stride_channel
    begin = group * group_tokens
    end = tl.minimum(begin + group_tokens, num_tokens)

    low = tl.full([BLOCK_C], float("inf"), tl.float32)
    high = tl.full([BLOCK_C], float("-inf"), tl.float32)
    for start in range(0, group_tokens, BLOCK_T):
        token = begin + start + tl.arange(0, BLOCK_T)
        is_token = token < end
        values = _load_tokens(
            cache_ptr,
            table_ptr,
            first_token + token,
            is_token,
            channel_offset,
            is_channel,
            block_size,
            stride_block,
            stride_row,
            LIMIT,
        )
        keep = is_token[:, None]
        low = tl.minimum(low, tl.min(tl.where(keep, values, float("inf")), axis=0))
        high = tl.maximum(high, tl.max(tl.where(keep, values, float("-inf")), axis=0))

    # Largest fp16 <= low: the nearest, or its neighbour below (0x8001 below zero).
    nearest = low.to(tl.float16)
    bits = nearest.to(tl.int16, bitcast=True)
    below = tl.where(nearest > 0, bits - 1, tl.where(nearest < 0, bits + 1, -0x7FFF))
    bits = tl.where(nearest.to(tl.float32) > low, below.to(tl.int16), bits)
    offset16 = bits.to(tl.float16, bitcast=True)
    offset = offset16.to(tl.float32)

    # Smallest fp16 >= the exact scale, which is not negative.
    exact = tl.div_rn(high - offset, tl.full([BLOCK_C], NUM_STEPS, tl.float32))
    nearest = exact.to(tl.float16)
    bits = nearest.to(tl.int16, bitcast=True)
    bits = tl.where(nearest.to(tl.float32) < exact, (bits + 1).to(tl.int16), bits)
    scale16 = bits.to(tl.float16, bitcast=True)
    scale = scale16.to(tl.float32)

    meta = group * num_channels + channel
    tl.store(scale_ptr + meta, scale16, mask=is_channel)
    tl.store(offset_ptr + meta, offset16, mask=is_channel)

    step = tl.where(scale > 0, scale, 1.0)
    for start in range(0, group_tokens, BLOCK_T):
        token = begin + start + tl.arange(0, BLOCK_T)
        is_token = token < end
        values = _load_tokens(
            cache_ptr,
            table_ptr,
            first_token + token,
            is_token,
            channel_offset,
            is_channel,
            block_size,
            stride_block,
            stride_row,
            LIMIT,
        )
        distance = values - offset[None, :]
        # div_rn: the default division is not correctly rounded and would part from the reference.
        data = tl.floor(tl.div_rn(distance, tl.broadcast_to(step[None, :], distance.shape)) + 0.5)
        data = tl.minimum(tl.maximum(data, 0.0), NUM_STEPS)
        tl.store(
            data_ptr + token[:, None] * num_channels + channel[None, :],
            data.to(tl.uint8),
            mask=is_token[:, None] & is_channel[None, :],
        )


@triton.jit
def _dequantize_kv_kernel(
    data_ptr,
    scale_ptr,
    offset_ptr,
    data_stride,
    param_stride,
    cache_ptr,
    layer_offset_ptr,
    table_ptr,
    first_token,
    first_packed,
    num_tokens,
    group_tokens,
    block_size,
    head_dim,
    num_channels,
    stride_block,
    stride_row,
    stride_head,
    stride_channel,
    LIMIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_LAYERS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """cache[table[t // block_size], t % block_size, c] = s[g, c] data[p, c] + o[g, c], each layer.

    p = first_packed, first_packed + 1, ... for t = first_token, first_token + 1, ...
    """
    if HAS_LAYERS:
        layer = tl.program_id(2).to(tl.int64)
        cache_ptr += tl.multiple_of(tl.load(layer_offset_ptr + layer), ALIGNMENT)
        data_ptr += layer * data_stride
        scale_ptr += layer * param_stride
        offset_ptr += layer * param_stride
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_token = token < num_tokens
    is_channel = channel < num_channels
    mask = is_token[:, None] & is_channel[None, :]

    packed = first_packed + token
    meta = (packed // group_tokens)[:, None] * num_channels + channel[None, :]
    data = tl.load(data_ptr + packed[:, None] * num_channels + channel[None, :], mask=mask, other=0)
    scale = tl.load(scale_ptr + meta, mask=mask, other=0.0).to(tl.float32)
    offset = tl.load(offset_ptr + meta, mask=mask, other=0.0).to(tl.float32)
    values = data.to(tl.float32) * scale + offset  # [BLOCK_T, BLOCK_C]
    values = tl.minimum(tl.maximum(values, -LIMIT), LIMIT)

    position = first_token + token
    block = tl.load(table_ptr + position // block_size, mask=is_token, other=0).to(tl.int64)
    row = block * stride_block + (position % block_size) * stride_row
    channel_offset = (channel // head_dim) * stride_head + (channel % head_dim) * stride_channel
    tl.store(
        cache_ptr + row[:, None] + channel_offset[None, :],
        values.to(cache_ptr.dtype.element_ty),
        mask=mask,
    )
