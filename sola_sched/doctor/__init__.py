"""What of all this works on this machine: `python -m sola_sched.doctor`.

`checks` are the questions, `__main__` prints the answers.

May import: errors, config, compiled, length_predictor, reports, vllm_adapter.
Third party: vllm (checks).
"""
