"""The replicas that a gateway knows: what left is forgotten, what is unknown is not guessed."""

from __future__ import annotations

import pytest
from cluster_views import LinearSteps, make_routed, make_view
from hypothesis import given, settings
from hypothesis import strategies as st

from sola_sched.cluster.all_routers import ALL_ROUTERS
from sola_sched.cluster.view import InstanceView
from sola_sched.errors import ConfigError
from sola_sched.serving.policies import make_router
from sola_sched.serving.replicas import Replica, Replicas


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def replicas_of(router: str = "least-ttft", names: str = "ab") -> Replicas:
    replicas = Replicas(make_router(router), Clock())
    replicas.sync({name: f"http://{name}:1" for name in names})
    return replicas


def by_name(replicas: Replicas) -> dict[str, Replica]:
    return {replica.name: replica for replica in replicas}


def chosen(replicas: Replicas, req_id: str = "r") -> Replica:
    choice = replicas.choose(make_routed(req_id), ())
    assert isinstance(choice, Replica)
    return choice


@pytest.mark.parametrize("router", sorted(ALL_ROUTERS))
def test_replicas_that_came_and_went_leave_nothing_behind(router: str) -> None:
    replicas = replicas_of(router)
    stay = {name: f"http://{name}:1" for name in "ab"}
    for number in range(200):
        replicas.sync(stay | {f"x{number}": "http://x:1"})
        replica = chosen(replicas, f"r{number}")
        with replicas.attempt(replica, make_routed(f"r{number}"), None):
            pass
        replicas.sync(stay)

    assert len(replicas.reports.views) == 2
    assert {chosen(replicas, f"s{n}").name for n in range(4)} <= set("ab")


def test_a_request_on_one_that_left_ends_there_and_weighs_on_nobody_else() -> None:
    replicas = replicas_of("memory")
    old = by_name(replicas)["a"]
    request = make_routed("long")
    attempt = replicas.attempt(old, request, None)
    attempt.__enter__()
    replicas.sync({"b": "http://b:1"})
    replicas.sync({"b": "http://b:1", "c": "http://c:1"})
    new = by_name(replicas)["c"]

    assert new.position != old.position
    attempt.__exit__(None, None, None)

    replicas.sync({"b": "http://b:1", "c": "http://c:1", "d": "http://d:1"})
    assert by_name(replicas)["d"].position == old.position
    assert replicas.reports.views[old.position].num_requests == 0


def test_what_comes_late_for_one_that_left_changes_nothing_of_its_successor() -> None:
    replicas = replicas_of()
    old = by_name(replicas)["a"]
    replicas.sync({"b": "http://b:1"})
    replicas.sync({"b": "http://b:1", "c": "http://c:1"})
    assert by_name(replicas)["c"].position == old.position

    replicas.reported(old, make_view(running=[1000.0], reported_s=100.0))
    with replicas.attempt(old, make_routed("late"), None):
        assert replicas.reports.views[old.position].num_requests == 0

    assert not by_name(replicas)["c"].has_reported


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["come", "go", "send", "end", "die"]),
                          st.integers(0, 7)), max_size=60))  # fmt: skip
def test_positions_are_those_of_the_replicas_that_have_them(
    steps: list[tuple[str, int]],
) -> None:
    replicas, urls, open_ = replicas_of("workload"), dict[str, str](), []
    for number, (word, which) in enumerate(steps):
        if word == "come":
            urls[f"x{number}"] = "http://x:1"
        elif word == "go" and urls:
            urls.pop(sorted(urls)[which % len(urls)])
        replicas.sync(urls)
        if word == "send" and urls:
            choice = replicas.choose(make_routed(f"r{number}"), ())
            if isinstance(choice, Replica):
                attempt = replicas.attempt(choice, make_routed(f"r{number}"), None)
                attempt.__enter__()
                open_.append(attempt)
        elif word == "end" and open_:
            open_.pop(which % len(open_)).__exit__(None, None, None)
        elif word == "die" and urls:
            replicas.lost(by_name(replicas)[sorted(urls)[which % len(urls)]])

        positions = [replica.position for replica in (*replicas, *replicas._left)]
        assert len(set(positions)) == len(positions)
        views = replicas.reports.views
        for replica in replicas:
            assert views[replica.position].num_requests == len(replica.attempts)
            assert views[replica.position].is_alive
    for attempt in open_:
        attempt.__exit__(None, None, None)
    assert len(replicas.reports.views) <= 1 + max(
        (replica.position for replica in replicas), default=-1
    )


def test_nothing_is_shown_of_the_load_of_one_that_has_not_reported() -> None:
    replicas = replicas_of()
    replicas.reported(by_name(replicas)["a"], make_view(running=[10.0], reported_s=99.0))

    known, unknown = replicas.shown()

    assert (known["num_running"], known["num_free_slots"], known["report_age_s"]) == (1, 255, 1.0)
    load = ("report_age_s", "num_running", "num_waiting", "num_lost", "num_free_slots",
            "kv_used_tokens")  # fmt: skip
    assert [unknown[name] for name in load] == [None] * len(load)
    assert unknown["num_in_flight"] == 0


