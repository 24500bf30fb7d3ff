"""From `input.path` to the files it names, in an order that is the same on every run. What is left out is said, and nothing twice."""

from __future__ import annotations

import fnmatch
import glob
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from engine.errors import UserError
from pipeline.formats import READERS, format_of, suffixes


@dataclass(frozen=True)
class InputFile:
    """name: the path relative to the input root, which ids and messages use."""

    path: str
    name: str
    format: str


@dataclass
class _Place:
    """What one entry of `input.path` names. In a folder a file's name must say that it is input; a file named itself need not."""

    entry: str
    root: str
    named: list[str]
    found: list[str]
    ignored: list[str]


def list_paths(path: str | Sequence[str]) -> list[str]:
    """The entries of `input.path`."""
    return [path] if isinstance(path, str) else list(path)


def find_files(path: str | Sequence[str], format: str) -> tuple[list[InputFile], list[str]]:
    """The files of `input.path`, and the names in its folders that are no input.

    Files come in the order of a list, and sorted within a folder or glob; a file that several entries name is read once, at the first.
    The input root is the folder of a file, the folder itself, the fixed part of a glob, and the common parent of a list's.

    Raises UserError for an entry that names no input file, and for folders, links and files that cannot be read.
    """
    places = [_find(entry) for entry in list_paths(path)]
    root = os.path.commonpath([os.path.abspath(place.root) for place in places])
    files: dict[str, InputFile] = {}
    ignored: list[str] = []
    for place in places:
        chosen = [(name, format_of(name, format) or (None if format == "auto" else format)) for name in place.named]
        chosen += [(name, format_of(name, format)) for name in place.found]
        others = place.ignored + [name for name, kind in chosen if kind is None]
        chosen = [(name, kind) for name, kind in chosen if kind is not None]
        if not chosen:
            _refuse_empty(place, others, format)
        for name, kind in sorted(chosen):
            _require_file(name)
            absolute = os.path.abspath(name)
            files.setdefault(absolute, InputFile(path=name, name=_show(absolute, root), format=kind))
        ignored += [_show(os.path.abspath(name), root) for name in others]
    return list(files.values()), sorted(set(ignored))


def _find(entry: str) -> _Place:
    try:
        mode = os.stat(entry).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return _find_glob(entry)
    except OSError as error:
        raise UserError(f"input.path '{entry}' cannot be read: {error.strerror}") from None
    if stat.S_ISDIR(mode):
        return _Place(entry, entry, [], *_walk(entry))
    return _Place(entry, os.path.dirname(entry), [entry], [], [])


def _find_glob(pattern: str) -> _Place:
    root, parts = _split_glob(pattern)
    place = _Place(pattern, root, [], [], [])
    if parts:
        _match(root, parts, place)
    elif os.path.lexists(pattern):  # a link to nothing
        place.named.append(pattern)
    if not (place.named or place.found or place.ignored):
        raise UserError(f"input.path '{pattern}' matches no file; allowed: a file, a folder or a glob that exists")
    return place


def _match(folder: str, parts: list[str], place: _Place) -> None:
    """Adds what the parts of a glob match in a folder. As `glob.glob`, but a folder that cannot be listed is refused, not passed over."""
    part, *rest = parts
    if part == "**" and rest:  # no folder at all, or any number of them
        _match(folder, rest, place)
        rest = parts
    for name in _list_folder(folder):
        path = os.path.join(folder, name)
        is_folder = os.path.isdir(path)
        if not fnmatch.fnmatchcase(name, part) or (rest and not is_folder):
            continue
        if (_is_hidden(name) and part[0] != name[0]) or (is_folder and os.path.islink(path) and glob.has_magic(part)):
            place.ignored.append(path)
        elif rest:
            _match(path, rest, place)
        elif is_folder:
            found, ignored = _walk(path)
            place.found += found
            place.ignored += ignored
        else:
            place.named.append(path)


def _list_folder(folder: str) -> list[str]:
    try:
        with os.scandir(folder or ".") as entries:
            return [entry.name for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        _refuse_folder(error)


def _walk(top: str) -> tuple[list[str], list[str]]:
    """The files below a folder, and what is left out: hidden names, and links to folders, which may lead in a circle."""
    found, ignored = [], []
    for folder, folders, names in os.walk(top, onerror=_refuse_folder):
        skipped = [name for name in folders if _is_hidden(name) or os.path.islink(os.path.join(folder, name))]
        folders[:] = [name for name in folders if name not in skipped]
        ignored += [os.path.join(folder, name) for name in [*skipped, *filter(_is_hidden, names)]]
        found += [os.path.join(folder, name) for name in names if not _is_hidden(name)]
    return found, ignored


def _refuse_folder(error: OSError) -> NoReturn:
    raise UserError(f"input folder '{error.filename}' cannot be read: {error.strerror}") from None


def _require_file(path: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        what = f"is a link to nothing ('{os.readlink(path)}')" if os.path.islink(path) else f"cannot be read: {error.strerror}"
        raise UserError(f"input file '{path}' {what}") from None
    if not stat.S_ISREG(mode):
        raise UserError(f"input file '{path}' is no regular file; allowed: files, which can be read twice")


def _refuse_empty(place: _Place, others: list[str], format: str) -> None:
    seen = f"; found: {', '.join(os.path.relpath(name, place.root or '.') for name in others[:5])}" if others else ""
    raise UserError(
        f"input.path '{place.entry}' holds no input file; allowed: names that end in {', '.join(suffixes(format))}, or a file or glob with "
        f"input.format={' or '.join(READERS)}{seen}"
    )


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _show(path: str, root: str) -> str:
    """A path as text: relative to the root, with slashes, and without the bytes that are no UTF-8."""
    return os.fsencode(os.path.relpath(path, root).replace(os.sep, "/")).decode("utf-8", "replace")


def _split_glob(pattern: str) -> tuple[str, list[str]]:
    """The folder before the first part that has a wildcard, and the other parts: `data/*/a.jsonl` -> `data`, [`*`, `a.jsonl`]."""
    parts = pattern.split(os.sep)
    num_fixed = next((index for index, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    root = os.sep.join(parts[:num_fixed]) or (os.sep if num_fixed else "")
    return root, [part for part in parts[num_fixed:] if part]
