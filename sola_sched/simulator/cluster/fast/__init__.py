"""A fast model of an engine: compiled, no scheduler inside, steps summed up between events.

`instance` is what the cluster drives. `state` holds what an engine knows of its requests, `steps`
moves it from event to event, `order` and `plans` decide as vLLM and `sola_sched` do, `times` has
the step times. All of them but `instance` are compiled by Numba.
"""
