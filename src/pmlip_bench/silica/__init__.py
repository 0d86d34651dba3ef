"""The paper's second benchmark: every method fine-tunes a pretrained potential on silica."""
