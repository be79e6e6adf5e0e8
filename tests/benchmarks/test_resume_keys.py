"""Rows are made again when what decides them has changed, and tell where they come from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import sola_sched
from harness import import_closure, provenance, resumable, sweep
from harness.points import BOUND, HINDSIGHT, SYNTHETIC, Point
from sola_sched.simulator.steps import profile as step_profile

pytestmark = pytest.mark.vllm

PACKAGE = Path(sola_sched.__file__).resolve().parent
BENCHMARKS = Path(sweep.__file__).resolve().parents[1]
BASE = Point(
    "llama-3-8b-a100", SYNTHETIC, rate_per_s=4.0, ttft_s=2.0, tpot_s=0.1, scheduler="stock:2048",
    num_requests=10,
)  # fmt: skip
COLUMNS = ("commit", "is_dirty", "vllm", "cpu", "num_cores", "num_workers")


def the_file(name: str) -> Path:
    """The one source file whose path ends so."""
    roots = (PACKAGE, BENCHMARKS / "harness")
    if name == "__init__.py":
        return PACKAGE / name
    (file,) = (path for root in roots for path in root.rglob("*.py") if path.match(name))
    return file


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call with files: their content is another one from then on, for a new process."""

    def change(*files: Path) -> None:
        def digest(paths: Any) -> str:
            paths = list(paths)
            return import_closure.digest(paths) + "".join(f for f in map(str, files)
                                                          if Path(f) in paths)  # fmt: skip

        sweep._source_digest.cache_clear()
        monkeypatch.setattr(sweep, "digest", digest)

    yield change
    sweep._source_digest.cache_clear()


@pytest.mark.parametrize(
    ("scheduler", "inside", "outside"),
    [
        ("stock", ("simulator/engine.py", "simulator/host.py", "harness/points.py", "__init__.py"),
         ("attain/planner.py", "vllm_adapter/scheduler.py", "report/table.py",
          "vllm_adapter/plugin.py")),
        ("sola", ("prediction/length.py", "cost/execution.py", "prediction/trust.py",
                  "core/ewt.py", "vllm_adapter/swap/swapping.py", "attain/planner.py",
                  "harness/sweep.py"),
         ("report/table.py", "bench/cli.py", "report/results.py", "bound/upper.py",
          "vllm_adapter/plugin.py", "harness/command.py", "harness/resumable.py")),
        ("sjf", ("baselines/rules.py", "cost/fit.py"), ("report/plots.py",)),
        (BOUND, ("bound/program.py", "steps/curves.py"),
         ("vllm_adapter/scheduler.py", "simulator/engine.py")),
        (HINDSIGHT, ("harness/hindsight.py", "attain/pace.py"), ("bound/upper.py",)),
    ],
)  # fmt: skip
def test_what_decides_a_run_changes_its_key(
    changed: Any, scheduler: str, inside: tuple[str, ...], outside: tuple[str, ...]
) -> None:
    point = replace(BASE, scheduler=scheduler)
    key = sweep.key_of(point)
    for name in inside:
        changed(the_file(name))
        assert sweep.key_of(point) != key, name
    for name in outside:
        changed(the_file(name))
        assert sweep.key_of(point) == key, name


def test_length_histogram_and_swap_policy_decide_our_runs(changed: Any) -> None:
    point = replace(BASE, scheduler="sola")
    key = sweep.key_of(point)
    for name in ("length_predictor/histogram.py", "kv_swap/policy.py"):
        (file,) = (path for path in sweep._sources("sola") if path.match(name))
        changed(file)
        assert sweep.key_of(point) != key, name


#: What the plug-in imports when vLLM loads it, beside `front_end`.
OF_PLUGIN = (
    "config/doubts.py", "config/live_options.py", "core/fates.py", "core/loops.py",
    "core/services.py", "core/state.py", "core/table.py", "core/traffic.py", "cost/execution.py",
    "reports/__init__.py", "reports/fates.py", "reports/refusals.py",
    "vllm_adapter/first_start.py", "vllm_adapter/names.py", "vllm_adapter/plugin.py",
    "vllm_adapter/swap/plugin_swap.py", "vllm_adapter/support.py",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.long
def test_all_that_a_run_imports_is_in_its_key() -> None:
    """The imports are found by reading; here they are found by running, in a fresh process."""
    script = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from dataclasses import replace\n"
        "from harness import sweep\n"
        "from harness.points import Point\n"
        f"base = Point(**json.loads({json.dumps(asdict(BASE))!r}))\n"
        f"for name in ('stock', {BOUND!r}, 'sola', 'sjf', {HINDSIGHT!r}):\n"
        "    before = set(sys.modules) if name != 'stock' else set()\n"
        "    sweep.run_point(replace(base, scheduler=name))\n"
        "    new = [m for n, m in list(sys.modules.items())\n"
        "           if n.startswith(('sola_sched', 'harness')) and n not in before]\n"
        "    files = {str(Path(m.__file__).resolve()) for m in new}\n"
        "    print(json.dumps([name, sorted(files)]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": str(BENCHMARKS)},
    )  # fmt: skip
    runs = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))

    keepers = {import_closure.__file__, provenance.__file__, resumable.__file__}
    left_out = {
        name: sorted(set(files) - set(map(str, sweep._sources(name))) - keepers)
        for name, files in runs.items()
    }
    assert len(runs) == 5
    # The form of files, and what vLLM loads of every plug-in, take no part.
    paths = {Path(file) for files in left_out.values() for file in files}
    others = {
        f"{path.parent.name}/{path.name}" for path in paths if path.parent.name != "front_end"
    }
    assert sorted(others - {"report/results.py", *OF_PLUGIN}) == []
    assert not left_out["sola"]


