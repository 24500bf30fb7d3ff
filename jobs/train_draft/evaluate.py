"""tau of the finished draft, through `rheo run`, on prompts that it was not trained on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pyarrow.parquet as pq

from engine.errors import EngineError
from jobs.train_draft.config import TrainDraftConfig
from jobs.train_draft.held_out import hash_prompt, is_held_out
from pipeline import exit_codes
from pipeline.config import InputSection, JobConfig, OutputSection, SpeculationSection
from pipeline.folders import open_folder
from pipeline.report import summarize
from pipeline.run import run_job


def evaluate(config: TrainDraftConfig, prompts: list[dict], draft: Path, folder: Path) -> dict[str, float] | int:
    """tau by method, or the exit code of a run that was stopped. prompts: {id, prompt} with the text after templating."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "prompts.jsonl"
    source.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    section = config.evaluation
    found = {}
    for method in section.methods:
        out = str(folder / method)
        job = JobConfig(
            job=dataclasses.replace(config.job, name=f"{config.job.name}: {method}"),
            input=InputSection(path=str(source), chat=False, parse_special=True),
            model=dataclasses.replace(config.model, draft="auto" if method == "off" else str(draft)),
            sampling=dataclasses.replace(config.sampling, max_tokens=section.max_tokens, n=1),
            speculation=SpeculationSection(method=method, tree_size=section.tree_size, depth=section.depth),
            engine=config.engine,
            ray=config.ray,
            output=OutputSection(path=out),
        )
        code = run_job(job)
        if code not in (exit_codes.OK, exit_codes.SOME_ROWS_FAILED):
            return code
        tau = summarize(open_folder(out)).tau
        if tau is None:
            raise EngineError(f"'{out}' has no cycle; allowed: an evaluation with evaluation.max_tokens > 1")
        found[method] = round(tau, 4)
    return found


def held_out_prompts(answers: Path, share: float, most: int) -> list[dict]:
    """The first prompts of the answers that are for validation."""
    chosen: dict[str, dict] = {}
    for part in sorted(answers.glob("rows/*.parquet")):
        for row in pq.read_table(part, columns=["id", "status", "prompt"]).to_pylist():
            if row["status"] == "ok" and row["prompt"] not in chosen and is_held_out(hash_prompt(row["prompt"]), share):
                chosen[row["prompt"]] = {"id": row["id"], "prompt": row["prompt"]}
            if len(chosen) == most:
                return list(chosen.values())
    return list(chosen.values())
