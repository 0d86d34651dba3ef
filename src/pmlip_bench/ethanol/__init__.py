"""Ethanol from BOTNet-datasets: one potential, tested far from its training set and along a broken bond."""
