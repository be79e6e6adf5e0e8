"""Where machine code is kept, and that what is compiled does what the source says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sola_sched.compiled import kept_code

HELPERS = Path(__file__).parents[1] / "helpers"

#: Compiles a function of one argument twice, with something done to the kept files between.
_TWICE = """
import sys
from pathlib import Path
from sola_sched.compiled import functions, kept_code

def next_number(x):
    return x + 1

def compiled():
    function = functions.for_types_of(functions.entry(next_number), 1)
    assert function(2) == 3

compiled()
kept_code.set_ready()
(damaged,) = kept_code.folder().rglob(f"*next_number*.{sys.argv[1]}")
whole = damaged.read_bytes()
damaged.write_bytes({"empty": b"", "cut": whole[:60], "zeros": bytes(len(whole))}[sys.argv[2]])
compiled()
assert len(damaged.read_bytes()) > 60, "it is written anew"
compiled()
print(kept_code.is_ready())
"""

#: Compiles functions with a disk that takes no more.
_FULL = """
import resource, signal
from sola_sched.compiled import functions, kept_code

def next_number(x):
    return x + 1

def number_before(x):
    return x - 1

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, -1))
for function in (next_number, number_before):
    functions.for_types_of(functions.entry(function), 1)
kept_code.set_ready()
resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
assert not kept_code.is_ready()
"""

#: Prints from where it is, and how often kept code was found for a function, and was not.
_WARM_UP = """
import sola_sched
from sola_sched.core import step_records
from sola_sched.core.steps import warm_up

warm_up()
stats = step_records.end_step.stats
print(sola_sched.__file__, sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""

#: Compiles a function for a user whom the machine does not know.
_NO_HOME = """
import pwd
from sola_sched.compiled import functions, kept_code

def unknown(uid):
    raise KeyError(uid)

def next_number(x):
    return x + 1

pwd.getpwuid = unknown
assert functions.for_types_of(functions.entry(next_number), 1)(2) == 3
print(kept_code.folder())
"""

#: Prints what 150 random states are planned to, three after another by each planner.
_PLANS = """
import numpy as np
from random_states import random_builder
from states import as_lists, make_attain

for seed in range(50):
    rng = np.random.default_rng(seed)
    planner = make_attain(
        best_effort_share=0.05 * (seed % 2), overload=("defer", "reject")[seed // 2 % 2]
    )
    for _ in range(3):
        print(as_lists(planner.plan(random_builder(rng, 1 + seed % 3).build())))
"""

#: Prints what cost models know after random steps, learned from live ones alone and given.
_COSTS = """
import numpy as np
from step_costs import make_model, random_steps

from sola_sched.cost.model import CostModel

for seed in range(8):
    rng = np.random.default_rng(seed)
    model = make_model() if seed % 2 else CostModel()
    for noise in rng.permutation((0.05, 0.3, 1.5)):
        for shape, time_s in random_steps(rng, 200, slowdown=rng.uniform(0.3, 3.0), noise=noise):
            print(model.step_s(shape))
            model.observe(shape, time_s)
            print(model.gamma, model.coefficients, model.mean_abs_error, model.is_ready)
"""

#: Prints what a monitor knows after random events.
_EVENTS = """
import numpy as np
from monitored import Engine, KINDS_OF_EVENTS

for seed in range(20):
    rng, engine = np.random.default_rng(seed), Engine()
    for _ in range(200):
        getattr(engine, KINDS_OF_EVENTS[rng.integers(len(KINDS_OF_EVENTS))])(int(rng.integers(6)))
        print(engine.look())
"""


def test_machine_code_of_other_sources_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kept_code._digest()
    (tmp_path / "planner" / "attain").mkdir(parents=True)
    source = tmp_path / "planner" / "attain" / "tuning.py"
    source.write_text("near = 0.5")
    monkeypatch.setattr(kept_code, "_PACKAGE", tmp_path)
    digest = kept_code._digest()
    source.write_text("near = 0.7")

    assert len({before, digest, kept_code._digest()}) == 3
    source.write_text("near = 0.5")
    assert kept_code._digest() == digest


def test_the_same_sources_elsewhere_are_not_compiled_again(tmp_path: Path) -> None:
    script = tmp_path / "warm.py"
    script.write_text(_WARM_UP)
    package = Path(kept_code._PACKAGE)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(package, elsewhere / "sola_sched", copy_function=shutil.copyfile)
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}

    first = run_script(script, **cache).stdout.split()
    second = run_script(script, PYTHONPATH=str(elsewhere), **cache).stdout.split()

    assert first == [str(package / "__init__.py"), "0", "1"]
    assert second == [str(elsewhere / "sola_sched" / "__init__.py"), "1", "0"]


