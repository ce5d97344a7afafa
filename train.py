"""
The trainer of every model. It runs as one process on a CPU or GPU, or through torchrun as several.

    python train.py                                     a small model on Python's standard library
    python train.py config=FILE.yaml n_layer=6          a config file, with one option changed
    python train.py run=long max_steps=9000 resume=true     go on from out/long/ckpt.pt; with
                                                        resume=auto, start if there is none
    torchrun --nproc_per_node=8 train.py gradient_accumulation_steps=8      data parallel, on one
                                                        node or more; fsdp=true shards the weights
    python train.py help model=rt                       every option, those of model=rt too

The options are those of TrainConfig and of the chosen model's Config. common/options.py merges
their defaults, a config file, a checkpoint and the command line. If a data set is missing and its
texts lie on this machine, a single process makes it. Otherwise prepare.py must make it first. A
task (task:NAME) is made while the model trains. out/<run>/ receives ckpt.pt (the state that was
saved last), best.pt (the state with the best validation loss), step_N.pt (with keep_interval=),
log.jsonl and curves.png. `step` counts completed optimizer steps.

On a GPU, Python takes longer to launch the kernels of a small model than they take to run.
compile=true lets torch.compile fuse kernels, which takes minutes at the start. auto
chooses it on a CUDA GPU with triton. compile=graph fuses nothing. It records the kernels of a
micro-batch's forward and backward pass and launches them as one CUDA graph (graphs.py), and it is
ready at once. It needs one process, a CUDA GPU and triton. The model must read no tensor on the
host, as int(x) does (mor with router=token reads one), and loop_warmup must be 0.

A run is repeatable, because its batch depends only on (seed, step), and the random numbers of a
forward pass depend only on (seed, step, micro-batch). So a resumed run, and a run that evaluates
more often, ends in the same weights (bit for bit on a CPU). A run on another number of processes
reads the same tokens. Schedules depend on step / max_steps, except for warmup_steps and
muon_momentum_steps, which count steps. So if a run is resumed with a larger max_steps=, a learning
rate that has fallen rises again.
"""
import contextlib
import hashlib
import json
import math
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

import graphs
from common.checkpoint import (build_model, check_tokenizer, fingerprint, load_start, load_teacher,
                               read_log, save_checkpoint, stamp)
from common.data import TextBatches, bits_per_byte, is_task, open_data
from common.device import Processes, compiles, device_name, stop_request
from common.log import OWN_NAMES, Log, in_words
from common.options import (TrainConfig, UserError, as_command, asks_help, config_file, first_line,
                            help_text, is_inside, lacks_memory, lock, merge, model_module, note,
                            read_text, run_cli, say, split_args)
from common.optim import (blocks_of, load_optimizers, loop_starts, lr_factor, make_optimizers,
                          set_budget, set_schedules, tokens_per_step)
from common.sharded import gathered, shard, whole
from common.tasks import TaskBatches, count_right
from prepare import prepare_missing, tell_changes
from sample import sample_text

KEPT = "and what was saved is kept"     # the end of error messages


@dataclass
class Run:
    """The parts of a run, and its progress. main, at the end of this file, calls setup, which makes
    a Run, and then train or evaluate, which take it."""
    cfg: TrainConfig
    procs: Processes
    batches: object         # TextBatches or TaskBatches
    model: torch.nn.Module
    forward: object         # the model as training calls it: compiled, data parallel
    optimizers: list
    teacher: object = None  # a model to distil from
    recorded: object = None     # micro_step as a CUDA graph
    log: object = None      # Log, on the first process
    step: int = 0           # completed optimizer steps
    tokens: int = 0         # trained on, over all processes
    flops: float = 0.0      # floating-point operations of these steps
    evaluated: int = 0      # `step` at the last evaluation
    best_ce: float = math.inf   # validation loss of best.pt
    # SHA-256 of the ckpt.pt that it saved last, or was resumed from. If the file has another one,
    # another run has saved there since, and this run must stop.
    stamp: bytes = None

    @property
    def folder(self):
        return self.cfg.folder

    @property
    def task(self):
        return is_task(self.cfg.dataset)


# ---- the training loop ----

