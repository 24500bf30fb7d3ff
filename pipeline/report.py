"""What a run has produced, counted from the parts themselves."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline import exit_codes, runfile
from pipeline.folders import Folder, open_folder
from pipeline.parts import Part, list_parts, open_part, read_parts
from pipeline.wording import clip, format_seconds

#: of a part, what `Summary.add` needs
COLUMNS = (
    "status",
    "error_type",
    "finish_reason",
    "num_prompt_tokens",
    "num_output_tokens",
    "num_cycles",
    "num_draft_tokens",
    "num_accepted_tokens",
    "worker",
)
_TOKENS = {
    "prompt": "num_prompt_tokens",
    "output": "num_output_tokens",
    "cycles": "num_cycles",
    "drafted": "num_draft_tokens",
    "accepted": "num_accepted_tokens",
}
_NUM_SAMPLES = 2
_LOOK_AT = 64  # rows of a part, in search of samples


@dataclass
class Summary:
    """Counts over all rows; rates are derived when printed. longest_row: prompt and output together, in tokens.

    workers: counts of each worker of each run, by (run id, worker). with_ok: names of the first parts that hold good rows. samples: a few
    of these rows, once `take_samples` was called.
    """

    num_files: int = 0
    num_rows: int = 0
    status: Counter = field(default_factory=Counter)
    errors: Counter = field(default_factory=Counter)
    finish: Counter = field(default_factory=Counter)
    tokens: Counter = field(default_factory=Counter)
    longest_row: int = 0
    workers: dict[tuple[str, str], Counter] = field(default_factory=lambda: defaultdict(Counter))
    with_ok: list[str] = field(default_factory=list)
    samples: list[dict] = field(default_factory=list)

    def add(self, part: Part) -> None:
        """Counts the rows of a part, which was read with `COLUMNS`."""
        self.num_files += 1
        table = part.table
        self.num_rows += table.num_rows
        if not table.num_rows:
            return
        for counter, name in ((self.status, "status"), (self.errors, "error_type"), (self.finish, "finish_reason")):
            counter.update(
                {entry["values"]: entry["counts"] for entry in table[name].value_counts().to_pylist() if entry["values"] is not None}
            )
        for name, column in _TOKENS.items():
            self.tokens[name] += pc.sum(table[column]).as_py()
        longest = pc.max(pc.add(table["num_prompt_tokens"], table["num_output_tokens"])).as_py()
        self.longest_row = max(self.longest_row, longest)
        sums = [(column, "sum") for column in ("num_output_tokens", "num_cycles", "num_accepted_tokens")]
        for row in table.group_by("worker").aggregate([*sums, ("worker", "count")]).to_pylist():
            self.workers[part.run_id, row["worker"]].update(
                rows=row["worker_count"],
                output=row["num_output_tokens_sum"],
                cycles=row["num_cycles_sum"],
                accepted=row["num_accepted_tokens_sum"],
            )
        if len(self.with_ok) < _NUM_SAMPLES and not part.is_error.all():
            self.with_ok.append(part.name)

    def watch(self, parts: Iterable[Part]) -> Iterator[Part]:
        """The same parts, each counted as it goes by."""
        for part in parts:
            self.add(part)
            yield part

    def take_samples(self, folder: Folder) -> None:
        self.samples = [row for name in self.with_ok for row in open_part(folder, name, _look_for_ok)][:_NUM_SAMPLES]

    @property
    def tau(self) -> float | None:
        return _tau(self.tokens)

    @property
    def exit_code(self) -> int:
        failed = self.status["error"]
        if not failed:
            return exit_codes.OK
        return exit_codes.ALL_ROWS_FAILED if failed == self.num_rows else exit_codes.SOME_ROWS_FAILED

    def workers_of(self, run_id: str) -> dict[str, Counter]:
        """The workers of one run, in order."""
        return {worker: tokens for (run, worker), tokens in sorted(self.workers.items()) if run == run_id}

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


def summarize(folder: Folder, parts: Iterable[Part] | None = None) -> Summary:
    """Counts the parts of an output, all or some, read with `COLUMNS`. Raises EngineError for one that cannot be read."""
    summary = Summary()
    for part in read_parts(folder, list_parts(folder).values(), COLUMNS) if parts is None else parts:
        summary.add(part)
    summary.take_samples(folder)
    return summary


def _look_for_ok(part: pq.ParquetFile) -> list[dict]:
    """Among the first rows only."""
    batch = next(part.iter_batches(_LOOK_AT, columns=["id", "sample", "status", "prompt", "text", "finish_reason"]))
    return [row for row in batch.to_pylist() if row["status"] == "ok"]


def read_report(output: str) -> str:
    """The text of `rheo report OUT`. Raises UserError when OUT holds no run."""
    folder = open_folder(output)
    run = runfile.require(folder)
    return render(summarize(folder), run, output)


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
    workers = summary.workers_of(run["run_id"])
    seconds, new = run["timing"].get("generate_s"), sum(workers.values(), Counter())
    if seconds and new["rows"]:
        lines.append(
            f"  speed        {new['output'] / seconds:.1f} tokens/s, {new['rows'] / seconds:.2f} rows/s "
            f"over {format_seconds(seconds)} (start and model load: {format_seconds(run['timing']['load_s'])})"
        )
    if len(run["runs"]) > 1:
        lines.append(f"  runs         {len(run['runs'])}; the last wrote {new['rows']} rows, the speed is its own")
    if run.get("engine"):  # absent where none was loaded
        lines.append(f"  engine       {describe_engine(run['engine'])}")
    if summary.tau is not None:
        drafted = summary.tokens["drafted"]
        share = f", {100 * summary.tokens['accepted'] / drafted:.1f}% of drafted tokens accepted" if drafted else ""
        lines.append(f"  tau          {summary.tau:.3f} over {summary.tokens['cycles']} cycles{share}")
    trained_length = run.get("engine", {}).get("draft_trained_length")
    if trained_length and summary.longest_row > trained_length:
        lines.append(f"  draft        trained on {trained_length} tokens, and worse behind them; longest row: {summary.longest_row}")
    if len(workers) > 1:
        lines += [f"  worker       {name}: {_describe_worker(tokens, seconds)}" for name, tokens in workers.items()]
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
