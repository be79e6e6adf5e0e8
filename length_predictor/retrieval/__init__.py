"""Output lengths from similar past prompts, as in ALISE's Algorithm 1: encoder, FAISS, decoder."""
