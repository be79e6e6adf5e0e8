"""Serving benchmark: stock vLLM against ``sola_sched.Scheduler`` on the same arrivals.

Run it with ``python -m sola_sched.bench``. Importing this package imports neither vLLM nor torch.

May import: errors, config, workloads, cost, prediction, core, simulator, vllm_adapter.
Third party: aiohttp, matplotlib, numpy, plotly (report.*), scipy, tokenizers,
torch (backends.*), transformers, vllm (backends.*).
"""
