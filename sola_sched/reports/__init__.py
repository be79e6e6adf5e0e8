"""What operators and clients are told: log lines, counters for Prometheus, refusals.

May import: errors, config, cost, core.
Third party: numpy.
"""
