"""Ray Data LLM over vLLM: a whole pipeline, which starts its engine anew in each measurement.

Nobody is told when its engine is loaded, so the first batch of rows marks the beginning: the seconds go from its end to that of the last
row, and its tokens do not count.
"""

import os
import time

from serving import require_lengths, serve

_CPU_CACHE_GIB = "4"  # as in vllm_generate.py


def load(setup):
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", _CPU_CACHE_GIB)
    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    resources = {"GPU": 1, "CPU": 1} if setup["device"].startswith("cuda") else {"CPU": 1}

    def measure(request):
        batch, num_tokens = request["batch"], request["output_tokens"]
        processor = build_processor(
            vLLMEngineProcessorConfig(
                model_source=setup["target"],
                engine_kwargs={"dtype": setup["dtype"], "max_num_seqs": batch, "seed": request["seed"]},
                batch_size=batch,
                concurrency=1,
                placement_group_config={"bundle_per_worker": resources},
                chat_template_stage=False,
                tokenize_stage=False,
                detokenize_stage=False,
            ),
            preprocess=lambda row: {
                "tokenized_prompt": row["ids"],
                "sampling_params": {
                    "temperature": request["temperature"],
                    "max_tokens": num_tokens,
                    "min_tokens": num_tokens,
                    "ignore_eos": True,
                    "detokenize": False,
                },
            },
            postprocess=lambda row: {"tokens": row["generated_tokens"], "ended_at": time.time()},
        )
        rows = processor(ray.data.from_items([{"ids": ids} for ids in request["prompts"]])).take_all()
        require_lengths([row["tokens"] for row in rows], num_tokens)
        ended = sorted(row["ended_at"] for row in rows)
        return {"seconds": ended[-1] - ended[batch - 1], "num_output_tokens": (len(rows) - batch) * num_tokens}

    return measure


if __name__ == "__main__":
    serve(load, ["ray", "vllm", "vllm-cpu", "torch"], is_pipeline=True)
