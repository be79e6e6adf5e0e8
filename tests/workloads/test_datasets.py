from __future__ import annotations

import csv
import gzip
import json
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sola_sched.config.slo import SloTarget
from sola_sched.errors import ConfigError, DatasetError
from sola_sched.workloads import download
from sola_sched.workloads.datasets import DatasetOptions, ModelLimits, build
from sola_sched.workloads.rows import normalise, read_rows


def encode_words(text: str) -> list[int]:
    return [100 + len(word) for word in text.split()]


LIMITS = ModelLimits(max_model_len=4096, vocab_size=1000, encode=encode_words)


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    text = "\n".join(json.dumps(row) for row in rows) + "\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Path:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", newline="") as out:
        csv.writer(out).writerows([header, *rows])
    return path


def shapes(options: DatasetOptions, limits: ModelLimits = LIMITS) -> list[tuple[int, int]]:
    """(prompt, output) lengths of each request."""
    options = replace(options, shuffle=False)
    return [(len(r.prompt_token_ids), r.output_tokens) for r in build(options, limits).requests]


def test_sharegpt_uses_the_first_two_turns(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(
        json.dumps(
            [
                {"id": "a", "conversations": [
                    {"from": "human", "value": "one two three"},
                    {"from": "gpt", "value": "four five"},
                    {"from": "human", "value": "six"}]},
                {"id": "b", "conversations": [{"from": "human", "value": "alone"}]},
            ]
        )
    )  # fmt: skip

    workload = build(DatasetOptions("sharegpt", path, num_prompts=1), LIMITS)

    assert workload.requests[0].prompt_token_ids == (103, 103, 105)
    assert workload.requests[0].output_tokens == 2
    assert "1 of 2 rows have no prompt or answer" in workload.notes[0]


def test_alpaca_joins_instruction_and_input(tmp_path: Path) -> None:
    path = tmp_path / "alpaca.json"
    path.write_text(json.dumps([{"instruction": "add these", "input": "1 2", "output": "3 !"}]))

    assert shapes(DatasetOptions("alpaca", path, num_prompts=1)) == [(4, 2)]


def test_longbench_reads_every_task_of_an_archive(tmp_path: Path) -> None:
    row = {"input": "who ?", "context": "a long text", "answers": ["me", "it is me"], "length": 3}
    path = tmp_path / "data.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data/a.jsonl", json.dumps(row) + "\n")
        archive.writestr("data/b.jsonl", json.dumps(row | {"answers": ["no"]}) + "\n")
        archive.writestr("data/._b.jsonl", b"\x00\xff")

    assert shapes(DatasetOptions("longbench", path, num_prompts=2)) == [(5, 3), (5, 1)]


def test_azure_trace_has_lengths_and_recorded_arrivals(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "azure.csv",
        ["TIMESTAMP", "ContextTokens", "GeneratedTokens"],
        [
            ["2023-11-16 18:15:46.6805900", 374, 44],
            ["2023-11-16 18:15:50.9951690", 396, 109],
            ["2023-11-16 18:15:51.2225670", 879, 55],
        ],
    )
    options = DatasetOptions("azure", path, num_prompts=3, self_timed=True)

    requests = build(options, LIMITS).requests

    assert [(len(r.prompt_token_ids), r.output_tokens) for r in requests] == [
        (374, 44), (396, 109), (879, 55),
    ]  # fmt: skip
    assert [r.arrival_s for r in requests] == pytest.approx([0, 4.314579, 4.541977])


def test_burstgpt_trace(tmp_path: Path) -> None:
    header = ["Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type"]
    path = write_csv(
        tmp_path / "BurstGPT.csv",
        header,
        [[5, "ChatGPT", 472, 18, 490, "Conversation log"], [45, "GPT-4", 9, 0, 9, "x"]],
    )

    workload = build(DatasetOptions("burstgpt", path, num_prompts=1, self_timed=True), LIMITS)

    assert [(len(r.prompt_token_ids), r.output_tokens) for r in workload.requests] == [(472, 18)]


def test_mooncake_trace_keeps_shared_prefixes(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1300, "output_length": 50, "hash_ids": [7, 8, 9]},
        {"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 11]},
    ]
    path = write_jsonl(tmp_path / "mooncake.jsonl", rows)

    first, second = build(
        DatasetOptions("mooncake", path, num_prompts=2, self_timed=True), LIMITS
    ).requests

    assert first.prompt_token_ids[:1024] == second.prompt_token_ids[:1024]
    assert first.prompt_token_ids[1024:1100] != second.prompt_token_ids[1024:]
    assert (first.arrival_s, second.arrival_s) == (0.0, 3.0)