def train(run):
    """Train to max_steps. Return True if the run is complete, and False if a signal has stopped it
    after a step, which may be the last one. Then its state is saved."""
    with stop_request() as signals:
        evaluate_and_keep(run)      # a killed run may have saved this step without evaluating it
        while run.step < run.cfg.max_steps:
            logged, stopping = train_step(run, signals)
            if run.log:
                run.log.step(logged, write=run.step % run.cfg.log_interval == 0 or stopping)
            if stopping:
                save(run, "ckpt.pt")
                return False
            evaluate_and_keep(run)
    return True


def train_step(run, signals):
    """Take one optimizer step over the global batch. Return the values to log, and whether any
    process was asked to stop. Raise UserError in every process if the loss or a gradient is not
    finite. No weight has moved then."""
    run.model.train()
    # With loop_warmup fewer loops run in the first steps. starts has the step at which each loop
    # begins. Models without loops do not read training_loops.
    starts = loop_starts(run.model.cfg, run.cfg.max_steps)
    run.model.training_loops = sum(run.step >= start for start in starts)
    logged = forward_backward(run)
    logged, stopping = clip_and_check(run, logged, signals)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            set_schedules(group, run.step, run.cfg)
        optimizer.step()
    clear_gradients(run)
    if hasattr(run.model, "end_step"):
        run.model.end_step(logged)
    # This is learning_rate after its schedule. A group's own rate may be another multiple of it.
    # common/log.py knows the lines of training steps by "lr".
    logged["lr"] = run.cfg.learning_rate * lr_factor(run.step, run.cfg)
    tokens = tokens_per_step(run.cfg, run.model)
    run.tokens += tokens
    run.flops += tokens * run.model.flops_per_token()
    run.step += 1
    return logged, stopping


def forward_backward(run):
    """Compute the gradients of this process's micro-batches, one after the other. Return the values
    to log. Their sums over all processes are the values of the global batch."""
    cfg, procs = run.cfg, run.procs
    n = cfg.gradient_accumulation_steps // procs.world      # micro-batches of this process
    indices = range(procs.rank * n, (procs.rank + 1) * n)
    micro_batches = [run.batches.micro_batch(run.step, i) for i in indices]
    counts = [int((y != -1).sum()) for _, y in micro_batches]
    total = max(1.0, procs.sum(sum(counts))[0])             # targets of the global batch
    all_rows, logged = cfg.batch_size * cfg.gradient_accumulation_steps, {}
    one_batch = run.recorded or micro_step
    for index, (x, y), count in zip(indices, micro_batches, counts):
        seed_forward(cfg.seed, run.step, index)
        # DDP averages gradients over the processes once a step. FSDP does so after each
        # micro-batch, because it keeps them sharded.
        sync = procs.world == 1 or cfg.fsdp or index == indices[-1]
        with contextlib.nullcontext() if sync else run.forward.no_sync():
            x, y = to_device(x, run), to_device(y, run)
            # The loss is the mean over the `count` targets of this micro-batch. The weight
            # count / total makes the micro-batches add up to the mean over the step's `total`
            # targets. The weight is multiplied by `world`, because DDP and FSDP average over so
            # many processes, and the sum is wanted.
            aux, right = one_batch(run, x, y, count / total * procs.world)
        values = {key: value * (count / total) for key, value in aux.items()}
        if run.task:
            right_tokens, right_rows = right
            values["token_accuracy"] = right_tokens / total
            values["sequence_accuracy"] = right_rows / all_rows
        for key, value in values.items():
            logged[key] = logged.get(key, 0.0) + value
    return logged


def micro_step(run, x, y, weight):
    """Add the gradients of weight * loss of a micro-batch to those of the parameters. Return two
    things. The first is aux, {name: mean over the targets}, which is logged. The second is, for a
    task, the numbers of right tokens and rows, and otherwise ()."""
    with run.procs.autocast:
        logits, loss, aux = run.forward(x, y)
        if taken := OWN_NAMES & aux.keys():
            raise UserError(f"the model logs {min(taken)!r}, which is a name that the log has "
                            f"already: the value needs another one")
        if run.teacher is not None:
            loss, aux = distil(run.teacher, x, y, logits, loss, aux)
    right = count_right(logits, y) if run.task else ()
    del logits      # because they may take gigabytes
    (loss * weight).backward()
    return {key: value.detach() for key, value in aux.items()}, right


