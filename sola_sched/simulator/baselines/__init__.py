"""Other schedulers' rules on vLLM's own `schedule()`, to compare with."""
