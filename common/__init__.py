"""The commands share these files: options, checkpoints, data, tasks, tokenizers, optimizers,
devices, sharding, and the formats of Hugging Face."""
