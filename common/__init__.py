"""What the commands share: options, checkpoints, data, optimizers."""
