"""What a plan is asked: flags, requests, models, services."""
