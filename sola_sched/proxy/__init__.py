"""What gateway and door have in common: HTTP between untrusted clients and vLLM servers.

`listener` and `front` bear clients (`limits`, `keys`, `bodies`). `paths` is the list of what
passes, and `headers` says which headers do. `json_object` and `form` read a body and leave it as it
is, `answers` writes to a client, and `upstream` asks a server.

May import: errors, config.
Third party: aiohttp, msgspec, multidict.
"""
