"""The tests can fail: each bug below is planted into a copy of the repository, and the named tests must notice."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT

# file, what stands there, what the bug puts in its place, the tests that must fail
BUGS = {
    "mask off by one": ("model_gpt.py", ".triu(S - T + 1)", ".triu(S - T + 2)",
                        "test_models.py -k no_position_sees_the_future"),
    "window off by one": ("model_gpt.py", "(distance < window)", "(distance <= window)",
                          "test_gpt.py -k attention_is_its_definition"),
    "cache not advanced": ("model_gpt.py", "self.lengths += slots.n_new", "pass",
                           "test_models.py -k cache_in_any_split"),
    "rows placed after the longest": ("model_gpt.py", "pos = self.lengths[:, None] + offset",
                                      "pos = (self.longest + offset)[None]",
                                      "test_models.py -k cache_in_any_split"),
    "reset keeps what stood there": ("model_gpt.py", "            buffer[rows] = 0\n", "            pass\n",
                                     "test_models.py -k slot_of_the_cache"),
    "reset forgets nothing": ("model_gpt.py", "self.lengths[rows] = 0", "pass",
                              "test_models.py -k slot_of_the_cache"),
    "wrong by 1e-8 (a slack tolerance would pass it)": ("model_gpt.py", "/ math.sqrt(q.size(-1))  ",
                                                        "/ math.sqrt(q.size(-1)) * (1 + 1e-8)",
                                                        "test_models.py -k test_naive_is_fast"),
    "rotary halves swapped": ("model_gpt.py", "[a * cos - b * sin, b * cos + a * sin]", "[a * cos + b * sin, b * cos - a * sin]",
                              "test_gpt.py -k loads_what_transformers_saved"),
    "val: a large document is not cut": ("prepare.py", "self.part = (wanted - val) / size if val < wanted - slack else 0",
                                         "self.part = 0", "test_prepare.py -k has_its_fraction"),
    "val: equal documents counted once": ("prepare.py", "sizes[key] += size", "sizes[key] = size",
                                          "test_prepare.py -k has_its_fraction"),
    "special tokens are made from text": ("common/tokenizer.py", "self.library.encode_special_tokens = True", "pass",
                                          "test_prepare.py -k holds_no_special and smollm"),
    "seed and step added": ("common/data.py", "SeedSequence([self.seed, step])", "SeedSequence([self.seed + step])",
                            "test_tasks.py -k are_not_added and words"),
    "dropout not reseeded": ("train.py", "        seed_forward(cfg.seed, run.step, index)\n", "",
                             "test_train.py -k two_processes"),
    "micro-batches weigh the same": ("train.py", "(count / total * procs.world)",
                                     "(1 / cfg.gradient_accumulation_steps * procs.world)",
                                     "test_train.py -k one_large_batch and gpt"),
    "a worse best": ("train.py", "run.step, min(run.best_ce, result[\"val_ce\"])",
                     "run.step, result[\"val_ce\"]", "test_train.py -k never_skipped"),
    "NaN trains on": ("train.py", "if not math.isfinite(logged[key]):", "if logged[key] == math.inf:",
                      "test_train.py -k not_finite"),
    "old settings on resume": ("common/optim.py", "group.update(setting)", "pass", "test_train.py -k changed_key_holds"),
    "renamed before it is on the disk": ("common/checkpoint.py", "            os.fsync(f.fileno())\n", "",
                                         "test_checkpoint.py -k order_of_a_save"),
    "FSDP: a block's gradients summed after one of its runs": (
        "common/sharded.py", "if model.runs_blocks_once else ()", "if True else ()",
        "test_fsdp.py -k lrt"),
    "contents not verified": ("common/checkpoint.py", 'state.pop("sha256") == fingerprint(state)', 'state.pop("sha256")',
                              "test_checkpoint.py -k below_the_zip_checksums"),
    "pickle runs": ("common/checkpoint.py", "weights_only=True", "weights_only=False",
                    "test_checkpoint.py test_shared.py -k hostile or executes"),
    "top_p one short": ("common/sampling.py", "p.cumsum(-1) - p >=", "p.cumsum(-1) >=", "test_sample.py -k by_hand"),
    "ended rows go on": ("sample.py", "if on and i != eot", "if i != eot", "test_sample.py -k ended_row"),
    "names may leave their root": ("common/keys.py", "if not NAME.fullmatch(name)", "if not NAME.search(name)",
                                   "test_bad_input.py -k escape"),
    "examples seeded by a sum": ("common/tasks.py", "generator(self.seed, i, self.split)",
                                 "generator(self.seed + i, self.split)",
                                 "test_tasks.py -k not_added"),
    "reference: a key too early": ("kernels.py", "(distance < 0) | (distance >= window)",
                                   "(distance < -1) | (distance >= window)",
                                   "test_kernels.py -k attend_is_the_definition"),
    "reference: gradient through lse lost": ("kernels.py", "- (0 if dlse is None else dlse)", "",
                                             "test_kernels.py -k attend_is_the_definition"),
    "reference: a block's last keys left out": ("kernels.py", "last.amax(0)", "last.amin(0)",
                                                "test_kernels.py -k attend_is_the_definition"),
    "merge: -inf minus -inf": ("kernels.py", "lse_a, lse_b = (x.clamp(min=-1e30) for x in (lse_a, lse_b))", "pass",
                               "test_kernels.py -k merge_of_empty_sides"),
    "scan: h0 forgotten in its gradient": ("kernels.py", "    states[:, 0] = h0", "    pass",
                                           "test_kernels.py -k scan_is_the_loop"),
    "scan: the gradient of a gate without x": ("kernels.py", "before.sub_(x_n).mul_(d)", "before.mul_(d)",
                                               "test_kernels.py -k scan_is_the_loop"),
    "operators: strides of a fake output": ("kernels.py", "register_fake(lambda q, *more: (\n    heads_like(q, *q.shape)",
                                            "register_fake(lambda q, *more: (\n    q.new_empty(q.shape)",
                                            "test_kernels.py -k opcheck"),
    "Triton: state lost between tiles": ("kernels_triton.py", "state = row_of(h, BLOCK_T - 1)",
                                         "state = row_of(h, BLOCK_T - 2)",
                                         "interpreted_kernels.py -k scan_is_the_loop"),
    "Triton: a key too late": ("kernels_triton.py", "visible = (distance >= 0)", "visible = (distance > 0)",
                               "test_kernels.py -k in_the_interpreter"),
    "Triton: tiles skipped too early": ("kernels_triton.py",
                                        "last = tl.cdiv(count_upto(pos_ptr, n, some_high, PLAIN), BLOCK)",
                                        "last = count_upto(pos_ptr, n, some_high, PLAIN) // BLOCK",
                                        "interpreted_kernels.py -k attend_is_the_definition"),
    "Triton: a slice taken for the whole lse": ("kernels_triton.py", "    lse = lse.contiguous()  ",
                                                "    lse = lse  ",
                                                "interpreted_kernels.py -k backward_over_some_of_the_keys"),
    "Triton: tiles that spill": ("kernels_triton.py", '"dkv": 3 * [(64, 128, 8, 2)]',
                                 '"dkv": 3 * [(128, 128, 4, 2)]',
                                 "test_kernels.py -k compiles_for_gpus"),
    "RT: persistent pairs of the input": ("model_rt.py", "k_i, v_i = self.persistent(y_i, rope_at(rope, at))",
                                          "k_i, v_i = self.persistent(x_i, rope_at(rope, at))",
                                          "test_rt.py -k theorem_4_1"),
    "RT: tiles of half the side": ("model_rt.py", "t = i & -i ", "t = max(1, (i & -i) // 2) ",
                                   "test_rt.py -k every_query"),
    "RT: decoding keeps the temporary pair": ("model_rt.py", "cache.write(l, *layer.persistent(x, rope))", "pass",
                                              "test_models.py -k cache_in_any_split and rt-default and not lrt"),
    "RT: recurrent=false decodes as the RT": ("model_rt.py", "if cache is not None and self.cfg.recurrent:",
                                              "if cache is not None:",
                                              "test_models.py -k cache_in_any_split and rt-recurrent"),
    "RT: a prefill of ragged rows": ("model_rt.py", "if rows_alike and", "if",
                                     "test_models.py -k rows_advance and rt-default and not lrt"),
    "RT: earlier chunks get no gradient": ("rt_wavefront.py", "                    total += part\n",
                                           "                    pass\n", "test_rt.py -k gradcheck"),
    "RT: the norm's gradient without its mean": ("rt_wavefront.py", "keepdim=True), value=-1)", "keepdim=True), value=0)",
                                                 "test_rt.py -k gradcheck"),
    "RT: keys stay alive until the backward": ("rt_wavefront.py", "run.k = run.v = None  ", "pass  ",
                                               "test_rt.py -k saved"),
    "RT: scores in bfloat16": ("rt_wavefront.py", "s = torch.bmm(q, self.k[:, :n].mT)  ",
                               "s = torch.bmm(q, self.k[:, :n].mT).bfloat16().to(out.dtype)  ",
                               "test_rt.py -k rounded_nowhere"),
    "RT: ALiBi in bfloat16": ("rt_wavefront.py", "bias.masked_fill(pos[0, :, None] == keys, -math.inf)",
                              "bias.masked_fill(pos[0, :, None] == keys, -math.inf).bfloat16().to(self.wide)",
                              "test_rt.py -k rounded_nowhere"),
    "RT: a softmax in bfloat16": ("rt_wavefront.py", "p = torch.cat([lse, s], -1).softmax(-1)",
                                  "p = torch.cat([lse, s], -1).bfloat16().softmax(-1).to(out.dtype)",
                                  "test_rt.py -k bfloat16"),
    "Relaxed: a factor alpha / r": ("model_relaxed.py", "B = U[:, :r] * S[:r]", "B = U[:, :r] * S[:r] * 16 / r",
                                    "test_relaxed.py -k best_of_their_rank"),
    "Relaxed: norms not folded": ("model_relaxed.py", "            if name in NORM_BEFORE:\n", "            if False:\n",
                                  "test_relaxed.py -k source_comes_back"),
    "Relaxed: another use's deltas": ("model_relaxed.py", "return layer % self.n_stored, layer // self.n_stored",
                                      "return layer % self.n_stored, layer % self.n_loop",
                                      "test_relaxed.py -k is_its_equations and cycle"),
    "serve: packed tokens have all deltas": ("serve.py", "(low * own).flatten(1)", "low.flatten(1)",
                                             "test_serve.py -k random_requests or later_tokens"),
    "serve: nothing deferred": ("serve.py", "self.defer(slot, [(slot.at[-1], slot.states[-1:])])", "pass",
                                "test_serve.py -k keys_of_those_that_left"),
    "serve: routed tokens go on": ("serve.py", "slot.going[mask.numpy()]", "slot.going",
                                   "test_serve.py -k routed_answers and expert"),
    "page: end-of-text has no log-probability": ("lab/page.py", "if (top := slot.request.top) is not None:",
                                                 "if (top := slot.request.top) is not None and token != self.eot:",
                                                 "test_page.py -k end_of_text"),
    "MoR: all tokens compete": ("model_mor.py", "s.masked_fill(~active, -math.inf)", "s",
                                "test_mor.py -k routing_is_its_equations and expert and 13"),
    "MoR: in the order of scores": ("model_mor.py", "at.topk(n, 1, largest=False).values", "at.topk(n, 1, largest=False).values.flip(1)",
                                    "test_mor.py -k routing_is_its_equations and expert and 13"),
    "MoR: old keys stay": ("model_mor.py", "flat.index_copy(0, self.places.flatten(), new.flatten(0, 1))",
                           "flat.index_add(0, self.places.flatten(), new.flatten(0, 1))",
                           "test_mor.py -k routing_is_its_equations and expert and share_update"),
    "MoR: padding is written to a token": ("model_mor.py", "torch.where(at < T, T * rows + at, B * T)",
                                           "(T * rows + at).clamp(max=B * T - 1)",
                                           "test_mor.py -k routing_is_its_equations and token"),
    "MoR: rotary by place among the chosen": ("model_mor.py", "self.gather(x[:, 0].expand(B, T, -1))[:, None]",
                                              "x[:, :, :n]",
                                              "test_mor.py -k routing_is_its_equations and expert and 13"),
    "MoR: the aux router moves the model": ("model_mor.py", "self.aux_routers[r](h.detach())", "self.aux_routers[r](h)",
                                            "test_mor.py -k routing_is_its_equations and expert and aux_router"),
    "MoR: who cannot compete counts": ("model_mor.py", "mean = lambda x: (x * active).sum() / active.sum()",
                                       "mean = lambda x: x.mean()",
                                       "test_mor.py -k routing_is_its_equations and expert"),
    "MoR: sharers make keys": ("model_mor.py", "return layer not in self.kv", "return True",
                               "test_mor.py -k only_chosen_tokens_run"),
    "MoR: padding is a key": ("model_mor.py", "self.cache.place(n, chosen.sum(1))",
                              "self.cache.place(n, torch.full_like(chosen.sum(1), n))",
                              "test_mor.py -k decoding_is_the_forward"),
    "MoR: a chunk is a text": ("model_mor.py", "if own_cache or self.cfg.kv != \"recursion\":", "if self.cfg.kv != \"recursion\":",
                               "test_mor.py -k decoding_is_the_forward"),
    "MoR: a list that grows is empty": ("model_mor.py", "[F.pad(x[:, :, :-1], more) for x in self.v]",
                                        "[F.pad(0 * x[:, :, :-1], more) for x in self.v]", "test_mor.py -k list_grows"),
    "MoR: no keys where no token goes on": ("model_mor.py", "K if cfg.kv == \"share_update\" and cache is not None else 0",
                                            "0", "test_mor.py -k decoding_is_the_forward and share_update"),
    "MoR: gated by softmax alone": ("model_mor.py", "(p + self.balance_bias).argmax(-1)", "p.argmax(-1)",
                                    "test_mor.py -k routing_is_its_equations and token and True-13"),
    "MoR: biases move away": ("model_mor.py", "(f - 1 / R).round(", "(1 / R - f).round(",
                              "test_mor.py -k loss_free_balance"),
    "MoR: routers in bfloat16": ("model_mor.py", "torch.autocast(h.device.type, enabled=False)",
                                 "torch.autocast(h.device.type, enabled=True)", "test_mor.py -k full_precision"),
    "MoR: reset keeps a recursion's keys": ("model_mor.py", "            cache.reset(rows)\n", "            pass\n",
                                            "test_mor.py -k cache_has_keys"),
    "MoR: packed tokens have one gate": ("model_mor.py", "s.gather(1, depth[:, None].to(h.device))[:, 0]", "s[:, 0]",
                                         "test_serve.py -k routed_answers and expert"),
    "MoR: a graph for each capacity": ("model_mor.py", "torch._dynamo.config.allow_unspec_int_on_nn_module = True", "pass",
                                       "test_mor.py -k one_graph and aux_router"),
    "LRT: no gradient through the buffer": ("model_lrt.py", "torch.slice_scatter(x, new, 2, part.start, None, part.step)",
                                            "torch.slice_scatter(x, new.detach(), 2, part.start, None, part.step)",
                                            "test_lrt.py -k each_path_is_its_equations"),
    "LRT: memory of the position itself": ("model_lrt.py", "torch.cat([zero, m[:, :-1]], 1)[:, subset]", "m[:, subset]",
                                           "test_lrt.py -k are_the_exact_chain"),
    "LRT: memories not written back": ("model_lrt.py", "m = torch.slice_scatter(m, new_m, 1, s, None, N)", "pass",
                                       "test_lrt.py -k are_the_exact_chain"),
    "LRT: a window off by one": ("model_lrt.py", "return self.swa + 1 if short and", "return self.swa if short and",
                                 "test_lrt.py -k each_path_is_its_equations and mixed-exact"),
    "LRT: the gate sees no value embedding": ("model_lrt.py", "gate(self.w_value(u[..., :VALUE_CHANNELS])) * e", "e",
                                              "test_lrt.py -k each_path_is_its_equations"),
    "LRT: padding becomes a memory": ("model_lrt.py", "torch.where(new, m, self.memory) if self.ragged else m",
                                      "m", "test_models.py -k advance_as_they_like and lrt-default"),
    "LRT: a reset keeps the memory": ("model_lrt.py", "self.memory[slice(None) if rows is None else rows] = 0",
                                      "pass", "test_models.py -k slot_of_the_cache and lrt-default"),
    "LRT: an evaluation prefills": ("model_lrt.py", "self.init_cache(len(idx), T), None, \"exact\")",
                                    "self.init_cache(len(idx), T), None, cfg.prefill)",
                                    "test_lrt.py -k goes_on_exactly"),
    "an estimate for an exact figure": ("train.py", "        if not exact:\n",
                                        "        if True:\n",
                                        "test_lrt.py -k exact_on_some_batches"),
    "RAT: heads of a group side by side": ("model_rat.py", "return torch.cat([x] * (like.size(-1) // x.size(-1)), -1)",
                                           "return x.repeat_interleave(like.size(-1) // x.size(-1), -1)",
                                           "test_rat.py -k its_equations"),
    "RAT: a query reads its own chunk's end": ("model_rat.py", "q_pos = (context.chunk_of - 1).int()",
                                               "q_pos = context.chunk_of.int()", "test_rat.py -k its_equations"),
    "RAT: the state outlives its chunk": ("model_rat.py",
                                          "cache.state.masked_fill(context.starts_chunk[:, :1, None], 0)", "cache.state",
                                          "test_rat.py -k around_the_ends"),
    "RAT: padding moves the state": ("model_rat.py", "h[self.rows[:, 0], self.last]", "h[self.rows[:, 0], self.at[:, -1]]",
                                     "test_models.py -k rows_advance and rat"),
    "RAT: a window one too wide": ("model_rat.py", "cfg.swa + 1 if kind", "cfg.swa + 2 if kind",
                                   "test_rat.py -k a_window_is"),
    "RAT: a ring one too small": ("model_rat.py", "swa=(G, min(cfg.swa + 1, max_len), 0)",
                                  "swa=(G, min(cfg.swa, max_len), 0)", "test_rat.py -k around_the_ends and swa"),
    "RAT: a full row reads the spare slot": ("model_rat.py", "x[:, :, :min(n, self.R)]", "x[:, :, :n]",
                                             "test_rat.py -k full_row"),
    "RAT: the state in bfloat16": ("model_rat.py", "upcast(zeros(states, cfg.n_embd))", "zeros(states, cfg.n_embd)",
                                   "test_rat.py -k states_are_float32"),
    "eval: with dropout": ("lab/eval.py", ".to(device).eval()", ".to(device)", "test_eval.py -k of_train and gpt"),
    "eval: a context cut at its end": ("lab/eval.py", "[*context, *answer[:-1]][-(limit or 0):]",
                                       "[*context, *answer[:-1]][:limit]",
                                       "test_eval.py -k rows_agree and gpt"),
    "eval: shorter contexts on other tokens": ("lab/eval.py", "idx, targets = (t.view(-1, k * length) for t in (x, y))",
                                               "idx, targets = (t[:, :k * length] for t in (x, y))",
                                               "test_eval.py -k same_tokens and rat"),
}


# The first bug of each file is planted in every run, all of them with --full.
SAMPLE = {file: bug for bug, (file, *_) in reversed(BUGS.items())}.values()
# In the copies the first failing example will do: hypothesis takes up to half a minute to make it smaller.
FIRST_EXAMPLE = ("tests/conftest.py", "max_examples=examples, ",
                 "max_examples=25, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate], ")


def plant(copy, file, old, new):
    text = (copy / file).read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}: the plant is out of date"
    (copy / file).write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def forked_pytest():
    """pytest in a folder, as a fork of one process: its exit status."""
    command = [sys.executable, ROOT / "tests" / "forked_pytest.py"]
    with subprocess.Popen(command, text=True, bufsize=1, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          env={**os.environ, "PYTHONPATH": ""}) as server:
        def ask(*job):
            server.stdin.write(json.dumps(job) + "\n")
            return int(server.stdout.readline())
        yield ask
        server.stdin.close()


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=() if bug in SAMPLE else pytest.mark.full) for bug in BUGS])
def test_a_planted_bug_is_caught(bug, forked_pytest, tmp_path):
    """The named tests fail in a copy of the repository that has the bug."""
    if bug.startswith("Triton"):
        pytest.importorskip("triton")
    *change, tests = BUGS[bug]
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "out", "data", "__pycache__"))
    plant(copy, *FIRST_EXAMPLE)
    plant(copy, *change)
    files, _, words = tests.partition(" -k ")
    full = ["--full"] * (words != "compiles_for_gpus")     # all variants take minutes, a few of each will do
    arguments = ["-n0", *full, "-x", "-q", "-p", "no:cacheprovider", "-k", words, *(f"tests/{f}" for f in files.split())]
    status = forked_pytest(str(copy), arguments, {"TRITON_INTERPRET": "1"} if files == "interpreted_kernels.py" else {})
    out, err = (Path(f"{copy}{end}").read_text() for end in (".out", ".err"))
    assert status == 1 and " failed" in out, f"not caught, exit status {status}:\n{out[-2000:]}\n{err[-500:]}"
