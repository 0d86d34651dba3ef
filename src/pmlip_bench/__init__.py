"""Benchmarks. Their result files hold the scores, the settings, the package versions and the machine."""
