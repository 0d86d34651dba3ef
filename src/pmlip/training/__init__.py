"""Fine-tuning: settings, the loss, the optimiser, the loop, and what a run keeps on disk."""
