"""What INT8 does to KV.

Caches in the shape of Llama-3-8B with outlier channels, group length by group length: error of
keys and values, of attention's output, and of the logits behind one layer. See README.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from harness.markdown import markdown
from harness.setup import Outcome, Setup
from sola_sched.kernels import reference

_HEADS, _KV_HEADS, _HEAD_DIM, _VOCAB = 32, 8, 128, 4096
_BLOCK_SIZE = 16
#: Share of key channels that are outliers and how many times larger they are; values have none.
_OUTLIERS, _OUTLIER_GAIN = 0.04, 12.0
#: Neighbouring tokens resemble each other: correlation of one token with the next.
_CORRELATION = 0.5


def make_kv(num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[tokens, KV heads, head_dim]`` bf16.

    A key channel has a mean of its own and, in a few places that are the same for all tokens, a
    magnitude far above the others, as reported for Llama models (KIVI, Liu et al., ICML 2024).
    """
    generator = torch.Generator().manual_seed(seed)

    def noise() -> torch.Tensor:
        white = torch.randn(num_tokens, _KV_HEADS, _HEAD_DIM, generator=generator)
        walk = [white[0]]
        for token in white[1:]:
            walk.append(_CORRELATION * walk[-1] + (1 - _CORRELATION**2) ** 0.5 * token)
        return torch.stack(walk)

    mean = torch.randn(1, _KV_HEADS, _HEAD_DIM, generator=generator)
    is_outlier = torch.rand(1, _KV_HEADS, _HEAD_DIM, generator=generator) < _OUTLIERS
    gain = torch.where(is_outlier, _OUTLIER_GAIN, 1.0)
    return (gain * (noise() + mean)).bfloat16(), noise().bfloat16()


def round_trip(values: torch.Tensor, group_tokens: int | None) -> torch.Tensor:
    """Through INT8 and back, in paged blocks."""
    num_tokens = values.shape[0]
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    cache = torch.zeros(num_blocks, _BLOCK_SIZE, *values.shape[1:], dtype=values.dtype)
    cache.view(-1, *values.shape[1:])[:num_tokens] = values
    table = torch.arange(num_blocks)
    packed = reference.quantize_kv(cache, table, num_tokens=num_tokens, group_tokens=group_tokens)
    restored = torch.zeros_like(cache)
    reference.dequantize_kv(packed, restored, table, group_tokens=group_tokens)
    return restored.flatten(0, 1)[:num_tokens]


def attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Output of decoding tokens, fp32: ``[queries, heads, head_dim]``."""
    keys = keys.float().repeat_interleave(_HEADS // _KV_HEADS, dim=1)
    values = values.float().repeat_interleave(_HEADS // _KV_HEADS, dim=1)
    scores = torch.einsum("qhd,thd->hqt", query, keys) / _HEAD_DIM**0.5
    return torch.einsum("hqt,thd->qhd", scores.softmax(dim=-1), values)


def relative_rms(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (found.float() - expected.float()).square().mean().sqrt()
    return float(difference / expected.float().square().mean().sqrt())


def measure(num_tokens: int, group_tokens: int | None, seeds: Sequence[int]) -> dict[str, float]:
    """Means over `seeds`; ``top1`` is the share of queries whose best logit stays the best."""
    sums: dict[str, float] = {}
    for seed in seeds:
        keys, values = make_kv(num_tokens, seed)
        generator = torch.Generator().manual_seed(seed + 1000)
        # Queries resemble some key, so that attention is peaked and not an average.
        picks = torch.randint(num_tokens, (64,), generator=generator)
        query = keys[picks].float().repeat_interleave(_HEADS // _KV_HEADS, dim=1)
        query = query / query.norm(dim=-1, keepdim=True) * 6.0
        query = query + torch.randn(query.shape, generator=generator)
        head = torch.randn(_HEADS * _HEAD_DIM, _VOCAB, generator=generator) / _HEAD_DIM
        exact = attention(query, keys, values)
        int8_keys, int8_values = round_trip(keys, group_tokens), round_trip(values, group_tokens)
        found = attention(query, int8_keys, int8_values)
        logits, int8_logits = exact.flatten(1) @ head, found.flatten(1) @ head
        row = {
            "keys": relative_rms(int8_keys, keys),
            "values": relative_rms(int8_values, values),
            "attention": relative_rms(found, exact),
            "logits": relative_rms(int8_logits, logits),
            "top1": float((logits.argmax(1) == int8_logits.argmax(1)).float().mean()),
        }
        for name, value in row.items():
            sums[name] = sums.get(name, 0.0) + value / len(seeds)
    return sums


def accuracy(setup: Setup) -> Outcome:
    """Errors by group length."""
    head = ["tokens a group", "bytes, bf16 = 1", "keys", "values", "attention output", "logits",
            "same best logit"]  # fmt: skip
    num_tokens, lines = setup.options["num_tokens"], []
    for group in (16, 32, 64, None):
        row = measure(num_tokens, group, setup.seeds)
        size = (1 + 4 / (group or num_tokens)) / 2
        cells = [f"{100 * row[name]:.2f} %" for name in ("keys", "values", "attention", "logits")]
        lines.append([str(group or "whole"), f"{size:.2f}", *cells, f"{100 * row['top1']:.1f} %"])
    title = f"Relative RMS error after INT8, {num_tokens} tokens, bf16, mean of"
    return Outcome([], f"{title} {len(setup.seeds)} seeds.\n\n{markdown(head, lines, 0)}")
