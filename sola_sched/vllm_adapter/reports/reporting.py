"""What the scheduler tells of itself: `sola_stats`, lines in the log, metrics, spans, the load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from sola_sched.config.sola_config import SolaConfig
from sola_sched.reports import load, load_text
from sola_sched.reports.fates import engine_facts
from sola_sched.reports.log import IntervalLog, engine_stats
from sola_sched.reports.missed_log import MissedLog
from sola_sched.vllm_adapter.reports.telemetry_sender import TelemetrySender
from sola_sched.vllm_adapter.versions import Seams

if TYPE_CHECKING:
    from sola_sched.vllm_adapter.reports.request_spans import RequestSpans
    from sola_sched.vllm_adapter.requests.arrival_times import ArrivalTimes
    from sola_sched.vllm_adapter.requests.targets import Targets
    from sola_sched.vllm_adapter.scheduler import SolaSchedulerMixin
    from sola_sched.vllm_adapter.steps.planning import Planning
    from sola_sched.vllm_adapter.steps.shortage import Shortage
    from sola_sched.vllm_adapter.steps.steering import Steering
    from sola_sched.vllm_adapter.swap.swapping import Swapping

logger = init_logger("vllm.sola_sched")


class Reporting:
    """Reports of one scheduler.

    Args:
        scheduler: Of which they are.
        seams: Of the same scheduler.
        interval_log: Says when a line is due.
        arrivals, targets, planning, steering, shortage, swapping: Parts with figures.

    Attributes:
        telemetry: Counts steps for the metrics.
        spans: Makes spans of requests; None where vLLM does not trace them.
    """

    def __init__(
        self,
        scheduler: SolaSchedulerMixin,
        seams: Seams,
        *,
        interval_log: IntervalLog,
        arrivals: ArrivalTimes,
        targets: Targets,
        planning: Planning,
        steering: Steering,
        shortage: Shortage,
        swapping: Swapping | None,
    ) -> None:
        self._scheduler, self._seams, self._interval_log = scheduler, seams, interval_log
        self._arrivals, self._targets = arrivals, targets
        self._planning, self._steering, self._swapping = planning, steering, swapping
        self._shortage = shortage
        config = scheduler.sola_config
        self._has_log = bool(config.log_interval_s)
        self._missed_log = MissedLog(config.log_missed)
        self._swapped_bytes = _no_bytes if swapping is None else swapping.num_bytes
        self.telemetry = TelemetrySender(
            log_stats=bool(getattr(scheduler, "log_stats", False)),
            load_interval_s=config.load_interval_s,
        )
        observability = getattr(scheduler.vllm_config, "observability_config", None)
        self.spans = _spans(getattr(observability, "otlp_traces_endpoint", None))

    def change(self, config: SolaConfig) -> None:
        """These are the options from now on."""
        self._missed_log.change(config.log_missed, self._scheduler.sola_monitor.fates)

    def updated(self, outputs: Any) -> None:
        """A step has ended, and its outcome is booked; metrics go along with its outputs."""
        scheduler = self._scheduler
        if self._has_log:
            try:
                self._log()
            except Exception as error:
                scheduler.sola_guard.failed_beside("logging", error)
        if self._missed_log.most:
            try:
                self._log_missed()
            except Exception as error:
                scheduler.sola_guard.failed_beside("logging late requests", error)
        if self.spans is not None:
            try:
                monitor = scheduler.sola_monitor
                now_s, wall_s = monitor.clock(), scheduler.sola_wall_clock()
                self.spans.send(monitor.fates, monitor.cost, now_s, wall_s)
            except Exception as error:
                scheduler.sola_guard.failed_beside("tracing", error)
        self.telemetry.send(
            outputs,
            scheduler.sola_monitor,
            is_idle=not scheduler.requests,
            is_followed=not scheduler.sola_guard.is_lost,
            swapped_bytes=self._swapped_bytes,
            load=self._load,
            engine=self._engine,
            refusal=scheduler.sola_options.refusal,
        )

    def _engine(self) -> dict[str, Any] | None:
        """What is needed to serve the same requests again in virtual time."""
        vllm_config = self._scheduler.vllm_config
        scheduler_config = vllm_config.scheduler_config
        options = self._scheduler.sola_options.options
        engine_args = {
            "max_num_seqs": scheduler_config.max_num_seqs,
            "max_num_batched_tokens": scheduler_config.max_num_batched_tokens,
            "max_model_len": vllm_config.model_config.max_model_len,
            "block_size": self._scheduler.block_size,
            "num_gpu_blocks_override": self._planning.num_blocks + 1,
            "async_scheduling": bool(scheduler_config.async_scheduling),
            "scheduling_policy": scheduler_config.policy,
        }
        return engine_facts(self._scheduler.sola_monitor.cost, engine_args, options)

    def _log(self) -> None:
        scheduler = self._scheduler
        passed_s = self._interval_log.due_s(
            scheduler.sola_clock(), not scheduler.requests, scheduler.sola_monitor.stats.num_ended
        )
        if passed_s is not None:
            num_running, num_waiting = len(scheduler.running), len(scheduler.waiting)
            line = self._interval_log.line(
                passed_s, scheduler.sola_stats(), num_running=num_running, num_waiting=num_waiting
            )
            logger.info("sola_sched: %s", line)
            if scheduler.sola_monitor.cost.is_ready:
                tokens = 1 + int(scheduler.num_spec_tokens)
                self._targets.note_step(scheduler.sola_monitor.cost.decode_s(1, 1) / tokens)

    def _log_missed(self) -> None:
        monitor = self._scheduler.sola_monitor
        for line in self._missed_log.lines(monitor.fates, monitor.cost, monitor.clock()):
            logger.info("sola_sched: %s", line)

    def _load(self) -> str:
        """What routers are told."""
        scheduler = self._scheduler
        vllm_config = scheduler.vllm_config
        return load_text.to_json(
            load.load_of(
                scheduler.sola_monitor,
                # None may be free for plans while streaming sessions wait for their clients.
                max_num_seqs=max(1, self._seams.num_slots),
                max_num_batched_tokens=scheduler.scheduler_config.max_num_batched_tokens,
                max_model_len=vllm_config.model_config.max_model_len,
                num_gpus=vllm_config.parallel_config.world_size,
                num_free_blocks=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
                num_blocks=self._planning.num_blocks,
                block_size=scheduler.block_size,
                serves_lost_last=scheduler.sola_config.traits.serves_lost_last,
            )
        )

    def stats(self) -> dict[str, Any]:
        """Figures since start: see `SolaSchedulerMixin.sola_stats`."""
        scheduler, guard = self._scheduler, self._scheduler.sola_guard
        predictions, planning = scheduler.sola_predictions, self._planning
        figures = {
            **engine_stats(scheduler.sola_config.policy, scheduler.sola_monitor),
            "problems": dict(planning.problems),
            "short_of_slots": planning.short_of_slots,
            "num_implausible_arrivals": self._arrivals.num_implausible,
            "num_invalid_slo": self._targets.num_invalid,
            "predictor": predictions.stats() if predictions is not None else {},
            "failures": dict(guard.num_failures),
            "is_aside": guard.is_aside,
            "num_stalled": planning.num_stalled,
            "shadow": dict(planning.shadow),
            **self._steering.counts,
            "num_kv_given_back": self._shortage.num_given_back,
        }
        if self._swapping is not None:
            figures["swap"] = self._swapping.stats()
        return figures


def _spans(endpoint: str | None) -> RequestSpans | None:
    """Spans of requests, where vLLM sends its own to an endpoint: it has the packages then."""
    if endpoint is None:
        return None
    from sola_sched.vllm_adapter.reports.request_spans import RequestSpans

    return RequestSpans()


def _no_bytes() -> tuple[int, int]:
    return 0, 0
