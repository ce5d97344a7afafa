"""python -m common.checkpoint RUN export=... writes Hugging Face folders that compute the same, and files that load
back."""
import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common import checkpoint, huggingface
import runs
import train
import sample
from common.options import UserError, model_module
from conftest import ROOT, move, snapshot, tiny
from test_prepare import EOT, SPECIAL, TEXTS, WORDS, llama2, phi, smollm
from test_gpt import cast, saved_llama, stored
from common.huggingface import hf_tokenizer
from common.tokenizer import ByteTokenizer, CharTokenizer, HFTokenizer, train_bpe

SIZES = dict(block_size=32, vocab_size=61, n_head=4, n_embd=32)
GEMMA = dict(mlp="geglu", scale_embeddings=True, head_dim=6)
CASES = [("gpt", dict(n_layer=2, n_kv_head=2, rope_theta=500.0)),
         ("gpt", dict(n_layer=2, qk_norm=True, tie_embeddings=False, head_dim=12)), ("gpt", dict(n_layer=2, window=5)),
         ("gpt", dict(n_layer=2, n_kv_head=1, **GEMMA)), ("relaxed", dict(n_layer=4, rank=2, **GEMMA)),
         ("mor", dict(n_layer=4, n_loop=2, router="none", **GEMMA)),
         ("relaxed", dict(n_layer=6, n_loop=3, rank=3, exit_loop=2, qk_norm=True)),
         ("relaxed", dict(n_layer=4, rank=2, tie_embeddings=False, n_kv_head=2)),
         ("mor", dict(n_layer=6, n_loop=2, router="none", share="middle_sequence", exit_loop=1))]


