"""The models of a job, fetched once, on the driver: workers find them in the cache and ask no hub (FIELD-CASES A26)."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.checks import check_chat_template
from pipeline.config import JobConfig


@dataclass(frozen=True)
class Models:
    """Names that mean the very same models to every worker: the commit of a repository is in them."""

    target: str
    revision: str | None
    draft: str


def fetch_models(config: JobConfig) -> Models:
    """Downloads and converts what is not in the cache yet. Raises UserError for what `check_model` could not see."""
    names = config.model
    if config.engine.kind == "fake":
        return Models(names.target, names.revision, names.draft)
    from engine.models.source import resolve_draft, resolve_target

    target = resolve_target(names.target, names.revision)
    if target.chat_template is None:
        check_chat_template(config.input, target.path)
    draft = resolve_draft(names.draft, target.preset, config.speculation.method, target.path)
    return Models(target.name, target.revision or names.revision, names.draft if draft is None else draft.name)
