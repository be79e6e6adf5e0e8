"""Runs an experiment: `python benchmarks/run.py NAME`; without a name it lists them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import command
from registry import EXPERIMENTS

if __name__ == "__main__":
    sys.exit(command.main(EXPERIMENTS, sys.argv[1:]))
