"""
The options of training are merged here: defaults, a config file, a checkpoint and the command line.
"""
from dataclasses import asdict, fields
from pathlib import Path

from common.checkpoint import load_checkpoint, load_initial, newest
from common.options import (HERE, START, TrainConfig, UserError, check_known, home, known,
                            load_yaml, model_module, names, note, plain_name, typed_config)


# ---- merging: defaults < config file < checkpoint (but for free_fields) < command line ----

def read_config(given):
    """(TrainConfig, the model's Config fields, checkpoint or None) of the command line's options,
    as text. Of the fields, vocab_size is missing where nothing sets it: it is the data's then."""
    base, ckpt = config_file(given), None
    named = base if "config" in given else {}
    values = {**base, **given}
    start = typed_config(TrainConfig, {key: values[key] for key in START & values.keys()})
    if start.resume == "auto":                  # of a run that a scheduler starts again and again
        start.resume = "true" if newest(start.folder).exists() else "false"
    given = {**given, "resume": start.resume}
    if start.resume == "true" or start.eval_only and not given.get("init_from"):
        given = {**given, "init_from": ""}      # what the run began with matters no more
        ckpt = load_checkpoint(newest(start.folder))
        base = keys_of_run(ckpt, start, named, given)
    elif start.init_from:
        ckpt = load_initial(start.init_from)
        ckpt = as_weights_of({**named, **given}.get("model", ckpt["model"]), ckpt)
        # the model is that of the weights, but for what the named file may change
        free = {key: named[key] for key in free_fields(ckpt) & named.keys()}
        base = {**config_file({"model": ckpt["model"], **given}), "model": ckpt["model"],
                **ckpt["model_config"], "fast": True, **free}
    cfg, model_fields = run_config(given, base)
    if start.resume != "true" and not start.eval_only and not Path(cfg.config).exists():
        note(f"there is no {cfg.config}: this is dataset={cfg.dataset} tokenizer={cfg.tokenizer} "
             f"optimizer={cfg.optimizer} max_steps={cfg.max_steps}, and what else is not given "
             f"has its default (train.py help)")
    for key, old in ckpt["model_config"].items() if ckpt else ():
        if model_fields[key] != old and key not in free_fields(ckpt):
            raise UserError(f"{key}={model_fields[key]}, but the checkpoint's model has "
                            f"{key}={old}")
    return cfg, model_fields, ckpt


def config_file(given):
    """The values of the file that config= names, or else of configs/MODEL_tiny.yaml."""
    tiny = HERE / "configs" / f"{given.get('model', TrainConfig.model)}_tiny.yaml"
    file = home(given.get("config", str(tiny)))
    yaml = load_yaml(file) if "config" in given or tiny.exists() else {}
    return {"run": plain_name(Path(file).stem), **yaml, "config": file}


def keys_of_run(ckpt, start, named, given):
    """A run keeps its options, but for START. A line tells where the file that the command line
    names differs."""
    check_same_model(given.get("model", ckpt["model"]), ckpt)
    keys = names(TrainConfig, model_module(ckpt["model"]).Config)
    kept = known({**ckpt["config"], **ckpt["model_config"]}, keys, start.folder)
    for key in sorted(named.keys() & kept.keys() - START - given.keys()):
        if named[key] != kept[key]:
            note(f"{key}={kept[key]} is the run's own and stays; the file has {named[key]} (an "
                 f"option on the command line would change it)")
    return {**kept, **{key: getattr(start, key) for key in START}}


def check_same_model(name, ckpt):
    if name != ckpt["model"]:
        raise UserError(f"model={name}, but the checkpoint holds model={ckpt['model']}")


def as_weights_of(name, ckpt):
    """A checkpoint as the start of model `name`: its own, or that of a model in its
    Config.CONVERTS_FROM, with the fields that both have; build_model converts the weights."""
    config, origin = model_module(name).Config, model_module(ckpt["model"]).Config
    if ckpt["model"] not in getattr(config, "CONVERTS_FROM", ()) or name == ckpt["model"]:
        check_same_model(name, ckpt)
        return ckpt
    old = ckpt["model_config"]
    for f in fields(origin):
        if f.name not in names(config) and old.get(f.name, f.default) != f.default:
            raise UserError(f"the checkpoint's model has {f.name}={old[f.name]}, "
                            f"which model={name} has not")
    shared = {key: old[key] for key in names(config) & old.keys()}
    return {**ckpt, "model": name, "model_config": shared, "converts": True}


def free_fields(ckpt):
    """The fields of a model that its weights do not fix."""
    free = getattr(model_module(ckpt["model"]).Config, "NOT_IN_WEIGHTS", ())
    return {"fast", "dropout", "block_size", *free, *["n_layer"] * ("converts" in ckpt)}


def run_config(given, base):
    """(TrainConfig, the model's Config fields) from options that are given, over those of base."""
    values = {**base, **given}
    if values.get("dataset") != base.get("dataset", TrainConfig.dataset) and "dataset" in given:
        values = {**base, "sample_prompt": "", **given}     # a prompt holds for its data set only
    schemas = TrainConfig, model_module(values.get("model", TrainConfig.model)).Config
    check_known(values, names(*schemas))
    cfg, model = (typed_config(schema, {key: values[key] for key in names(schema) if key in values})
                  for schema in schemas)
    model_fields = asdict(model)
    if cfg.max_flops and {"max_steps", "max_flops"} <= given.keys():
        raise UserError("max_flops sets max_steps: give one of the two")
    if "max_steps" in given:
        cfg.max_flops = 0.0
    if "vocab_size" not in values:
        del model_fields["vocab_size"]
    return cfg, model_fields
