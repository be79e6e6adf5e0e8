"""The search: what can be rented, how it serves the load, and the cheapest that attains."""
