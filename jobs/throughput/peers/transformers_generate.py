"""transformers' `generate`, plain or assisted: by the draft where it is a language model, else by the row's own text (prompt lookup).

A batch is padded on the left and runs to its end before the next one begins.
"""

import time

from serving import batches, require_lengths, serve

_LOOKUP_TOKENS = 10  # of transformers' documentation


def load(setup):
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(setup["num_threads"])
    device = torch.device(setup["device"])

    def load_model(path):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, setup["dtype"]), local_files_only=True)
        # the checkpoint's own defaults may sample otherwise, and end at EOS
        model.generation_config = GenerationConfig(pad_token_id=0)
        return model.to(device).eval()

    model = load_model(setup["target"])
    assistance = {}
    if setup["name"] == "transformers-assisted":
        if setup["draft_kind"] == "causal_lm":
            assistance = {"assistant_model": load_model(setup["draft"])}
        else:
            assistance = {"prompt_lookup_num_tokens": _LOOKUP_TOKENS}

    def generate(prompts, request):
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        sampling = {"do_sample": False}
        if request["temperature"] > 0:
            sampling = {"do_sample": True, "temperature": request["temperature"], "top_k": 0, "top_p": 1.0}
        config = GenerationConfig(max_new_tokens=request["output_tokens"], pad_token_id=0, **sampling)
        out = model.generate(ids, attention_mask=mask, generation_config=config, **assistance)
        return out[:, longest:].tolist()

    def measure(request):
        torch.manual_seed(request["seed"])
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        rows = []
        for prompts in batches(request["prompts"], request["batch"]):
            rows += generate(prompts, request)
        seconds = time.perf_counter() - started
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        return {
            "seconds": seconds,
            "num_output_tokens": require_lengths(rows, request["output_tokens"]),
            "peak_device_bytes": peak,
        }

    return measure


if __name__ == "__main__":
    serve(load, ["transformers", "torch"])
