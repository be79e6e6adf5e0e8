"""What a step costs: the model of step times, its fit, its correction by live steps, its file.

May import: errors, compiled.
Third party: numpy.
"""
