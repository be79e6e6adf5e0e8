"""What the scheduler tells of itself: log lines, metrics, spans and the load for a router."""