def test_custom_rows_may_carry_counts_classes_and_targets(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a b c", "output_tokens": 7},
        {"prompt_tokens": 20, "output_tokens": 3, "slo_class": "chat", "ttft_slo_ms": 500},
        {"prompt_tokens": 20, "output_tokens": 3, "e2e_slo_ms": 9000, "tpot_slo_ms": 50},
    ]
    path = write_jsonl(tmp_path / "custom.jsonl", rows)

    workload = build(DatasetOptions("custom", path, num_prompts=3, shuffle=False), LIMITS)

    text, counts, whole = workload.requests
    assert whole.slo == SloTarget(tpot_s=0.05, e2e_s=9.0)
    assert text.prompt_token_ids == (101, 101, 101)
    assert (len(counts.prompt_token_ids), counts.output_tokens) == (20, 3)
    assert (text.slo, text.slo_class) == (None, None)
    assert (counts.slo, counts.slo_class) == (SloTarget(ttft_s=0.5), "chat")


@pytest.mark.parametrize(
    ("row", "shape"),
    [
        ({"prompt_tokens": "74", "output_tokens": "918"}, (74, 918)),
        ({"arrival_s": 0.5, "prompt_tokens": 10, "output_tokens": 4}, (10, 4)),
        ({"prompt": "x y", "prompt_tokens": 9, "response": "z", "response_tokens": 6}, (9, 6)),
        ({"prompt_tokens": 9, "response_tokens": {"m1": 10, "m2": 30, "m3": 20}}, (9, 20)),
        ({"prompt_tokens": 9, "reference_tokens": 2}, (9, 2)),
        ({"prompt_tokens": 9, "completion_tokens": 4}, (9, 4)),
        ({"usage": {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}}, (9, 4)),
        ({"prompt_tokens": 9, "vicuna7b_tokens": [5, 8, 6], "response_tokens": 1}, (9, 6)),
        ({"queued_s": 1.0, "prompt_tokens": 3, "output_tokens": 2, "gpu": "x"}, (3, 2)),
    ],
)
def test_token_count_columns_of_other_tables(
    tmp_path: Path, row: dict[str, Any], shape: tuple[int, int]
) -> None:
    path = write_jsonl(tmp_path / "table.jsonl.gz", [row])

    limits = replace(LIMITS, prefer_text=False)
    assert shapes(DatasetOptions("custom", path, num_prompts=1), limits) == [shape]


def test_gzipped_csv(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv.gz", ["prompt_tokens", "output_tokens"], [[8, 2], [6, 3]])

    assert shapes(DatasetOptions("custom", path, num_prompts=2)) == [(8, 2), (6, 3)]


def test_long_files_are_scaled_to_the_model_and_the_rest_is_cut(tmp_path: Path) -> None:
    rows = [{"prompt_tokens": 900, "output_tokens": 100}] * 199
    rows += [{"prompt_tokens": 3900, "output_tokens": 100}]
    path = write_jsonl(tmp_path / "long.jsonl", rows)

    workload = build(
        DatasetOptions("custom", path, num_prompts=200, shuffle=False),
        replace(LIMITS, max_model_len=500),
    )

    assert len(workload.requests[0].prompt_token_ids) == 450
    assert workload.requests[0].output_tokens == 50
    assert (len(workload.requests[-1].prompt_token_ids), workload.requests[-1].output_tokens) == (
        450, 50,
    )  # fmt: skip
    assert workload.notes == (
        "lengths x 0.5: data set context 1,000 tokens, model context 500.",
        "1 of 200 requests cut to fit the model context.",
    )


def test_short_file_is_repeated_and_says_so(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "two.jsonl", [{"prompt_tokens": 4, "output_tokens": 2}] * 2)

    workload = build(DatasetOptions("custom", path, num_prompts=5), LIMITS)

    assert len(workload.requests) == 5
    assert workload.notes == ("two.jsonl has 2 requests; they are repeated.",)


def test_sharegpt_like_fits_the_model_and_repeats_with_its_seed() -> None:
    limits = replace(LIMITS, max_model_len=2048)

    workload = build(DatasetOptions(num_prompts=2000, seed=4), limits)

    totals = [len(r.prompt_token_ids) + r.output_tokens for r in workload.requests]
    assert max(totals) <= 2048
    assert np.median([len(r.prompt_token_ids) for r in workload.requests]) == pytest.approx(
        1681 / 4, rel=0.1
    )
    assert workload == build(DatasetOptions(num_prompts=2000, seed=4), limits)
    assert workload != build(DatasetOptions(num_prompts=2000, seed=5), limits)


@pytest.mark.parametrize("name", ["sharegpt-like", "random"])
def test_first_requests_do_not_depend_on_how_many_follow(name: str) -> None:
    options = DatasetOptions(name, random_range_ratio=0.5, random_prefix_len=4, length_scale=0.2)

    few = build(replace(options, num_prompts=20), LIMITS).requests
    many = build(replace(options, num_prompts=300), LIMITS).requests

    assert few == many[:20]


def test_random_lengths_and_shared_prefix() -> None:
    options = DatasetOptions(
        "random", num_prompts=50, random_input_len=100, random_output_len=20,
        random_range_ratio=0.5, random_prefix_len=16,
    )  # fmt: skip

    requests = build(options, LIMITS).requests

    lengths = [len(r.prompt_token_ids) for r in requests]
    assert 66 <= min(lengths) < 100 < max(lengths) <= 166
    assert len({r.prompt_token_ids[:16] for r in requests}) == 1
    assert len({r.prompt_token_ids[16:24] for r in requests}) == 50


def test_output_len_replaces_recorded_lengths(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "only a prompt"}])

    assert shapes(DatasetOptions("custom", path, num_prompts=1, output_len=9)) == [(3, 9)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, "needs a prompt: none of the columns"),
        ({"prompt_tokens": 3}, "must give an output length"),
        ({"prompt_tokens": "many", "output_tokens": 3}, "whole number"),
        ({"prompt_tokens": 5, "output_tokens": 0}, "at least one request"),
        ([1, 2], "must be an object"),
    ],
)
def test_unusable_rows_are_explained(tmp_path: Path, row: Any, message: str) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", [row])

    with pytest.raises(DatasetError, match=message):
        build(DatasetOptions("custom", path, num_prompts=1), LIMITS)


