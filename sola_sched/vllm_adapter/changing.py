"""Options that change while the engine runs: the file is looked at, and what it says holds at once.

A request keeps the targets that it came with.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from sola_sched.config.doubts import doubts
from sola_sched.vllm_adapter.support import support_of

if TYPE_CHECKING:
    from sola_sched.config.sola_config import SolaConfig
    from sola_sched.vllm_adapter.reports.reporting import Reporting
    from sola_sched.vllm_adapter.requests.targets import Targets
    from sola_sched.vllm_adapter.scheduler import SolaSchedulerMixin
    from sola_sched.vllm_adapter.steps.planning import Planning

logger = init_logger("vllm.sola_sched")

#: Seconds between two looks of an engine that works.
_LOOK_EVERY_S = 1.0


class Changing:
    """Lets changed options hold in one scheduler.

    Args:
        scheduler: Whose options they are, with where they come from.
        targets, planning, reporting: Parts that read options.
    """

    def __init__(
        self,
        scheduler: SolaSchedulerMixin,
        targets: Targets,
        planning: Planning,
        reporting: Reporting,
    ) -> None:
        self._scheduler, self._options = scheduler, scheduler.sola_options
        self._targets, self._planning, self._reporting = targets, planning, reporting
        self._looked_s = scheduler.sola_clock()

    def step(self) -> None:
        """A step is about to be planned."""
        now_s = self._scheduler.sola_clock()
        if not 0.0 <= now_s - self._looked_s < _LOOK_EVERY_S:
            self._looked_s = now_s
            self.look()

    def look(self) -> None:
        """Take over what has changed; call before a request that may name a new class."""
        try:
            news = self._options.look(self._make)
            if news is None:
                return
            _tell(logger, news, is_wrong=self._options.problem is not None)
            if self._options.config != self._scheduler.sola_config:
                self._take_over()
        except Exception as error:
            self._scheduler.sola_guard.failed("changing options", error)

    def _make(self, config: SolaConfig) -> None:
        """Make what may refuse these options, before they hold.

        A rollback holds even if this raises: with the planner that there is.
        """
        scheduler = self._scheduler
        support = support_of(scheduler.vllm_config, config)
        self._made = scheduler.sola_planner, support
        before, scheduler.sola_config = scheduler.sola_config, config
        try:
            self._made = scheduler.sola_new_planner(), support
        finally:
            scheduler.sola_config = before

    def _take_over(self) -> None:
        scheduler, config = self._scheduler, self._options.config
        scheduler.sola_config = config
        self._targets.change(config)
        self._planning.change(config)
        self._reporting.change(config)
        scheduler.sola_monitor.services.set_shares(config.shares)
        scheduler.sola_planner, scheduler.sola_support = self._made
        for doubt in doubts(config):
            logger.warning("sola_sched: %s", doubt)
        logger.info("sola_sched: %s", scheduler.sola_support)


def _tell(log: logging.Logger, news: str, *, is_wrong: bool) -> None:
    if is_wrong:
        log.error("sola_sched: %s", news)
    else:
        log.info("sola_sched: %s", news)


def make_changing(
    scheduler: SolaSchedulerMixin, targets: Targets, planning: Planning, reporting: Reporting
) -> Changing | None:
    """The part of a scheduler; None where no option can change."""
    if scheduler.sola_options.path is None:
        return None
    return Changing(scheduler, targets, planning, reporting)
