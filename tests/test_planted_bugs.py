"""The tests can fail: each bug below is planted into a copy of the repository, and the named tests must notice."""
import importlib.util
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
    "mask off by one": ("model_gpt.py", "visible = distance >= 0", "visible = distance >= -1",
                        "test_models.py -k no_position_sees_the_future"),
    "window off by one": ("model_gpt.py", "(distance < window)", "(distance <= window)",
                          "test_gpt.py -k attention_is_its_definition"),
    "cache not advanced": ("model_gpt.py", "self.lengths += self.new", "pass",
                           "test_models.py -k cache_in_any_split"),
    "rows placed after the longest": ("model_gpt.py", "pos = self.lengths[:, None] + offset",
                                      "pos = (self.longest + offset)[None]",
                                      "test_models.py -k cache_in_any_split"),
    "reset keeps what stood there": ("model_gpt.py", "            buffer[rows] = 0\n", "            pass\n",
                                     "test_models.py -k even_a_nan"),
    "reset forgets nothing": ("model_gpt.py", "self.lengths[rows] = 0", "pass",
                              "test_models.py -k slot_of_the_cache"),
    "wrong by 1e-8 (a slack tolerance would pass it)": ("model_gpt.py", "/ math.sqrt(q.size(-1))  ",
                                                        "/ math.sqrt(q.size(-1)) * (1 + 1e-8)",
                                                        "test_models.py -k test_naive_is_fast"),
    "rotary halves swapped": ("model_gpt.py", "torch.cat([-sin, sin], -1)", "torch.cat([sin, -sin], -1)",
                              "test_gpt.py -k loads_what_transformers_saved"),
    "seed and step added": ("data.py", "SeedSequence([self.seed, step])", "SeedSequence([self.seed + step])",
                            "test_train.py -k are_not_added"),
    "optimizer not restored": ("train.py", 'load_optimizers(self.optimizers, ckpt["optimizers"])', "pass",
                               "test_train.py -k resume_at_every_step"),
    "dropout not reseeded": ("train.py", "            self.seed_forward(index)\n", "",
                             "test_train.py -k two_processes"),
    "micro-batches weigh the same": ("train.py", "(count / total * procs.world)",
                                     "(1 / cfg.gradient_accumulation_steps * procs.world)",
                                     "test_train.py -k losses_count_tokens"),
    "evaluation in training mode": ("train.py", "        self.model.eval()\n", "",
                                    "test_train.py -k eval_only"),
    "one step too many": ("train.py", "while self.step < cfg.max_steps:", "while self.step <= cfg.max_steps:",
                          "test_train.py -k the_log"),
    "a worse best": ("train.py", "self.best_ce = min(self.best_ce, result[\"val_ce\"])",
                     "self.best_ce = result[\"val_ce\"]", "test_train.py -k best_checkpoint"),
    "an evaluation skipped": ("train.py", "self.evaluated < self.step and self.step % cfg.eval_interval == 0",
                              "self.evaluated and self.evaluated < self.step and self.step % cfg.eval_interval == 0",
                              "test_train.py -k never_skipped"),
    "NaN trains on": ("train.py", "if not math.isfinite(logged[k])]", "if logged[k] == math.inf]",
                      "test_train.py -k not_finite"),
    "old settings on resume": ("optim.py", "group.update(setting)", "pass", "test_train.py -k changed_on_resume"),
    "saved in place": ("checkpoint.py", 'path.with_name(path.name + ".tmp")', "path",
                       "test_checkpoint.py -k full_disk_leaves"),
    "renamed before it is on the disk": ("checkpoint.py", "            os.fsync(f.fileno())\n", "",
                                         "test_checkpoint.py -k order_of_a_save"),
    "contents not verified": ("checkpoint.py", 'state.pop("sha256") == fingerprint(state)', 'state.pop("sha256")',
                              "test_checkpoint.py -k below_the_zip_checksums"),
    "pickle runs": ("checkpoint.py", "weights_only=True", "weights_only=False",
                    "test_checkpoint.py test_shared.py -k hostile or executes"),
    "top_p one short": ("sampling.py", "p.cumsum(-1) - p >=", "p.cumsum(-1) >=", "test_sample.py -k by_hand"),
    "ended rows go on": ("sample.py", "if on and i != eot", "if i != eot", "test_sample.py -k ended_row"),
    "names may leave their root": ("config.py", "if not NAME.fullmatch(name)", "if not NAME.search(name)",
                                   "test_bad_input.py -k escape"),
    "recall: first times scored": ("tasks.py", "return_index=True)[1]] = False ", "return_index=True)[1]] = True ",
                                   "test_tasks.py -k what_the_task_says"),
    "permutations composed backwards": ("tasks.py", "tuple(p[x] for x in s)", "tuple(s[x] for x in p)",
                                        "test_tasks.py -k what_the_task_says and s3"),
    "a map for each split": ("tasks.py", "values=memorized_values(seed)", "values=memorized_values(seed + split)",
                             "test_tasks.py -k one_map"),
    "examples seeded by a sum": ("tasks.py", "generator(self.seed, i, self.split)",
                                 "generator(self.seed + i, self.split)",
                                 "test_tasks.py -k not_added"),
    "every process draws the first rows": ("tasks.py", "drawn[index * self.rows:(index + 1) * self.rows]",
                                           "drawn[:self.rows]", "test_tasks.py -k pure_function and selective_copying"),
    "masked targets counted": ("tasks.py", "(right | masked).all(1)", "right.all(1)", "test_tasks.py -k by_hand"),
    "rows weigh as tokens": ("train.py", "rows / all_rows", "rows / len(y) * (count / total)",
                             "test_tasks.py -k not_micro_batches"),
    "decoder reads every position": ("tasks.py", "hidden[:, -1:]", "hidden", "test_tasks.py -k last_position"),
    "reference: a key too early": ("model_gpt.py", "visible = distance >= 0", "visible = distance >= -1",
                                   "test_kernels.py -k attend_is_the_definition"),
    "reference: gradient through lse lost": ("kernels.py", "v[..., -1], do[..., -1] = 1, dlse",
                                             "v[..., -1], do[..., -1] = 1, 0",
                                             "test_kernels.py -k attend_is_the_definition"),
    "reference: a block taken for wholly visible": ("kernels.py", "counts[:, 3].amin(0)",
                                                    "counts[:, 3].amax(0)",
                                                    "test_kernels.py -k attend_on_other_paths"),
    "merge: -inf minus -inf": ("kernels.py", "top = top.masked_fill(empty, 0)", "pass",
                               "test_kernels.py -k merge_of_empty_sides"),
    "scan: h0 forgotten in its gradient": ("kernels.py", "before.unflatten(0, (B, -1))[:, 0, 0] = h0", "pass",
                                           "test_kernels.py -k scan_is_the_loop"),
    "operators: strides of a fake output": ("kernels.py", "lambda q, *more: (heads_like(q, *q.shape)",
                                            "lambda q, *more: (q.new_empty(q.shape)",
                                            "test_kernels.py -k opcheck"),
    "Triton: a key too late": ("kernels_triton.py", "visible = (distance >= 0)", "visible = (distance > 0)",
                               "test_kernels.py -k in_the_interpreter"),
    "Triton: tiles skipped too early": ("kernels_triton.py",
                                        "last = tl.cdiv(count_upto(pos_ptr, n, some_high, PLAIN), BLOCK)",
                                        "last = count_upto(pos_ptr, n, some_high, PLAIN) // BLOCK",
                                        "interpreted_kernels.py -k attend_is_the_definition"),
    "Triton: state lost between tiles": ("kernels_triton.py", "state = row_of(h, BLOCK_T - 1)",
                                         "state = row_of(h, BLOCK_T - 2)",
                                         "interpreted_kernels.py -k scan_is_the_loop"),
    "Triton: a slice taken for the whole lse": ("kernels_triton.py", "    lse = lse.contiguous()  ",
                                                "    lse = lse  ",
                                                "interpreted_kernels.py -k backward_over_some_of_the_keys"),
    "Triton: tiles that spill": ("kernels_triton.py", '"dkv": 3 * [(64, 128, 8, 2)]',
                                 '"dkv": 3 * [(128, 128, 4, 2)]',
                                 "test_kernels.py -k compiles_for_gpus"),
    "RT: persistent pairs of the input": ("model_rt.py", "k_i, v_i = self.persistent(y_i, tables_at(rope, here))",
                                          "k_i, v_i = self.persistent(x_i, tables_at(rope, here))",
                                          "test_rt.py -k theorem_4_1"),
    "RT: tiles of half the side": ("model_rt.py", "t = i & -i ", "t = max(1, (i & -i) // 2) ",
                                   "test_rt.py -k every_query"),
    "RT: the buffer under autograd": ("model_rt.py", "    if torch.is_grad_enabled():\n        return torch.cat",
                                      "    if False:\n        return torch.cat", "test_rt.py -k only_for_autograd"),
    "RT: decoding keeps the temporary pair": ("model_rt.py", "cache.append(l, *layer.persistent(x, rope))", "pass",
                                              "test_models.py -k cache_in_any_split and rt-default and not lrt"),
    "RT: a block's own pairs are persistent": ("model_rt.py", "(slots < pos - pos % cfg.block)", "(slots < pos)",
                                               "test_models.py -k cache_in_any_split and rt-block"),
    "RT: a prefill of ragged rows": ("model_rt.py", "if T > 1 and equal_rows and", "if T > 1 and",
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
    "Relaxed: all depths' deltas": ("model_relaxed.py", "(n_loop, -1)) * use[..., None]", "(n_loop, -1))",
                                    "test_relaxed.py -k mixed_depths_are"),
    "Relaxed: propagate by the first loop": ("model_relaxed.py", "in enumerate(self.loop_layers(depth)):",
                                             "in enumerate(self.loop_layers(0)):",
                                             "test_relaxed.py -k propagated_keys"),
    "Relaxed: the last loop learns from KL": ("model_relaxed.py", "last.detach().log_softmax(-1)",
                                              "last.log_softmax(-1)", "test_relaxed.py -k does_not_learn_from"),
    "Relaxed: aggressive weighs the last too": ("model_relaxed.py", "[self.cfg.exit_weight] * (n - 1) + [1.0]",
                                                "[self.cfg.exit_weight] * n", "test_relaxed.py -k every_loop_counts"),
    "kd without t^2": ("train.py", "kd = t ** 2 * (kl", "kd = (kl", "test_relaxed.py -k distance_from_the_teacher"),
    "tied weights saved twice": ("train.py", '"weights": dict(self.model.state_dict())',
                                 '"weights": {k: v.clone() for k, v in self.model.state_dict().items()}',
                                 "test_relaxed.py -k holds_each_tied"),
    "serve: nothing deferred": ("serve.py", "                self.defer(slot, [(slot.at[-1], slot.h[-1:])])\n", "",
                             "test_serve.py -k keys_of_those_that_left"),
    "serve: deferred tokens in disorder": ("serve.py", "zip(positions, new[:len(old)].split(1))",
                                          "zip(positions, new[:len(old)].flip(0).split(1))",
                                          "test_serve.py -k keys_of_those_that_left and exact"),
    "serve: deferring ends after one loop": ("serve.py", "if slot.depth < self.n_loop - 1:", "if slot.depth < 1:",
                                           "test_serve.py -k keys_of_those_that_left and exact"),
    "serve: a row attends to its neighbour's keys": ("serve.py", "kv if self.in_place else kv.index_select(0, self.slot)",
                                                     "kv[:len(self.slot)] if not self.in_place else kv",
                                                     "test_serve.py -k attend_to_their_own"),
    "serve: several tokens look ahead": ("serve.py", "        last[row, step] = entry\n",
                                         "        last[row, step] = entry.max()\n", "test_serve.py -k attend_to_their_own"),
    "serve: exit a loop late": ("serve.py", "depth >= bound - 1", "depth >= bound", "test_serve.py -k rules_that_name"),
    "serve: a bound reached is enough": ("serve.py", "[:, 0] > bound", "[:, 0] >= bound",
                                         "test_serve.py -k must_be_exceeded"),
    "serve: static joins": ("serve.py", 'if self.batching == "static" and self.busy():', "if False:",
                            "test_serve.py -k requests_are_admitted"),
    "serve: depths in step": ("serve.py", '            if self.batching == "depth":\n                return\n', "",
                              "test_serve.py -k which_depths"),
    "serve: random numbers of the slot": ("serve.py", "self.generator(self.admitted)", "self.generator(slot.number)",
                                          "test_serve.py -k sampled_answers"),
    "serve: a full slot goes on": ("serve.py", "if slot.at.stop > self.max_len:", "if False:",
                                   "test_serve.py -k longer_than_the_cache"),
    "serve: a prompt exits early": ("serve.py", "slot.depth == end or early and not slot.prompt", "slot.depth == end or early",
                                    "test_serve.py -k keys_of_those_that_left and propagate"),
    "serve: the oracle's last loop": ("serve.py", "slot.guesses.index(slot.guesses[-1])", "len(slot.guesses) - 1",
                                      "test_serve.py -k oracle_counts"),
    "serve: a slot forgets no keys": ("serve.py", "            kv[slot] = 0\n", "            pass\n",
                                      "test_serve.py -k grows_and_forgets"),
    "serve: routed tokens go on": ("serve.py", "slot.going[mask.numpy()]", "slot.going",
                                   "test_serve.py -k routed_answers and expert"),
    "requests: a bool is a number": ("serve.py", "type(value) not in REQUEST_KEYS[key]",
                                     "not isinstance(value, tuple(REQUEST_KEYS[key]))",
                                     "test_serve.py -k bad_line_is"),
    "MoR: all tokens compete": ("model_mor.py", "s.detach().masked_fill(~active, -math.inf)", "s.detach()",
                                "test_mor.py -k expert_choice_is_its_equations and 13"),
    "MoR: in the order of scores": ("model_mor.py", "topk(k, 1).indices.sort(1).values", "topk(k, 1).indices",
                                    "test_mor.py -k expert_choice_is_its_equations and 13"),
    "MoR: new keys one token late": ("model_mor.py", "(took.cumsum(1) - 1)", "(took.cumsum(1) - 2)",
                                     "test_mor.py -k expert_choice_is_its_equations and share_update"),
    "MoR: padding is written to a token": ("model_mor.py", "torch.where(at < T, places, B * T)",
                                           "places.clamp(max=B * T - 1)",
                                           "test_mor.py -k token_choice_is_its_equations"),
    "MoR: rotary by place among the chosen": ("model_mor.py", "self.take(x[:, 0].expand(B, T, -1))[:, None]",
                                              "x[:, :, :self.shape[1]]",
                                              "test_mor.py -k expert_choice_is_its_equations and 13"),
    "MoR: the aux router moves the model": ("model_mor.py", "self.aux_routers[r](h.detach(), ", "self.aux_routers[r](h, ",
                                            "test_mor.py -k expert_choice_is_its_equations and aux_router"),
    "MoR: who cannot compete counts": ("model_mor.py", "mean = lambda x: ((x * active).sum((1, 2)) / n).sum()",
                                       "mean = lambda x: x.mean((1, 2)).sum()",
                                       "test_mor.py -k expert_choice_is_its_equations"),
    "MoR: sharers make keys": ("model_mor.py", "fresh = r == 0 or cfg.kv != \"share\"", "fresh = True",
                               "test_mor.py -k expert_choice_is_its_equations and share"),
    "MoR: keys one over another": ("model_mor.py", "self.entry = start + torch.arange(", "self.entry = start + 0 * torch.arange(",
                                   "test_mor.py -k decoding_is_the_forward"),
    "MoR: a chunk is a text": ("model_mor.py", "(cache.longest or not cfg.fast)", "not cfg.fast",
                               "test_mor.py -k decoding_is_the_forward"),
    "MoR: keys in another row": ("model_mor.py", "rows = self.tokens.rows[:, None]",
                                 "rows = torch.arange(len(k), device=k.device)[:, None]",
                                 "test_mor.py -k decoding_is_the_forward"),
    "MoR: gated by softmax alone": ("model_mor.py", "(p.detach() + self.balance_bias).argmax(-1)", "p.argmax(-1)",
                                    "test_mor.py -k token_choice_is_its_equations and True-13"),
    "MoR: biases move away": ("model_mor.py", "(loads.mean() - loads).sign()", "(loads - loads.mean()).sign()",
                              "test_mor.py -k loss_free_balance"),
    "MoR: routers in bfloat16": ("model_mor.py", "torch.autocast(h.device.type, enabled=False)",
                                 "torch.autocast(h.device.type, enabled=True)", "test_mor.py -k full_precision"),
    "MoR: reset keeps who took a recursion": ("model_mor.py", "cache.took[slice(None) if rows is None else rows] = False",
                                              "pass", "test_mor.py -k cache_has_keys"),
    "MoR: packed tokens have one gate": ("model_mor.py", "s.gather(1, depth[:, None].to(h.device))[:, 0]", "s[:, 0]",
                                         "test_mor.py -k packed"),
    "MoR: evaluation counts as load": ("model_mor.py", "        if self.training:\n            self.loads =",
                                       "        if True:\n            self.loads =", "test_mor_runs.py -k no_load"),
    "MoR: loads of the last micro-batch": ("model_mor.py", "self.loads.to(loads.device) + loads", "loads",
                                           "test_mor.py -k loss_free_balance"),
    "MoR: loads of one process": ("train.py", "self.model.end_step(self.procs.sum)",
                                  "self.model.end_step(lambda *x: list(x))", "test_mor_runs.py -k summed_over"),
    "MoR: the warm-up starts again": ("train.py", "        self.model.train()\n        self.model.set_step(self.step)\n",
                                     "        self.model.train()\n", "test_mor_runs.py -k capacity_falls"),
    "MoR: the warm-up's step is not read": ("model_mor.py", "self.set_step(int(self.warmup_step))", "pass",
                                            "test_mor.py -k weights_know"),
    "MoR: a graph for each capacity": ("model_mor.py", "torch._dynamo.maybe_mark_dynamic(room, 0)", "pass",
                                       "test_mor.py -k one_graph and aux_router"),
    "MoR: dead in the last batch": ("model_mor.py", "self.reached[:len(last)] +=", "self.reached[:len(last)] =",
                                    "test_mor_runs.py -k dead_positions"),
    "MoR: a warm-up costs nothing": ("model_mor.py", "            max_flops -= cost(step)\n", "            pass\n",
                                     "test_mor.py -k pays_for_the_warm_up"),
    "a budget of the forward alone": ("run.py", "step = tokens_per_step(cfg, model) * model.flops_per_token()",
                                      "step = tokens_per_step(cfg, model) * model.flops_per_token() / 3",
                                      "test_mor_runs.py -k budget_of_operations"),
    "LRT: no gradient through the buffer": ("model_lrt.py", "torch.slice_scatter(old, new, 2, s, None, S)",
                                            "torch.slice_scatter(old, new.detach(), 2, s, None, S)",
                                            "test_lrt.py -k each_path_is_its_equations"),
    "LRT: memory of the position itself": ("model_lrt.py", "F.pad(m, (0, 0, 1, -1))[:, subset]", "m[:, subset]",
                                           "test_lrt.py -k are_the_exact_chain"),
    "LRT: memories not written back": ("model_lrt.py", "m = torch.slice_scatter(m, new_m, 1, s, None, S)", "pass",
                                       "test_lrt.py -k are_the_exact_chain"),
    "LRT: a window off by one": ("model_lrt.py", "return self.swa + 1 if short and", "return self.swa if short and",
                                 "test_lrt.py -k each_path_is_its_equations and mixed-exact"),
    "LRT: the gate sees no value embedding": ("model_lrt.py", "gate(self.w_value(u[..., :VALUE_CHANNELS])) * e", "e",
                                              "test_lrt.py -k each_path_is_its_equations"),
    "LRT: padding becomes a memory": ("model_lrt.py", "m = torch.where(self.new[:, None, None] > 0, m, self.memory)",
                                      "pass", "test_models.py -k advance_as_they_like and lrt-default"),
    "LRT: a reset keeps the memory": ("model_lrt.py", "self.memory[slice(None) if rows is None else rows] = 0",
                                      "pass", "test_models.py -k slot_of_the_cache and lrt-default"),
    "LRT: an evaluation prefills": ("model_lrt.py", "self.init_cache(len(idx), T), None, \"exact\")",
                                    "self.init_cache(len(idx), T), None, cfg.prefill)",
                                    "test_lrt.py -k goes_on_exactly"),
    "an estimate for an exact figure": ("train.py", "if i in exact or estimate is None else",
                                        "if estimate is None else",
                                        "test_lrt.py -k exact_on_some_batches"),
    "decay stays": ("optim.py", "group[\"peak_decay\"] * (1 - step / cfg.max_steps)", "group[\"peak_decay\"]",
                    "test_lrt.py -k schedules_of_the_paper"),
    "rat's reference: a gate's gradient without the value": ("kernels.py", ".addcmul_(dv, sv).addcmul_(dv, v, value=-1)",
                                                        ".addcmul_(dv, sv)",
                                                        "test_kernels.py -k rat_is_the_definition"),
    "RAT: heads of a group side by side": ("model_rat.py", "heads = torch.cat([q] * copies, -1), ",
                                           "heads = q.unflatten(-1, (-1, 8)).repeat_interleave(copies, 2).flatten(2), ",
                                           "test_rat.py -k its_equations"),
    "RAT: a query reads its own chunk's end": ("model_rat.py", "q_pos = (chunk_of - 1).int()", "q_pos = chunk_of.int()",
                                               "test_rat.py -k around_the_ends"),
    "RAT: the state outlives its chunk": ("model_rat.py", "gate = gate.masked_fill(restart[..., None], 0)", "pass",
                                          "test_rat.py -k around_the_ends"),
    "RAT: padding moves the state": ("model_rat.py", "gate = gate.masked_fill(context.padding[..., None], 1)", "pass",
                                     "test_models.py -k rows_advance and rat"),
    "RAT: a window one too wide": ("model_rat.py", "swa=cfg.swa + 1, reversed=cfg.chunk",
                                   "swa=cfg.swa + 2, reversed=cfg.chunk", "test_rat.py -k a_window_is"),
    "RAT: a ring one too small": ("model_rat.py", "swa=(G, min(cfg.swa + 1, max_len), 0)",
                                  "swa=(G, min(cfg.swa, max_len), 0)", "test_rat.py -k around_the_ends and swa"),
    "RAT: a full row reads the spare slot": ("model_rat.py", "n = min(context.start // L + 1, cache.R) ",
                                             "n = context.start // L + 1 ", "test_rat.py -k full_row"),
    "RAT: the state in bfloat16": ("model_rat.py", "self.state = R, upcast(zeros(width))",
                                   "self.state = R, zeros(width)",
                                   "test_rat.py -k states_are_float32"),
    "needles: the order of asking": ("tasks.py", "order = rng.permutation(pairs)", "order = np.arange(pairs)",
                                     "test_tasks.py -k strewn"),
}


