"""How functions over arrays and records are compiled, and where their machine code is kept.

May import: errors, config.
Third party: numpy, numba.
"""
