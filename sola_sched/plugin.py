"""The `vllm.general_plugins` entry point: bad per-request SLOs become HTTP 400.

vLLM loads the plug-in in every process and may call it more than once. It changes nothing for
other scheduler classes. vLLM offers no hook to check free request arguments at admission (custom
logits processors have one, but cost the model runner and exclude speculative decoding), so the
input processor's own parameter check is extended by ours. Without the plug-in (`VLLM_PLUGINS`)
the scheduler falls back to the default SLO and logs it.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from sola_sched.config import CONFIG_KEY, SolaConfig
from sola_sched.errors import SloError
from sola_sched.slo import REQUEST_KEYS, request_target

_MARK = "_sola_sched_checks_slo"


def register() -> None:
    """Extend the input processor's check of sampling parameters, once per process."""
    from vllm.v1.engine.input_processor import InputProcessor

    original = InputProcessor._validate_params
    if getattr(original, _MARK, False):
        return

    @wraps(original)
    def check(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        extra_args = getattr(params, "extra_args", None)
        if extra_args and any(key in extra_args for key in REQUEST_KEYS):
            check_request(self.vllm_config, extra_args)
        return original(self, params, *args, **kwargs)

    setattr(check, _MARK, True)
    InputProcessor._validate_params = check


def check_request(vllm_config: Any, extra_args: Any) -> None:
    """Refuse invalid SLO keys if `vllm_config` selects a scheduler of this package.

    Raises:
        VLLMValidationError: (HTTP 400) The message names key, value and rule.
    """
    if not is_ours(vllm_config.scheduler_config.scheduler_cls):
        return
    config = SolaConfig.from_mapping((vllm_config.additional_config or {}).get(CONFIG_KEY))
    try:
        request_target(extra_args, config.default_slo, config.classes)
    except SloError as error:
        raise _validation_error()(str(error)) from error


def is_ours(scheduler_cls: Any) -> bool:
    """Whether a `--scheduler-cls` value, name or class, is steered by this package."""
    if scheduler_cls is None:
        return False
    if isinstance(scheduler_cls, str):
        if scheduler_cls.split(".", 1)[0] == "sola_sched":
            return True
        from vllm.utils.import_utils import resolve_obj_by_qualname

        scheduler_cls = resolve_obj_by_qualname(scheduler_cls)
    return any(base.__module__ == "sola_sched.scheduler" for base in scheduler_cls.__mro__)


def _validation_error() -> type[Exception]:
    try:
        from vllm.exceptions import VLLMValidationError
    except ImportError:
        return ValueError
    error: type[Exception] = VLLMValidationError
    return error
