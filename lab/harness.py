"""
Our models in lm-evaluation-harness (Gao et al.; the package lm_eval): the tasks of eval.py tasks=...
"""
import random

import torch
from tqdm import tqdm

from common.keys import UserError, first_line, need
from sample import stream


class HarnessModel:
    """What lm_eval asks of a model, for each of ours. Its TemplateLM is the second base."""

    def __init__(self, model, tokenizer, batch_size):
        super().__init__()
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size

    @property
    def eot_token_id(self):
        return self.tokenizer.eot

    def tok_encode(self, string, **_):
        return self.tokenizer.encode(string)

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests, **_):
        """(texts, context, answer), of token ids -> the answer's log-likelihood and whether it
        is the greedy one. Requests that differ in the last token only share a forward pass."""
        from lm_eval.models.utils import Collator
        limit = self.model.context_limit
        longest = max((len(answer) for _, _, answer in requests), default=0)
        if limit and longest > limit:
            raise UserError(f"a task has an answer of {longest} tokens: the model reads "
                            f"{limit} (block_size)")
        order = Collator(requests, sort_fn=lambda r: -len(r[1] + r[2]),
                         group_by="contexts", group_fn=lambda r: r[1] + r[2][:-1])
        found, bar = [], tqdm(total=len(requests), disable=None, leave=False)
        for chunk in order.get_batched(n=self.batch_size):
            # too long: without the first tokens
            rows = [(context + answer)[:-1][-(limit or 0):] for _, context, answer in chunk]
            for request, row, logits in zip(chunk, rows, self.logits(rows)):
                logits = logits[:len(row)][None]
                for _, answer, logits in order.get_cache(*request, logits):
                    found.append(self.score(logits[0, -len(answer):], answer))
                    bar.update()
        return order.get_original(found)

    def logits(self, rows):
        """Rows of token ids -> (B, T, V). Padding is on the right, where no token attends to it."""
        idx = torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, rows)), batch_first=True)
        return self.model(idx.to(next(self.model.parameters()).device))[0]

    def score(self, logits, answer):
        """The log-likelihood of an answer from its logits (n, V), and whether it is the greedy one
        among the tokens that the tokenizer has."""
        ids = torch.tensor(answer, device=logits.device)
        total = logits.log_softmax(-1).gather(-1, ids[:, None]).sum()
        greedy = logits[:, :self.tokenizer.vocab_size].argmax(-1)
        return float(total), bool((greedy == ids).all())

    def loglikelihood_rolling(self, requests, **_):
        """The log-likelihood of whole documents, each token predicted once."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
        length, documents = self.model.cfg.block_size, []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(ids, self.eot_token_id, length, context_len=1)
            documents.append([(None, *make_disjoint_window(window)) for window in windows])
        scores = iter(self._loglikelihood_tokens([w for windows in documents for w in windows]))
        return [sum(next(scores)[0] for _ in windows) for windows in documents]

    def generate_until(self, requests, **_):
        from lm_eval.models.utils import Collator, normalize_gen_kwargs
        order = Collator([request.args for request in requests], sort_fn=lambda r: -len(r[0]),
                         group_by="gen_kwargs", group_fn=lambda r: r[1])
        texts = []
        for n, chunk in enumerate(order.get_batched(n=self.batch_size)):
            options = normalize_gen_kwargs(chunk[0][1])
            texts += self.generate([context for context, _ in chunk], options, seed=n)
        return order.get_original(texts)

    def generate(self, contexts, options, seed):
        """Continue texts as one batch, each up to the first stop string or end-of-text."""
        from lm_eval.models.utils import postprocess_generated_text
        new, limit = options["max_gen_toks"], self.model.context_limit
        kept = max(1, limit - new, limit // 2) if limit else 0          # of a context
        prompts = [(self.tok_encode(text) or [self.eot_token_id])[-kept:] for text in contexts]
        rows, answers = [[] for _ in prompts], [""] * len(prompts)
        for step in stream(self.model, prompts, new, options.get("temperature", 0.0),
                           options.get("top_k", 0), options.get("top_p", 1.0),
                           eot=self.eot_token_id, seed=seed, vocab_size=self.tokenizer.vocab_size):
            for row, token in zip(rows, step):
                row.extend([token] * (token is not None))
            texts = [self.tokenizer.decode(row) for row in rows]
            answers = [postprocess_generated_text(text, options["until"], None)
                       for text in texts]
            if all(token is None or answer != text
                   for token, answer, text in zip(step, answers, texts)):
                break                                   # every row has met a stop string
        return answers


def load_tasks(cfg):
    """lm_eval's tasks by name, with their data."""
    need("lm_eval")
    random.seed(0)      # as lm_eval's simple_evaluate: some tasks shuffle their choices
    from lm_eval.tasks import TaskManager
    names, folder = cfg.tasks.split(","), cfg.include_path
    manager = TaskManager(include_path=folder or None, include_defaults=not folder)
    for name in names:
        if name not in manager.all_tasks:
            raise UserError(f"tasks={name:.60}: {folder or 'lm_eval'} has no such task")
    try:
        loaded = manager.load(names)
    except Exception as e:      # of a YAML file, of a download: of any kind
        raise UserError(f"tasks={cfg.tasks}: {type(e).__name__}: {first_line(e)}") from e
    for task in loaded["tasks"].values():
        shots = task.get_config("num_fewshot")
        if shots is None or (shots and cfg.num_fewshot >= 0):   # a task's own 0 stays
            task.set_config("num_fewshot", max(0, cfg.num_fewshot))
        task.set_fewshot_seed(seed=1234)
    return loaded


def evaluate_tasks(model, tokenizer, tasks, batch_size, limit=0):
    """What the JSON file gets of tasks."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.evaluator import evaluate
    harness_model = type("RunModel", (HarnessModel, TemplateLM), {})
    try:
        found = evaluate(harness_model(model, tokenizer, batch_size), tasks,
                         limit=limit or None, log_samples=False)
    except (ValueError, AssertionError) as e:   # more shots than examples; a task that runs code
        raise UserError(f"tasks={','.join(tasks['tasks'])}: {first_line(e)}") from e
    numbers = lambda values: {key: v for key, v in values.items() if isinstance(v, float)}
    return {"tasks": {name: numbers(values) for name, values in found["results"].items()}}


def print_tasks(result):
    for name, values in result["tasks"].items():
        for metric, value in values.items():
            print(f"{name:24} {metric:32}{value:12.4f}")
