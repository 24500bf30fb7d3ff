"""Options from a YAML file and the command line, read into dataclasses; whatever is wrong is refused by its name."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from engine.errors import UserError, unknown_name
from pipeline.wording import did_you_mean

T = TypeVar("T")


def load_options(schema: type[T], yaml_path: str, overrides: Sequence[str] = ()) -> T:
    """The options of a YAML file with `key=value` overrides over it. A `job.name` that is not set becomes the file's name.

    schema: a dataclass of sections, each a dataclass with a default.
    Raises UserError for a file that cannot be read, an unknown option, a wrong type or a missing required option.
    """
    layers = [_read_yaml(schema, yaml_path), *(_read_override(schema, override) for override in overrides)]
    for layer in layers:
        _refuse_unknown(layer, schema, schema, prefix="")
        speculation = layer.get("speculation")
        if speculation and speculation.get("method") is False:  # a bare `off` in YAML
            speculation["method"] = "off"
    given = OmegaConf.merge(*layers)  # first, so that only the last value of an option counts
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), given))
    except OmegaConfBaseException as error:
        raise UserError(_describe(error, schema, OmegaConf.to_container(given))) from None
    if config.job.name is None:
        config.job.name = os.path.splitext(os.path.basename(yaml_path))[0]
    return config


def _read_override(schema: type, override: str) -> dict[str, Any]:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(f"override '{override}'; allowed: key=value, for instance sampling.temperature=0.7")
    is_text = _annotation(schema, key) in ("str", "str | None")
    try:
        layer = OmegaConf.to_container(OmegaConf.from_dotlist([override]))
    except YAMLError:
        if not is_text:
            raise UserError(f"override '{override}' is not valid YAML; allowed: quotes around text, as {key}='\"a: b\"'") from None
        layer = {}
    except OmegaConfBaseException as error:
        raise UserError(f"override '{override}' cannot be read: {_first_line(error)}") from None
    if is_text and not isinstance(_lookup(layer, key), str) and value != "null":  # `{{ a }}` is a map in YAML, and `a: b: c` is nothing
        for part in reversed(key.split(".")):
            value = {part: value}
        return value
    return layer


def _annotation(schema: type, key: str) -> str | None:
    """The type of an option, as it is written; None for what is no option."""
    section: Any = schema
    found = None
    for part in key.split("."):
        found = next((f for f in dataclasses.fields(section) if f.name == part), None) if section else None
        section = found.default_factory if found and dataclasses.is_dataclass(found.default_factory) else None
    return str(found.type) if found else None


def option_names(section: type, prefix: str = "") -> list[str]:
    """Every option as a dotted name, in the order of the classes."""
    names = []
    for name, nested in _fields(section).items():
        names += option_names(nested, f"{prefix}{name}.") if nested else [prefix + name]
    return names


def _read_yaml(schema: type, path: str) -> dict:
    try:
        container = OmegaConf.to_container(OmegaConf.load(path))
    except FileNotFoundError:
        raise UserError(f"job file '{path}' does not exist{did_you_mean(path)}") from None
    except OSError as error:
        raise UserError(f"job file '{path}' cannot be read: {error.strerror or 'it is no YAML map'}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"job file '{path}' is not UTF-8: {error.reason} at byte {error.start}") from None
    except (YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"job file '{path}' is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(container, dict):
        raise UserError(f"job file '{path}' holds a {type(container).__name__}; allowed: a map of sections ({', '.join(_fields(schema))})")
    return {name: value for name, value in container.items() if value is not None}  # `sampling:` alone is an empty section


def _fields(section: type) -> dict[str, type | None]:
    """Field names, each with the section class it holds, if any."""
    found = {}
    for f in dataclasses.fields(section):
        nested = f.default_factory if dataclasses.is_dataclass(f.default_factory) else None
        found[f.name] = nested
    return found


def _refuse_unknown(values: Mapping[str, Any], section: type, schema: type, prefix: str) -> None:
    fields = _fields(section)
    for name, value in values.items():
        if name not in fields:
            allowed = list(fields)
            elsewhere = [option for option in option_names(schema) if option.rsplit(".", 1)[-1] == name]
            hint = f"; '{elsewhere[0]}' is an option" if elsewhere else ""
            what = f"option in '{prefix[:-1]}'" if prefix else "section"
            raise UserError(unknown_name(what, name, allowed) + hint)
        nested = fields[name]
        if nested is None or value is None:
            continue
        if not isinstance(value, Mapping):
            raise UserError(f"{prefix}{name}={value!r}; allowed: a map with {', '.join(_fields(nested))}")
        _refuse_unknown(value, nested, schema, f"{prefix}{name}.")


def _describe(error: OmegaConfBaseException, schema: type, given: Mapping[str, Any]) -> str:
    """An omegaconf error as: the option, its value, what is allowed."""
    name = error.full_key or ""
    section: Any = schema
    for part in name.split("."):
        section = next((f for f in dataclasses.fields(section) if f.name == part), None) if section else None
        if section is None:
            break
        annotation = section.type
        section = section.default_factory if dataclasses.is_dataclass(section.default_factory) else None
    else:
        value = _lookup(given, name)
        if type(error).__name__ == "MissingMandatoryValue":
            return f"{name} is required; set it in the job file or with {name}=..."
        if type(error).__name__ == "ValidationError":
            return f"{name}={'null' if value is None else repr(value)}; allowed: {_ALLOWED.get(str(annotation), str(annotation))}"
    return f"{name}: {_first_line(error)}" if name else _first_line(error)


_ALLOWED = {
    "int": "an integer",
    "int | None": "an integer or null",
    "float": "a number",
    "float | None": "a number or null",
    "bool": "true or false",
    "str": "text",
    "str | None": "text or null",
    "dict[str, Any]": "a map",
}


def _lookup(layer: Any, name: str) -> Any:
    """The value of a dotted name, None where there is none."""
    for part in name.split("."):
        layer = layer.get(part) if isinstance(layer, Mapping) else None
    return layer


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
