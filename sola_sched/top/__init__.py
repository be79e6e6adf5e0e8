"""A live view of servers in the terminal: `python -m sola_sched.top`.

`metrics` reads what a server says, `history` says what happened between looks, `screen` shows it.

May import: errors, config, explain, reports.
Third party: rich (screen), textual (screen).
"""
