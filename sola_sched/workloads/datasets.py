"""Builds the requests of a run from a synthetic, downloaded or given data set."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sola_sched.config.slo import SloTarget
from sola_sched.errors import ConfigError, DatasetError, SloError
from sola_sched.workloads import lengths
from sola_sched.workloads.download import PUBLIC_FILES, fetch
from sola_sched.workloads.rows import Row, read_rows
from sola_sched.workloads.workload import RequestSpec, Workload, random_token_ids

Encode = Callable[[str], Sequence[int]]

SYNTHETIC = ("sharegpt-like", "random")
DATASET_NAMES = (*SYNTHETIC, *PUBLIC_FILES, "custom")
#: Rows whose lengths decide the automatic scale, at least.
_SCALE_SAMPLE = 1000
#: Tokens of one entry of a trace's ``hash_ids``.
_HASH_BLOCK = 512


@dataclass(frozen=True)
class DatasetOptions:
    """What to draw the requests from.

    Attributes:
        name: One of ``DATASET_NAMES``.
        path: The data set's file or folder; None downloads a public one.
        num_prompts: Requests wanted, >= 1; rows are repeated if there are fewer.
        is_at_most: Fewer will do, and a note says how many were left out.
        seed: Of the choice, the lengths and the random tokens.
        length_scale: Factor on every prompt and output length; None scales down just enough
            for the model's context (see ``build``).
        output_len: Replaces every output length, tokens; None keeps them.
        random_input_len: Mean prompt length of ``random``.
        random_output_len: Mean output length of ``random``.
        random_range_ratio: ``random`` draws within ``len * (1 - r)`` to ``len * (1 + r)``.
        random_prefix_len: Tokens shared by all prompts of ``random``, before the above.
        self_timed: Keep the recorded order and arrival times.
        shuffle: Take rows in random order instead of the file's; ignored if ``self_timed``.
    """

    name: str = "sharegpt-like"
    path: Path | None = None
    num_prompts: int = 1000
    is_at_most: bool = False
    seed: int = 0
    length_scale: float | None = None
    output_len: int | None = None
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    self_timed: bool = False
    shuffle: bool = True


@dataclass(frozen=True)
class ModelLimits:
    """What the requests must fit.

    Attributes:
        max_model_len: Longest prompt + output, tokens.
        vocab_size: Random token ids stay below this.
        encode: Text to token ids, or None if there is no tokenizer.
        prefer_text: Tokenize a row's text even if the row also has token counts.
    """

    max_model_len: int
    vocab_size: int
    encode: Encode | None = None
    prefer_text: bool = True


@dataclass(frozen=True)
class _Item:
    num_prompt: int
    num_output: int
    token_ids: tuple[int, ...] | None
    row: Row


def build(options: DatasetOptions, limits: ModelLimits) -> Workload:
    """Build the requests, without arrival times unless they are recorded ones.

    Every length is multiplied by one scale so that the shape is kept: by default
    ``max_model_len / 8192`` for ``sharegpt-like`` and ``max_model_len / p99`` for files, with
    ``p99`` the 99th percentile of prompt + output, and never more than 1. A request that is
    still too long loses the end of its prompt. Both are told in the workload's notes.

    Raises:
        DatasetError: A file is missing or unusable.
        ConfigError: An option does not fit the data set or the model.
    """
    if options.name not in DATASET_NAMES:
        raise ConfigError(
            f"'--dataset-name' must be one of {', '.join(DATASET_NAMES)} (got {options.name!r})."
        )
    if options.name in SYNTHETIC and options.path is not None:
        raise ConfigError(
            "'--dataset-path' needs a data set that is read from a file (got "
            f"{str(options.path)!r} with '--dataset-name {options.name}', which is made up); add "
            "e.g. '--dataset-name custom'."
        )
    if options.num_prompts < 1:
        raise ConfigError(f"'--num-prompts' must be >= 1 (got {options.num_prompts}).")
    # One generator each, so that the first requests do not depend on how many follow.
    rng, output_rng, token_rng = (np.random.default_rng([options.seed, i]) for i in (0, 4, 5))
    notes: list[str] = []
    prefix: tuple[int, ...] = ()
    if options.name in SYNTHETIC:
        if options.self_timed:
            raise ConfigError(
                f"'--self-timed' needs recorded arrivals (got --dataset-name {options.name}); "
                "use azure, burstgpt, mooncake or a custom file with a time column."
            )
        items, context = _synthetic(options, rng, output_rng)
        if options.name == "random":
            prefix = random_token_ids(token_rng, options.random_prefix_len, limits.vocab_size)
    else:
        items = _from_file(options, limits, rng, notes)
        totals = [item.num_prompt + item.num_output for item in items]
        context = int(np.percentile(totals, 99))
    scale = options.length_scale
    if scale is None:
        scale = min(1.0, limits.max_model_len / max(1, context))
    if not 0 < scale < math.inf:
        raise ConfigError(f"'--length-scale' must be a finite number > 0 (got {scale!r}).")
    if scale != 1.0:
        notes.append(
            f"lengths x {scale:.3g}: data set context {context:,} tokens, "
            f"model context {limits.max_model_len:,}."
        )
    return _to_workload(
        items[: options.num_prompts], scale, prefix, options, limits, token_rng, notes
    )


def _synthetic(
    options: DatasetOptions, rng: np.random.Generator, output_rng: np.random.Generator
) -> tuple[list[_Item], int]:
    size = options.num_prompts
    if options.name == "sharegpt-like":
        prompts = lengths.SHAREGPT_PROMPT.sample(rng, size)
        outputs = lengths.SHAREGPT_OUTPUT.sample(output_rng, size)
        context = lengths.SHAREGPT_CONTEXT
    else:
        ratio = options.random_range_ratio
        if not 0 <= ratio < 1:
            raise ConfigError(f"'--random-range-ratio' must be in [0, 1) (got {ratio!r}).")
        prompts, outputs = (
            draw.integers(max(1, int(mean * (1 - ratio))), int(mean * (1 + ratio)) + 1, size)
            for mean, draw in (
                (options.random_input_len, rng),
                (options.random_output_len, output_rng),
            )
        )
        context = int((prompts + outputs).max()) + options.random_prefix_len
    if options.output_len is not None:
        outputs = np.full(size, options.output_len)
    items = [_Item(int(p), int(o), None, Row()) for p, o in zip(prompts, outputs, strict=True)]
    return items, context


def _from_file(
    options: DatasetOptions, limits: ModelLimits, rng: np.random.Generator, notes: list[str]
) -> list[_Item]:
    if options.path is None and options.name == "custom":
        raise DatasetError(
            "'--dataset-name custom' needs --dataset-path: JSON lines with 'prompt' (text) or "
            "'prompt_tokens' (a count), and 'output_tokens'."
        )
    path = options.path or fetch(options.name)
    rows = list(read_rows(path))
    usable = [row for row in rows if row.is_usable]
    if not usable:
        raise DatasetError(f"{path} must hold at least one request with a prompt (got none).")
    if len(usable) < len(rows):
        notes.append(f"{len(rows) - len(usable):,} of {len(rows):,} rows have no prompt or answer.")
    if options.self_timed:
        if any(row.arrival_s is None for row in usable):
            raise DatasetError(
                f"'--self-timed' needs an arrival time in every row of {path}; leave it out for "
                "Poisson arrivals at --request-rate."
            )
        usable.sort(key=lambda row: row.arrival_s or 0.0)
    elif options.shuffle:
        usable = [usable[i] for i in rng.permutation(len(usable))]
    wanted = max(options.num_prompts, min(_SCALE_SAMPLE, len(usable)))
    if options.is_at_most:
        if options.num_prompts < len(usable):
            notes.append(
                f"The first {options.num_prompts:,} of the {len(usable):,} requests in "
                f"{path.name}; --num-prompts takes more."
            )
        wanted = min(wanted, len(usable))
    elif options.num_prompts > len(usable):
        notes.append(f"{path.name} has {len(usable):,} requests; they are repeated.")
        if options.self_timed:
            raise DatasetError(
                f"'--num-prompts' must be at most {len(usable)} with --self-timed "
                f"(got {options.num_prompts}): {path} holds no more."
            )
    return [_measure(usable[i % len(usable)], options, limits, path) for i in range(wanted)]


def _measure(row: Row, options: DatasetOptions, limits: ModelLimits, path: Path) -> _Item:
    encode = limits.encode
    token_ids: tuple[int, ...] | None = None
    if row.prompt is not None and (limits.prefer_text or row.prompt_tokens is None):
        if encode is None:
            raise DatasetError(
                f"{path} holds text, so a tokenizer is needed; pass --tokenizer with a folder "
                "or model name."
            )
        token_ids = tuple(encode(row.prompt)) or (0,)
    num_prompt = len(token_ids) if token_ids is not None else row.prompt_tokens or 1
    num_output = options.output_len if options.output_len is not None else row.output_tokens
    if num_output is None and row.output is not None:
        if encode is None:
            raise DatasetError(
                f"{path} holds text, so a tokenizer is needed; pass --tokenizer, or "
                "--output-len to set every output length."
            )
        num_output = max(1, len(encode(row.output)))
    if num_output is None:
        raise DatasetError(
            f"{path} must give an output length ('output_tokens' or an answer text); "
            "pass --output-len to set one for all."
        )
    return _Item(num_prompt, num_output, token_ids, row)


def _to_workload(
    items: Sequence[_Item],
    scale: float,
    prefix: tuple[int, ...],
    options: DatasetOptions,
    limits: ModelLimits,
    rng: np.random.Generator,
    notes: list[str],
) -> Workload:
    requests: list[RequestSpec] = []
    num_clipped = 0
    first_s = (items[0].row.arrival_s or 0.0) if options.self_timed else 0.0
    prefix = prefix[: round(len(prefix) * scale)]
    for index, item in enumerate(items):
        num_output = max(1, round(item.num_output * scale))
        num_prompt = max(1, round(item.num_prompt * scale))
        room = limits.max_model_len - len(prefix)
        if num_prompt + num_output > room:
            num_clipped += 1
            num_output = min(num_output, room - 1)
            num_prompt = min(num_prompt, room - num_output)
        if num_prompt < 1 or num_output < 1:
            raise ConfigError(
                f"A request needs room for a prompt and an output token (--max-model-len "
                f"{limits.max_model_len}, shared prefix {len(prefix)}); raise --max-model-len."
            )
        if item.token_ids is not None:
            body = item.token_ids[:num_prompt]
        elif item.row.hash_ids:
            body = _hashed_prompt(item.row.hash_ids, num_prompt, scale, limits.vocab_size)
        else:
            body = random_token_ids(rng, num_prompt, limits.vocab_size)
        requests.append(
            RequestSpec(
                req_id=str(index),
                prompt_token_ids=prefix + body,
                output_tokens=num_output,
                arrival_s=(item.row.arrival_s or 0.0) - first_s if options.self_timed else 0.0,
                slo=_row_slo(item.row),
                slo_class=item.row.slo_class,
            )
        )
    if num_clipped:
        notes.append(f"{num_clipped:,} of {len(items):,} requests cut to fit the model context.")
    return Workload(requests=tuple(requests), notes=tuple(notes))


def _row_slo(row: Row) -> SloTarget | None:
    given = {"ttft_s": row.ttft_slo_ms, "tpot_s": row.tpot_slo_ms, "e2e_s": row.e2e_slo_ms}
    targets_s = {name: float(value) / 1e3 for name, value in given.items() if value is not None}
    try:
        return SloTarget(**targets_s) if targets_s else None
    except SloError as error:
        raise DatasetError(f"The targets of a row contradict each other: {error}") from error


def _hashed_prompt(
    hash_ids: Sequence[int], num_prompt: int, scale: float, vocab_size: int
) -> tuple[int, ...]:
    """Equal block ids give equal tokens, so recorded prefix sharing is kept."""
    size = max(1, round(_HASH_BLOCK * scale))
    tokens: list[int] = []
    for hash_id in hash_ids:
        tokens += _hash_block(hash_id, size, vocab_size)
        if len(tokens) >= num_prompt:
            return tuple(tokens[:num_prompt])
    last = np.random.default_rng([hash_ids[-1], 1])
    return (*tokens, *random_token_ids(last, num_prompt - len(tokens), vocab_size))


@functools.lru_cache(maxsize=4096)
def _hash_block(hash_id: int, size: int, vocab_size: int) -> tuple[int, ...]:
    return random_token_ids(np.random.default_rng([hash_id, 0]), size, vocab_size)