def distil(teacher, x, y, logits, loss, aux):
    """Add to the loss the KL divergence from the teacher's distribution, averaged over the targets
    that count (Hinton et al. 2015)."""
    counted = y != -1
    with torch.no_grad():
        log_p = teacher(x)[0].log_softmax(-1)                               # (B, T, V)
    kl = (log_p.exp() * (log_p - logits.log_softmax(-1))).sum(-1)           # (B, T)
    kd = (kl * counted).sum() / counted.sum().clamp(min=1)
    return loss + kd, {**aux, "kd": kd}


def seed_forward(seed, step, index):
    """Seed the random numbers of a forward pass by (seed, step, micro-batch)."""
    # The list ends in 1, and those of common/tasks.py end in other numbers, so that no two draws
    # have the same seed.
    words = np.random.SeedSequence([seed, step, index, 1])
    high, low = words.generate_state(2, np.uint32)
    torch.manual_seed(int(high) << 32 | int(low))


def to_device(x, run):
    if run.procs.device.type == "cuda":         # Python goes on while the copy waits for its turn
        return x.pin_memory().to(run.procs.device, non_blocking=True)
    return x.to(run.procs.device)


def clip_and_check(run, logged, signals):
    """Clip the gradients. Return the logged values, summed over all processes, and whether any
    process was asked to stop. One all-reduce sums both. Raise UserError in all processes if the
    loss or the gradient norm is not finite. The check waits for the GPU in each step, because an
    update that is not finite must not happen."""
    clip = run.cfg.grad_clip or math.inf
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), clip)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm     # sharded gradients
    values = [float(v) for v in logged.values()]
    *values, stopping = run.procs.sum(*values, float(len(signals) > 0))
    logged = dict(zip(logged, values), grad_norm=float(norm))
    for key in ("ce", "grad_norm"):
        if not math.isfinite(logged[key]):
            raise UserError(f"{key} is {logged[key]} at step {run.step}: the run stops before "
                            f"the update, {KEPT}. With resume=true and another seed= it goes on "
                            f"with other batches")
    return logged, stopping > 0


def clear_gradients(run):
    """Free the gradients, or set them to zero where a graph adds to them."""
    if run.cfg.compile == "graph":
        torch._foreach_zero_([p.grad for p in run.model.parameters() if p.grad is not None])
    else:
        run.model.zero_grad(set_to_none=True)


# ---- evaluation ----

@torch.no_grad()
def evaluate(run):
    """Return the mean cross-entropy of eval_batches batches of the validation data, in nats a
    token. A text also has bits per byte. A task has the fraction of its scored tokens that are
    right, and the fraction of its rows in which all scored tokens are right.

    In eval mode a model computes the same function as when it decodes (but for LRT with
    prefill=interleaved). A model that has `estimate` (LRT) also estimates the cross-entropy by its
    faster training path. It does so on all batches, and computes the exact figures on exact_batches
    of them. val_gap is the exact cross-entropy minus the estimate, on the batches that have
    both."""
    model, procs = run.model.eval(), run.procs
    batches = run.batches.val_batches(run.cfg.eval_batches)
    # These batches get the exact figures: all of them, or as many as are wanted, evenly spaced.
    n, wanted = len(batches), run.cfg.exact_batches
    exact = range(n) if not 0 < wanted < n else set(np.linspace(0, n - 1, wanted).astype(int))
    names = ["ce", *getattr(model, "eval_metrics", ())]
    # All processes sum the same names, because a process may have no batch.
    names += ["token_accuracy", "sequence_accuracy", "ce_estimate", "gap"]
    totals, counts = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
    with gathered(run.model), graphs.plain_steps(model):    # each process needs all weights
        for i in range(procs.rank, n, procs.world):
            x, y = (to_device(z, run) for z in run.batches.cut(run.batches.val, batches[i]))
            with procs.autocast:
                for name, total, count in figures(run, x, y, i in exact):
                    totals[name] += total
                    counts[name] += count
    summed = zip(totals, procs.sum(*totals.values()), procs.sum(*counts.values()))
    means = {f"val_{name}": total / count for name, total, count in summed if count}
    if not run.task:
        means["val_bpb"] = bits_per_byte(means["val_ce"], run.batches.val)
    return means


