"""Workloads: data sets, lengths and arrival times."""