def test_damaged_and_missing_files_are_explained(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": ')
    empty = tmp_path / "empty"
    empty.mkdir()

    with pytest.raises(DatasetError, match="must be readable JSON"):
        list(read_rows(broken))
    with pytest.raises(DatasetError, match="must name an existing file"):
        list(read_rows(tmp_path / "nowhere.json"))
    with pytest.raises(DatasetError, match="folder must hold"):
        list(read_rows(empty))


def test_text_without_a_tokenizer_is_explained(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [{"prompt": "a", "response": "b"}])

    with pytest.raises(DatasetError, match="pass --tokenizer"):
        build(DatasetOptions("custom", path, num_prompts=1), replace(LIMITS, encode=None))


def test_self_timed_needs_recorded_arrivals(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [{"prompt_tokens": 3, "output_tokens": 3}])

    with pytest.raises(DatasetError, match="needs an arrival time in every row"):
        build(DatasetOptions("custom", path, num_prompts=1, self_timed=True), LIMITS)
    with pytest.raises(ConfigError, match="needs recorded arrivals"):
        build(DatasetOptions(self_timed=True), LIMITS)


def test_missing_public_file_names_the_file_and_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreachable = download.PublicFile("http://127.0.0.1:9/alpaca_data.json", "alpaca_data.json")
    monkeypatch.setitem(download.PUBLIC_FILES, "alpaca", unreachable)

    with pytest.raises(DatasetError, match=r"needs the file alpaca_data.json.*--dataset-path"):
        download.fetch("alpaca", cache_dir=tmp_path)
    assert list(tmp_path.rglob("*.json*")) == []


def test_public_file_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source.json"
    source.write_text("[]")
    public = download.PublicFile(source.as_uri(), "alpaca_data.json")
    monkeypatch.setitem(download.PUBLIC_FILES, "alpaca", public)

    path = download.fetch("alpaca", cache_dir=tmp_path / "cache", quiet=True)
    source.unlink()

    assert path.read_text() == "[]"
    assert download.fetch("alpaca", cache_dir=tmp_path / "cache", quiet=True) == path
    assert [p.name for p in path.parent.iterdir()] == ["alpaca_data.json"]


@pytest.mark.parametrize("ending", ["", ".gz", ".zip"])
def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path, ending: str) -> None:
    content = b"\xef\xbb\xbfprompt,output_tokens\nwhy?,7\n"
    path = tmp_path / f"log.csv{ending}"
    if ending == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("log.csv", content)
    else:
        path.write_bytes(gzip.compress(content) if ending else content)

    (row,) = read_rows(path)

    assert (row.prompt, row.output_tokens) == ("why?", 7)


def test_messages_whose_content_is_a_list_of_parts_are_read() -> None:
    parts = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": "data:"}},
        {"type": "text", "text": "And that?"},
    ]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]

    row = normalise({"messages": messages, "usage": {"completion_tokens": 3}}, "row 0")

    assert row.prompt == "Be brief.\n\nWhat is this?\n\nAnd that?"
    for odd in (None, 3, [None, 3, {"text": 5}], {"text": "no list"}):
        assert (
            normalise({"messages": [{"content": odd}], "prompt_tokens": 3}, "row 0").prompt is None
        )
