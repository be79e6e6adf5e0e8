"""Output-length prediction; each predictor is a module of its own, loaded when it is imported."""
