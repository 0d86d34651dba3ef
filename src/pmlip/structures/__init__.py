"""Labelled structures: read from files, validated, and annotated with uncertainties."""

LABELS = ("energy", "forces", "stress")
