"""The examples run, and show what they claim."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_the_custom_engine_attains_more_with_the_planner_and_loses_nothing() -> None:
    spec = importlib.util.spec_from_file_location("custom_engine", EXAMPLES / "custom_engine.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    attainment = module.main()
    assert attainment["attain"] > 1.5 * attainment["fcfs"]
    engine = module.Engine("attain", [(0.01 * i, 300, 40) for i in range(100)])
    engine.run()
    assert engine.monitor.stats.num_finished == 100
    assert not engine.running
    assert not engine.waiting


def test_the_custom_engine_needs_neither_vllm_nor_torch() -> None:
    code = (
        "import runpy, sys; sys.modules['vllm'] = sys.modules['torch'] = None;"
        f"runpy.run_path({str(EXAMPLES / 'custom_engine.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "attain:" in done.stdout
