"""Several services on shared GPUs in virtual time (SeaLLM); vLLM loads with `real` only."""
