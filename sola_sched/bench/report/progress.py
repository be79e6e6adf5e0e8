"""Progress bar over requests."""

from __future__ import annotations

import sys
from typing import Any

from sola_sched.config.progress_bar import tqdm_class
from sola_sched.config.slo import SloTarget
from sola_sched.core.metrics import RequestRecord

#: Seconds between two updates where the bar goes to a file, one line each.
_LOG_INTERVAL_S = 10.0


def interval_s() -> float:
    """Seconds between two updates of a bar on stderr."""
    return 0.5 if sys.stderr.isatty() else _LOG_INTERVAL_S


class Progress:
    """A progress bar over requests that shows the attainment so far."""

    def __init__(
        self,
        title: str,
        total: int | None = None,
        slo: SloTarget | None = None,
        *,
        is_hidden: bool = False,
    ) -> None:
        self._slo = slo
        self._num_done = self._num_attained = 0
        self._bar: Any = tqdm_class()(
            total=total, desc=title, unit="req", disable=is_hidden, file=sys.stderr,
            dynamic_ncols=True, leave=total is not None,
            mininterval=interval_s(),
        )  # fmt: skip

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.close()

    def done(self, record: RequestRecord) -> None:
        self._num_done += 1
        if self._slo is not None:
            self._num_attained += record.attains(self._slo)
            share = self._num_attained / self._num_done
            self._bar.set_postfix_str(f"{share:.0%} attained", refresh=False)
        self._bar.update()
