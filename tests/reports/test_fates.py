"""Fates on their way out of the engine core, the book that keeps them, and what is said of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fates import a_fate, ended, record_of
from states import make_cost

from sola_sched.core.fates import Ended, shown_id
from sola_sched.cost.model import CostModel
from sola_sched.reports.fates import FateBook, engine_facts, from_report, to_report
from sola_sched.reports.reasons import remedies, story, verdict


def test_a_report_is_json_and_holds_each_request() -> None:
    report = to_report(ended(record_of(), record_of(end="missed", first_token_s=12.0)))
    told = list(from_report(json.loads(json.dumps(report))))
    assert told == [a_fate("r0"), a_fate("r1", end="missed", first_token_s=12.0)]
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert (told[0]["e2e_s"], told[0]["lost_s"], told[0]["num_prompt"]) == (None, None, 200)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, []),
        ({"first_token_s": 11.5, "last_token_s": 12.0}, ["ttft"]),
        ({"last_token_s": 30.0}, ["tpot"]),
        ({"e2e_s": 1.0}, ["e2e"]),
        ({"first_token_s": 11.5, "last_token_s": 30.0, "e2e_s": 2.0}, ["ttft", "tpot", "e2e"]),
        ({"num_output": 1, "last_token_s": 10.5}, []),
        # Nobody knows how fast the rest would have been.
        ({"end": "aborted", "last_token_s": 30.0, "ended_s": 30.0}, []),
        ({"end": "failed", "first_token_s": float("nan"), "ended_s": 12.0}, ["ttft"]),
    ],
)
def test_which_targets_were_missed(fields: dict[str, Any], expected: list[str]) -> None:
    assert a_fate(**fields)["missed"] == expected


@pytest.mark.parametrize("is_old", [False, True])
def test_what_step_times_are_not_known_for_is_neither_told_nor_used(is_old: bool) -> None:
    """As in the engine's first steps, and in files of releases that told 0."""
    late = {"end": "missed", "first_token_s": 15.0, "last_token_s": 40.0, "ended_s": 40.0}
    fate = a_fate(**late, alone_s=0.0, alone_step_s=0.0)
    assert (fate["alone_s"], fate["alone_step_s"]) == (None, None)
    if is_old:
        fate |= {"alone_s": 0.0, "alone_step_s": 0.0}
    said = " ".join([*story(fate, [fate]), *remedies(fate, [fate])])
    assert "Its prompt took 5.00 s, in 1 step." in said
    assert "output tokens took 250 ms each on average." in said
    for word in ("idle engine", "was alone", "longer than predicted"):
        assert word not in said


def test_the_book_keeps_the_latest_and_finds_them_by_a_part_of_their_ids() -> None:
    book = FateBook(most=3)
    book.add(to_report(ended(record_of(), record_of(end="missed"), record_of())))
    book.add(to_report(ended(record_of(end="rejected"), record_of(), first=10)))
    assert len(book) == 3
    assert [fate["request_id"] for fate in book.latest(10)] == ["r11", "r10", "r2"]
    assert [fate["request_id"] for fate in book.latest(10, are_missed=True)] == ["r10"]
    assert [fate["request_id"] for fate in book.latest(1)] == ["r11"]
    assert [fate["request_id"] for fate in book.find("r1")] == ["r10", "r11"]
    assert [fate["request_id"] for fate in book.find("r11")] == ["r11"]
    assert book.find("r0") == []  # forgotten


@pytest.mark.parametrize("own", ["A" * 1000, "B" * 230, "a\nb" + "c" * 1000, "\x1b[2J"])
def test_the_book_finds_a_request_by_the_id_that_its_client_gave(own: str) -> None:
    book, records = FateBook(), ended(record_of()).records
    whole = f"chatcmpl-{own}-0-1f2e3d4c"
    for name in ("other", whole):
        book.add(to_report(Ended([shown_id(name)], ["default"], records)))
    for asked in (own, whole, shown_id(whole)):
        assert [fate["request_id"] for fate in book.find(asked)] == [shown_id(whole)]


def test_one_that_ends_again_is_the_latest() -> None:
    book = FateBook()
    book.add(to_report(ended(record_of(), record_of())))
    book.add(to_report(ended(record_of(end="missed"))))
    assert [(fate["request_id"], fate["end"]) for fate in book.latest(9)] == [
        ("r0", "missed"),
        ("r1", "attained"),
    ]


