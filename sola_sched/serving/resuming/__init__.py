"""How a stream goes on at another replica after its own has gone.

`events` cuts a stream, `asked` and `values` read its request, `transcript` holds what was sent.
`plans` decides how it goes on, for which `questions` asks the replica, and `rewrite` makes the new
events into those of the stream.
"""
