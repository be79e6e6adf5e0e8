"""The gateway before several vLLM servers: `server` takes a request, `replicas` knows where it may
go, `delivery` brings it there as often as it takes, and `outgoing` is its answer.
"""
