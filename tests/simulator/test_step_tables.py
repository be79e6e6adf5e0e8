"""Step times interpolated in tables, against sums worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sola_sched.errors import ProfileError
from sola_sched.simulator.steps.profile import load_step_profile
from sola_sched.simulator.steps.tables import StepTables, graph_size
from sola_sched.simulator.steps.time import StepCounts

TABLES = StepTables(
    host_s=1.0,
    attention_s=0.5,
    tokens=((1.0, 10.0), (100.0, 20.0), (200.0, 40.0)),
    requests=((1.0, 2.0), (11.0, 3.0)),
    pairs=((0.0, 0.0), (1000.0, 1.0), (2000.0, 3.0)),
    decode_requests=(1.0, 3.0),
    decode_context=(100.0, 300.0),
    decode_s=((0.0, 2.0), (1.0, 4.0)),
    per_prompt_token_s=0.01,
)


@pytest.mark.parametrize(
    ("counts", "seconds"),
    [
        # No tokens, no time.
        (StepCounts(), 0.0),
        # The first point of every table.
        (StepCounts(1, 100), 1.0 + 0.5 + 10.0 + 2.0 + 0.0),
        # Less context than the table has costs what its first column does.
        (StepCounts(1, 7), 13.5),
        # Halfway between two rows and two columns: 2 of 1 and 3, 200 of 100 and 300.
        (StepCounts(2, 200), 1.5 + (10.0 + 10.0 / 99) + 2.1 + (0.0 + 1.0 + 2.0 + 4.0) / 4),
        # Beyond the last column its slope goes on, beyond the last row that of the first column:
        # row 3 is 5.5 at 400, two more decodes cost 1.
        (StepCounts(5, 400), 1.5 + (10.0 + 40.0 / 99) + 2.4 + 5.5 + 1.0),
        # A chunk of 50 tokens, 1500 pairs.
        (StepCounts(0, 0, 1, 50, 1500.0), 1.5 + (10.0 + 490.0 / 99) + 2.0 + 2.0 + 0.5),
        # Mixed, and beyond the last token count.
        (StepCounts(1, 100, 1, 299, 3000.0), 1.5 + 60.0 + 2.1 + 0.0 + 5.0 + 2.99),
    ],
)
def test_step_takes_the_sum_worked_out_by_hand(counts: StepCounts, seconds: float) -> None:
    assert TABLES.seconds(counts) == pytest.approx(seconds, rel=1e-12)


def test_a_scheduled_step_counts_one_token_as_a_decode() -> None:
    output = SimpleNamespace(num_scheduled_tokens={"a": 1, "b": 50})
    requests = {
        "a": SimpleNamespace(num_computed_tokens=101),
        "b": SimpleNamespace(num_computed_tokens=70),
    }

    counts = StepCounts.of(output, requests)

    assert counts == StepCounts(1, 100, 1, 50, 50 * (20 + 25.0))
    assert TABLES(output, requests) == TABLES.seconds(counts)


def test_steps_are_padded_to_the_sizes_of_cuda_graphs() -> None:
    padded = replace(TABLES, max_graph_tokens=512)

    assert padded.seconds(StepCounts(33, 100)) - TABLES.seconds(StepCounts(33, 100)) == (
        pytest.approx(7 * 10.0 / 99)  # 33 decodes run as 40
    )
    assert padded.seconds(StepCounts(40, 100)) == TABLES.seconds(StepCounts(40, 100))
    assert padded.seconds(StepCounts(0, 0, 1, 513)) == TABLES.seconds(StepCounts(0, 0, 1, 513))


@pytest.mark.vllm
def test_sizes_of_cuda_graphs_are_those_that_vllm_documents() -> None:
    from vllm.config import VllmConfig

    rule = VllmConfig._set_cudagraph_sizes.__doc__ or ""
    assert "[1, 2, 4] + list(range(8, 256, 8)) + list(" in rule
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]

    for tokens in range(1, 513):
        assert graph_size(tokens, 512) == min(size for size in sizes if size >= tokens)
    assert graph_size(513, 512) == 513
    assert graph_size(300, 256) == 300
    assert graph_size(3, 0) == 3


_COUNTS = st.builds(
    StepCounts,
    num_decodes=st.integers(1, 600),
    decode_ctx=st.integers(0, 3_000_000),
    num_prefills=st.integers(1, 50),
    prefill_tokens=st.integers(100, 20_000),
    pairs=st.floats(0, 1e8),
)


@given(_COUNTS, st.sampled_from(StepCounts._fields), st.integers(1, 100_000))
@example(StepCounts(513, 4096, 1, 100, 0.0), "decode_ctx", 1)  # more decodes than were measured
def test_more_work_never_takes_less_time(counts: StepCounts, name: str, more: int) -> None:
    tables = load_step_profile("llama-3-8b-a100-measured").step_time
    assert isinstance(tables, StepTables)
    larger = counts._replace(**{name: getattr(counts, name) + more})

    assert tables.seconds(larger) >= tables.seconds(counts)


def test_tables_come_back_from_json() -> None:
    stored = json.loads(json.dumps(TABLES.to_json()))

    assert StepTables.from_json(stored) == TABLES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"host_s": -1.0}, r"'step_tables\.host_s' must be finite and >= 0"),
        ({"tokens": {"points": [[1, 2]]}}, r"'step_tables\.tokens' must have two points"),
        ({"tokens": {"points": [[1, 2], [2, 1]]}}, "seconds that never fall"),
        ({"pairs": {"points": [[1, 2], [1, 3]]}}, r"'step_tables\.pairs' must have two points"),
        ({"decode": None}, "'step_tables' must hold what"),
        ({"max_graph_tokens": "many"}, "'step_tables' must hold what"),
    ],
)
def test_tables_that_would_let_a_step_get_faster_are_refused(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(ProfileError, match=message):
        StepTables.from_json(TABLES.to_json() | change)


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        ([[0.0, 2.0]], "have a row of seconds for each number of requests"),
        ([[0.0, 2.0], [1.0, 1.5]], "never fall"),
        ([[0.0, 2.0], [4.0, 3.0]], "never fall"),
    ],
)
def test_a_grid_that_falls_along_either_axis_is_refused(
    seconds: list[list[float]], message: str
) -> None:
    stored = TABLES.to_json()
    stored["decode"]["seconds"] = seconds

    with pytest.raises(ProfileError, match=message):
        StepTables.from_json(stored)