def figures(run, x, y, exact):
    """Yield the figures of a batch, each as a name, a sum, and how many values are in the sum."""
    model, tokens = run.model, int((y != -1).sum())
    estimate = model.estimate(x, y) if hasattr(model, "estimate") else None
    if estimate is not None:
        yield "ce_estimate", float(estimate) * tokens, tokens
        if not exact:
            return
    logits, _, aux = model(x, y)
    for name in ("ce", *getattr(model, "eval_metrics", ())):
        yield name, float(aux[name]) * tokens, tokens
    if estimate is not None:
        yield "gap", float(aux["ce"]) * tokens - float(estimate) * tokens, tokens
    if run.task:
        right_tokens, right_rows = count_right(logits, y)
        yield "token_accuracy", int(right_tokens), tokens
        yield "sequence_accuracy", int(right_rows), len(y)


# ---- saving ----

# A run's folder has these files. A checkpoint has .tmp behind its name while it is written.
OURS = re.compile(r"(ckpt|best|step_[0-9]+)\.pt|log\.jsonl|curves\.png")
PROGRESS = "step", "tokens", "flops", "evaluated", "best_ce"    # fields of a Run
# Validation losses can be compared if all of these are the same.
MEASURE = ("data", "eval_batches", "exact_batches", "batch_size", "precision", "block_size",
           "exit_loop", "train_path")


def evaluate_and_keep(run):
    """After each eval_interval steps and after the last step, save ckpt.pt and then evaluate the
    state. After the last evaluation, save ckpt.pt again. After each keep_interval steps, save
    ckpt.pt and then step_N.pt. An evaluation that fails ends the run, so that nothing is saved
    after it. The ckpt.pt from before the evaluation stays."""
    def due(interval):
        return run.step > 0 and interval > 0 and run.step % interval == 0
    start = time.perf_counter()
    last = run.step >= run.cfg.max_steps
    evaluates = run.evaluated < run.step and (last or due(run.cfg.eval_interval))
    if evaluates:
        save_and_evaluate(run)
    if last and evaluates or due(run.cfg.keep_interval):
        save(run, "ckpt.pt")        # now with the evaluation, for a run that goes on from here
    if due(run.cfg.keep_interval):
        save(run, f"step_{run.step}.pt")    # last, so that it is never newer than ckpt.pt
    if run.log:
        run.log.leave_out(time.perf_counter() - start)


def save_and_evaluate(run):
    """Save the state, evaluate it, and save it as best.pt if its loss is the best. Only the next
    save of ckpt.pt knows of the evaluation. A run that is killed before that save evaluates the
    state again when it is resumed, with the same result."""
    save(run, "ckpt.pt")
    result = evaluate(run)
    ce = result["val_ce"]
    # LRT's exact chain may overflow while its estimate is finite. Further training may mend that.
    result = {name: value for name, value in result.items() if math.isfinite(value)}
    if not {"val_ce", "val_ce_estimate"} & result.keys():
        raise UserError(f"val_ce is {ce} at step {run.step}: the run stops. If there is "
                        f"a best.pt, a copy of it in the place of ckpt.pt goes on from there")
    best = ce < run.best_ce
    run.evaluated, run.best_ce = run.step, min(run.best_ce, ce)
    if best:
        save(run, "best.pt")
    if run.log:
        run.log.evaluation(result, best)


def save(run, name):
    """Save the state as the file `name`. Raise UserError if a weight is not finite, so that the
    last good checkpoint stays."""
    saved = state(run)                          # all processes take part, if weights are sharded
    with run.procs.together():
        if not all(w is None or w.isfinite().all() for w in saved["weights"].values()):
            raise UserError(f"a weight is not finite at step {run.step}: the run stops, {KEPT}")
        if run.procs.master:
            ckpt = run.folder / "ckpt.pt"
            if stamp(ckpt) not in (run.stamp, None):    # a file system may have no locks
                raise UserError(f"{run.folder}: another run has saved there meanwhile, so that "
                                f"this one stops")
            save_checkpoint(run.folder / name, saved)
            if name == "ckpt.pt":
                run.stamp = stamp(ckpt)


