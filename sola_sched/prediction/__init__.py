"""What is predicted of a request's output length, and whether predictions deserve trust.

The predictors themselves are in `sola_sched.length_predictor`.

May import: errors.
Third party: numpy.
"""
