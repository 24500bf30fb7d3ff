"""What cycles cost in seconds, learned from those that ran."""

from __future__ import annotations

import math
from collections.abc import Mapping

#: the weight of a new measurement, once there are as many
_RATE = 0.1

#: a measurement counts as so many times what was expected at most: another program may have had the machine
_OUTLIER = 2.0


class Curve:
    """Seconds as a function of a count (tokens, nodes, levels): knots at powers of two, straight lines between and beyond them.

    Measurements are taken as parts of what was expected of their sum, since a draft is timed as a whole and not level by level.
    """

    def __init__(self) -> None:
        self._values: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._values)

    def __call__(self, number: float) -> float:
        """Seconds at a number >= 1; 0 where nothing has been measured yet."""
        x = math.log2(number)
        return self._at_knot(math.floor(x)) * (1 - self._share(number)) + self._at_knot(math.floor(x) + 1) * self._share(number)

    def learn(self, numbers: list[int], seconds: float) -> None:
        """One measurement: `seconds` for all the numbers together."""
        knots = {}
        for number in numbers:
            low = math.floor(math.log2(number))
            share = self._share(number)
            knots[low] = max(knots.get(low, 0.0), 1 - share)
            if share:
                knots[low + 1] = max(knots.get(low + 1, 0.0), share)
        for knot in knots:
            # a knot that is not known yet begins as the line through the known ones, or as an even share
            self._values.setdefault(knot, self._at_knot(knot) or seconds / len(numbers))
        expected = sum(self(number) for number in numbers)
        ratio = seconds / expected
        for knot, weight in knots.items():
            count = self._counts[knot] = self._counts.get(knot, 0) + 1
            limited = ratio if count <= 2 else min(ratio, _OUTLIER)
            self._values[knot] *= limited ** (weight * max(_RATE, 1 / count))

    def _share(self, number: float) -> float:
        """How far a number lies between the knot before it and the one behind it."""
        low = 2 ** math.floor(math.log2(number))
        return number / low - 1

    def _at_knot(self, knot: int) -> float:
        values = self._values
        if knot in values:
            return values[knot]
        if not values:
            return 0.0
        below, above = [k for k in values if k < knot], [k for k in values if k > knot]
        if below and above:
            low, high = max(below), min(above)
        elif len(values) == 1:
            return next(iter(values.values()))
        else:
            low, high = sorted(values)[-2:] if below else sorted(values)[:2]
        slope = (values[high] - values[low]) / (2**high - 2**low)
        nearest = high if below and not above else low
        return max(values[nearest] + slope * (2**knot - 2**nearest), values[min(values)] / 2)


class Costs:
    """Seconds of a cycle of one size of batch."""

    def __init__(self) -> None:
        self._draft, self._target, self._rest = Curve(), Curve(), Curve()

    def seconds(self, *, level_nodes: list[int], num_tokens: int, num_walked: float) -> float:
        """Of a cycle. level_nodes: nodes that each draft forward reads. num_tokens: of the target's pass. num_walked: levels that the
        verification of the batch visits."""
        return sum(map(self._draft, level_nodes)) + self._target(num_tokens) + self._rest(num_walked)

    def learn(self, seconds: Mapping[str, float], *, level_nodes: list[int], num_tokens: int, num_walked: int) -> None:
        """seconds: by phase, as `engine.stopwatch` names them."""
        if level_nodes:
            self._draft.learn(level_nodes, seconds["draft"])
        self._target.learn([num_tokens], seconds["verify"])
        self._rest.learn([num_walked], seconds["law"] + seconds["commit"])
