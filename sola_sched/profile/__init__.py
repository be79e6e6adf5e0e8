"""``python -m sola_sched.profile``: measures a model on this machine and writes its cost model.

May import: errors, config, cost, vllm_adapter.
Third party: numpy, vllm.
"""
