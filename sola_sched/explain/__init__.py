"""Why a request was late, and what would have helped: `python -m sola_sched.explain`.

`source` reads what a server says of its requests, `replay` runs the same minutes in virtual time.

May import: errors, config, workloads, cost, core, reports, simulator, bench.
Third party: numpy.
"""
