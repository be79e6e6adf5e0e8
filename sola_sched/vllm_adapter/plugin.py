"""The `vllm.general_plugins` entry point: what vLLM has no other hook for is put in place here.

vLLM loads the plug-in in every process and may call it more than once. It changes nothing for
other scheduler classes. What it adds to the API server's process is in `front_end`; what it changes
in the engine's arguments needs to know vLLM's inside, so that is here (`plugin_swap`).
"""

from __future__ import annotations

from sola_sched.front_end.metrics import register_metrics
from sola_sched.front_end.options import print_option_errors_plainly
from sola_sched.front_end.refusals import register_refusals
from sola_sched.front_end.request_checks import register_request_checks
from sola_sched.vllm_adapter.swap.plugin_swap import register_swap


def register() -> None:
    """Extend vLLM's server, its checks of requests and its choice of connector, once."""
    print_option_errors_plainly()
    register_swap()
    register_metrics()
    register_refusals()
    register_request_checks()
