"""The model card of a trained draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jobs.train_draft.config import TrainDraftConfig
from pipeline.wording import format_seconds


def write_card(draft: Path, config: TrainDraftConfig, log: list[dict[str, Any]], tau: dict[str, float]) -> None:
    """README.md in `draft`. log: of the training. tau: by method, where it was measured."""
    validations = [entry for entry in log if "validation" in entry]
    train, last = config.train, validations[-1]
    answers = "given answers" if config.answers.given else f"the target's own answers at temperature {config.sampling.temperature:g}"
    lines = [
        f"# {draft.parent.name}",
        "",
        f"An EAGLE-3 draft for `{config.model.target}`, in the official EAGLE layout, bf16. Made by `rheo train-draft`.",
        "",
        f"- Data: {answers}; {train.validation:.0%} of the prompts held out.",
        f"- Training: {last['step']} steps in {format_seconds(last['seconds'])}: {train.batch} windows of {train.queries} places, "
        f"{train.draft_steps} draft steps, Muon and AdamW at {train.learning_rate:g}.",
        "- On held-out prompts, by draft step:",
        "",
        "| | " + " | ".join(str(step + 1) for step in range(len(last["validation"]["acceptance"]))) + " |",
        "|---|" + "---|" * len(last["validation"]["acceptance"]),
    ]
    names = {"acceptance": "expected acceptance, sum of min(p, q)", "top1": "same most likely token", "cross_entropy": "cross-entropy"}
    lines += [f"| {name} | " + " | ".join(f"{value:.3f}" for value in last["validation"][metric]) + " |" for metric, name in names.items()]
    if tau:
        section = config.evaluation
        figures = ", ".join(f"{value:.3f} ({method})" for method, value in tau.items())
        lines += [
            "",
            f"- tau on {section.prompts} held-out prompts at temperature {config.sampling.temperature:g}, trees of {section.tree_size} "
            f"nodes and {section.depth} levels, {section.max_tokens} tokens: {figures}.",
        ]
    (draft / "README.md").write_text("\n".join(lines) + "\n")
