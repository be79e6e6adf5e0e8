"""The edge to vLLM: the scheduler class, the plug-in, and all that is known of vLLM's inside.

The scheduler runs in the engine's process; vLLM loads the plug-in in every process. What the API
server's process does beside them is in `front_end`.

`scheduler` hands over to its parts: `requests` keeps what is known, `steps` plans a step and
steers it, `swap` moves KV, `reports` tells of it all.

`names` lists every name of vLLM that a step depends on, `versions` the releases and where they
differ.

May import: errors, config, compiled, cost, prediction, core, planner, reports, kv_swap,
  length_predictor, colocation, front_end.
Third party: numpy, vllm, opentelemetry (reports.*).
"""
