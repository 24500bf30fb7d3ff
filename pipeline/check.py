"""`rheo check`: everything that can be known without loading a model."""

from __future__ import annotations

import itertools
from collections import Counter

from pipeline.checks import check_config, check_input, check_model, check_output
from pipeline.config import JobConfig
from pipeline.run import find_finished_run
from pipeline.sources import read_chunk
from pipeline.wording import clip, count

_LOOK_AT = 100


def check_job(config: JobConfig) -> str:
    """What the job would do, as text. Raises UserError for whatever would stop `rheo run`."""
    defaults = check_config(config)
    check_output(config.output.path)
    finished = find_finished_run(config)
    plan, columns = check_input(config, defaults)
    check_model(config)
    tables = (table for chunk in plan.chunks for table in read_chunk(chunk, columns))
    rows = list(itertools.islice((row for table in tables for row in table.to_pylist()), _LOOK_AT))
    good = [row for row in rows if row["error_type"] is None]
    bad = [row for row in rows if row["error_type"] is not None]
    lines = [
        f"{config.job.name}: ok",
        f"  input    {plan.describe()} make {count(plan.num_rows, 'row')}",
        f"  model    {config.model.target}, draft {config.model.draft}, method {config.speculation.method} ({config.engine.kind} engine)",
        f"  output   {config.output.path} can be written",
    ]
    if finished is not None:
        lines.append(f"  earlier  this job is finished already: nothing would be done (exit code {finished['exit_code']}, as then)")
    if plan.ignored:
        lines.append(f"  left out {plan.describe_ignored()}")
    lines.append(f"  first {count(len(rows), 'row')}: {len(good)} readable, {len(bad)} would be error rows")
    if good:
        lines.append(f"    {clip(good[0]['id'])}: {clip(good[0]['prompt'] or good[0]['messages'])}")
    for name, times in Counter(row["error_type"] for row in bad).most_common():
        example = next(row["error_message"] for row in bad if row["error_type"] == name)
        lines.append(f"    {name}: {times}, for instance {example}")
    return "\n".join(lines)
