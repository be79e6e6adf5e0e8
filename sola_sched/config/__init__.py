"""What the operator sets and a request may ask for, validated when it is read.

May import: errors.
Third party: tqdm (progress_bar).
"""
