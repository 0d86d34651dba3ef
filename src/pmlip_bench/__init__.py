"""Benchmarks: each writes result files that say what was measured, with what, and on what machine."""
