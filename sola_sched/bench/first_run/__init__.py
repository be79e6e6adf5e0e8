"""What ``python -m sola_sched.bench`` does without arguments: a first, convincing comparison."""
