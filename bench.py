"""
Speed, side by side in one run: what the README's ratios come from.

    python bench.py gpt                                   the baseline: training, and decoding with and without cache
    python bench.py gpt n_layer=8 n_embd=512 device=cuda  at another size

The keys are train.py's (python train.py help), and sizes start from configs/<model>_tiny.yaml as there. The
contestants take turns, round after round, so that a noisy neighbour disturbs all alike; each figure is the median
over the rounds.
"""
import dataclasses
import statistics
import time

import torch

from prepare import UserError, asks_help, run_cli
from train import device_name, make_optimizers, model_module, pick_device, read_config


def medians(contestants, rounds, device):
    """contestants: {name: (prepare, call)}. Seconds of each call, the median over `rounds` rounds in which each
    runs once, after two rounds that do not count; prepare, where there is one, runs outside the clock."""
    times = {name: [] for name in contestants}
    for n in range(rounds + 2):
        for name, (prepare, call) in contestants.items():
            if prepare:
                prepare()
            wait(device)
            start = time.perf_counter()
            call()
            wait(device)
            if n >= 2:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def wait(device):
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def training_step(model, cfg):
    """A function that does one optimizer step on a fixed random batch."""
    device = model.wte.weight.device
    idx = torch.randint(0, model.cfg.vocab_size, (cfg.batch_size, model.cfg.block_size + 1), device=device)
    optimizers = make_optimizers(model, cfg)

    def step():
        model.train()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(idx[:, :-1], idx[:, 1:])[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return step


def decoding(model, position, steps):
    """Two contestants that decode the last `steps` tokens up to number `position`, one row: from the cache of the
    tokens before them, and by running the whole prefix again for each."""
    model.eval()
    idx = torch.randint(0, model.cfg.vocab_size, (1, position), device=model.wte.weight.device)
    cache = model.init_cache(1, position)

    @torch.inference_mode()
    def prefill():
        cache.reset()
        model(idx[:, :position - steps], cache=cache)

    @torch.inference_mode()
    def with_cache():
        for t in range(position - steps, position):
            model(idx[:, t:t + 1], cache=cache)

    @torch.inference_mode()
    def without():
        for t in range(position - steps, position):
            model(idx[:, :t + 1])

    return {"with the cache": (prefill, with_cache), "prefix recomputed": (None, without)}


def bench_gpt(model, cfg, device):
    """Training, fast beside naive, and decoding at the end of the context, cached beside recomputed."""
    T, tokens = model.cfg.block_size, cfg.batch_size * model.cfg.block_size
    if T < 2:
        raise UserError(f"block_size={T}: decoding needs at least 2 tokens")
    naive = type(model)(dataclasses.replace(model.cfg, fast=False)).to(device)
    steps = medians({"fast": (None, training_step(model, cfg)), "naive": (None, training_step(naive, cfg))}, 10, device)
    for name, seconds in steps.items():
        print(f"training, {name:20s}{1000 * seconds:9.2f} ms a step{tokens / seconds:12,.0f} tokens/s")
    n = min(8, T - 1)
    times = medians(decoding(model, T, n), 10, device)
    for name, seconds in times.items():
        print(f"decoding, {name:20s}{1000 * seconds / n:9.2f} ms a token{n / seconds:11,.0f} tokens/s")
    ratio = times["prefix recomputed"] / times["with the cache"]
    print(f"at token {T} the cache is {ratio:.1f}x as fast as recomputing; in training the fast path is "
          f"{steps['naive'] / steps['fast']:.2f}x as fast as the naive one")


def main(argv):
    if asks_help(argv):
        return print(__doc__.strip())
    names = [a for a in argv if "=" not in a]
    benches = {"gpt": bench_gpt}
    if len(names) > 1 or not set(names) <= set(benches):
        raise UserError(f"python bench.py NAME [key=value ...], NAME one of: {', '.join(benches)}")
    name = names[0] if names else "gpt"
    cfg, model_fields, _, _ = read_config([f"model={name}"] + [a for a in argv if "=" in a])
    device = pick_device(cfg.device)
    module = model_module(name)
    torch.manual_seed(cfg.seed)
    model = module.Model(module.Config(**model_fields)).to(device)
    print(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters, batch {cfg.batch_size} x "
          f"{model.cfg.block_size} tokens; {device_name(device)}, torch {torch.__version__}; training in "
          f"{'bfloat16 (autocast)' if device.type == 'cuda' else 'float32'}, decoding in float32, not compiled")
    benches[name](model, cfg, device)


if __name__ == "__main__":
    run_cli(main)
