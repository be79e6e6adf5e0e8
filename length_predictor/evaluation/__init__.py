"""How good predictors are, beside each other and beside a fine-tuned encoder (`proxy`)."""
