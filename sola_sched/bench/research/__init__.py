"""Sweeps and the fidelity of virtual time."""
