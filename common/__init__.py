"""What the commands share: keys, checkpoints, data, optimizers. The commands import it before torch
and tqdm, which end in a traceback where they refuse what the environment sets for them."""
import os
import sys

if any(name.startswith(("TORCH", "PYTORCH", "TQDM")) for name in os.environ):
    try:
        import torch
        import tqdm
    except Exception as e:      # of any type
        words = " ".join(str(e).split())[:300]
        print(f"error: torch or tqdm cannot be imported here ({words}): look at the environment's "
              f"TORCH, PYTORCH and TQDM variables", file=sys.stderr)
        sys.exit(2)
