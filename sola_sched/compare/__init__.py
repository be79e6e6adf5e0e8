"""Which of two servers serves its requests better: `python -m sola_sched.compare`.

May import: errors, config, bench, explain, reports.
Third party: none.
"""
