"""Swapping of preempted requests' KV blocks to host memory.

May import: errors, config, cost, core, kernels.
Third party: numpy, torch, vllm (connector).
"""