def state(run):
    """Return all that a resumed run needs, as tensors and plain values. This includes no state of a
    random number generator, because a step seeds its forward passes itself."""
    return {"model": run.cfg.model,
            "config": asdict(run.cfg), "model_config": asdict(run.model.cfg),
            "tokenizer": run.batches.train.tokenizer.to_dict(),
            "weights": whole(run.model.state_dict()),
            "optimizers": [whole(optimizer.state_dict()) for optimizer in run.optimizers],
            **{name: getattr(run, name) for name in PROGRESS}, "data": run.batches.fingerprint,
            "precision": run.procs.precision}


def restore(run, ckpt):
    """Go on from the state of a checkpoint. The model has its weights already."""
    for name in (*PROGRESS, "stamp"):
        setattr(run, name, ckpt[name])
    now = {**asdict(run.cfg), **asdict(run.model.cfg), "data": run.batches.fingerprint,
           "precision": run.procs.precision}
    was = {**ckpt["config"], **ckpt["model_config"], **ckpt}
    # An option that an older checkpoint lacks is not compared. batch_size matters only if an
    # evaluation reads a part of the text.
    partial = run.cfg.eval_batches or run.cfg.exact_batches
    if other := [name for name in MEASURE if name in now and was.get(name, now[name]) != now[name]
                 and (partial or name != "batch_size")]:
        note(f"the checkpoint's losses were measured with another {', '.join(other)}: the best "
             f"loss is forgotten, and the next evaluation replaces best.pt")
        run.best_ce = math.inf
    try:
        load_optimizers(run.optimizers, ckpt["optimizers"], run.step, run.cfg)
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as e:
        if lacks_memory(e):
            raise
        raise UserError(f"resume: the checkpoint does not fit: {first_line(e)}") from e
    if run.step >= run.cfg.max_steps:
        note(f"nothing is left to train: the checkpoint is of step {run.step}, and "
             f"max_steps={run.cfg.max_steps}")


# ---- set-up ----

def setup(argv):
    """Return the Run that the arguments describe. All is checked before anything but a data set is
    written."""
    given = split_args(argv)[1]
    cfg, model_fields, ckpt = merge(given, load_start)
    cfg.fsdp = cfg.fsdp and not cfg.eval_only   # each process evaluates with all weights
    procs = Processes(cfg)
    with procs.together():
        if procs.master and cfg.resume == "true" and not cfg.eval_only:
            lock(cfg.folder)
            if stamp(cfg.folder / "ckpt.pt") != ckpt["stamp"]:
                raise UserError(f"{cfg.folder}: another run has saved there meanwhile; the same "
                                f"command goes on from it")
        check_new(cfg)
        check_graph(cfg, procs)
        batches = open_batches(cfg, model_fields["block_size"], procs.world)
        if ckpt is not None:
            check_tokenizer(ckpt, batches.train, cfg.init_from or cfg.folder)
        fit_to_data(cfg, given, batches)
        model = make_model(cfg, model_fields, ckpt, batches.train.vocab_size).to(procs.device)
        if not cfg.eval_only:
            set_budget(cfg, model)
        teacher = load_teacher(cfg, model, batches.train)
    # This sum waits for all processes, so that the first writes to the folder only after all have
    # read it.
    number = number_of(cfg, model, batches, teacher, ckpt) if procs.world > 1 else 0
    if procs.sum(number)[0] != procs.world * number:
        raise UserError("the processes have different options, data or checkpoints: every node "
                        "needs the same command, and the same files in out_dir and data_dir")
    if cfg.fsdp:
        shard(model, blocks_of(model), procs.device, procs.world)
    run = Run(cfg, procs, batches, model, prepare_forward(cfg, model, procs),
              make_optimizers(model, cfg), teacher)
    if cfg.eval_only and ckpt is not None:
        run.step = ckpt["step"]
    elif cfg.resume == "true":
        restore(run, ckpt)
    if not cfg.eval_only:
        if compiles(cfg, procs.device):
            note("torch.compile takes minutes at the start (compile=false starts at once)")
        try_micro_step(run)
        if cfg.compile == "graph":
            run.recorded = record_micro_step(run)
        with procs.together():
            claim_folder(run)
    if procs.master:
        describe(run)
    return run


