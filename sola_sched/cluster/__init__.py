"""Placement above one engine: what a router knows, and where it sends a request.

Pure: numpy and the core, neither vLLM nor Ray. Times are seconds, memory is tokens of KV.

May import: errors, config, cost, prediction, core.
Third party: numpy, scipy, ruptures (scaling).
"""
