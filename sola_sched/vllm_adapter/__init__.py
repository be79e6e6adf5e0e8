"""The edge to vLLM: the scheduler class, the plug-in, and all that is known of vLLM's inside.

`names` lists every name of vLLM that a step depends on, `versions` the releases and where they
differ.

May import: errors, config, compiled, cost, prediction, core, planner, reports, kv_swap,
  length_predictor, colocation.
Third party: numpy, prometheus_client, vllm.
"""
