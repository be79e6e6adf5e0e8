"""Bad per-request SLOs become HTTP 400.

vLLM offers no hook to check free request arguments at admission (custom logits processors have
one, but cost the model runner and exclude speculative decoding), so two of its own checks are
extended by ours: that of the input processor, and that of `SamplingParams`. The server builds the
latter before it answers, so a stream gets its 400 too; the former alone runs when the first event
of a stream is due. Without the plug-in (`VLLM_PLUGINS`) the scheduler falls back to the default SLO
and logs it.
"""

from __future__ import annotations

from functools import wraps
from typing import Any
from weakref import WeakSet

from sola_sched.config.slo import meant_keys, request_target
from sola_sched.errors import SloError
from sola_sched.front_end.options_http import options_in_force
from sola_sched.front_end.scheduler_class import is_ours

_MARK = "_sola_sched_checks_slo"

#: The asynchronous front ends in this process whose scheduler is ours; a server has one.
_servers: WeakSet[Any] = WeakSet()


def register_request_checks() -> None:
    """Extend vLLM's checks of sampling parameters, once per process."""
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
    return any(meant_keys(extra_args))


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


def _validation_error() -> type[Exception]:
    try:
        from vllm.exceptions import VLLMValidationError
    except ImportError:
        return ValueError
    error: type[Exception] = VLLMValidationError
    return error
