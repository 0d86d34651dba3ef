"""Fine-tuning: settings, loss, optimiser, training loop, and the saved state of a run."""
