"""INT8 compression of paged KV blocks: a torch reference and Triton kernels.

``sola_sched.kernels.reference`` runs on any device; ``sola_sched.kernels.int8_kv`` has the same
functions as Triton kernels. Import the one you want: this package imports neither by itself, so
that it loads on a machine without torch or Triton.

May import: none.
Third party: torch, triton.
"""
