"""RAT's layers in Relaxed's loops. The blocks are tied. They have no deltas, so that rank=, init= and lora_init= of
Relaxed change nothing."""
from dataclasses import dataclass

import model_rat
import model_relaxed


@dataclass
class Config(model_rat.Config, model_relaxed.Config):
    CONVERTS_FROM = ()

    def __post_init__(self):
        super().__post_init__()
        for k in range(self.n_stored):          # a block has a window in all loops, or in none
            if len({*self.kinds[k::self.n_stored]}) > 1:
                raise ValueError(f"n_layer={self.n_layer}, n_loop={self.n_loop}, "
                                 f"swa={self.swa}: block {k} would have a window in some loops "
                                 f"only")


class Model(model_relaxed.Model):
    context_type, cached_context_type = model_rat.Context, model_rat.CachedContext
    context_limit = None
    mixer_flops = model_rat.Model.mixer_flops

    def make_block(self, cfg, k):
        return model_rat.Block(cfg, model_rat.MIXERS[cfg.kinds[k]])

    def init_cache(self, batch_size, max_len):
        n_layer = self.loops_to_run * self.cfg.n_stored
        return model_rat.Cache(self.cfg, *self.cache_sizes(batch_size, max_len), n_layer)
