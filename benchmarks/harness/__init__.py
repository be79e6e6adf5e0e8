"""What the experiments share: points and sweeps, rows that are kept, options, tables.

`benchmarks/` is on the path of whoever imports this: `benchmarks/run.py` puts it there, and worker
processes get the path of the process that starts them.
"""
