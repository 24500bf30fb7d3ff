"""What a draft head's config.json says of its rotary positions. Imports no torch.

transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 `rope_parameters` with both in it; both are read.
"""

from __future__ import annotations

from typing import Any

from engine.models.draft_fields import DraftFields

#: the reference's when config.json names none, also for targets with another one (LAW.md 1.5)
DEFAULT_ROPE_THETA = 10000.0

#: type -> (the numbers it must have, those it may have). Not here are the types whose frequencies change with the longest sequence of a
#: pass: with them a row's law would depend on its neighbours.
_NUMBERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}


def take_rope(fields: DraftFields) -> tuple[float, dict[str, Any]]:
    """The rotary base, and the scaling as {"rope_type": ..., its numbers}; without scaling the type is "default".

    Raises UserError with the field, its value and what is allowed, also when two fields say different things.
    """
    bases, scalings = {}, {}
    if (theta := fields.take("rope_theta")) is not None:
        bases["rope_theta"] = theta
    for field in ("rope_scaling", "rope_parameters"):
        section = fields.take(field)
        if section is None:
            continue
        if not isinstance(section, dict):
            raise fields.refusal(field, "a JSON object")
        section = {name: value for name, value in section.items() if value is not None}
        if "rope_theta" in section:
            bases[field] = section.pop("rope_theta")
        scalings[field] = _read_scaling(fields, field, section)
    base_field, base = next(iter(bases.items()), ("", DEFAULT_ROPE_THETA))
    for field, theta in bases.items():
        if not _is_number(theta) or theta <= 1:
            raise fields.refusal(field, "a rope_theta > 1")
        if theta != base:
            raise fields.refusal(field, f"the same base as in {base_field}, {base}")
    if len(scalings) == 2 and scalings["rope_scaling"] != scalings["rope_parameters"]:
        raise fields.refusal("rope_scaling", f"the same as in rope_parameters={scalings['rope_parameters']}")
    return float(base), next(iter(scalings.values()), {"rope_type": "default"})


def _read_scaling(fields: DraftFields, field: str, section: dict[str, Any]) -> dict[str, Any]:
    numbers = {name: value for name, value in section.items() if name not in ("rope_type", "type")}
    kind = section.get("rope_type", section.get("type", "default"))  # `type` is the older name; some files have both
    if kind not in tuple(_NUMBERS) or section.get("type", kind) != kind:
        raise fields.refusal(field, f"one rope_type of {', '.join(_NUMBERS)}")
    required, optional = _NUMBERS[kind]
    if not set(required) <= set(numbers) <= {*required, *optional}:
        names = [*required, *(f"{name} (optional)" for name in optional)]
        raise fields.refusal(field, f"for rope_type {kind}, besides rope_theta: {', '.join(names) or 'nothing'}")
    for name, value in numbers.items():
        if name == "truncate":
            if type(value) is not bool:
                raise fields.refusal(field, "truncate: true or false")
        elif not _is_number(value) or value <= 0:
            raise fields.refusal(field, f"{name}: a number > 0")
    if kind == "llama3" and numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        raise fields.refusal(field, "a high_freq_factor above low_freq_factor")
    return {"rope_type": kind, **numbers}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
