"""Which files decide a result: the imports written in the source, followed from one or several."""

from __future__ import annotations

from pathlib import Path

import pytest

import sola_sched
from harness.import_closure import digest, import_closure

PACKAGE = Path(sola_sched.__file__).resolve().parent


def names(files: tuple[Path, ...]) -> set[str]:
    """Paths below `sola_sched`, of other files folder and name."""
    root = PACKAGE.parent
    return {
        str(file.relative_to(root))
        if file.is_relative_to(PACKAGE)
        else f"{file.parent.name}/{file.name}"
        for file in files
    }


def test_imports_are_followed_through_modules_functions_and_packages() -> None:
    found = names(import_closure(["sola_sched.vllm_adapter.swap.swapping"]))

    assert {"sola_sched/vllm_adapter/swap/swapping.py", "sola_sched/__init__.py"} <= found
    assert {"kv_swap/policy.py", "kv_swap/__init__.py"} <= found, "a package that lies elsewhere"
    assert "sola_sched/bench/report/table.py" not in found


def test_names_for_type_checkers_and_of_lazy_packages_pull_in_nothing() -> None:
    assert names(import_closure(["sola_sched"])) == {"sola_sched/__init__.py"}


def test_a_name_of_a_lazy_package_leads_to_the_module_that_has_it(tmp_path: Path) -> None:
    script = tmp_path / "one.py"
    script.write_text("from sola_sched import SloTarget\n")

    assert names(import_closure([script])) >= {"sola_sched/config/slo.py", "sola_sched/__init__.py"}


@pytest.mark.parametrize(
    "line",
    [
        "import sola_sched.config.slo",
        "from sola_sched.config import slo",
        "from sola_sched.config.slo import SloTarget",
        "def f():\n    import sola_sched.config.slo as other",
        "import importlib\nimportlib.import_module('sola_sched.config.slo')",
        "NAME = 'sola_sched.config.slo:SloTarget'",
        "if True:\n    try:\n        from sola_sched.config.slo import TTFT_KEY\n"
        "    except OSError:\n        pass",
    ],
)
def test_every_way_to_name_a_module_counts(line: str, tmp_path: Path) -> None:
    script = tmp_path / "one.py"
    script.write_text(line + "\n")

    assert PACKAGE / "config" / "slo.py" in import_closure([script])


def test_scripts_lead_to_those_beside_them(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("import json\nfrom two import A\n")
    (tmp_path / "two.py").write_text("from sola_sched.errors import ConfigError as A\n")
    (tmp_path / "three.py").write_text("")

    found = import_closure([tmp_path / "one.py"])

    assert found == tuple(
        sorted([tmp_path / "one.py", tmp_path / "two.py", PACKAGE / "__init__.py",
                PACKAGE / "errors.py"])
    )  # fmt: skip


def test_nothing_is_followed_through_what_is_left_out() -> None:
    roots = ["sola_sched.bench.backends.simulation"]
    whole, part = (
        names(import_closure(roots, out)) for out in ((), ["sola_sched.vllm_adapter.scheduler"])
    )

    assert {"sola_sched/vllm_adapter/scheduler.py", "sola_sched/core/ewt.py"} <= whole
    assert "sola_sched/vllm_adapter/scheduler.py" not in part
    assert "sola_sched/simulator/engine.py" in part


def test_a_root_that_is_no_module_is_refused() -> None:
    with pytest.raises(ValueError, match="There must be a module 'numpy'"):
        import_closure(["numpy"])


def test_a_digest_tells_content_and_names(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    seen = {digest([one]), digest([]), digest([two])}
    one.write_text("a")
    seen.add(digest([one]))
    one.write_text("b")
    seen |= {digest([one]), digest([one, two])}

    assert len(seen) == 6
    assert digest([one]) == digest([one])


def test_a_digest_is_the_same_wherever_the_files_lie(tmp_path: Path) -> None:
    digests = set()
    for first, second in (("a", "b"), ("b", "a")):
        here, there = tmp_path / first / "one.py", tmp_path / second / "two.py"
        for file, content in ((here, "1"), (there, "2")):
            file.parent.mkdir(exist_ok=True)
            file.write_text(content)
        digests |= {digest(sorted([here, there])), digest([there, here])}

    assert len(digests) == 1
