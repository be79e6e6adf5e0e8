"""Many engines, a router and what goes wrong, in virtual time; vLLM loads with `real` only."""
