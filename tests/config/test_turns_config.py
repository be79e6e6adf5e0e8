"""The option `turns`."""

from __future__ import annotations

import pytest

from sola_sched.config.sola_config import SolaConfig
from sola_sched.config.turns import TurnsConfig
from sola_sched.errors import ConfigError


def test_the_option_is_read() -> None:
    config = SolaConfig.from_mapping({"turns": {"group": "gpu0", "share": 0.5}})

    assert config.turns == TurnsConfig("gpu0", 0.5, 2.0)
    assert SolaConfig.from_mapping({"turns": None}).turns is None


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ("gpu0", "'turns' must be an object with 'group'"),
        ({"share": 0.5}, "'turns' must be an object with 'group'"),
        ({"group": ""}, r"'turns\.group' must be a name or a path \(got ''\)"),
        ({"group": "g", "share": 1.0}, r"'turns\.share' must be a number in \[0, 1\)"),
        ({"group": "g", "limit_s": 0}, r"'turns\.limit_s' must be a number in \(0, inf\)"),
        ({"group": "g", "shares": 0.5}, r"Unknown option 'shares' \(write 'share'\) in 'turns'"),
    ],
)
def test_what_breaks_its_rule_is_refused(turns: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SolaConfig.from_mapping({"turns": turns})
