"""What operators and clients are told: log lines, counters for Prometheus, refusals.

May import: errors, config, core.
Third party: numpy.
"""
