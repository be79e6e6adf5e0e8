"""The process beside the engine that a predictor runs in, and the scheduler's side of it."""
