"""Whatever a data set's file holds, the answer is a workload or one line that names the rule."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.points import read_lengths
from sola_sched.bench import values
from sola_sched.config.flags import json_object, positive_float, positive_int, rate
from sola_sched.errors import ConfigError, DatasetError
from sola_sched.workloads.datasets import DatasetOptions, ModelLimits, build
from sola_sched.workloads.workload import Workload

LIMITS = ModelLimits(max_model_len=256, vocab_size=100, encode=lambda text: [5] * len(text.split()))
COLUMNS = (
    "prompt", "prompt_tokens", "response", "output_tokens", "output_length", "conversations",
    "context", "answers", "input", "instruction", "output", "timestamp", "TIMESTAMP", "arrival_s",
    "hash_ids", "slo_class", "ttft_slo_ms", "tpot_slo_ms", "e2e_slo_ms",
)  # fmt: skip

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["7", "inf", "nan", "-1", "1e400", "2023-11-16 18:15:46.6805900", 10**30])
)  # fmt: skip
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["value", "a", "b"]), inner, max_size=2)
    ),
    max_leaves=6,
)
rows = st.dictionaries(st.sampled_from(COLUMNS) | st.text(max_size=3), anything, max_size=6)
likely = st.fixed_dictionaries(
    {"prompt_tokens": st.just(9) | scalars, "output_tokens": st.just(4) | scalars},
    optional=dict.fromkeys(COLUMNS[6:], anything),
)


def check(path: Path, **options: Any) -> None:
    """Builds, or says why not in one line that names the file or the value."""
    try:
        built = build(DatasetOptions("custom", path, num_prompts=2, **options), LIMITS)
    except (DatasetError, ConfigError) as error:
        message = str(error)
        assert "must" in message or "need" in message
        assert len(message) < 1000 + len(str(path))
    else:
        assert isinstance(built, Workload)
        assert all(r.prompt_token_ids and r.output_tokens >= 1 for r in built.requests)


@given(st.lists(rows | likely, max_size=3) | anything, st.booleans())
def test_any_json_is_a_data_set_or_an_error(document: Any, self_timed: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.json"
        path.write_text(json.dumps(document))
        check(path, self_timed=self_timed)
        with contextlib.suppress(DatasetError):
            read_lengths.__wrapped__(path.name, 256, path.parent)


@given(st.lists(likely | rows | anything, max_size=3))
def test_any_lines_are_a_data_set_or_an_error(lines: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)))
        check(path)


@given(
    st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace")),
    st.sampled_from(["a.json", "a.jsonl", "a.csv", "a.zip", "a.json.gz", "a.jsonl.gz", "a"]),
    st.booleans(),
)
def test_any_bytes_are_a_data_set_or_an_error(content: bytes, name: str, is_packed: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        packed = gzip.compress(content)[: None if len(content) % 2 else -4]
        path.write_bytes(packed if is_packed else content)
        check(path)


@given(
    st.lists(st.sampled_from(COLUMNS), max_size=4),
    st.lists(st.lists(scalars.map(str), max_size=5), max_size=3),
)
def test_any_table_is_a_data_set_or_an_error(header: list[str], cells: list[list[str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.csv"
        text = "\n".join(",".join(line) for line in [header, *cells])
        path.write_bytes(text.encode("utf-8", "replace"))
        check(path)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('[{"conversations": "oops"}]', "'conversations' must be a list of objects .* 'oops'"),
        ('[{"conversations": [{"value": 3}]}]', "with a text 'value' .*{'value': 3}"),
        ('[{"prompt_tokens": 1e400, "output_tokens": 3}]', "whole number from 0 .*got inf in row"),
        ('[{"prompt_tokens": 1e300, "output_tokens": 3}]', "to 2,147,483,647 .*got 1e\\+300"),
        ('[{"prompt_tokens": [], "output_tokens": 3}]', "token count must be .*got \\[\\]"),
        ('[{"prompt_tokens": true, "output_tokens": 3}]', "token count must be .*got True"),
        ('[{"prompt": 5, "output_tokens": 3}]', "'prompt' must be a text .got 5 in row 0"),
        ('[{"prompt": "a", "response": [1]}]', "'response' must be a text"),
        ('[{"context": "a", "answers": 4}]', "'answers' must be a list of texts .got 4"),
        ('[{"instruction": {}, "output": "b"}]', "'instruction' must be a text"),
        ('[{"prompt_tokens": 4, "output_tokens": 3, "hash_ids": ["x"]}]', "'hash_ids' must be"),
        ('[{"prompt_tokens": 4, "output_tokens": 3, "timestamp": NaN}]', "must be a finite number"),
        ('[{"prompt_tokens": 4, "output_tokens": 3, "TIMESTAMP": "0001-13"}]', "must be a date"),
        ('[{"prompt_tokens": 4, "output_tokens": 3, "ttft_slo_ms": -1}]', "'ttft_slo_ms' must be"),
        ('[{"prompt_tokens": 4, "output_tokens": 3, "slo_class": []}]', "'slo_class' must be"),
        ("[" * 100_000, "must be readable JSON"),
        ('[{"prompt_tokens": ' + "9" * 5000 + "}]", "must be readable JSON"),
    ],
)  # fmt: skip
def test_what_breaks_a_rule_is_named(tmp_path: Path, text: str, rule: str) -> None:
    path = tmp_path / "data.json"
    path.write_text(text)

    with pytest.raises(DatasetError, match=rule) as caught:
        build(DatasetOptions("custom", path, num_prompts=1), LIMITS)
    assert "\n" not in str(caught.value)


def test_archives_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "data.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.json", "[]")
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 10] = 99  # an unknown compression
    path.write_bytes(bytes(content))

    with pytest.raises(DatasetError, match="must be readable JSON"):
        build(DatasetOptions("custom", path), LIMITS)
    with pytest.raises(DatasetError, match="must be readable"):
        build(DatasetOptions("custom", Path("x" * 5000)), LIMITS)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_lengths_cannot_be_scaled_without_end(scale: float) -> None:
    with pytest.raises(ConfigError, match="'--length-scale' must be a finite number > 0"):
        build(DatasetOptions(num_prompts=1, length_scale=scale), LIMITS)


PARSERS = (
    lambda text: values.parse_slo([text]), values.parse_slo_class, values.parse_percentiles,
    lambda text: values.parse_pairs([text], "--metadata"), values.parse_metric_names,
)  # fmt: skip
#: `argparse` tells their `ValueError` in one line, as it does its own.
TYPES = (positive_int, positive_float, rate, json_object)
flags = (
    st.text(max_size=12)
    | st.sampled_from(["ttft:inf", "ttft:1e-330", "a:1:2:nan", "{", "[" * 9000, "9" * 5000, "²"])
    | st.lists(
        st.sampled_from(["ttft", ":", "1", "e", "9", "-", ".", ",", "=", "{", "}", "nan"]),
        max_size=8,
    ).map("".join)
)


@settings(max_examples=200)
@given(st.sampled_from(PARSERS), flags)
def test_any_text_of_a_flag_has_a_value_or_an_error(parse: Any, text: str) -> None:
    with contextlib.suppress(ConfigError):
        parse(text)


@given(st.sampled_from(TYPES), flags)
def test_any_number_of_a_flag_is_one_or_an_error(parse: Any, text: str) -> None:
    with contextlib.suppress(ValueError, argparse.ArgumentTypeError):
        parse(text)
