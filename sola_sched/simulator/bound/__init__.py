"""An upper bound on how many requests of a trace any scheduler can serve within both targets."""
