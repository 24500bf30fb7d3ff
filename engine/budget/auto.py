"""The controller of `speculation.budget=auto`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from engine.budget.acceptance import Acceptance, accepted_within
from engine.budget.costs import Costs
from engine.budget.plan import PLAIN, Plan, Setting, grid
from engine.law.tree import Tree
from engine.law.verification import Verdict
from engine.params import Speculation
from engine.row import Row
from engine.stopwatch import StoppedPass, Stopwatch

#: another setting is taken when it promises so much more than the present one, so that noise does not make the choice flap
_LEAD = 1.05

#: cycles before anything is chosen that try the largest tree on one row, and a plain step, by turns
_NUM_FIRST = 8

#: of the time, what probes of the largest tree on one row may take
_PROBE_SHARE = 0.02


class _Bucket:
    """What is known of batches of about one size."""

    def __init__(self) -> None:
        self.costs = Costs()
        self.choice = PLAIN
        self.num_seen = 0
        self.owed_s = 0.0


class AutoBudget:
    """Chooses a setting for each size of batch (powers of two) by expected tokens per second, `PLAIN` among them.

    It reads past cycles and the clock, nothing of the cycle that it plans: safe for every method (LAW.md section 6).

    Args:
        level_nodes: nodes of a row that each draft forward of a setting reads.
        device: of the target.
    """

    def __init__(self, speculation: Speculation, level_nodes: Callable[[Setting], list[int]], device: torch.device):
        self._settings = grid(speculation)
        self._level_nodes = level_nodes
        self._acceptance = Acceptance([PLAIN, *self._settings])
        self._watch = Stopwatch(device)
        self._buckets: dict[int, _Bucket] = {}
        self._num_planned = 0
        #: row cycles by setting, of all that were planned
        self.chosen: Counter[Setting] = Counter()
        #: of all cycles that read no prompt: seconds taken, and those that plain decoding is expected to take for the same tokens
        self.seconds = self.plain_seconds = 0.0

    def start_pass(self, *, num_rows: int, reads_prompt: bool) -> StoppedPass:
        """As a `engine.stopwatch.Watch`; the pass before is over by now, and read."""
        self._watch.passes.clear()
        return self._watch.start_pass(num_rows=num_rows, reads_prompt=reads_prompt)

    def plan(self, rows: Sequence[Row]) -> Plan:
        """The trees of the next cycle."""
        drafting = [index for index, row in enumerate(rows) if row.drafts]
        if not drafting:
            return Plan(PLAIN, [1] * len(rows))
        bucket, largest = self._bucket(len(drafting)), self._settings[-1]
        setting, wanted = bucket.choice, drafting
        is_first = bucket.num_seen < _NUM_FIRST
        if is_first and bucket.num_seen % 2:
            setting = PLAIN
        elif is_first or bucket.owed_s >= self._extra_seconds(bucket, len(drafting)):
            if not is_first:
                bucket.owed_s = 0.0
            # by turns, so that each row is heard
            setting, wanted = largest, [drafting[self._num_planned % len(drafting)]]
        self._num_planned += 1
        sizes = [1] * len(rows)
        for index in wanted:
            sizes[index] = setting.size
        self.chosen[setting] += len(wanted)
        self.chosen[PLAIN] += len(drafting) - len(wanted)
        return Plan(setting if max(sizes) > 1 else PLAIN, sizes)

    def learn(self, plan: Plan, tree: Tree, verdict: Verdict, draws: Sequence[bool]) -> None:
        """Take in a cycle that has ended. draws: rows that emitted anything."""
        (timed,) = self._watch.passes
        drafting = [index for index, size in enumerate(plan.sizes) if size > 1]
        if drafting:
            self._learn_acceptance(plan, tree, verdict, drafting)
        if timed.reads_prompt:
            return
        accepted = verdict.num_accepted_B.tolist()
        seconds, num_rows = timed.seconds(), len(plan.sizes)
        bucket = self._bucket(num_rows)
        bucket.costs.learn(
            seconds,
            level_nodes=self._nodes(plan.setting, drafting[-1] + 1 - drafting[0]) if drafting else [],
            num_tokens=timed.num_tokens,
            num_walked=1 + max(accepted),
        )
        bucket.num_seen += 1
        taken = sum(seconds.values())
        bucket.owed_s += _PROBE_SHARE * taken
        plain = self._seconds(bucket, PLAIN, num_rows)
        self.seconds += taken
        self.plain_seconds += plain * (1 + sum(accepted) / num_rows)
        if bucket.num_seen >= _NUM_FIRST:
            self._choose(bucket, num_rows)

    def rate(self, num_rows: int, setting: Setting) -> float:
        """Expected tokens per second of a batch; 0 where nothing has been measured."""
        seconds = self._seconds(self._bucket(num_rows), setting, num_rows)
        return num_rows * (1 + self._acceptance.mean(setting)) / seconds if seconds else 0.0

    def _choose(self, bucket: _Bucket, num_rows: int) -> None:
        best = max([PLAIN, *self._settings], key=lambda setting: self.rate(num_rows, setting))
        if self.rate(num_rows, best) > _LEAD * self.rate(num_rows, bucket.choice):
            bucket.choice = best

    def _learn_acceptance(self, plan: Plan, tree: Tree, verdict: Verdict, drafting: list[int]) -> None:
        size, depth = plan.setting
        known = [setting for setting in self._settings if setting.size <= size and setting.depth <= depth]
        accepted = accepted_within(tree, verdict, known).tolist()
        for index in drafting:
            for setting, number in zip(known, accepted[index], strict=True):
                self._acceptance.learn(setting, number)

    def _extra_seconds(self, bucket: _Bucket, num_rows: int) -> float:
        """What a probe takes longer than the cycle in whose place it runs."""
        largest = self._settings[-1]
        if bucket.choice == largest:
            return float("inf")
        probe = bucket.costs.seconds(
            level_nodes=self._nodes(largest, 1),
            num_tokens=num_rows - 1 + largest.size,
            num_walked=self._acceptance.num_walked(largest, 1),
        )
        return max(probe - self._seconds(bucket, bucket.choice, num_rows), 0.0) + probe / 8

    def _seconds(self, bucket: _Bucket, setting: Setting, num_rows: int) -> float:
        return bucket.costs.seconds(
            level_nodes=self._nodes(setting, num_rows) if setting != PLAIN else [],
            num_tokens=num_rows * setting.size,
            num_walked=self._acceptance.num_walked(setting, num_rows),
        )

    def _nodes(self, setting: Setting, num_rows: int) -> list[int]:
        return [num_rows * number for number in self._level_nodes(setting)]

    def _bucket(self, num_rows: int) -> _Bucket:
        return self._buckets.setdefault((num_rows - 1).bit_length(), _Bucket())
