"""Services on a fake Ray Serve whose placement follows them: added, removed, wrongly described."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from fake_serve import FakeServe
from placed_world import CHAT, CODE, TALK, World

from sola_sched.adaptive_placement.observe import Observed
from sola_sched.errors import DeploymentError
from sola_sched.plan.outputs.deploy import engines_of


@pytest.fixture
def world() -> Iterator[World]:
    serve = FakeServe()
    with serve.running() as address:
        yield World(serve, address)


def test_each_service_gets_a_gateway_and_engines_on_gpus_of_their_own_or_with_turns(world) -> None:
    world.describe(CHAT, CODE)

    assert world.served() == {"chat", "code"}
    places: dict[str, list[dict[str, Any]]] = {}
    for name, args in world.serve.engines.items():
        places.setdefault(name.partition("--")[2], []).append(args["engines"][0]["options"])
    for held in places.values():
        assert sum(options["gpu_memory_utilization"] for options in held) <= 0.9
        has_turns = ["turns" in o["additional_config"]["sola_sched"] for o in held]
        assert has_turns == [len(held) > 1] * len(held)
    world.follower.tick()
    assert world.serve.history[-1] == world.serve.names


def test_added_and_removed_services_leave_the_others_alone_while_there_is_room(world) -> None:
    world.describe(CHAT)
    started = list(world.serve.started)

    world.describe(CHAT, CODE)
    both = world.served()
    world.describe(CODE)

    assert both == {"chat", "code"}
    assert world.served() == {"code"}
    assert [n for n in world.serve.started if n == "chat"] == ["chat"]  # the gateway, once
    assert "chat" not in world.serve.names
    assert started[0] == "chat"


def test_gateways_stay_through_every_change_so_that_requests_can_wait_there(world) -> None:
    world.describe(CHAT, CODE)

    world.describe(CHAT | {"rate": 4}, CODE, TALK)

    assert world.served() == {"chat", "code", "talk"}
    assert all({"chat", "code"} <= set(names) for names in world.serve.history)
    assert [n for n in world.serve.started if "--" not in n] == ["chat", "code", "talk"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be used"),
        ("{}", "must be a list"),
        (json.dumps([CHAT, CHAT]), "must be unique"),
        (json.dumps([CHAT | {"rate": 0}]), "rate of service chat"),
        (json.dumps([CHAT | {"colour": "red"}]), "got 'colour'"),
        (json.dumps([CHAT | {"model": "gpt-9"}]), "'model' must be one of"),
        (json.dumps([CHAT, CODE | {"rate": "much"}]), "'code' is not added"),
        (json.dumps([CHAT, CODE | {"prompt": 1e308}]), "'prompt' of service code must be from"),
        (json.dumps([CHAT, CODE | {"output": 1e9}]), "'output' of service code must be from"),
        (json.dumps([CHAT, CODE | {"rate": 1e-320}]), "'rate' of service code must be from"),
        (json.dumps([CHAT, CODE | {"ttft": 1e-321}]), "'ttft' of service code must be from"),
        (json.dumps([CHAT, CODE | {"tpot": 1e300}]), "'tpot' of service code must be from"),
        (json.dumps([CHAT, CODE | {"rate": 10**400}]), "'code' is not added"),
        (json.dumps([CHAT, {k: v for k, v in CODE.items() if k != "rate"}]), "must have 'rate'"),
    ],
)  # fmt: skip
def test_wrong_description_changes_nothing_and_is_named(world, caplog, text, message) -> None:
    world.describe(CHAT)
    before = list(world.serve.history)

    world.text = text
    with caplog.at_level(logging.ERROR):
        world.follower.tick()

    assert message in caplog.text
    assert world.serve.history == before


def test_model_that_cannot_start_is_given_up_and_the_others_are_as_before(world, caplog) -> None:
    world.num_gpus = 1
    world.follower = world.make()
    world.describe(CHAT)
    before = dict(world.serve.engines)
    world.serve.bad_models = {"facebook/opt-6.7b"}

    with pytest.raises(DeploymentError, match="no such model"):
        world.describe(CHAT, TALK)
    assert world.serve.engines == before
    world.follower.tick()

    assert "'talk' cannot start as it is described and is not added" in caplog.text
    assert world.serve.engines == before
    assert world.served() == {"chat"}
    assert "talk" not in world.serve.names


def test_changed_service_that_cannot_start_goes_on_as_before(world, caplog) -> None:
    world.describe(CHAT)
    before = dict(world.serve.engines)
    world.serve.bad_models = {"facebook/opt-6.7b"}

    with pytest.raises(DeploymentError):
        world.describe(CHAT | {"model": "opt-6.7b"})
    world.follower.tick()

    assert "'chat' cannot start as it is described: it goes on as before" in caplog.text
    assert world.serve.engines == before


def test_changed_target_starts_that_service_anew_and_no_other(world) -> None:
    world.describe(CHAT, CODE)
    alone = all(len({n for n in world.serve.engines if n.endswith(p)}) == 1
                for p in {n.partition("--")[2] for n in world.serve.engines})  # fmt: skip
    world.serve.started.clear()

    world.describe(CHAT, CODE | {"tpot": 120})

    assert any(name.startswith("code--") for name in world.serve.started)
    assert not alone or not any(name.startswith("chat") for name in world.serve.started)
    (config,) = {
        args["engines"][0]["options"]["additional_config"]["sola_sched"]["tpot_s"]
        for name, args in world.serve.engines.items() if name.startswith("code")
    }  # fmt: skip
    assert config == pytest.approx(0.12)


def test_changed_arguments_of_its_engine_start_a_service_anew(world) -> None:
    engine = {"model": "/models/mine", "additional_config": {"sola_sched": {"overload": "reject"}}}
    world.describe(CHAT | {"engine": engine}, CODE)
    world.serve.started.clear()

    world.follower = world.make()
    world.follower.tick()
    assert world.serve.started == []

    world.describe(CHAT | {"engine": engine | {"model": "/models/other"}}, CODE)
    assert any(name.startswith("chat--") for name in world.serve.started)
    models = {n.partition("--")[0]: args["model"] for n, args in world.serve.engines.items()}
    assert models["chat"] == "/models/other"


def test_a_controller_that_starts_anew_goes_on_from_what_is_deployed(world) -> None:
    world.describe(CHAT, CODE)
    world.serve.started.clear()

    world.follower = world.make()
    world.follower.tick()

    assert world.serve.started == []
    # What engines had counted before is no load of its first interval.
    assert [set(gateways) for gateways in world.observer.asked] == [{"chat", "code"}]


def test_descriptions_in_the_middle_of_being_written_change_nothing(world, caplog) -> None:
    world.describe(CHAT)
    served = world.served()

    def read() -> str:
        return b"\xc3".decode()

    for world.follower._read in (read, lambda: "[" * 200_000):
        world.follower.tick()

    assert world.served() == served
    assert caplog.text.count("nothing is changed") == 2


def test_applications_of_others_stay(world) -> None:
    other = {"name": "other", "import_path": "their.app:app", "args": {"model": "x"}}
    world.serve.put({"applications": [other]})

    world.describe(CHAT)
    world.describe(CODE)

    assert "other" in world.serve.names
    assert world.serve.started.count("other") == 1


@pytest.mark.parametrize("is_bad", [False, True])
def test_what_others_do_while_engines_start_and_stop_is_left_as_they_want_it(world, is_bad) -> None:
    """To deploy is to replace all applications: those of others are what they are by then."""
    old = {"name": "old", "import_path": "their.app:app", "args": {"model": "x"}}
    odd = {"name": "odd", "import_path": "sola_sched.serving.ray_app:build",
           "args": {"front": "none", "model": "y"}}  # fmt: skip
    world.serve.put({"applications": [old]})
    world.describe(CHAT)
    steps = iter(
        [lambda now: [*now, old | {"name": "new"}],
         lambda now: [*(each for each in now if each["name"] != "old"), odd],
         lambda now: [each | ({"args": {"model": "z"}} if each["name"] == "new" else {})
                      for each in now]]
    )  # fmt: skip
    sleep = world.sleep

    def slept(seconds: float) -> None:
        if (step := next(steps, None)) is not None:
            world.serve.put({"applications": step(world.serve.configs)})
        sleep(seconds)

    world.serve.looks, world.follower._api._sleep = 6, slept
    world.serve.bad_models = {"facebook/opt-6.7b"} if is_bad else set()
    with pytest.raises(DeploymentError) if is_bad else contextlib.nullcontext():
        world.describe(CHAT | {"model": "opt-6.7b"}, CODE)

    found = {each["name"]: each["args"] for each in world.serve.configs}
    assert next(steps, None) is None
    assert found["new"] == {"model": "z"}
    assert found["odd"] == odd["args"]
    assert "old" not in found
    assert "chat" in world.served()


def test_load_that_grows_is_answered_at_the_end_of_the_interval(world, caplog) -> None:
    world.describe(CHAT, CODE)
    few = len(world.serve.engines)
    # A hundred times as many requests as described, most of them late.
    world.observer.seen = {
        "chat": Observed(2500, 500, 2500, 200 * 1.28, 60 * 1.28),
        "code": Observed(30, 30, 30, 200 * 1.28, 60 * 1.28),
    }
    world.now_s = world.follower.interval_s - 1.0
    world.follower.tick()
    assert len(world.serve.engines) == few

    world.now_s = 10_000.0
    world.follower.tick()

    assert world.observer.asked == [
        {"chat": "http://127.0.0.1:9000", "code": "http://127.0.0.1:9001"}
    ]
    chats = [name for name in world.serve.engines if name.startswith("chat--")]
    degrees = [len(p.gpus) for s, p in engines_of(world.serve.configs) if s == "chat"]
    assert sum(degrees) > 1, chats
