"""The commands share these files: options, checkpoints, data, tasks, tokenizers, optimizers,
devices, sharding, the log of a run, and the formats of Hugging Face."""
