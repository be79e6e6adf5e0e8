"""What runs in the process of vLLM's API server, beside the engine that our scheduler steers.

- At start: `options` are read before the model loads; `server_args` gets our middlewares.
- Requests: `request_checks` refuses bad targets (HTTP 400), `refusals` answers what the engine has
  refused because of overload (HTTP 503), `hints_http` tells of targets that nothing reads.
- Paths of our own: `fates_http`, `options_http`, `load_feed`.
- Metrics: `metrics` gives vLLM's front ends the `stat_logger`, which fills `/metrics`.

Nothing here knows the scheduler, which runs in the engine's process: `scheduler_class` recognises
it by its name, and its reports come with vLLM's statistics (`reports`). The plug-in
(`vllm_adapter/plugin.py`) puts all of it in place.

May import: errors, config, cost, reports, length_predictor.
Third party: prometheus_client (stat_logger), vllm.
"""
