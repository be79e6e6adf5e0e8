"""The engine of the soak: parts of it fail now and then, and copies of KV fail and come late."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

from faults import COPY_SITES, SITES, SWAP_SITES, Faults
from swap_faults import install

from soak import census
from soak.paths import FOLDER, ROLE
from sola_sched.vllm_adapter.scheduler import Scheduler

#: Steps between two failures, on average: fewer, and planning steps aside, as it should.
_STEPS_BETWEEN = 1500
_FAILING_COPIES, _LATE_POLLS = 0.02, 3
_FILE = "failures"


class _OneAtATime(Faults):
    """One site fails once, whenever `arm` is called."""

    def __init__(self, path: Path, seed: int) -> None:
        self._path = path
        super().__init__(*SITES, *SWAP_SITES, *COPY_SITES, share=0.0, seed=seed)
        self._sites = tuple(self.num_raised)

    def arm(self, rng: random.Random) -> None:
        self.share_of = {rng.choice(self._sites): 1.0}

    def _raise(self, site: str) -> None:
        self.share_of = {}
        self._path.write_text(str(self.total + 1), encoding="utf-8")
        super()._raise(site)


class FaultyScheduler(Scheduler):
    """`sola_sched.Scheduler` at whose boundaries something is raised."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        role, folder = os.environ[ROLE], Path(os.environ[FOLDER])
        self._soak_rng = random.Random(role)
        self._soak_faults = _OneAtATime(folder / f"{role} {_FILE}", len(role))
        super().__init__(*args, **kwargs)
        self._soak_context = self._soak_faults.injected()
        self._soak_context.__enter__()
        census.start(folder, f"{role} engine")

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._soak_rng.random() < 1 / _STEPS_BETWEEN:
            self._soak_faults.arm(self._soak_rng)
        return super().schedule(*args, **kwargs)


class FaultyWorker:
    """What vLLM adds to its worker."""

    def fail_copies(self) -> None:
        """From now on copies fail and come late, now and then; says what the process holds."""
        install(None, max_delay_polls=_LATE_POLLS, fail_ratio=_FAILING_COPIES)
        census.start(Path(os.environ[FOLDER]), f"{os.environ[ROLE]} worker")


def num_failures(folder: Path, role: str) -> int:
    """Failures that the engine of this name has had injected."""
    path = folder / f"{role} {_FILE}"
    return int(path.read_text(encoding="utf-8")) if path.exists() else 0
