"""Serving benchmark: stock vLLM against ``sola_sched.Scheduler`` on the same arrivals.

Run it with ``python -m sola_sched.bench``. Importing this package imports neither vLLM nor torch.
"""
