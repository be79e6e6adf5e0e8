"""Services on a fake Ray Serve whose placement follows them: added, removed, wrongly described."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from fake_serve import FakeServe
from raw_answers import answering, http

from sola_sched.adaptive_placement.__main__ import main
from sola_sched.adaptive_placement.follow import Follower
from sola_sched.adaptive_placement.observe import Observed, Observer, counts
from sola_sched.adaptive_placement.search import Options
from sola_sched.adaptive_placement.serve_api import ServeApi
from sola_sched.cluster.sharing.placement import Cluster
from sola_sched.errors import DeploymentError, InfeasibleError
from sola_sched.plan.outputs.deploy import engines_of

CHAT = {"name": "chat", "model": "llama-3-8b", "rate": 1, "ttft": 1500, "tpot": 80,
        "prompt": 200, "output": 60}  # fmt: skip
CODE = CHAT | {"name": "code", "model": "llama-2-7b", "rate": 0.3}
TALK = CHAT | {"name": "talk", "model": "opt-6.7b", "rate": 0.3}


class FakeObserver(Observer):
    """Says what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Observed] = {}
        self.asked: list[dict[str, str]] = []

    def since_last(self, gateways: Any) -> dict[str, Observed]:
        self.asked.append(dict(gateways))
        return self.seen


@dataclass
class World:
    """A fake Serve, a clock, descriptions, and the loop."""

    serve: FakeServe
    address: str
    text: str = "[]"
    now_s: float = 0.0
    num_gpus: int = 4
    observer: FakeObserver = field(default_factory=FakeObserver)

    def __post_init__(self) -> None:
        self.follower = self.make()

    def make(self) -> Follower:
        api = ServeApi(self.address, clock=lambda: self.now_s, sleep=self.sleep)
        return Follower(
            api, lambda: self.text, Options("a100", Cluster.of(self.num_gpus)), interval_s=100.0,
            observer=self.observer, limit_s=60.0, clock=lambda: self.now_s, sleep=self.sleep,
        )  # fmt: skip

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def describe(self, *services: dict[str, Any]) -> None:
        self.text = json.dumps(services)
        self.follower.tick()

    def served(self) -> set[str]:
        """Services that have an engine and a gateway."""
        with_engine = {name.partition("--")[0] for name in self.serve.engines}
        return with_engine & set(self.serve.names)


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


def test_trouble_with_serve_is_an_error_and_nothing_is_changed(world) -> None:
    world.describe(CHAT)
    before = world.serve.names
    world.serve.refuse = "1 validation error"

    with pytest.raises(DeploymentError, match="HTTP 400: 1 validation error"):
        world.describe(CHAT, CODE)

    assert world.serve.names == before
    world.serve.refuse = ""
    with pytest.raises(InfeasibleError):
        world.describe(CHAT | {"model": "qwen1.5-72b", "prompt": 2_000_000})
    assert world.serve.names == before
    with pytest.raises(DeploymentError, match="must be reached"):
        ServeApi("http://127.0.0.1:9").details()


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


def test_counters_of_engines_are_read_and_differences_taken() -> None:
    def text(num: int, met: int) -> str:
        return (
            "# TYPE vllm:request_prompt_tokens histogram\n"
            f'vllm:request_prompt_tokens_count{{engine="0"}} {num}\n'
            f'vllm:request_prompt_tokens_sum{{engine="0"}} {100 * num}\n'
            "# TYPE vllm:request_generation_tokens histogram\n"
            f'vllm:request_generation_tokens_sum{{engine="0"}} {20 * num}\n'
            "# TYPE sola_requests counter\n"
            f'sola_requests_total{{outcome="attained",slo_class="default"}} {met}\n'
            f'sola_requests_total{{outcome="missed",slo_class="default"}} {num - met}\n'
            f'sola_requests_total{{outcome="aborted",slo_class="default"}} 3\n'
        )

    pages = {
        "http://gate/replicas": json.dumps([{"url": "http://one"}, {"url": "http://two"}]),
        "http://one/metrics": text(10, 9),
        "http://two/metrics": text(4, 4),
    }

    def fetch(url: str) -> str:
        if url not in pages:
            raise OSError(url)
        return pages[url]

    observer = Observer(fetch)
    assert counts(pages["http://one/metrics"])["attained"] == 9
    first = observer.since_last({"chat": "http://gate", "gone": "http://away"})
    pages["http://one/metrics"] = text(16, 12)
    del pages["http://two/metrics"]
    second = observer.since_last({"chat": "http://gate"})
    pages["http://two/metrics"] = text(6, 5)
    third = observer.since_last({"chat": "http://gate"})
    gate = pages.pop("http://gate/replicas")
    assert observer.since_last({"chat": "http://gate"}) == {}
    pages["http://gate/replicas"] = gate
    pages["http://one/metrics"] = text(17, 13)
    fourth = observer.since_last({"chat": "http://gate"})
    pages["http://one/metrics"] = text(3, 2)
    fifth = observer.since_last({"chat": "http://gate"})

    assert first == {"chat": Observed(14, 13, 14, 100.0, 20.0)}
    assert second == {}  # what one engine counted is not the service's load
    assert third == {"chat": Observed(2, 1, 2, 100.0, 20.0)}
    assert fourth == {"chat": Observed(1, 1, 1, 100.0, 20.0)}  # no engine is new
    assert fifth == {"chat": Observed(3, 2, 3, 100.0, 20.0)}  # at an address that is known


def test_what_an_engine_counted_before_it_could_be_read_is_no_load_of_an_interval() -> None:
    pages = {"http://gate/replicas": json.dumps([{"url": "http://one"}])}

    def fetch(url: str) -> str:
        if url not in pages:
            raise OSError(url)
        return pages[url]

    def count(num: int) -> None:
        pages["http://one/metrics"] = f"vllm:request_prompt_tokens_count {num}\n"

    observer = Observer(fetch)
    assert observer.since_last({"chat": "http://gate"}) == {}  # silent at the baseline
    count(100_000)
    assert observer.since_last({"chat": "http://gate"}) == {"chat": Observed()}
    count(100_003)
    assert observer.since_last({"chat": "http://gate"}) == {"chat": Observed(3)}
