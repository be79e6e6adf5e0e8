"""What a gateway's client gets for one request: a stream or a whole answer, or a refusal."""
