"""What the commands share: keys, checkpoints, data, optimizers."""