def check_new(cfg):
    """Raise UserError if the folder holds a checkpoint and the options do not say what is to
    happen to it. best.pt and step_N.pt count, too, because ckpt.pt alone may have been removed.
    Raise UserError, too, if the run would remove the weights that it starts from."""
    if cfg.resume == "true" or cfg.eval_only:
        return
    if cfg.overwrite and cfg.init_from and is_inside(cfg.init_from, cfg.folder):
        raise UserError(f"init_from={cfg.init_from} is in the folder of the run itself, which "
                        f"overwrite=true empties: run=NAME names another folder")
    names = sorted(file.name for file in cfg.folder.glob("*.pt") if OURS.fullmatch(file.name))
    if names and not cfg.overwrite:
        last = "ckpt.pt" in names
        use = "resume=true goes on from it" if last else "init_from= takes its weights"
        raise UserError(f"{cfg.folder / ('ckpt.pt' if last else names[0])} is a checkpoint: {use}, "
                        f"overwrite=true replaces it, run=NAME starts another run")


def number_of(cfg, model, batches, teacher, ckpt):
    """Return a number by which processes are compared. It is the same in all of them only if they
    have the same options, data and checkpoints. Options that name places may differ, because the
    files in these places are compared."""
    places = "out_dir", "data_dir", "dataset", "tokenizer", "config", "init_from", "teacher"
    options = {name: value for name, value in asdict(cfg).items() if name not in places}
    taught = teacher and {"model": type(teacher).__module__, "model_config": asdict(teacher.cfg),
                          "weights": teacher.state_dict()}
    weights = [start and (start.get("step"), fingerprint(start)) for start in (ckpt, taught)]
    decides = options, asdict(model.cfg), batches.fingerprint, weights
    return int(hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:8], 16)


def check_graph(cfg, procs):
    """Raise UserError if compile=graph is given where no step can be recorded."""
    one_gpu = procs.world == 1 and graphs.recordable(torch.empty(0, device=procs.device))
    if cfg.compile == "graph" and not cfg.eval_only and not one_gpu:
        missing = ", and triton is missing" * (not graphs.has_triton())
        raise UserError(f"compile=graph needs triton and one process on a CUDA GPU, but this run "
                        f"has {procs.world} on {procs.device.type}{missing}: compile=auto runs "
                        f"anywhere")


def open_batches(cfg, block_size, world):
    """Return the batches of a task or of a data set. A single process prepares a missing data set
    of local files itself. With several processes, a missing data set is an error that names the
    command to make it, because the other processes would wait for longer than a collective may
    take."""
    if is_task(cfg.dataset):
        return TaskBatches(cfg, block_size)
    if world == 1:
        prepare_missing(cfg)
    batches = TextBatches(open_data(cfg), cfg, block_size)
    tell_changes(batches.train.folder, batches.train.meta)
    return batches


def fit_to_data(cfg, given, batches):
    """Raise UserError if tokenizer= or sample_prompt= of the command line does not fit the data. A
    tokenizer of a config file or a checkpoint that does not fit gives way to the data's tokenizer.
    If there is no prompt, or if that of a config file or a checkpoint does not fit, the first
    tokens of the validation data are the prompt."""
    task, data = is_task(cfg.dataset), batches.train
    # The tokens of a task are fixed, so that tokenizer= may only repeat its default there.
    made = TrainConfig.tokenizer if task else data.meta.get("tokenizer_name", cfg.tokenizer)
    if given.get("tokenizer", made) != made:
        raise UserError(f"tokenizer={cfg.tokenizer} is not the one of dataset={cfg.dataset}: "
                        f"leave out tokenizer")
    cfg.tokenizer = made
    try:
        fits = data.tokenizer.encode(cfg.sample_prompt) if cfg.sample_prompt else []
    except UserError as e:
        if given.get("sample_prompt"):
            raise UserError(f"sample_prompt: {e}") from e
        fits = []
    if not fits:
        ids = batches.cut(batches.val, [0])[0][0, :16].tolist()
        text = data.tokenizer.decode(ids).replace("\0", "")    # no option may hold a zero byte
        cfg.sample_prompt = text.rstrip("\ufffd") or text or "\n"


