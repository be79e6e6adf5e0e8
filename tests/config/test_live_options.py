"""Options that change while a server runs: the file, what it may say, and what is in force."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sola_sched.config.live_options import CHANGEABLE, LiveOptions
from sola_sched.config.sola_config import SolaConfig
from sola_sched.errors import ConfigError

START = {"ttft_s": 1.0, "tpot_s": 0.05, "classes": {"chat": {"ttft_s": 0.5, "share": 0.3}}}


def live(path: Path, **options: Any) -> LiveOptions:
    return LiveOptions({"sola_sched": {**START, **options, "options_file": str(path)}})


def write(path: Path, options: Any) -> None:
    """As an operator should: beside it, then in its place."""
    beside = path.with_suffix(".new")
    beside.write_text(options if isinstance(options, str) else json.dumps(options))
    beside.rename(path)


def test_without_a_file_the_options_of_the_command_line_hold(tmp_path: Path) -> None:
    options = live(tmp_path / "none.json")
    assert options.config.ttft_s == 1.0
    assert options.look() is None
    assert LiveOptions({"sola_sched": START}).look() is None
    assert LiveOptions(None).config.ttft_s == 2.0


def test_a_file_holds_at_start_and_whenever_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    write(path, {"ttft_s": 3.0})
    options = live(path)
    assert (options.config.ttft_s, options.config.tpot_s) == (3.0, 0.05)
    assert options.look() is None

    write(path, {"classes": {"batch": {}}, "steer": False, "max_wait_s": 60})
    news = options.look()

    assert news is not None
    assert "'ttft_s' 3.0 -> 1.0" in news
    assert "'steer' True -> False" in news
    assert options.problem is None
    config = options.config
    assert (config.ttft_s, config.steer, config.shares) == (1.0, False, {})
    assert list(config.classes) == ["batch"]
    assert config.classes["batch"].max_wait_s == 60
    assert options.options == {**START, "classes": {"batch": {}}, "steer": False, "max_wait_s": 60}
    assert options.look() is None


def test_a_file_that_is_taken_away_leaves_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    write(path, {"ttft_s": 3.0})
    options = live(path)
    path.unlink()
    assert options.look() == f"options changed ({path}): 'ttft_s' 3.0 -> 1.0"
    assert options.config.ttft_s == 1.0


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ('{"ttft_s": 1', "must be a JSON object"),
        ("[1]", "must be a JSON object"),
        ("[" * 100_000, "must be a JSON object"),
        ({"ttft_s": 0.3, "tpot_s": -1}, "'tpot_s' must be a number"),
        ({"ttft_s": 0.3, "e2e_s": 0.1}, "must be >= 'ttft_s'"),
        ({"ttft_s": 0.3, "classes": {"a": {"share": 0.6}, "b": {"share": 0.6}}}, "below 1"),
        ({"ttft_s": 0.3, "classes": {"a": {"ttft": 1}}}, "SLO class 'a'"),
        ({"ttft_s": 0.3, "policy": "alise"}, "'policy' cannot change while the server runs"),
        ({"ttft_s": 0.3, "swap": {}}, "'swap' cannot change while the server runs"),
        ({"ttft_s": 0.3, "options_file": "x"}, "'options_file' cannot change"),
        (
            {"ttft_s": 0.3, "max_wait": 1},
            "Unknown option 'max_wait' (write 'max_wait_s', in seconds) in the file; it may have: "
            "ttft_s, tpot_s, e2e_s, classes, max_wait_s, best_effort_share, safety, steer, "
            "log_missed, plan_limit_s. (In 'options_file' ",
        ),
        ({"polcy": "alise"}, "Unknown option 'polcy' (write 'policy') in the file; it may have: "),
    ],
)
def test_a_wrong_file_changes_nothing_and_says_why_once(
    content: Any, rule: str, tmp_path: Path
) -> None:
    path = tmp_path / "options.json"
    write(path, {"ttft_s": 3.0})
    options = live(path)
    before = options.config

    write(path, content)
    news = options.look()

    assert news is not None
    assert rule in news
    assert str(path) in news
    assert len(news) < 700
    assert options.problem
    assert options.problem in news
    assert options.config is before
    assert options.look() is None

    write(path, {"ttft_s": 4.0})
    assert options.look()
    assert options.problem is None
    assert options.config.ttft_s == 4.0


def test_a_file_that_breaks_more_than_a_rule_changes_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "options.json"
    options = live(path)

    def fail(*args: Any) -> Any:
        raise OverflowError("too large")

    monkeypatch.setattr(LiveOptions, "_read", fail)
    write(path, {"ttft_s": 0.5})

    assert "stay as they were: OverflowError('too large')" in (options.look() or "")
    assert options.problem == "OverflowError('too large')"
    assert options.look() is None, "said once"


def test_a_wrong_file_ends_the_start(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    write(path, {"polcy": "alise"})
    with pytest.raises(ConfigError, match=r"polcy.*options\.json"):
        live(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="must be a file that can be read"):
        live(path)


def test_a_repaired_file_is_told_even_if_nothing_changes(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    options = live(path)
    write(path, "{")
    assert options.look()
    path.unlink()
    assert options.look() == f"options unchanged ({path})"


def refuse(config: SolaConfig) -> None:
    raise OSError("no space left")


def test_options_that_are_tried_out_in_vain_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    options = live(path)
    for changes in ({"ttft_s": 3.0}, {"ttft_s": 3.0, "steer": False}, {"safety": 0.5}):
        write(path, changes)
        assert options.look(refuse) == "options stay as they were: OSError('no space left')"
        assert options.options == START
        assert options.problem == "OSError('no space left')"


def test_a_rollback_holds_though_it_is_tried_out_in_vain(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    options = live(path)
    for before, rollback in (
        ({}, {"steer": False}),
        ({"ttft_s": 3.0}, {"steer": False}),
        ({"ttft_s": 3.0}, {"ttft_s": 3.0, "steer": False}),
    ):
        write(path, before)
        options.look()

        write(path, rollback)
        news = options.look(refuse)

        assert news is not None
        assert news.startswith(f"options changed ({path}): ")
        assert "'steer' True -> False" in news
        assert news.endswith("; the policy could not be made anew: OSError('no space left')")
        assert options.problem is None
        assert options.options == {**START, **rollback}


def as_it_arrives(refusal: Any) -> Any:
    return json.loads(json.dumps(refusal))


def test_another_process_goes_on_with_the_options_of_one_that_refuses_the_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "options.json"
    engine, front_end = live(path), live(path)
    assert engine.refusal() is None
    write(path, {"ttft_s": 3.0})
    engine.look()
    write(path, {"classes": {"batch": {}}})
    engine.look(refuse)
    front_end.look()
    assert front_end.problem is None

    front_end.follow(as_it_arrives(engine.refusal()))

    assert front_end.problem == engine.problem == "OSError('no space left')"
    assert front_end.config == engine.config
    assert front_end.options == engine.options == {**START, "ttft_s": 3.0}
    assert front_end.look() is None
    path.unlink()
    for each in (engine, front_end):
        each.look()
        assert (each.problem, each.refusal(), each.options) == (None, None, START)


@pytest.mark.parametrize("was_there", [True, False])
def test_a_refusal_of_another_file_is_not_followed(was_there: bool, tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    write(path, {"ttft_s": 3.0})
    engine, front_end = live(path), live(path)
    if was_there:
        write(path, {"ttft_s": 4.0})
    else:
        path.unlink()
    engine.look(refuse)
    write(path, {"ttft_s": 5.0})
    front_end.look()

    front_end.follow(as_it_arrives(engine.refusal()))

    assert front_end.problem is None
    assert front_end.config.ttft_s == 5.0


def test_without_a_file_no_refusal_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    write(path, {"ttft_s": 3.0})
    engine, other = live(path), LiveOptions({"sola_sched": START})
    path.unlink()
    engine.look(refuse)
    other.follow(as_it_arrives(engine.refusal()))
    assert (other.problem, other.config.ttft_s) == (None, 1.0)


@pytest.mark.parametrize("name", CHANGEABLE)
def test_what_may_change_is_an_option_whose_default_can_be_written(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / "options.json"
    options = LiveOptions({"sola_sched": {"options_file": str(path)}})
    value: Any = getattr(options.config, name)
    write(path, {name: value})
    options.look()
    assert options.problem is None


def test_the_name_of_the_file_is_text() -> None:
    with pytest.raises(ConfigError, match="'options_file' must be a path or null"):
        LiveOptions({"sola_sched": {"options_file": 3}})