def test_one_that_has_not_reported_is_taken_to_be_like_one_that_has() -> None:
    """Its step times are not those of some GPU, or it would get all requests of a slow cluster."""
    slow = LinearSteps(step_s=0.5, per_prompt_token_s=0.01)
    replicas = replicas_of()

    replicas.reported(by_name(replicas)["a"], make_view(model=slow, reported_s=99.0))
    replicas.sync({name: f"http://{name}:1" for name in "abc"})

    names = [_sent(replicas, f"r{number}").name for number in range(9)]
    assert {name: names.count(name) for name in names} == {"a": 3, "b": 3, "c": 3}


def test_a_request_is_not_refused_for_what_is_not_known() -> None:
    replicas = replicas_of()
    small: InstanceView = make_view(max_model_len=50, reported_s=99.0)
    replicas.reported(by_name(replicas)["a"], small)

    assert chosen(replicas).name == "b"


def _sent(replicas: Replicas, req_id: str) -> Replica:
    """Where a request goes that stays there."""
    replica = chosen(replicas, req_id)
    replicas.attempt(replica, make_routed(req_id), None).__enter__()
    return replica


@pytest.mark.parametrize("router", sorted(ALL_ROUTERS))
def test_one_that_died_under_load_and_is_started_again_is_not_taken_to_be_full(router: str) -> None:
    replicas = replicas_of(router)
    a, b = by_name(replicas).values()
    replicas.reported(a, make_view(running=[900.0] * 90, waiting=[500.0] * 50, reported_s=99.0))
    replicas.reported(b, make_view(running=[900.0] * 20, reported_s=99.0))

    replicas.lost(a)
    replicas.found(a)  # its engine reports with its first step: nothing comes before a request

    view = replicas.reports.views[a.position]
    assert (a.has_reported, view.num_requests, view.is_alive) == (False, 0, True)
    assert view.max_num_seqs == 256  # as the others have it
    assert "a" in {_sent(replicas, f"r{number}").name for number in range(8)} or router == "single"
    replicas.reported(a, make_view(running=[1.0], reported_s=100.0))
    assert replicas.reports.views[a.position].num_running == 1


@pytest.mark.parametrize("router", sorted(ALL_ROUTERS))
def test_one_that_is_started_again_takes_no_longer_prompts_than_before(router: str) -> None:
    replicas = replicas_of(router, "ba")
    large, small = replicas
    replicas.reported(large, make_view(max_model_len=32768, reported_s=99.0))
    limits = {"max_model_len": 4096, "kv_capacity_tokens": 9000, "max_num_seqs": 8}
    replicas.reported(small, make_view(**limits, running=[1.0], reported_s=99.0))

    replicas.lost(small)
    replicas.found(small)

    view = replicas.reports.views[small.position]
    assert {name: getattr(view, name) for name in limits} == limits
    assert view.num_requests == 0
    for number in range(4):
        request = make_routed(f"r{number}", prompt_tokens=8000)
        assert replicas.choose(request, ()) is large
    assert replicas.with_longer_context(small, 8000) == {large}


def test_one_that_has_never_said_what_it_takes_gives_way_to_those_that_have() -> None:
    replicas = replicas_of(names="abc")
    unknown, small, large = replicas
    assert replicas.with_longer_context(unknown, 8000) == set()

    replicas.reported(small, make_view(max_model_len=4096, reported_s=99.0))
    replicas.reported(large, make_view(max_model_len=32768, reported_s=99.0))

    assert replicas.with_longer_context(unknown, 8000) == {large}
    assert replicas.with_longer_context(unknown, 40_000) == {small, large}


@pytest.mark.parametrize("router", sorted(ALL_ROUTERS))
def test_a_prompt_that_is_taken_for_too_long_goes_to_any_of_those_that_take_the_longest(
    router: str,
) -> None:
    """What it has is a guess; and where it has failed it does not go again."""
    replicas = replicas_of(router, "sabcd")
    for replica in replicas:
        length = 4096 if replica.name == "s" else 8192
        replicas.reported(replica, make_view(max_model_len=length, reported_s=99.0))
    long = {"prompt_tokens": 9000}

    names = []
    for number in range(40):
        choice = replicas.choose(make_routed(f"r{number}", **long), ())
        assert isinstance(choice, Replica)
        replicas.attempt(choice, make_routed(f"r{number}", **long), None).__enter__()
        names.append(choice.name)
    again = replicas.choose(make_routed("z", **long, avoid=[by_name(replicas)["a"].position]), ())

    assert isinstance(again, Replica)
    assert again.name not in "sa"
    assert set(names) == ({"a"} if router == "single" else set("abcd"))


@pytest.mark.parametrize("url", ["http://me:s3cret@b:1", "http://s3cret@b:1"])
def test_a_url_with_a_password_is_refused_and_not_shown(url: str) -> None:
    replicas = replicas_of()

    with pytest.raises(ConfigError, match="without a user and password") as caught:
        replicas.sync({"b": url})

    assert "s3cret" not in str(caught.value)
    assert set(by_name(replicas)) == {"a", "b"}