@pytest.mark.parametrize("model, keys", CASES)
def test_transformers_computes_the_same_logits(model, keys, tmp_path):
    """All weights are random, norms and deltas too. Then the folder loads back as a model_gpt."""
    from transformers import AutoModelForCausalLM
    torch.manual_seed(0)
    module = model_module(model)
    ours = move(module.Model(module.Config(**SIZES, **keys)).eval(), 0.1)
    huggingface.to_pretrained(ours, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    own = dict(qk_norm="Qwen3", window="Mistral", scale_embeddings="Gemma")
    family = next((own[key] for key in own if keys.get(key)), "Llama")
    assert type(theirs).__name__ == f"{family}ForCausalLM"
    assert theirs.config.eos_token_id is None, "transformers would stop at a token that ends nothing here"
    idx, again = torch.randint(0, 61, (2, 32)), huggingface.from_pretrained(tmp_path)
    logits = ours(idx)[0]
    for other in theirs(idx).logits, again(idx)[0]:
        assert (logits - other).abs().max() < 1e-5 * logits.abs().max()
    if model == "gpt":
        same = torch.allclose if family == "Gemma" else torch.equal    # its norms are stored less 1
        cfg = ours.cfg
        sizes = dict(head_dim=cfg.head_size, n_mlp=cfg.mlp_width, n_kv_head=cfg.kv_heads)
        assert again.cfg == dataclasses.replace(cfg, **sizes) and all(map(same, again.parameters(), ours.parameters()))


@given(texts=st.lists(TEXTS, min_size=9, max_size=9))
def test_the_export_encodes_as_we_do(texts, exported):
    """transformers reads the ids that the model was trained on, for every kind of tokenizer, and so does hf:FOLDER."""
    special = [*SPECIAL, "</s>"]                    # they are tokens there and characters here
    for ours, theirs, again in exported:
        for text in ["cat ünder\n    cat  aaa aaaa aaaaa", *texts]:
            for word in special:
                text = text.replace(word, "")
            ids = ours.encode(text)
            assert theirs.encode(text) == ids == again.encode(text), (ours.kind, text)
            shown = theirs.decode(ids, skip_special_tokens=True)
            text = text.replace("▁", " ") if ours.made_of.get("eos") == "</s>" else text  # Llama 2's sign of a space
            assert shown == ours.decode(ids) == again.decode(ids) == text
        assert theirs.eos_token_id == ours.eot == again.eot and len(theirs) == ours.vocab_size == again.vocab_size


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return (tokenizer, the export as transformers reads it, the export as we read it) of each kind. The kind hf: has
    all its forms."""
    from transformers import AutoTokenizer
    bpe = train_bpe(360, [2 * "the cat sat on the mat, 1234 times\n    the end aaaaaaa aaaab baaa", WORDS])
    found = []
    for ours in (ByteTokenizer(), bpe, *(HFTokenizer(json.dumps(data), eos) for data, eos in (
            (smollm(), EOT), (phi(), EOT), (llama2(), "</s>")))):
        folder = tmp_path_factory.mktemp(ours.kind)
        assert huggingface.save_tokenizer(ours, folder)
        found.append((ours, AutoTokenizer.from_pretrained(folder), hf_tokenizer(str(folder))))
    assert not huggingface.save_tokenizer(CharTokenizer("ab"), tmp_path_factory.mktemp("char"))
    return found


def test_an_exported_file_is_the_run_without_optimizers(data_dir, tmp_path, capsys):
    """The weights are the same bit for bit, for load_run, for sample.py, and as init_from."""
    trainer, file = runs.run("relaxed", tmp_path / "out", data_dir, "rank=2"), tmp_path / "new" / "m.pt"
    folder = trainer.folder
    checkpoint.main([str(folder), f"export={file}"])
    model, tokenizer, ckpt = checkpoint.load_run(file)
    state = train.state(trainer)
    assert ckpt["step"] == 6 and tokenizer.kind == "byte" and ckpt["optimizers"] == []
    assert runs.fingerprint(dict(model.state_dict())) == runs.fingerprint(state["weights"])
    for source in (folder, file):
        sample.main([str(source), "prompt=a", "max_new_tokens=8", "device=cpu"])
    first, second = (line for line in capsys.readouterr().out.splitlines() if line.startswith("a"))
    assert first == second
    more = runs.run("relaxed", tmp_path, data_dir, f"init_from={file}", "max_steps=1", "learning_rate=0", "rank=2")
    assert runs.fingerprint(train.state(more)["weights"]) == runs.fingerprint(state["weights"])
    with pytest.raises(UserError, match="overwrite=true"):
        checkpoint.main([str(folder), f"export={file}"])
    with pytest.raises(UserError, match="is in a run's folder"):     # otherwise the run would lose its optimizers
        checkpoint.main([str(folder), f"export={folder / 'ckpt.pt'}", "overwrite=true"])
    checkpoint.main([str(folder), f"export={file}", "overwrite=true", "exit_loop=1"])
    assert checkpoint.load_run(file)[0].loops_to_run == 1
    checkpoint.main([str(file), f"export={tmp_path / 'all.pt'}", "exit_loop=0"])
    assert checkpoint.load_run(tmp_path / "all.pt")[0].loops_to_run == 2


@pytest.mark.parametrize("sizes, dtype, model, keys", [
    (dict(kind="Llama", head_dim=16), torch.float32, "mor", ["router=none", "n_loop=2", "share=middle_cycle"]),
    (dict(kind="Gemma", head_dim=16), torch.bfloat16, "relaxed", ["n_loop=2", "rank=3"])])
def test_from_a_folder_to_a_folder(sizes, dtype, model, keys, data_dir, tmp_path):
    """The model is converted by the recipe, trained, and exported at a fixed depth. transformers then computes its
    logits."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    saved_llama(tmp_path / "source", vocab_size=257, num_hidden_layers=4, **sizes)
    if dtype == torch.bfloat16:
        stored(tmp_path / "source", cast(dtype))
    recipe = [f"config={ROOT / 'configs' / f'{model}_uptrain.yaml'}", f"init_from={tmp_path / 'source'}", *keys]
    if model == "relaxed":
        recipe.append(f"teacher={tmp_path / 'source'}")
    small = ["dataset=words", "block_size=16", "batch_size=2", "gradient_accumulation_steps=1", "max_steps=20",
             "eval_interval=20", "eval_batches=1", "warmup_steps=2", "sample_tokens=0", "device=cpu", "run=r"]
    train.main([*recipe, *small, f"out_dir={tmp_path}", f"data_dir={data_dir}"])
    checkpoint.main([str(tmp_path / "r"), f"export={tmp_path / 'hf'}", "exit_loop=1"])
    ours, _, ckpt = checkpoint.load_run(tmp_path / "r", exit_loop=1)
    theirs, tokenizer = (part.from_pretrained(tmp_path / "hf") for part in (AutoModelForCausalLM, AutoTokenizer))
    assert theirs.generation_config.eos_token_id == tokenizer.eos_token_id is not None
    assert type(theirs).__name__ == f"{sizes['kind']}ForCausalLM" and ckpt["step"] == 20
    idx = torch.randint(0, 257, (2, 16))
    assert (ours(idx)[0] - theirs(idx).logits).abs().max() < 1e-4


@pytest.mark.parametrize("model, keys", [("rt", []), ("gpt", ["mlp=gelu"]), ("gpt", ["mlp=geglu"]), ("mor", []),
                                         ("gpt", ["n_head=3", "head_dim=8", "qk_norm=false"]),
                                         ("mor", ["router=none", "kv=share"])])
def test_what_no_llama_computes_is_refused_and_harms_nothing(model, keys, data_dir, tmp_path):
    runs.run(model, tmp_path, data_dir, "max_steps=1", *keys)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "tokenizer.json").write_text("kept")
    for target in (tmp_path / "hf", tmp_path / "new" / "hf"):
        with pytest.raises(UserError, match="can be written as"):
            checkpoint.main([str(tmp_path / "r"), f"export={target}", "overwrite=true"])
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "kept" and not (tmp_path / "new").exists()


