"""What a run has produced, counted from the parts themselves."""

from __future__ import annotations

import glob
import os
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from engine.errors import EngineError, UserError
from pipeline import exit_codes, runfile
from pipeline.schema import SCHEMA
from pipeline.wording import clip, format_seconds

_COLUMNS = [
    "status",
    "error_type",
    "finish_reason",
    "num_prompt_tokens",
    "num_output_tokens",
    "num_cycles",
    "num_draft_tokens",
    "num_accepted_tokens",
    "worker",
]
_NUM_SAMPLES = 2


@dataclass
class Summary:
    """Counts over all rows; rates are derived when printed. longest_row: prompt and output together, in tokens."""

    num_files: int = 0
    num_rows: int = 0
    status: Counter = field(default_factory=Counter)
    errors: Counter = field(default_factory=Counter)
    finish: Counter = field(default_factory=Counter)
    tokens: Counter = field(default_factory=Counter)
    longest_row: int = 0
    workers: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))
    samples: list[dict] = field(default_factory=list)

    @property
    def tau(self) -> float | None:
        return _tau(self.tokens)

    @property
    def exit_code(self) -> int:
        failed = self.status["error"]
        if not failed:
            return exit_codes.OK
        return exit_codes.ALL_ROWS_FAILED if failed == self.num_rows else exit_codes.SOME_ROWS_FAILED

    def counts(self) -> dict:
        """For run.json."""
        return {
            "files": self.num_files,
            "rows": self.num_rows,
            "status": dict(self.status),
            "errors": dict(self.errors),
            "finish_reason": dict(self.finish),
            "tokens": dict(self.tokens),
        }


def _tau(tokens: Counter) -> float | None:
    """Mean acceptance length, pooled over all cycles."""
    cycles = tokens["cycles"]
    return (tokens["accepted"] + cycles) / cycles if cycles else None


def summarize(output: str) -> Summary:
    """Reads OUT/rows/*.parquet. Raises EngineError for a part that cannot be read or has another schema."""
    summary = Summary()
    for path in sorted(glob.glob(os.path.join(glob.escape(output), "rows", "*.parquet"))):
        try:
            with pq.ParquetFile(path) as part:
                if not part.schema_arrow.equals(SCHEMA):
                    raise EngineError(f"'{path}' has another schema than this version of rheo writes")
                summary.num_files += 1
                for batch in part.iter_batches(columns=_COLUMNS):
                    _count(summary, batch)
                if len(summary.samples) < _NUM_SAMPLES:
                    _take_samples(summary, part)
        except (pa.ArrowException, OSError) as error:
            raise EngineError(f"'{path}' cannot be read: {error}") from None
    return summary


def _count(summary: Summary, batch: pa.RecordBatch) -> None:
    columns = batch.to_pydict()
    summary.num_rows += batch.num_rows
    summary.status.update(columns["status"])
    summary.errors.update(error for error in columns["error_type"] if error is not None)
    summary.finish.update(columns["finish_reason"])
    summary.tokens.update(
        prompt=sum(columns["num_prompt_tokens"]),
        output=sum(columns["num_output_tokens"]),
        cycles=sum(columns["num_cycles"]),
        drafted=sum(columns["num_draft_tokens"]),
        accepted=sum(columns["num_accepted_tokens"]),
    )
    counted = ("worker", "num_prompt_tokens", "num_output_tokens", "num_cycles", "num_accepted_tokens")
    for worker, prompt, output, cycles, accepted in zip(*(columns[name] for name in counted), strict=True):
        summary.longest_row = max(summary.longest_row, prompt + output)
        summary.workers[worker].update(rows=1, output=output, cycles=cycles, accepted=accepted)


def _take_samples(summary: Summary, part: pq.ParquetFile) -> None:
    for batch in part.iter_batches(64, columns=["id", "sample", "status", "prompt", "text", "finish_reason"]):
        for row in batch.to_pylist():
            if row["status"] == "ok" and len(summary.samples) < _NUM_SAMPLES:
                summary.samples.append(row)
        return  # a look, not a search


def read_report(output: str) -> str:
    """The text of `rheo report OUT`. Raises UserError when OUT holds no run."""
    run = runfile.read(output)
    if run is None:
        raise UserError(f"'{output}' holds no run: there is no {runfile.NAME} in it; allowed: the output.path of a job")
    return render(summarize(output), run, output)


def render(summary: Summary, run: dict, output: str) -> str:
    """The closing summary as plain text."""
    ok, failed = summary.status["ok"], summary.status["error"]
    expected = run["num_rows"]
    lines = [f"{run['config']['job']['name']}: {run['status']}, {summary.num_rows} of {expected} rows in {output}/rows"]
    lines.append(f"  status       {ok} ok, {failed} error")
    for name, count in summary.errors.most_common():
        lines.append(f"    {name}: {count}")
    if ok:
        length = summary.finish["length"]
        lines.append(f"  finished by  {summary.finish['stop']} stop, {length} length ({100 * length / ok:.1f}%)")
    lines.append(f"  tokens       {summary.tokens['output']} out, {summary.tokens['prompt']} in")
    seconds = run["timing"].get("generate_s")
    if seconds:
        lines.append(
            f"  speed        {summary.tokens['output'] / seconds:.1f} tokens/s, {summary.num_rows / seconds:.2f} rows/s "
            f"over {format_seconds(seconds)} (start and model load: {format_seconds(run['timing']['load_s'])})"
        )
    if run.get("engine"):  # absent where none was loaded
        lines.append(f"  engine       {describe_engine(run['engine'])}")
    if summary.tau is not None:
        drafted = summary.tokens["drafted"]
        share = f", {100 * summary.tokens['accepted'] / drafted:.1f}% of drafted tokens accepted" if drafted else ""
        lines.append(f"  tau          {summary.tau:.3f} over {summary.tokens['cycles']} cycles{share}")
    trained_length = run.get("engine", {}).get("draft_trained_length")
    if trained_length and summary.longest_row > trained_length:
        lines.append(f"  draft        trained on {trained_length} tokens, and worse behind them; longest row: {summary.longest_row}")
    if len(summary.workers) > 1:
        lines += [f"  worker       {name}: {_describe_worker(tokens, seconds)}" for name, tokens in sorted(summary.workers.items())]
    for row in summary.samples:
        lines.append(f"  sample       {row['id']} [{row['sample']}], {row['finish_reason']}")
        lines.append(f"    prompt: {clip(row['prompt'])}")
        lines.append(f"    text:   {clip(row['text'])}")
    return "\n".join(lines)


def _describe_worker(tokens: Counter, seconds: float | None) -> str:
    tau = _tau(tokens)
    parts = [f"{tokens['rows']} rows", f"{tokens['output'] / seconds:.1f} tokens/s" if seconds else "", f"tau {tau:.3f}" if tau else ""]
    return ", ".join(filter(None, parts))


def describe_engine(engine: dict) -> str:
    """What ran, in one line."""
    tree = "" if engine["method"] == "off" else f" (tree_size {engine['tree_size']}, depth {engine['depth']}, top_k {engine['top_k']}"
    if engine["method"] == "rheo":
        tree += f", m {engine['m']}"
    tree += ")" if tree else ""
    return (
        f"{engine['method']}{tree}, {engine['dtype']} on {engine['device']}, max_batch {engine['max_batch']}, threads {engine['threads']}"
    )
