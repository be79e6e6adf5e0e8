"""What is known of an engine's requests: arrival, targets, and what vLLM does with them.

`booking` tells the `StateMonitor` of each change; `rejecting` ends those that a plan gives up.
"""