def make_model(cfg, fields, ckpt, vocab_size):
    """Return the model, initialised from the seed or with the checkpoint's weights. vocab_size is
    the data's. If the options have one too, it is taken, and it must not be smaller."""
    fields = {"vocab_size": vocab_size, **fields}
    if fields["vocab_size"] < vocab_size:
        raise UserError(f"vocab_size={fields['vocab_size']} is less than the data's {vocab_size} "
                        f"tokens")
    torch.manual_seed(cfg.seed)
    if ckpt is not None:
        return build_model(ckpt, **fields)
    module = model_module(cfg.model)
    return module.Model(module.Config(**fields))


def prepare_forward(cfg, model, procs):
    """Return the model as training calls it: compiled if compile= says so, and data parallel if
    there are several processes."""
    compiled = compiles(cfg, procs.device)
    if cfg.fsdp:
        torch.compiler.config.recompile_limit = 64  # all blocks share one function's compilations
        for block in blocks_of(model) if compiled else ():
            block.compile()                     # the hooks around the blocks are not compiled
        return model
    forward = torch.compile(model) if compiled else model
    if procs.world == 1 or cfg.eval_only:
        return forward
    # The parameters of a loop that has not begun get no gradient.
    unused = getattr(model.cfg, "loop_warmup", 0) > 0
    return torch.nn.parallel.DistributedDataParallel(forward, find_unused_parameters=unused)


def try_micro_step(run):
    """Compute a micro-batch and drop its gradients, so that a missing compiler, too little memory
    for it or an error of a library ends the run here, before its folder is touched. Code that is
    compiled here is used again. This changes nothing in the run, because each forward pass is
    seeded, and because the buffers, which a model may change in a forward pass, are set back."""
    run.model.train()
    before = [buffer.clone() for buffer in run.model.buffers()]
    x, y = (to_device(z, run) for z in run.batches.micro_batch(0, 0))
    micro_step(run, x, y, 1.0)
    without = [name for name, p in run.model.named_parameters()
               if p.requires_grad and p.grad is None]
    if without and getattr(run.forward, "find_unused_parameters", None) is False:
        raise UserError(f"{without[0]} gets no gradient, and then DistributedDataParallel fails: "
                        f"set its requires_grad to False, or train with one process")
    clear_gradients(run)
    for buffer, old in zip(run.model.buffers(), before):
        buffer.copy_(old)


def record_micro_step(run):
    """Return micro_step as a CUDA graph. Raise UserError if the model cannot be recorded.

    A replay runs no Python, so that a Python number would keep the value that it had during the
    recording. Therefore weight is a tensor, as x and y are. try_micro_step has compiled Triton's
    kernels and made the gradients. The graph adds to the gradients where they lie in memory, so
    that clear_gradients must keep them. A replay draws dropout's numbers from the seed of its step.
    Clipping and the optimizers stay outside of the graph, because the schedules change their
    numbers in each step."""
    if getattr(run.model.cfg, "loop_warmup", 0):
        raise UserError("compile=graph records all loops, so that loop_warmup cannot run fewer "
                        "(compile=auto can)")
    x, y = (to_device(z, run) for z in run.batches.micro_batch(0, 0))
    weight = torch.ones((), device=x.device, dtype=next(run.model.parameters()).dtype)
    names = []

    def recorded(x, y, weight):
        aux, right = micro_step(run, x, y, weight)
        names[:] = aux
        return [*aux.values(), *right]

    def replay(run, x, y, value):
        values = graph(x, y, torch.full_like(weight, value))
        return dict(zip(names, values)), values[len(names):]
    try:
        graph = graphs.Graph(recorded, (x, y, weight))
    except RuntimeError as e:
        for cause in (e, e.__context__):
            if cause is not None and lacks_memory(cause):
                raise cause
        why = first_line(e.__context__ or e)
        raise UserError(f"compile=graph: a step of model={run.cfg.model} with these options cannot "
                        f"be recorded (compile=auto trains it): {why}") from e
    return replay


