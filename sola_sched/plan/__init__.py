"""The cheapest GPUs that serve a load within its targets: `python -m sola_sched.plan`.

`inputs` reads what is asked, `search` finds the cheapest configuration that attains, `outputs`
writes the answer; `services` does all three for several services.

May import: errors, config, workloads, cost, prediction, core, cluster, simulator, bench.
Third party: huggingface_hub (inputs.*), matplotlib, numpy, transformers (inputs.*).
"""
