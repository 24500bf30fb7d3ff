"""`rheo check`: everything that can be known without loading a model."""

from __future__ import annotations

import itertools
from collections import Counter

from engine.errors import UserError
from engine.params import SamplingParams
from pipeline.checks import check_config, check_model, check_places, describe_ignored, find_input
from pipeline.columns import Columns
from pipeline.config import JobConfig
from pipeline.earlier import find_rows, read_earlier
from pipeline.fingerprint import describe_job
from pipeline.folders import Folder, explained_failures, open_folder
from pipeline.sources import read_chunk, scan_input
from pipeline.wording import clip, count

_LOOK_AT = 100


def check_job(config: JobConfig) -> str:
    """What the job would do, as text. Raises UserError for whatever would stop `rheo run`, a changed model apart."""
    defaults = check_config(config)
    folder = open_folder(config.output.path, config.output.storage_options)
    with explained_failures(folder, UserError):
        return _check(config, defaults, folder)


def _check(config: JobConfig, defaults: SamplingParams, folder: Folder) -> str:
    check_places(config)
    folder.probe()
    earlier = read_earlier(folder, config)
    files, ignored = find_input(config, earlier.file_names)
    earlier.require_same(describe_job(config, files), grow=config.input.grow, whole=False)
    check_model(config)
    columns = Columns(config.input, defaults, config.sampling.n)
    plan = scan_input(files, columns)
    done = find_rows(earlier.read_own(folder), plan.row_numbers, retry_errors=config.output.retry_errors).done
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
    if earlier.is_finished(config, len(files)) and done.count == plan.num_rows:
        lines.append(f"  earlier  this job is finished already: nothing would be done (exit code {earlier.repeated_code(config)})")
    elif done.count:
        lines.append(f"  earlier  {count(done.count, 'row')} of {plan.num_rows} are there; the rest would be generated")
    elif config.output.overwrite and earlier.dropped:
        lines.append(f"  earlier  the rows of an earlier run ({count(len(earlier.dropped), 'part')}) would be dropped")
    if ignored:
        lines.append(f"  left out {describe_ignored(ignored)}")
    lines.append(f"  first {count(len(rows), 'row')}: {len(good)} readable, {len(bad)} would be error rows")
    if good:
        lines.append(f"    {clip(good[0]['id'])}: {clip(good[0]['prompt'] or good[0]['messages'])}")
    for name, times in Counter(row["error_type"] for row in bad).most_common():
        example = next(row["error_message"] for row in bad if row["error_type"] == name)
        lines.append(f"    {name}: {times}, for instance {example}")
    return "\n".join(lines)
