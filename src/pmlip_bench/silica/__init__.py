"""The paper's second benchmark: a pretrained potential fine-tuned on silica by every method."""
