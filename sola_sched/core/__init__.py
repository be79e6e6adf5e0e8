"""What is known of the requests of an engine, in plain data that no engine owns.

`monitor` keeps the table, `state` is what a planner gets and gives, `metrics` defines TTFT, TPOT
and goodput.

May import: errors, config, compiled, cost, prediction.
Third party: numpy.
"""
