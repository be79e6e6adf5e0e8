"""The examples run, and show what they claim."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def custom_engine() -> Any:
    spec = importlib.util.spec_from_file_location("custom_engine", EXAMPLES / "custom_engine.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_custom_engine_attains_more_with_the_planner_and_loses_nothing() -> None:
    module = custom_engine()
    attainment = module.main()
    assert attainment["attain"] > 1.5 * attainment["fcfs"]
    engine = module.Engine("attain", [(0.01 * i, 300, 40) for i in range(100)])
    engine.run()
    assert engine.monitor.stats.num_finished == 100
    assert not engine.running
    assert not engine.waiting


@pytest.mark.parametrize("policy", [None, "paper", "attain"])
def test_the_custom_engine_admits_only_what_the_step_has_tokens_and_memory_for(
    policy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = custom_engine()
    monkeypatch.setattr(module, "BLOCKS", 300)
    monkeypatch.setattr(module, "LIMITS", module.LIMITS._replace(num_blocks=300))
    engine = module.Engine(policy, [(0.01 * i, 700, 100) for i in range(60)])
    while engine.arriving or engine.waiting or engine.running:
        engine.step()
        computed = engine.monitor.table.num_computed[engine.running]
        assert (computed > 0).all()
        assert (-(-computed // module.BLOCK_SIZE)).sum() <= 300
    assert engine.monitor.stats.num_finished == 60


def test_the_custom_engine_needs_neither_vllm_nor_torch() -> None:
    code = (
        "import runpy, sys; sys.modules['vllm'] = sys.modules['torch'] = None;"
        f"runpy.run_path({str(EXAMPLES / 'custom_engine.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "attain:" in done.stdout
