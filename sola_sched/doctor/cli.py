"""Says what of all this works on this machine.

    python -m sola_sched.doctor

A line for each part: `ok`, `off` (it could be had, and how) or `no`. The exit code is 1 where the
scheduler itself cannot run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from sola_sched.config.flags import LineParser
from sola_sched.doctor.checks import FAILS, findings


def main(argv: Sequence[str] | None = None) -> int:
    """Print the answers; return the exit code."""
    LineParser(
        prog="python -m sola_sched.doctor",
        description="What of all this works on this machine.",
    ).parse_args(argv)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is to be downloaded
    can_run = True
    for finding in findings():
        print(f"{finding.state:4} {finding.subject}: {finding.said}", flush=True)
        can_run &= not (finding.is_needed and finding.state == FAILS)
    print("\nThe scheduler runs here." if can_run else "\nThe scheduler cannot run here.")
    return 0 if can_run else 1
