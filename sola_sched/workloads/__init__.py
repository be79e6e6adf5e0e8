"""Workloads: the requests of data sets and logs, with lengths, arrival times and classes.

May import: errors, config, prediction.
Third party: numpy.
"""