def test_of_an_engine_what_a_replay_needs() -> None:
    facts = engine_facts(make_cost(), {"max_num_seqs": 8}, {"ttft_s": 1.0, "profile": "/a/file"})
    assert facts is not None
    assert facts["options"] == {"ttft_s": 1.0}
    assert facts["engine_args"] == {"max_num_seqs": 8}
    assert json.loads(json.dumps(facts)) == facts
    assert engine_facts(CostModel(), {}, {}) is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"end": "missed", "first_token_s": 13.3, "last_token_s": 14.3},
            "It was late: its first token came 3.30 s after its arrival (its target was 1.00 s).",
        ),
        (
            {"end": "missed", "last_token_s": 30.5, "ended_s": 30.5},
            "It was late: it took 200 ms a token (its target was 100 ms).",
        ),
        ({}, "It met its targets."),
        ({"end": "rejected"}, "It was refused: it could not have met its targets."),
        ({"end": "aborted"}, "Its client left before it was late."),
        (
            {"end": "missed", "first_token_s": float("nan"), "ended_s": 13.0, "num_output": 0},
            "It was late: it ended before its first token (its target was 1.00 s).",
        ),
    ],
)
def test_the_verdict(fields: dict[str, Any], said: str) -> None:
    assert verdict(a_fate(**fields)) == said


_LATE = {"end": "missed", "first_token_s": 13.3, "last_token_s": 14.3, "ended_s": 14.3}


@pytest.mark.parametrize(
    ("fields", "told", "helps"),
    [
        (
            {"started_s": 13.0, "waited_s": (2.9, 0.0, 0.1), "num_before": 12, "num_running": 256},
            "It waited 2.90 s for a free slot.",
            "It was 2.30 s late and had waited 2.90 s for a free slot. More slots",
        ),
        (
            {"started_s": 13.0, "waited_s": (0.0, 3.0, 0.0)},
            "It waited 3.00 s for KV memory.",
            "waited 3.00 s for KV memory",
        ),
        (
            {"started_s": 13.0, "waited_s": (0.5, 0.0, 2.5), "num_overtook": 4},
            "4 requests that arrived later were started before it.",
            "waited 2.50 s for compute time",
        ),
        (
            {"num_prompt": 90_000, "alone_s": 3.2, "num_chunks": 44},
            "Its prompt took 3.30 s, in 44 steps. On an idle engine it would take 3.20 s.",
            "Its prompt takes 3.20 s even on an idle engine, longer than its TTFT target of 1.00 s",
        ),
        (
            {"num_chunks": 30, "alone_s": 0.2},
            "in 30 steps",
            "Its prompt was computed in small pieces",
        ),
        (
            {"lost_s": 10.62, "need_s": 0.45, "started_s": 13.0, "waited_s": (0.0, 0.0, 3.0)},
            "The scheduler gave it up 620 ms after its arrival: its first token was due in 380 ms "
            "and, by the step times predicted then, still needed at least 450 ms.",
            "compute time",
        ),
        (
            {"num_chunks": 3, "alone_s": 0.2, "lost_s": 10.9},
            "in 3 steps",
            "For most of the rest its prompt had been started, and others were computed",
        ),
        (
            {"started_s": 13.0},
            "It waited 3.00 s for other reasons",
            "waited 3.00 s",
        ),
    ],
)
def test_a_late_first_token_is_explained(fields: dict[str, Any], told: str, helps: str) -> None:
    fate = a_fate(**(_LATE | fields))
    assert any(told in line for line in story(fate)), story(fate)
    assert any(helps in line for line in remedies(fate)), remedies(fate)


@pytest.mark.parametrize(
    ("fields", "told", "helps"),
    [
        (
            {"num_held": 40, "held_s": 12.0},
            "It was left out of 40 steps so that others could be in time. That cost it 12.00 s.",
            "had it not been left out or preempted",
        ),
        ({"num_preemptions": 1}, "It was preempted 1 time: ", "left out or preempted"),
        (
            {"alone_step_s": 0.15},
            "On an idle engine a token takes 150 ms.",
            "even on an idle engine",
        ),
        ({}, "Its 101 output tokens took 200 ms each", "Its steps were too long"),
    ],
)
def test_slow_tokens_are_explained(fields: dict[str, Any], told: str, helps: str) -> None:
    fate = a_fate(**{"end": "missed", "last_token_s": 30.5, "ended_s": 30.5, **fields})
    assert any(told in line for line in story(fate)), story(fate)
    assert any(helps in line for line in remedies(fate)), remedies(fate)


def test_one_that_met_its_targets_needs_nothing() -> None:
    fate = a_fate(predicted=80)
    assert remedies(fate) == []
    assert story(fate)[-1] == "Its output was predicted to be 80 tokens long. It was 101."


def test_a_few_of_many_are_not_called_none() -> None:
    late = a_fate("late", "chat", **(_LATE | {"started_s": 13.0, "num_before": 301}))
    flood = [a_fate(f"job{i}", "job", arrival_s=9.0, started_s=11.0) for i in range(299)]
    one = a_fate("one", "chat", arrival_s=9.0, started_s=11.0)

    told = story(late, [*flood, one, late])

    assert "301 were waiting (100 % of class job, under 1 % of class chat)." in told[0]


