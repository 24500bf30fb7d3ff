"""What the scripts of this folder have in common. They run under other interpreters, so nothing here imports rheo.

Asked on stdin, answered on stdout, one JSON object a line. First:
    {name, target, draft, draft_kind, dtype, device, num_threads, max_batch, seed} -> {load_s, versions, is_pipeline}
    target, draft: folders; draft null and draft_kind null, "eagle3", "causal_lm" or "ngram".
Then for each measurement:
    {prompts, batch, output_tokens, temperature, seed} -> {seconds, num_output_tokens, ...}
    prompts: lists of token ids. Every row writes `output_tokens` tokens, EOS or not. What else an answer may have: num_cycles,
    num_accepted, peak_device_bytes.
What fails answers {error}.
"""

import importlib.metadata
import json
import os
import sys
import time
import traceback


def serve(load, packages, is_pipeline=False):
    """Answers until stdin is at its end.

    load: from what came first, a function that measures. packages: whose versions are told. is_pipeline: a measurement starts everything
    anew.
    """
    # libraries print to stdout: from here on that is stderr, and the answers have a descriptor of their own
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(make):
        try:
            told = make()
        except Exception as error:  # whatever it is, whoever asked waits for an answer
            traceback.print_exc()
            told = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
        answers.write(json.dumps(told) + "\n")
        answers.flush()

    measure = None

    def begin():
        nonlocal measure
        started = time.perf_counter()
        measure = load(json.loads(sys.stdin.readline()))
        versions = {name: importlib.metadata.version(name) for name in packages if _is_installed(name)}
        return {"load_s": time.perf_counter() - started, "versions": versions, "is_pipeline": is_pipeline}

    answer(begin)
    for line in sys.stdin:
        answer(lambda line=line: measure(json.loads(line)))


def batches(prompts, size):
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def require_lengths(rows, num_tokens):
    """The number of tokens of all rows. Raises RuntimeError for a row with another length."""
    wrong = [len(row) for row in rows if len(row) != num_tokens]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(rows)} rows have other than {num_tokens} tokens; the first has {wrong[0]}")
    return len(rows) * num_tokens


def _is_installed(name):
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
