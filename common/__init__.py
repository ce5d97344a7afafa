"""The commands share these files: options, checkpoints, data, optimizers."""
