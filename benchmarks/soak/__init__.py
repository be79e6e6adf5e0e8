"""Everything at once on the real engine, and what grows; the same in virtual time."""
