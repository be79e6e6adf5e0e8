"""The cheapest GPUs that serve a load within its targets: `python -m sola_sched.plan`.

May import: errors, config, workloads, cost, prediction, core, cluster, simulator, bench.
Third party: huggingface_hub (model_config), matplotlib, numpy, tqdm, transformers (model_config).
"""
