"""`rheo train-draft`: answers, features, training, export, evaluation. Each stage goes on where it stopped."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path

from engine.errors import EngineError, UserError
from engine.models.eagle3_config import MIN_TARGET_LAYERS, default_feature_layers
from engine.models.folder import read_config
from jobs.train_draft import checkpoints, record
from jobs.train_draft.card import write_card
from jobs.train_draft.config import TrainDraftConfig, answers_job
from jobs.train_draft.evaluate import evaluate, held_out_prompts
from pipeline import exit_codes
from pipeline.checks import check_config, check_model, check_places
from pipeline.config import JobConfig
from pipeline.local_folder import LocalFolder
from pipeline.notes import show, tell
from pipeline.run import run_job
from pipeline.s3 import is_s3

_MAX_VOCABULARY = 32_000
_GOOD = (exit_codes.OK, exit_codes.SOME_ROWS_FAILED)


def train_draft(config: TrainDraftConfig) -> int:
    """Runs what is not done yet, and returns the exit code: that of a `rheo run` inside that did not come to its end, else 0.

    Raises UserError before anything is started, and for an output that was begun with other options; EngineError for a stage that failed.
    """
    out = Path(config.output.path)
    if is_s3(config.output.path):
        raise UserError(f"output.path='{config.output.path}'; allowed: a local folder, as features are read at random")
    if config.output.overwrite:
        raise UserError(f"output.overwrite=true; allowed: false; remove '{out}' to begin anew")
    job = answers_job(config, str(out / "answers"))
    check_config(job)
    check_places(job)
    check_model(job)
    stages = _Stages(config, job, out)
    folder = LocalFolder(str(out))
    folder.probe()
    with folder.lock():
        record.require_same(out, config)
        try:
            return stages.run()
        except UserError:
            record.forget_unless_begun(out)
            raise
        except KeyboardInterrupt:
            tell("rheo: interrupted; the same command goes on from here")
            return exit_codes.SIGNAL_BASE + signal.SIGINT


class _Stages:
    """Raises UserError for options that do not fit the target."""

    def __init__(self, config: TrainDraftConfig, job: JobConfig, out: Path):
        from engine.models.source import resolve_target

        self._config, self._job, self._out = config, job, out
        self._target = resolve_target(config.model.target, config.model.revision)
        self._sizes = read_config(self._target.path)
        self._log = out / "ray.log"
        self._settings = self._choose_settings()

    def run(self) -> int:
        code = self._write_answers()
        if code not in _GOOD:
            return code
        self._train()
        return self._evaluate()

    def _write_answers(self) -> int:
        if self._config.answers.given is None:
            return run_job(self._job)
        from jobs.train_draft.given import write_given

        write_given(self._config, self._job, self._target, vocab_size=self._sizes["vocab_size"])
        return exit_codes.OK

    def _train(self) -> None:
        from jobs.train_draft.export import export
        from jobs.train_draft.stages import capture, find_missing, ray_pool, train

        settings = self._settings
        answers, features, training = self._out / "answers", Path(settings["corpus"]), Path(settings["folder"])
        parts = find_missing(answers, features)
        if parts or checkpoints.last_step(training) < settings["steps"]:
            with ray_pool(self._config, self._log) as pool:
                if parts:
                    capture(self._config, pool, parts, features, settings["feature_layers"] or self._default_layers())
                if not list(features.glob("*.safetensors")):
                    raise EngineError(f"no answer in '{answers}' is long enough to learn from")
                train(pool, settings, self._log)
        export(training, self._out / "draft")
        write_card(self._out / "draft", self._config, checkpoints.read_log(training), tau={})

    def _evaluate(self) -> int:
        section, draft = self._config.evaluation, self._out / "draft"
        if not section.prompts:
            show(f"{draft}: trained, and not evaluated (evaluation.prompts=0)")
            return exit_codes.OK
        prompts = held_out_prompts(self._out / "answers", self._config.train.validation, section.prompts)
        found = evaluate(self._config, prompts, draft, self._out / "evaluation" / str(self._config.train.steps))
        if isinstance(found, int):
            return found
        write_card(draft, self._config, checkpoints.read_log(self._out / "training"), tau=found)
        (self._out / "tau.json").write_text(json.dumps(found, indent=1) + "\n")
        show(f"{draft}: " + ", ".join(f"tau {tau:.3f} ({method})" for method, tau in found.items()))
        return exit_codes.OK

    def _choose_settings(self) -> dict:
        """Of jobs.train_draft.training.Settings, but for what depends on the workers."""
        from engine.models.source import resolve_draft

        draft, num_layers = self._config.draft, self._sizes["num_hidden_layers"]
        if draft.feature_layers is None and num_layers < MIN_TARGET_LAYERS:
            raise UserError(
                f"the target has num_hidden_layers={num_layers}; allowed: at least {MIN_TARGET_LAYERS}, or draft.feature_layers"
            )
        layers = draft.feature_layers and tuple(draft.feature_layers)
        if layers and layers[-1] >= num_layers:
            raise UserError(f"draft.feature_layers={list(layers)}; allowed: 0 to {num_layers - 1}, the target's layers")
        vocab_size = self._sizes["vocab_size"]
        if draft.vocab_size is not None and draft.vocab_size > vocab_size:
            raise UserError(f"draft.vocab_size={draft.vocab_size}; allowed: at most {vocab_size}, the target's")
        init = None if draft.init == "target" else resolve_draft(draft.init, self._target.preset, "rheo", self._target.path)
        if init is not None and init.kind != "eagle3":
            raise UserError(f"draft.init='{draft.init}' is of the kind {init.kind}; allowed: target, or an EAGLE-3 head")
        section = dataclasses.asdict(self._config.train)
        return {
            **section,
            "target": str(self._target.path),
            "init": None if init is None else str(init.path),
            "corpus": str((self._out / "features").resolve()),
            "folder": str((self._out / "training").resolve()),
            "dtype": self._config.model.dtype,
            "seed": self._config.job.seed,
            "max_tokens": self._config.answers.max_tokens,
            "vocab_size": draft.vocab_size or min(vocab_size, _MAX_VOCABULARY),
            "intermediate_size": draft.intermediate_size,
            "feature_layers": layers,
        }

    def _default_layers(self) -> tuple[int, ...]:
        return default_feature_layers(self._sizes["num_hidden_layers"])
