"""Step times in virtual time: curves, profiles of models on GPUs, and the roofline behind them."""
