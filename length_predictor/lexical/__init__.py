"""Output lengths from the words of a prompt."""