def test_others_are_told_by_class_and_a_flood_of_another_one_is_called_so() -> None:
    late = a_fate("late", "chat", **(_LATE | {"started_s": 13.0, "waited_s": (0.0, 0.0, 3.0),
                                              "num_before": 3, "num_overtook": 2}))  # fmt: skip
    flood = [
        a_fate(f"job{i}", "job", arrival_s=9.0 + 0.4 * i, started_s=11.0 + 0.1 * i)
        for i in range(5)
    ]
    own = a_fate("other", "chat", arrival_s=9.9, started_s=10.5)
    gone = a_fate("gone", "job", arrival_s=5.0, started_s=5.5, last_token_s=6.0, ended_s=6.0)
    known = [*flood, own, gone, late]

    told = story(late, known)

    assert "3 were waiting (75 % of class job, 25 % of class chat)." in told[0]  # of 4 known
    assert "2 requests that arrived later were started before it (all of class job)." in told
    assert remedies(late, known)[-1] == (
        "Of 6 requests that waited before it or were preferred to it 5 were of class job. A higher "
        "weight or a `share` for class chat would have protected it."
    )
    assert remedies(late, [*flood, late])[-1].startswith(
        "All 5 requests that waited before it or were preferred to it were of class job."
    )
    assert len(remedies(late, [own, late])) == len(remedies(late)) == 1
    assert "of class" not in " ".join(story(late, [own, late]))


def test_classes_are_counted_where_all_others_are_known() -> None:
    late = a_fate("late", "chat", **(_LATE | {"started_s": 13.0, "num_before": 2}))
    before = [a_fate(name, name, arrival_s=9.0, started_s=11.0) for name in ("job", "chat")]
    assert "2 were waiting (1 of class job, 1 of class chat)." in story(late, [*before, late])[0]


def test_what_most_of_a_wait_was_for_is_named_though_it_is_not_all_of_it() -> None:
    late = a_fate(**(_LATE | {"started_s": 13.2, "waited_s": (0.0, 2.2, 0.1)}))
    assert remedies(late) == [
        "It was 2.30 s late and had waited 3.20 s, most of it for KV memory. More KV memory "
        "(`--gpu-memory-utilization`, `--kv-cache-dtype fp8`), swapping, or one more engine would "
        "have helped."
    ]
    nearly_all = a_fate(**(_LATE | {"started_s": 13.0, "waited_s": (0.0, 2.9, 0.1)}))
    assert "It waited 2.90 s for KV memory." in story(nearly_all)


def test_looser_tpot_targets_are_advised_only_where_these_bound_the_steps() -> None:
    late = a_fate("late", **(_LATE | {"started_s": 13.0, "waited_s": (0.0, 0.0, 3.0)}))
    near = a_fate("near", arrival_s=9.0, started_s=9.0, first_token_s=9.5, last_token_s=18.0)
    far = a_fate("far", arrival_s=9.0, started_s=9.0, first_token_s=9.5, last_token_s=11.5)
    assert "or looser TPOT targets" in remedies(late, [near, late])[0]
    assert "TPOT" not in remedies(late, [far, late])[0]


def test_a_prompt_that_was_slow_although_alone_is_said_to_have_been_alone() -> None:
    slow = a_fate("slow", **(_LATE | {"started_s": 10.0, "alone_s": 0.1}))
    beside = a_fate("beside", arrival_s=11.0, started_s=11.0, first_token_s=11.5)
    said = "No other request is known to have been computed meanwhile"
    assert any(said in line for line in story(slow, [slow]))
    assert not any(said in line for line in story(slow, [slow, beside]))
    assert not any(said in line for line in story(slow))
    assert any("another program" in line for line in remedies(slow, [slow]))


def test_a_first_token_that_is_overdue_is_called_so() -> None:
    fate = a_fate(**(_LATE | {"lost_s": 11.2, "need_s": 0.2, "started_s": 13.0}))
    assert any(
        "gave it up 1.20 s after its arrival: its first token was overdue and, by the step times "
        "predicted then, still needed at least 200 ms." in line
        for line in story(fate)
    )


def test_what_is_left_of_a_prompt_is_not_told_where_that_is_nothing() -> None:
    fate = a_fate(**(_LATE | {"lost_s": 11.2, "need_s": 0.0, "started_s": 13.0}))
    assert any("its first token was overdue. From then on" in line for line in story(fate))


def test_a_request_whose_tpot_no_step_meets_is_not_said_to_have_had_no_time() -> None:
    lost = {"lost_s": 10.0, "need_s": None, "tpot_s": 0.005, "alone_step_s": 0.011}
    [line] = [line for line in story(a_fate(**(_LATE | lost))) if "gave it up" in line]
    assert "a token takes 11 ms even on an idle engine, longer than its TPOT target of 5" in line
    assert "still needed" not in line


def test_a_slow_engine_is_named_though_the_target_was_too_short_for_any() -> None:
    slow = a_fate("slow", **(_LATE | {"started_s": 10.0, "alone_s": 1.2}))
    too_short, engine = remedies(slow, [slow])
    assert "no order of requests can help" in too_short
    assert "so the engine itself was slow" in engine
    assert len(remedies(slow)) == 1


def test_a_short_wait_and_none_are_not_worth_a_sentence() -> None:
    assert not any("waited" in line for line in story(a_fate(started_s=10.01)))
    assert "when no request was running and none was waiting." in story(a_fate())[0]
