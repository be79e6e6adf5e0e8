"""Several engines that share what computes: turns, and a KV cache for models of unlike shapes."""
