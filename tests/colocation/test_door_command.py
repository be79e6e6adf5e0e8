"""`python -m sola_sched.colocation door`: what it refuses."""

from __future__ import annotations

import pytest

pytest.importorskip("aiohttp")

from sola_sched.colocation.__main__ import main

SERVICE = ["door", "--service", "a=http://127.0.0.1:9"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["door", "--service", "=http://b:1"], "--service: must be NAME=URL (got '=http://b:1')"),
        (
            ["door", "--service", "a=here:1"],
            "must be http://HOST:PORT without a path (got 'here:1')",
        ),
        (["door", "--service", "a=http://b:x"], "must be http://HOST:PORT without a path"),
        (["door", "--service", "a=http://b:1/v1"], "must be http://HOST:PORT without a path"),
        ([*SERVICE, "--service", "a=http://b:1"], "must have each NAME once (got a, a)"),
        ([*SERVICE, "--max-awake", "0"], "--max-awake: must be a whole number >= 1 (got '0')"),
        ([*SERVICE, "--idle-s", "nan"], "--idle-s must be finite and >= 0 (got nan)"),
        ([*SERVICE, "--least-s", "-1"], "--least-s must be finite and >= 0 (got -1.0)"),
        (SERVICE, "every server must run"),
    ],
)
def test_bad_arguments_and_servers_that_do_not_run_end_with_2(
    capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(args)

    assert ended.value.code == 2
    assert message in capsys.readouterr().err
