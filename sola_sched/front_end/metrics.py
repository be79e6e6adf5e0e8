"""Gives front ends of our schedulers the logger that fills `/metrics`.

vLLM has an entry point for that, `vllm.stat_logger_plugins`. It would also switch statistics on in
every other engine of the environment that has switched them off, so the logger is passed to the
constructors of the front ends instead, which take loggers as an argument.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

from vllm.logger import init_logger

from sola_sched.front_end.scheduler_class import is_ours

_MARK = "_sola_sched_metrics"

logger = init_logger("vllm.sola_sched")


def register_metrics() -> None:
    """Extend the constructors of vLLM's front ends, once per process."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    for owner in (AsyncLLM, LLMEngine):
        if not getattr(owner.__init__, _MARK, False):
            _extend(owner)


def _extend(owner: type) -> None:
    original: Any = owner.__init__  # type: ignore[misc]
    signature = inspect.signature(original)

    @wraps(original)
    def extended(*args: Any, **kwargs: Any) -> None:
        try:
            given = signature.bind(*args, **kwargs)
            _add_logger(given.arguments, signature.parameters)
            args, kwargs = given.args, given.kwargs
        except Exception:  # the original says what is wrong with its arguments
            logger.debug("sola_sched: no metrics", exc_info=True)
        original(*args, **kwargs)

    setattr(extended, _MARK, True)
    owner.__init__ = extended  # type: ignore[misc]


def _add_logger(arguments: dict[str, Any], known: Any) -> None:
    vllm_config = arguments["vllm_config"]
    if not is_ours(vllm_config.scheduler_config.scheduler_cls):
        return
    if not arguments["log_stats"]:
        return
    if "stat_loggers" not in known:
        logger.info("sola_sched: no metrics, this vLLM's front end takes no loggers")
        return
    try:
        from sola_sched.front_end.stat_logger import SolaStatLogger
    except ImportError as error:
        logger.info("sola_sched: no metrics, this vLLM lacks what they need: %s", error)
        return
    # Ours comes first: it takes the reports out before others look.
    arguments["stat_loggers"] = [SolaStatLogger, *(arguments.get("stat_loggers") or ())]
