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
    "scan: h0 forgotten in its gradient": ("kernels.py", "    before[:, 0, 0] = h0", "    pass",
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
                                        "last = tl.cdiv(count_upto(pos_ptr, n, some_high), BLOCK)",
                                        "last = count_upto(pos_ptr, n, some_high) // BLOCK",
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
    "Relaxed: a factor alpha / r": ("model_relaxed.py", "(u[:, :part.rank] * s[:part.rank]).t()",
                                    "(u[:, :part.rank] * s[:part.rank]).t() * 16 / part.rank",
                                    "test_relaxed.py -k best_of_their_rank"),
    "Relaxed: norms not folded": ("model_relaxed.py", "        if name in NORM_BEFORE:\n", "        if False:\n",
                                  "test_relaxed.py -k source_comes_back"),
    "Relaxed: another use's deltas": ("model_relaxed.py", "return layer % self.n_stored, layer // self.n_stored",
                                      "return layer % self.n_stored, layer % self.n_loop",
                                      "test_relaxed.py -k is_its_equations and cycle"),
    "Relaxed: stepwise rounds down": ("model_relaxed.py", "[round(k * (L - 1) / max(1, K - 1))]",
                                      "[int(k * (L - 1) / max(1, K - 1))]", "test_relaxed.py -k start_from"),
    "Relaxed: A zero too": ("model_relaxed.py", "        if missing.norm() > 2 * cfg.n_loop * eps * target.norm():\n",
                            "        if True:\n", "test_relaxed.py -k nothing_is_left"),
    "Relaxed: deltas never merged": ("model_relaxed.py", "if x.numel() // n_in * (n_in + n_out) > n_in * n_out:",
                                     "if False:", "test_relaxed.py -k merged"),
    "Relaxed: all depths' deltas": ("model_relaxed.py", "-1, self.rank) * use", "-1, self.rank)",
                                    "test_serve.py -k random_requests or later_tokens"),
    "Relaxed: propagate by the first loop": ("model_relaxed.py", "for k, u in self.loop_layers(depth)]",
                                             "for k, u in self.loop_layers(0)]",
                                             "test_serve.py -k random_requests or later_tokens"),
    "Relaxed: the last loop learns from KL": ("model_relaxed.py", "last.detach().log_softmax(-1)",
                                              "last.log_softmax(-1)", "test_relaxed.py -k does_not_learn_from"),
    "Relaxed: aggressive weighs the last too": ("model_relaxed.py", "[self.cfg.exit_weight] * (n - 1) + [1.0]",
                                                "[self.cfg.exit_weight] * n", "test_relaxed.py -k every_loop_counts"),
    "serve: nothing deferred": ("serve.py", "self.defer(slot, [(slot.at[-1], slot.h[-1:])])", "pass",
                             "test_serve.py -k keys_of_those_that_left"),
    "serve: a row attends to its neighbour's keys": ("serve.py", "kv if self.in_place else kv.index_select(0, self.slot)",
                                                     "kv[:len(self.slot)] if not self.in_place else kv",
                                                     "test_serve.py -k random_requests"),
    "serve: random numbers of the slot": ("serve.py", "generator(self.seed, self.admitted,", "generator(self.seed, slot.number,",
                                          "test_serve.py -k sampled_answers"),
    "serve: a prompt exits early": ("serve.py", "(slot.depth == end or not slot.prompt)", "True",
                                    "test_serve.py -k random_requests or later_tokens"),
    "page: end-of-text has no log-probability": ("lab/page.py", "if (top := slot.request.top) is not None:",
                                                 "if (top := slot.request.top) is not None and token != self.eot:",
                                                 "test_page.py -k end_of_text"),
    "serve: routed tokens go on": ("serve.py", "slot.going[mask.numpy()]", "slot.going",
                                   "test_serve.py -k routed_answers and expert"),
    "MoR: all tokens compete": ("model_mor.py", "s.masked_fill(~active, -math.inf)", "s",
                                "test_mor.py -k routing_is_its_equations and expert and 13"),
    "MoR: rotary by place among the chosen": ("model_mor.py", "self.gather(x[:, 0].expand(B, T, -1))[:, None]",
                                              "x[:, :, :n]", "test_mor.py -k routing_is_its_equations and expert and 13"),
    "MoR: no keys where no token goes on": ("model_mor.py", "for later in self.copies.get(layer, ()):", "for later in ():",
                                            "test_mor.py -k decoding_is_the_forward and share_update"),
    "LRT: no gradient through the buffer": ("model_lrt.py", "torch.slice_scatter(x, new, 2, self.at.start, None, self.at.step)",
                                            "torch.slice_scatter(x, new.detach(), 2, self.at.start, None, self.at.step)",
                                            "test_lrt.py -k each_path_is_its_equations"),
    "LRT: memory of the position itself": ("model_lrt.py", "torch.cat([zero, m[:, :-1]], 1)[:, at]", "m[:, at]",
                                           "test_lrt.py -k are_the_exact_chain"),
    "LRT: padding becomes a memory": ("model_lrt.py", "m if slots.at is None else torch.where(new, m, self.memory)",
                                      "m", "test_lrt.py -k goes_on_exactly and default"),
    "an estimate for an exact figure": ("train.py", "        if not exact:\n",
                                        "        if True:\n",
                                        "test_lrt.py -k exact_on_some_batches"),
    "RAT: a query attends to its own chunk's end": ("model_rat.py", "last = (context.chunk_of - 1).int()",
                                                    "last = context.chunk_of.int()", "test_rat.py -k its_equations"),
    "RAT: the state outlives its chunk": ("model_rat.py", "cached[:, None].masked_fill(context.starts, 0)", "cached[:, None]",
                                          "test_rat.py -k around_the_ends"),
    "RAT: a ring one too small": ("model_rat.py", "swa=(G, min(cfg.swa, max_len), 0)",
                                  "swa=(G, min(cfg.swa - 1, max_len), 0)", "test_rat.py -k around_the_ends and swa"),
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
