"""Comparison with records of the PyTorch path, number by number."""
