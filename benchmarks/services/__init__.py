"""Services of one engine: doubling budgets and guaranteed shares against vLLM."""
