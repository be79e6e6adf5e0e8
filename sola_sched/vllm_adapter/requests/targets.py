"""The class and the targets of each request: its own, its adapter's or model's, or the default."""

from __future__ import annotations

from vllm.logger import init_logger
from vllm.v1.request import Request

from sola_sched.config.slo import CLASS_KEY, DEFAULT_CLASS, SloTarget, request_target
from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.fates import shown_id
from sola_sched.errors import SloError

logger = init_logger("vllm.sola_sched")


class Targets:
    """Finds targets.

    Args:
        config: Has the classes.
        model_name: Under which the model is served, which may be that of a class.

    Attributes:
        num_invalid: Requests whose own targets cannot be read.
    """

    def __init__(self, config: SolaConfig, model_name: str) -> None:
        self._model_name = model_name
        self.change(config)
        self._strangers: set[str] = set()  # adapters without a class, which the log has named
        self.num_invalid = 0
        self._step_s = 0.0  # until it is known
        self._told_short: set[str] = set()  # classes with a target that the log has called short

    def change(self, config: SolaConfig) -> None:
        """These are the classes and the default from now on."""
        self._classes, self._default = config.classes, config.default_slo

    def note_step(self, seconds: float) -> None:
        """No token comes sooner: shorter targets are told, once for each class."""
        self._step_s = seconds

    def of(self, request: Request) -> tuple[str, SloTarget]:
        """Name of its SLO class, and its targets."""
        slo_class, target = self._of(request)
        is_short = min(target.ttft_s, target.tpot_s, target.e2e_s) < self._step_s
        if is_short and slo_class not in self._told_short:
            self._told_short.add(slo_class)
            logger.warning(
                "sola_sched: %s (class %s): a target is shorter than one step of this model with a "
                "single token, %.3g ms, so nobody can meet it: %s. The keys of 'vllm_xargs' are in "
                "milliseconds, the options of the server in seconds.",
                request.request_id, slo_class, 1e3 * self._step_s, target,
            )  # fmt: skip
        return slo_class, target

    def _of(self, request: Request) -> tuple[str, SloTarget]:
        params = request.sampling_params
        extra_args = params.extra_args if params is not None else None
        service, default = self._service_of(request)
        if not extra_args:
            return service, default
        try:
            target = request_target(extra_args, default, self._classes)
        except SloError as error:  # the front end refuses these unless the plug-in is off
            self.num_invalid += 1
            if self.num_invalid == 1:
                shown = shown_id(request.request_id)
                logger.warning("%s: using the default SLO instead. %s", shown, error)
            return service, default
        return extra_args.get(CLASS_KEY) or service, target

    def _service_of(self, request: Request) -> tuple[str, SloTarget]:
        """The class of its adapter's or model's name, and its targets, whatever it says."""
        classes = self._classes
        if request.lora_request is None:
            name = self._model_name
        else:
            name = request.lora_request.lora_name
            if classes and name not in classes and name not in self._strangers:
                self._strangers.add(name)
                logger.info(
                    "sola_sched: adapter %r has no class in 'classes': its requests that name "
                    "none have the default targets and no share",
                    name,
                )
        if name in classes:
            return name, classes[name]
        return DEFAULT_CLASS, self._default
