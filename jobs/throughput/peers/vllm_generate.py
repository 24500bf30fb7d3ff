"""vLLM's offline `LLM`, plain or with its own EAGLE-3 speculation over the same head.

The slots of an `LLM` are fixed when it is loaded, so a cell with fewer rows at once runs batch after batch. Text is not made of the tokens.
"""

import os
import time

from serving import batches, require_lengths, serve

_DRAFTED = 3  # tokens of a chain, as in vLLM's examples for EAGLE-3
_CPU_CACHE_GIB = "4"  # else vLLM takes most of the machine's memory; an environment variable of the user's goes before


def load(setup):
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", _CPU_CACHE_GIB)
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    options = {}
    if setup["name"] == "vllm-eagle3":
        if setup["draft_kind"] != "eagle3":
            raise ValueError(f"the draft is of the kind {setup['draft_kind']}; allowed: an EAGLE-3 head")
        speculation = {"method": "eagle3", "model": setup["draft"], "num_speculative_tokens": _DRAFTED}
        options = {"speculative_config": speculation, "disable_log_stats": False}
    llm = LLM(model=setup["target"], dtype=setup["dtype"], max_num_seqs=setup["max_batch"], seed=setup["seed"], **options)

    def measure(request):
        # a prompt that was measured before must be read again
        llm.reset_prefix_cache()
        params = [
            SamplingParams(
                temperature=request["temperature"],
                max_tokens=request["output_tokens"],
                min_tokens=request["output_tokens"],
                ignore_eos=True,
                seed=request["seed"] * 1_000_003 + row,
                detokenize=False,
            )
            for row in range(len(request["prompts"]))
        ]
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in request["prompts"]]
        before = count_drafts(llm) if options else None
        started = time.perf_counter()
        rows = []
        for some, their in zip(batches(prompts, request["batch"]), batches(params, request["batch"]), strict=True):
            rows += [output.outputs[0].token_ids for output in llm.generate(some, their, use_tqdm=False)]
        seconds = time.perf_counter() - started
        answer = {"seconds": seconds, "num_output_tokens": require_lengths(rows, request["output_tokens"])}
        if before is not None:
            answer.update({name: count - before[name] for name, count in count_drafts(llm).items()})
        return answer

    return measure


def count_drafts(llm):
    """Since the start: chains that were verified, and tokens of them that were accepted."""
    totals = {"vllm:spec_decode_num_drafts": 0, "vllm:spec_decode_num_accepted_tokens": 0}
    for metric in llm.get_metrics():
        if metric.name in totals:
            totals[metric.name] += metric.value
    return {"num_cycles": totals["vllm:spec_decode_num_drafts"], "num_accepted": totals["vllm:spec_decode_num_accepted_tokens"]}


if __name__ == "__main__":
    serve(load, ["vllm", "vllm-cpu", "torch"])