def test_a_profile_changes_the_keys_of_its_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in step_profile.FOLDER.glob("llama-3-8b-*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(step_profile, "FOLDER", tmp_path)
    other = replace(BASE, profile="llama-3-8b-h100")
    before = sweep.key_of(BASE), sweep.key_of(other)

    with (tmp_path / "llama-3-8b-a100.json").open("a") as file:
        file.write("\n")

    assert sweep.key_of(BASE) != before[0]
    assert sweep.key_of(other) == before[1]


def test_recorded_predictions_and_vllm_change_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "recorded.json"
    point = replace(BASE, scheduler=f"sola:sim.predictor=recorded:{file}")
    keys = {sweep.key_of(point)}
    file.write_text("{}")
    keys.add(sweep.key_of(point))
    monkeypatch.setattr(provenance, "vllm_version", lambda: "0.0")
    keys.add(sweep.key_of(point))

    assert len(keys) == 3


def test_a_scheduler_of_another_file_changes_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: Any
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "our_classes.py").write_text("import our_parts\n")
    (tmp_path / "our_parts.py").write_text("")
    point = replace(BASE, scheduler="stock:2048,engine.scheduler_cls=our_classes.Ours")
    key = sweep.key_of(point)

    changed(tmp_path / "our_parts.py")

    assert sweep.key_of(point) != key


def test_rows_tell_where_they_come_from(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    sweep.run([BASE, replace(BASE, scheduler=BOUND)], path, is_hidden=True)

    for row in map(json.loads, path.read_text().splitlines()):
        facts = {name: row[name] for name in COLUMNS}
        assert facts == provenance.columns(1)
        assert facts["vllm"] == provenance.vllm_version() is not None
        assert facts["cpu"]
        assert facts["num_cores"] >= 1


def test_number_of_workers_is_that_of_the_processes(tmp_path: Path) -> None:
    items = [(("text", text),) for text in "123"]

    rows = resumable.run(items, tmp_path / "a", str, dict, num_workers=2, is_hidden=True)

    assert [(row["text"], row["num_workers"]) for row in rows] == [("1", 2), ("2", 2), ("3", 2)]


def test_rows_of_older_files_are_made_again_and_can_still_be_read(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    sweep.run([BASE], path, is_hidden=True)
    row = json.loads(path.read_text())
    old = {k: v for k, v in row.items() if k not in COLUMNS} | {"key": "350c4b59ca2e"}
    path.write_text(json.dumps(old) + "\n")

    (read,) = sweep.stored([BASE], path)
    assert read["goodput_per_s"] > 0
    assert "commit" not in read
    sweep.run([BASE], path, is_hidden=True)

    keys = [row["key"] for row in resumable.load(path)]
    assert keys == ["350c4b59ca2e", sweep.key_of(BASE)]
    assert sweep.stored([BASE], path)[0]["key"] == keys[1]


def test_a_checkout_tells_its_commit_and_whether_it_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b",
                        *arguments], check=True, capture_output=True)  # fmt: skip

    folder = tmp_path / "benchmarks" / "harness"
    folder.mkdir(parents=True)
    file = folder / "provenance.py"
    file.write_text("")
    monkeypatch.setattr(provenance, "_FILE", file)

    def checkout() -> tuple[str | None, bool | None]:
        return provenance.checkout.__wrapped__()

    git("init", "-q")
    assert checkout() == (None, None), "not yet in git"
    git("add", ".")
    git("commit", "-qm", "One")
    commit, is_dirty = checkout()
    assert commit is not None
    assert len(commit) == 12
    assert is_dirty is False
    (tmp_path / "rows.jsonl").write_text("{}")
    assert checkout() == (commit, False), "rows are no source"
    (folder / "new.py").write_text("")
    assert checkout() == (commit, True)
