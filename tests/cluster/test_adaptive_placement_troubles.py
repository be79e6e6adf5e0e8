"""What keeps a placement from following: Serve, addresses, applications of others, arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fake_serve import FakeServe
from placed_world import CHAT, CODE, World
from raw_answers import answering, http

from sola_sched.adaptive_placement.cli import main
from sola_sched.adaptive_placement.follow import Follower
from sola_sched.adaptive_placement.observe import Observed
from sola_sched.adaptive_placement.serve_api import ServeApi
from sola_sched.errors import DeploymentError, InfeasibleError


@pytest.fixture
def world() -> Iterator[World]:
    serve = FakeServe()
    with serve.running() as address:
        yield World(serve, address)


def test_trouble_with_serve_is_an_error_and_nothing_is_changed(world) -> None:
    world.describe(CHAT)
    before = world.serve.names
    world.serve.refuse = "1 validation error"

    with pytest.raises(DeploymentError, match="HTTP 400: 1 validation error"):
        world.describe(CHAT, CODE)

    assert world.serve.names == before
    world.serve.refuse = ""
    engine = {"model": "/models/long", "max_model_len": 10_000_000}
    long = {"model": "qwen1.5-72b", "prompt": 2_000_000, "engine": engine}
    with pytest.raises(InfeasibleError):
        world.describe(CHAT | long)
    assert world.serve.names == before
    with pytest.raises(DeploymentError, match="must be reached"):
        ServeApi("http://127.0.0.1:9").details()


@pytest.mark.parametrize("is_late", [False, True], ids=["observing", "placing"])
def test_serve_that_does_not_answer_once_is_no_reason_to_place_anew(world, is_late, caplog) -> None:
    """The interval is still over, and the services are still the same."""
    world.describe(CHAT, CODE)
    ended, changed = [], []
    controller = world.follower._controller
    end, change = controller.end_interval, controller.services_changed
    controller.end_interval = lambda *args: ended.append(args[1]) or end(*args)
    controller.services_changed = lambda *args: changed.append(args) or change(*args)
    world.observer.seen = {"chat": Observed(100, 90, 100, 250.0, 75.0)}
    api, left = world.follower._api, [1]
    name = "deployed" if is_late else "details"
    ask = getattr(api, name)

    def fail_once() -> Any:
        # The services' gateways are asked for first, then what is deployed.
        if len(world.observer.asked) >= is_late and left.pop(0) if left else False:
            raise DeploymentError("the dashboard is away")
        return ask()

    setattr(api, name, fail_once)
    world.now_s = world.follower.interval_s + 50.0
    follow_for(world.follower, 3)

    assert "the dashboard is away" in caplog.text
    assert (ended, changed) == ([0.9], [])
    assert len(world.observer.asked) == 1


def test_what_has_been_decided_is_done_when_serve_answers_again(world) -> None:
    world.describe(CHAT)
    world.serve.refuse = "not now"
    with pytest.raises(DeploymentError):
        world.describe(CHAT, CODE)
    decided = world.follower._decided
    world.serve.refuse = ""

    world.follower.tick()

    assert decided is not None
    assert world.follower._decided is None
    assert world.served() == {"chat", "code"}


class Stopped(Exception):
    """The loop has gone on for long enough."""


def follow_for(follower: Follower, num_ticks: int) -> None:
    """Let the loop run for some ticks."""
    left = iter(range(num_ticks - 1))

    def sleep(seconds: float) -> None:
        if next(left, None) is None:
            raise Stopped

    follower._sleep = sleep
    with pytest.raises(Stopped):
        follower.run()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (http(b"<html><body>Sign in" + b" please" * 1000), "got '<html><body>Sign in please"),
        (http(b""), "got ''"),
        (http(b"\xff\xfe\xfd"), "must be Ray's dashboard"),
        (http(b"[" * 200_000), "must be Ray's dashboard"),
        (http(b"7"), "got '7': it must be an object"),
        (http(b"[[1, 2]]"), "it must be an object"),
        (http(b'{"status": "ok"}'), "'applications' must be an object"),
        (http(b'{"applications": []}'), "'applications' must be an object"),
        (http(b'{"applications": {"a": null}}'), "application 'a' must be an object"),
        (
            http(b'{"applications": {"a": {"deployed_app_config": "b"}}}'),
            "'deployed_app_config' must be an object",
        ),
        (http(b'{"applications": {"a": {"deployments": 1}}}'), "'deployments' must be an object"),
        (
            http(b'{"applications": {"a": {"deployments": {"b": 1}}}}'),
            "deployment 'b' must be an object",
        ),
        (
            http(b'{"applications": {"a": {"deployments": {"b": {"replicas": 1}}}}}'),
            "'replicas' must be a list of objects",
        ),
        (
            http(b'{"applications": {"a": {"deployments": {"b": {"replicas": ["c"]}}}}}'),
            "'replicas' must be a list of objects",
        ),
    ],
    ids=[
        *("html", "empty", "bytes", "deep", "number", "pairs", "other", "list", "null"),
        *("config", "deployments", "deployment", "replicas", "replica"),
    ],
)
def test_address_of_something_else_is_named_and_asked_again(caplog, answer, message) -> None:
    with answering(answer) as address:
        follow_for(World(FakeServe(), address, json.dumps([CHAT])).follower, 3)

    errors = [record.getMessage() for record in caplog.records]
    assert len(errors) == 3
    for said in errors:
        assert f"what answers at {address} must be Ray's dashboard" in said
        assert message in said
        assert said.endswith("correct '--address'.")
        assert len(said) < 500


@pytest.mark.parametrize(
    "args",
    [
        {"model": "chat", "follows": "chat"},
        {"model": "m", "front": "none", "options": {"served_model_name": "chat"}},
        {"model": "m", "front": "none", "engines": [{"resources": {"sola_node_0": 0.001}}]},
    ],
    ids=["port", "engines", "env"],
)
def test_application_of_ours_that_plan_has_not_written_is_named(world, caplog, args) -> None:
    theirs = {"name": "mine", "import_path": "sola_sched.serving.ray_app:build", "args": args}
    world.serve.put({"applications": [theirs]})
    world.text = json.dumps([CHAT])

    follow_for(world.follower, 2)

    assert caplog.text.count("application 'mine' must be as `plan` writes it") == 2
    assert world.serve.names == ["mine"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--address", "here:8265"],
            "argument --address: must be http://HOST:PORT without a path (got 'here:8265')",
        ),
        (
            ["--address", "http://me:s3cret@here:8265"],
            "must be http://HOST:PORT without a user and password (got '...@here:8265')",
        ),
        (["--first-port", "70000"], "must be a port, 0 to 65535"),
        (["--num-gpus", "12"], "'num_gpus' must fill nodes of 8 (got 12)"),
        (["--interval-s", "nan"], "'--interval-s' must hold finite numbers > 0"),
        (["--services", "nowhere.json"], "'--services' must be a file (got nowhere.json)"),
    ],
)
def test_bad_arguments_end_the_command_with_2(tmp_path, capsys, args, message) -> None:
    services = tmp_path / "services.json"
    services.write_text(json.dumps([CHAT]))

    code = main(["--services", str(services), "--gpu", "a100", "--num-gpus", "8", *args])

    assert code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "s3cret" not in error
