"""The `vllm.general_plugins` entry point: bad per-request SLOs become HTTP 400, KV is swapped.

vLLM loads the plug-in in every process and may call it more than once. It changes nothing for
other scheduler classes. vLLM offers no hook to check free request arguments at admission (custom
logits processors have one, but cost the model runner and exclude speculative decoding), so two of
its own checks are extended by ours: that of the input processor, and that of `SamplingParams`.
The server builds the latter before it answers, so a stream gets its 400 too; the former alone
runs when the first event of a stream is due. Without the plug-in (`VLLM_PLUGINS`) the scheduler
falls back to the default SLO and logs it.
"""

from __future__ import annotations

from functools import wraps
from typing import Any
from weakref import WeakSet

from sola_sched.config.slo import meant_key, request_target
from sola_sched.errors import SloError
from sola_sched.vllm_adapter.options_http import options_in_force
from sola_sched.vllm_adapter.plugin_metrics import register_metrics
from sola_sched.vllm_adapter.plugin_options import print_option_errors_plainly
from sola_sched.vllm_adapter.plugin_refusals import register_refusals
from sola_sched.vllm_adapter.plugin_swap import register_swap

_MARK = "_sola_sched_checks_slo"


#: The asynchronous front ends in this process whose scheduler is ours; a server has one.
_servers: WeakSet[Any] = WeakSet()


def register() -> None:
    """Extend vLLM's checks of sampling parameters, its server and its choice of connector, once."""
    print_option_errors_plainly()
    register_swap(is_ours)
    register_metrics(is_ours)
    register_refusals(is_ours)
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    if getattr(InputProcessor._validate_params, _MARK, False):
        return
    _extend(InputProcessor, "_validate_params", _check_submitted)
    _extend(AsyncLLM, "__init__", _remember)
    _extend(SamplingParams, "_verify_args", _check_built)


def _extend(owner: type, name: str, ours: Any) -> None:
    """Call `ours` after the method `name`, with the same arguments."""
    original = getattr(owner, name)

    @wraps(original)
    def extended(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        ours(*args, **kwargs)
        return result

    setattr(extended, _MARK, True)
    setattr(owner, name, extended)


def _check_submitted(processor: Any, params: Any, *_: Any, **__: Any) -> None:
    if _has_our_keys(params):
        check_request(processor.vllm_config, params.extra_args)


def _remember(server: Any, *_: Any, **__: Any) -> None:
    if is_ours(server.vllm_config.scheduler_config.scheduler_cls):
        _servers.add(server)
        options_in_force(server.vllm_config.additional_config)


def _check_built(params: Any) -> None:
    """Refuse what every server here would refuse: the engine it is for is not known yet."""
    if not _servers or not _has_our_keys(params):
        return
    for server in _servers:
        try:
            check_request(server.vllm_config, params.extra_args)
        except Exception as error:
            refusal = error
        else:
            return
    raise refusal


def _has_our_keys(params: Any) -> bool:
    extra_args = getattr(params, "extra_args", None) or {}
    return any(map(meant_key, extra_args))


def check_request(vllm_config: Any, extra_args: Any) -> None:
    """Refuse invalid SLO keys if `vllm_config` selects a scheduler of this package.

    Raises:
        VLLMValidationError: (HTTP 400) The message names key, value and rule.
    """
    if not is_ours(vllm_config.scheduler_config.scheduler_cls):
        return
    config = options_in_force(vllm_config.additional_config).config
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
    return any(
        base.__module__ == "sola_sched.vllm_adapter.scheduler" for base in scheduler_cls.__mro__
    )


def _validation_error() -> type[Exception]:
    try:
        from vllm.exceptions import VLLMValidationError
    except ImportError:
        return ValueError
    error: type[Exception] = VLLMValidationError
    return error