@pytest.mark.parametrize("name, keys", [("mor", {"router": "none"}), ("relaxed", {}), ("gpt", {})])
def test_a_fork_may_compute_something_else(name, keys):
    model = tiny(name, **keys)
    assert huggingface.unrolled(model)
    model.__class__ = type("Model", (type(model),), {"__module__": "model_fork"})
    with pytest.raises(UserError, match="model_fork computes what no Llama does"):
        huggingface.unrolled(model)


def test_an_export_replaces_an_export_and_nothing_else(data_dir, tmp_path, monkeypatch):
    """Files that transformers reads besides ours are refused. What fails, or was killed before, leaves nothing."""
    run, hf = str(runs.run("gpt", tmp_path, data_dir, "max_steps=1").folder), tmp_path / "new" / os.fsdecode(b"caf\xe9")
    char = runs.run("gpt", tmp_path / "char", data_dir, "max_steps=1")
    state = {**train.state(char), "tokenizer": CharTokenizer("ab").to_dict()}
    checkpoint.save_checkpoint(tmp_path / "char.pt", state)
    (tmp_path / ".hf.tmp" / "new").mkdir(parents=True)

    def fails(*given):
        raise UserError("a full disk")
    with monkeypatch.context() as patch, pytest.raises(UserError, match="a full disk"):
        patch.setattr(huggingface, "save_tokenizer", fails)
        checkpoint.main([run, f"export={tmp_path / 'hf'}"])
    with monkeypatch.context() as patch, pytest.raises(UserError, match="could not save"):
        patch.setattr(torch, "save", lambda *given: os.stat("/nowhere"))
        checkpoint.main([run, f"export={tmp_path / 'made' / 'too' / 'm.pt'}"])
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / "hf").exists() and not (tmp_path / ".hf.tmp").exists()
    checkpoint.main([run, f"export={hf}"])
    before, rename = snapshot(hf), os.rename
    assert {file.name for file in before} == huggingface.EXPORTED
    for killed in False, True:      # the older export goes back to its place
        with monkeypatch.context() as patch, pytest.raises((OSError, UserError)):
            patch.setattr(os, "rename", lambda old, new: rename(old, new) if "new" not in Path(old).name else os.stat("/nowhere"))
            if killed:
                (hf.parent / f".{hf.name}.tmp").mkdir()
                rename(hf, hf.parent / f".{hf.name}.tmp" / "old")
            checkpoint.main([run, f"export={hf}", "overwrite=true"])
        assert snapshot(hf) == before
    for other in "generation_config.json", "adapter_config.json", "model.safetensors.index.json":
        (hf / other).write_text("{}")
        with pytest.raises(UserError, match=f"{other} is not of an export"):
            checkpoint.main([run, f"export={hf}", "overwrite=true"])
        (hf / other).unlink()
    with pytest.raises(UserError, match="ckpt.pt|best.pt|log.jsonl"):
        checkpoint.main([run, f"export={run}", "overwrite=true"])
    assert snapshot(hf) == before
    checkpoint.main([str(tmp_path / "char.pt"), f"export={hf}", "overwrite=true"])
    assert {file.name for file in hf.iterdir()} == {"config.json", "model.safetensors"}
    assert list(hf.parent.iterdir()) == [hf]


def test_a_config_names_the_dtype(tmp_path):
    huggingface.to_pretrained(tiny("gpt").bfloat16(), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_transformers_has_no_advice_about_an_export(tmp_path, monkeypatch):
    """It would call a Mistral's large tokenizer incorrect if config.json did not say for which version it is."""
    from transformers import AutoTokenizer, tokenization_utils_tokenizers as library
    told, gpt, data = [], model_module("gpt"), smollm()
    data["model"]["vocab"] |= {f"word{i}": i for i in range(len(data["model"]["vocab"]), 100_001)}
    model = gpt.Model(gpt.Config(block_size=8, vocab_size=100_001, n_layer=1, n_head=1, n_embd=4, window=5))
    huggingface.export(model, HFTokenizer(json.dumps(data), EOT), tmp_path / "hf")
    monkeypatch.setattr(library.logger, "warning", told.append)
    AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "mistral" and told == []
