"""The last report of every instance, and what was sent to it since."""

from __future__ import annotations

import logging
import math

from sola_sched.cluster.view import InstanceView, RoutedRequest, Views
from sola_sched.errors import ReportError

_log = logging.getLogger(__name__)


class Reports:
    """Keeps the views that a router decides on.

    An update costs what one instance's requests do, whatever the number of instances.

    Args:
        delivery_s: What a request may take from the router to an engine's queue: one that was sent
            less than this before a report was made counts as not in it.
        silent_s: An instance whose last report is older gets nothing until it reports again.

    Attributes:
        num_ignored: Reports that could not be true, or were older than the one before.
    """

    def __init__(self, *, delivery_s: float = 0.0, silent_s: float = math.inf) -> None:
        self.num_ignored = 0
        self._delivery_s = delivery_s
        self._silent_s = silent_s
        self._views: list[InstanceView] = []
        self._reported: list[InstanceView] = []
        self._sent: list[dict[str, tuple[float, RoutedRequest]]] = []
        self._is_gone: list[bool] = []
        self._is_silent: list[bool] = []
        self._is_drained: list[bool] = []
        self._free: set[int] = set()
        self._has_nonsense: set[int] = set()  # those whose last report was ignored

    @property
    def views(self) -> Views:
        """One view for each position, in order of joining but for those taken anew; read only."""
        return self._views

    def join(self, view: InstanceView, now_s: float) -> int:
        """Add an instance; its position is returned, the lowest that is free.

        Raises:
            ReportError: The view cannot be true.
        """
        view.check(now_s)
        if self._free:
            position = min(self._free)
            self._free.discard(position)
            self._has_nonsense.discard(position)
            self._views[position] = self._reported[position] = view
            self._is_gone[position] = self._is_silent[position] = False
            self._is_drained[position] = False
            return position
        self._views.append(view)
        self._reported.append(view)
        self._sent.append({})
        self._is_gone.append(False)
        self._is_silent.append(False)
        self._is_drained.append(False)
        return len(self._views) - 1

    def report(self, instance: int, view: InstanceView, now_s: float) -> bool:
        """Take in a report; one that cannot be true is ignored, see `ignore`.

        Returns:
            False if it was ignored.
        """
        try:
            view.check(now_s)
            last_s = self._reported[instance].reported_s
            if view.reported_s < last_s:
                raise ReportError(
                    f"'reported_s' must not be older than in the last report, {last_s:g} "
                    f"(got {view.reported_s:g})."
                )
        except ReportError as error:
            self.ignore(instance, error)
            return False
        self._has_nonsense.discard(instance)
        self._reported[instance] = view
        self._is_silent[instance] = False
        self._sent[instance] = {
            req_id: (sent_s, request)
            for req_id, (sent_s, request) in self._sent[instance].items()
            if sent_s + self._delivery_s > view.reported_s
        }
        self._rebuild(instance)
        return True

    def ignore(self, instance: int, error: ReportError, name: str = "") -> None:
        """Count a report that is of no use; of several after another the first is logged.

        Args:
            name: What the log calls the instance, if not by its number.
        """
        self.num_ignored += 1
        if instance not in self._has_nonsense:
            self._has_nonsense.add(instance)
            _log.warning(
                "a report of %s is ignored, as are those after it until one is right: %s",
                name or f"instance {instance}", error,
            )  # fmt: skip

    def sent(self, instance: int, request: RoutedRequest, now_s: float) -> None:
        """The request was sent to the instance: until a report has it, it counts as waiting."""
        self._sent[instance][request.req_id] = (now_s, request)
        self._views[instance] = self._views[instance].with_requests([request])

    def ended(self, instance: int, req_id: str) -> None:
        """The request is no longer on the instance."""
        if self._sent[instance].pop(req_id, None) is not None:
            self._rebuild(instance)

    def died(self, instance: int) -> None:
        """The instance is gone, with all that it had; it does not come back."""
        self._is_gone[instance] = True
        self._sent[instance].clear()
        self._rebuild(instance)

    def forget(self, instance: int) -> None:
        """Nobody asks for the instance any more, which is gone: another may have its position."""
        self.died(instance)
        self._free.add(instance)
        columns = (self._views, self._reported, self._sent, self._is_gone, self._is_silent,
                   self._is_drained)  # fmt: skip
        while (last := len(self._views) - 1) in self._free:
            self._free.discard(last)
            for column in columns:
                del column[last]

    def drain(self, instance: int) -> None:
        """The instance gets nothing more; what it has goes on."""
        self._is_drained[instance] = True
        self._rebuild(instance)

    def assume(self, instance: int, view: InstanceView) -> None:
        """What an instance that has not reported yet is taken for."""
        self._reported[instance] = view
        self._rebuild(instance)

    def expire(self, now_s: float) -> None:
        """Offer none that has been silent for too long; to be called now and then."""
        for instance, view in enumerate(self._views):
            if view.is_alive and now_s - view.reported_s > self._silent_s:
                self._is_silent[instance] = True
                self._rebuild(instance)

    def _rebuild(self, instance: int) -> None:
        view = self._reported[instance]
        if self._is_gone[instance] or self._is_silent[instance] or self._is_drained[instance]:
            view = view.but(is_alive=False)
        requests = [request for _, request in self._sent[instance].values()]
        self._views[instance] = view.with_requests(requests) if requests else view
