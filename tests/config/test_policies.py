"""Names of policies: our own, installed ones, and classes by their path."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from installed_policy import installed_policy

from sola_sched.config.policies import (
    BUILT_IN,
    POLICY_OPTIONS,
    PolicyTraits,
    policy_class,
    traits_of,
)
from sola_sched.config.sola_config import SolaConfig
from sola_sched.errors import ConfigError
from sola_sched.planner import AttainPlanner, CheckedPlanner, make_planner

EDF = "edf_policy:EarliestDeadlineFirst"


class Fine:
    traits = PolicyTraits(options=("tile", "policy_options"), gives_shares=True)

    def __init__(self, config: SolaConfig) -> None:
        self.config = config

    def plan(self, state: Any) -> Any: ...


class WithoutTraits:
    def plan(self, state: Any) -> Any: ...


class ReadsWhatIsNot:
    traits = PolicyTraits(options=("tiles",))

    def plan(self, state: Any) -> Any: ...


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes above in a module that can be imported by a short name."""
    module = ModuleType("elsewhere")
    for each in (Fine, WithoutTraits, ReadsWhatIsNot):
        setattr(module, each.__name__, each)
    monkeypatch.setitem(sys.modules, "elsewhere", module)


@pytest.mark.parametrize("name", BUILT_IN)
def test_our_own_are_there_and_say_what_they_read(name: str) -> None:
    assert traits_of(name).options
    assert set(traits_of(name).options) <= set(POLICY_OPTIONS)
    assert make_planner(SolaConfig(policy=name)).traits == traits_of(name)


def test_every_option_of_policies_is_one_of_the_configuration() -> None:
    assert set(POLICY_OPTIONS) <= set(SolaConfig.__dataclass_fields__)


def test_our_own_plans_are_not_checked_and_those_of_others_are() -> None:
    assert isinstance(make_planner(SolaConfig()), AttainPlanner)
    assert isinstance(make_planner(SolaConfig(policy="elsewhere:Fine")), CheckedPlanner)


def test_an_installed_policy_has_its_name(tmp_path: Path) -> None:
    with installed_policy(tmp_path, "edf", EDF):
        assert policy_class("edf").__name__ == "EarliestDeadlineFirst"
        assert SolaConfig.from_mapping({"policy": "edf", "policy_options": {"chunk": 64}})
    with pytest.raises(ConfigError, match=r"\(got 'edf'\)"):
        policy_class("edf")


def test_nobody_takes_a_name_of_ours(tmp_path: Path) -> None:
    with installed_policy(tmp_path, "attain", EDF):
        assert policy_class("attain") is AttainPlanner


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "best",
            r"one of attain, paper, alise, doubling \(got 'best'\), or a class .*module:Class",
        ),
        ("atain", r"\(got 'atain'\) \(meant: 'attain'\?\)"),
        (3, r"'policy' must be one of .*\(got 3\)"),
        ("nowhere:Edf", r"'nowhere:Edf', must be importable .*ModuleNotFoundError.*PYTHONPATH"),
        ("elsewhere:Nobody", r"must be importable .*AttributeError"),
        ("elsewhere:", r"must be one of attain, .*\(got 'elsewhere:'\)"),
        ("json:loads", r"must be a class with a method 'plan\(state\)' .*got <function loads"),
        ("elsewhere:WithoutTraits", r"must have an attribute 'traits', a PolicyTraits \(got None"),
        ("elsewhere:ReadsWhatIsNot", r"must be of window, .*\(got 'tiles'\)"),
    ],
)
def test_what_is_no_policy_is_refused_with_what_to_do(name: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SolaConfig.from_mapping({"policy": name})


def test_options_that_a_policy_reads_are_taken_and_others_refused() -> None:
    options = {"policy": "elsewhere:Fine", "tile": 64, "policy_options": {"a": 1}}
    assert SolaConfig.from_mapping(options).policy_options == {"a": 1}
    with pytest.raises(ConfigError, match=r"'levels' has an effect with 'policy' 'alise' only"):
        SolaConfig.from_mapping({"policy": "elsewhere:Fine", "levels": 3})
    with pytest.raises(ConfigError, match=r"'policy_options' .* a class that reads it only"):
        SolaConfig.from_mapping({"policy_options": {"a": 1}})
    with pytest.raises(ConfigError, match=r"'policy_options' must be an object .*got 3"):
        SolaConfig.from_mapping({"policy": "elsewhere:Fine", "policy_options": 3})


def test_shares_go_to_policies_that_give_them() -> None:
    classes = {"classes": {"chat": {"ttft_s": 1.0, "share": 0.5}}}
    assert SolaConfig.from_mapping({"policy": "elsewhere:Fine", **classes}).shares == {"chat": 0.5}
    with pytest.raises(ConfigError, match=r"'attain' or 'alise' or 'doubling' only"):
        SolaConfig.from_mapping({"policy": "paper", **classes})
