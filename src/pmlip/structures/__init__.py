"""Structures with labels: reading them from files, checking them, and what files say about their uncertainty."""

LABELS = ("energy", "forces", "stress")
