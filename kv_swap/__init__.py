"""Swapping of preempted requests' KV blocks to host memory."""