def test_functions_work_where_nothing_can_be_kept(tmp_path: Path) -> None:
    code = "from sola_sched.core.state import RequestTable; print(RequestTable().add('r'))"
    (tmp_path / "file").touch()

    assert run(code, XDG_CACHE_HOME=str(tmp_path / "file")) == "0\n"


@pytest.mark.parametrize("how", ["empty", "cut", "zeros"])
@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_a_damaged_file_of_kept_code_is_compiled_anew(kind: str, how: str, tmp_path: Path) -> None:
    script = tmp_path / "twice.py"
    script.write_text(_TWICE)

    told = run_script(script, kind, how, XDG_CACHE_HOME=str(tmp_path))

    assert told.stdout == "False\n", "other engines shall not believe that all is there"
    assert told.stderr.count(" is damaged (") == 1


def test_functions_work_on_a_full_disk(tmp_path: Path) -> None:
    script = tmp_path / "full.py"
    script.write_text(_FULL)

    told = run_script(script, XDG_CACHE_HOME=str(tmp_path))

    assert told.stderr.count("cannot be kept") == 1, "it is told once"


@pytest.mark.parametrize("is_temporary_there", [True, False])
def test_functions_work_for_a_user_without_a_home(is_temporary_there: bool, tmp_path: Path) -> None:
    script, temporary = tmp_path / "home.py", tmp_path / "temporary"
    if is_temporary_there:
        temporary.mkdir()
    code = f"import tempfile; tempfile.tempdir = {str(temporary)!r}\n"
    script.write_text(code + _NO_HOME)

    told = run_script(script, XDG_CACHE_HOME="", HOME=None)

    assert (str(temporary) in told.stdout) == is_temporary_there


def test_machine_code_of_another_processor_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    arm = "processor\t: 0\nFeatures\t: {}\nCPU implementer\t: 0x41\nCPU part\t: {}\n"
    processors = set()
    for features, part in (("fp", "0xd0c"), ("fp sve", "0xd0c"), ("fp sve", "0xd40")):
        text = arm.format(features, part)
        monkeypatch.setattr(Path, "read_text", lambda _, text=text: text)
        processors.add(tuple(kept_code._processor()))

    assert len(processors) == 3


def test_plans_are_the_same_compiled_and_as_they_stand() -> None:
    plans = run(_PLANS)

    assert len(plans.splitlines()) == 150
    assert run(_PLANS, NUMBA_DISABLE_JIT="1") == plans


@pytest.mark.parametrize("code", [_COSTS, _EVENTS], ids=["cost", "monitor"])
def test_what_steps_teach_is_the_same_compiled_and_as_it_stands(code: str) -> None:
    learned = run(code)

    assert len(learned.splitlines()) > 1000
    assert run(code, NUMBA_DISABLE_JIT="1") == learned


def run_script(
    script: Path, *args: str, **variables: str | None
) -> subprocess.CompletedProcess[str]:
    """A file, since numba keeps nothing of functions that have none."""
    given = {**os.environ, **variables}
    environment = {name: value for name, value in given.items() if value is not None}
    done = subprocess.run(
        [sys.executable, str(script), *args], capture_output=True, text=True, env=environment
    )
    assert not done.returncode, done.stderr
    return done


def run(code: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(HELPERS), **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert not done.returncode, done.stderr
    return done.stdout