def claim_folder(run):
    """Make the run's folder and its log, in the first process. If the file system has locks, no
    other run can have the folder until this one ends. Files that a killed run left half written are
    removed. If overwrite=true replaces an older run, its files are removed, too, first its ckpt.pt.
    If the process is killed after that, check_new refuses the files that are left. Files of the
    user stay."""
    folder = run.folder
    if not run.procs.master:
        return
    folder.mkdir(parents=True, exist_ok=True)
    lock(folder)
    check_new(run.cfg)                          # because another run may have ended meanwhile
    for file in sorted(folder.iterdir(), key=lambda file: file.name != "ckpt.pt"):
        older = run.cfg.overwrite and OURS.fullmatch(file.name)
        if older or file.suffix == ".tmp" and OURS.fullmatch(file.stem):
            file.unlink()
    run.log = Log(run)


def describe(run):
    """Print the model, the data, and what the run will do."""
    cfg, model, procs = run.cfg, run.model, run.procs
    size = sum(p.numel() for p in model.parameters())
    path = "fast" if model.cfg.fast else "naive"
    say(f"{cfg.run}: model {cfg.model}, {size:,} parameters, "
        f"{model.flops_per_token():.3g} FLOPs a token, {path} path, {cfg.dataset}")
    if not run.task:
        train, val = run.batches.train, run.batches.val
        say(f"{train.folder}: {train.tokens:,} tokens to train on, {val.tokens:,} to validate")
    if not cfg.eval_only:
        if cfg.lr_schedule != "linear" and cfg.warmup_steps >= cfg.max_steps:
            note(f"warmup_steps={cfg.warmup_steps} is not over after {cfg.max_steps} steps: the "
                 f"learning rate does not reach its peak")
        say(f"{cfg.max_steps:,} steps of {tokens_per_step(cfg, model):,} tokens on "
            f"{device_name(procs.device)}, {procs.world} process{'es' * (procs.world > 1)}"
            + f"; going on from step {run.step}" * (run.step > 0))


# ---- the command line ----

def main(argv):
    if asks_help(argv):
        return print_help(argv)
    run = setup(argv)
    if run.cfg.eval_only:
        result = evaluate(run)
        if not math.isfinite(result["val_ce"]):
            raise UserError(f"val_ce is {result['val_ce']}: the weights are broken, or lrt's chain "
                            f"overflows")
        if run.procs.master:
            print(in_words(result))
        run.procs.meet()
    else:
        done = train(run)
        with gathered(run.model), graphs.plain_steps(run.model):    # the sample needs all weights
            run.procs.meet()
            if run.procs.master:
                finish(run, done)
    run.procs.leave()


def print_help(argv):
    """Print the usage, the trainer's options, those of the chosen model, and what its config file
    sets."""
    given = split_args([arg for arg in argv if not asks_help([arg])], most=None)[1]
    file = config_file(given)
    name = {**file, **given}.get("model", TrainConfig.model)
    print(help_text(TrainConfig, __doc__))
    print("\n" + help_text(model_module(name).Config, f"options of model={name}:"))
    if Path(file["config"]).exists():
        print(f"\nin the place of these defaults, {file['config']} has:\n")
        print(read_text(file["config"], "config"))


def finish(run, done):
    """Print what the model writes, draw curves.png, and print where the files are."""
    cfg = run.cfg
    run.log.bar.close()
    if not done:
        return say(f"stopped at step {run.step}; go on with resume=true")
    if cfg.sample_tokens and not run.task:
        try:
            text = sample_text(run.model, run.batches.train.tokenizer, cfg.sample_prompt,
                               cfg.sample_tokens, seed=cfg.seed)
            say("\n".join(["-" * 80, text, "-" * 80]))
        except Exception as e:  # no cache, too little memory, a kernel that does not compile
            say(f"note: no sample: {first_line(e)}")
    try:                        # a run needs neither lab nor matplotlib
        from lab.plot import draw_curves
        draw_curves(read_log(run.log.path), run.folder / "curves.png", cfg.run)
    except Exception as e:      # matplotlib's settings may break anything
        say(f"note: no curves.png: {first_line(e)}")
    more = "" if run.task else f"; more text: {as_command('sample.py', path=run.folder)}"
    best = ", best.pt" * (run.folder / "best.pt").exists()
    picture = ", curves.png" * (run.folder / "curves.png").exists()
    say(f"{run.folder}: ckpt.pt{best}, log.jsonl{picture}{more}")


if __name__ == "__main__":
    run_cli(main)