# In the copies the first failing example will do: hypothesis takes up to half a minute to make it smaller.
FIRST_EXAMPLE = ("tests/conftest.py", "deadline=None, database=None",
                 "deadline=None, database=None, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate]")


def plant(copy, file, old, new):
    text = (copy / file).read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}: the plant is out of date"
    (copy / file).write_text(text.replace(old, new))


def job_of(bug, copy):
    """A job for forked_pytest.py: the named tests in a copy of the repository that has the bug."""
    *change, tests = BUGS[bug]
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "out", "data", "__pycache__"))
    plant(copy, *FIRST_EXAMPLE)
    plant(copy, *change)
    files, _, words = tests.partition(" -k ")
    arguments = ["-x", "-q", "-p", "no:cacheprovider", "-k", words, *(f"tests/{f}" for f in files.split())]
    return str(copy), arguments, {"TRITON_INTERPRET": "1"} if files == "interpreted_kernels.py" else {}


def statuses_of(jobs, path):
    path.write_text(json.dumps(jobs))
    with subprocess.Popen([sys.executable, ROOT / "tests" / "forked_pytest.py", path], text=True, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}) as p:
        return json.loads(p.stdout.read())


@pytest.fixture(scope="module")
def planted(request, tmp_path_factory):
    """{bug: exit status, stdout, stderr of the named tests; or the error in planting it} of all bugs selected."""
    bugs = [item.callspec.params["bug"] for item in request.session.items
            if item.module is request.module and hasattr(item, "callspec")]
    if importlib.util.find_spec("triton") is None:
        bugs = [bug for bug in bugs if not bug.startswith("Triton")]
    folder, jobs, found = tmp_path_factory.mktemp("planted"), {}, {}
    for number, bug in enumerate(bugs):
        try:
            jobs[bug] = job_of(bug, folder / str(number))
        except AssertionError as error:
            found[bug] = error
    statuses = statuses_of([*jobs.values()], folder / "jobs.json")
    for (bug, (copy, *_)), status in zip(jobs.items(), statuses, strict=True):
        found[bug] = status, *(Path(copy + end).read_text() for end in (".out", ".err"))
    return found


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug, planted):
    if bug not in planted:
        pytest.skip("triton is not installed")
    if isinstance(planted[bug], AssertionError):
        raise planted[bug]
    status, out, err = planted[bug]
    assert status == 1 and " failed" in out, f"not caught, exit status {status}:\n{out[-2000:]}\n{err[-500:]}"
