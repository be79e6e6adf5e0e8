"""One step: `planning` makes its plan, and `steering` has vLLM's `schedule()` follow it."""
