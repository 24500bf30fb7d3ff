"""From `input.path` to the files it names, in an order that is the same on every run. What is left out is said, and nothing twice."""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from engine.errors import UserError
from pipeline.formats import READERS, format_of, suffixes
from pipeline.input_file import InputFile, local_version
from pipeline.places import Place, is_hidden, match_parts
from pipeline.s3 import is_s3
from pipeline.s3_files import find_objects, key_matches
from pipeline.wording import did_you_mean

_FORMATS = " or ".join(READERS)


def list_paths(path: str | Sequence[str]) -> list[str]:
    """The entries of `input.path`."""
    return [path] if isinstance(path, str) else list(path)


def find_files(
    path: str | Sequence[str], format: str, storage_options: Mapping[str, Any] | None = None
) -> tuple[list[InputFile], list[str]]:
    """The files of `input.path`, and the names in its folders that are no input.

    Files come in the order of a list, and sorted within a folder or glob; a file that several entries or links name is read once.
    The input root is the folder of a file, the folder itself, the fixed part of a glob, and the common parent of a list's. Objects of
    several buckets are named `bucket/key`; beside files on a disk, `s3://bucket/key`, and the root is that of the files.

    Raises UserError for an entry that names no input file, and for folders, links, files and buckets that cannot be read.
    """
    options = dict(storage_options or {})
    places = [find_objects(entry, options) if is_s3(entry) else _find(entry) for entry in list_paths(path)]
    show = _name_by_root(places)
    files: dict[str, InputFile] = {}
    linked = _find_links([name for place in places for name in (*place.named, *place.found) if not is_s3(name)])
    ignored: list[str] = []
    for place in places:
        chosen = [(name, format_of(name, format) or (None if format == "auto" else format)) for name in place.named]
        chosen += [(name, format_of(name, format)) for name in place.found]
        others = place.ignored + [name for name, kind in chosen if kind is None]
        chosen = [(name, kind) for name, kind in chosen if kind is not None]
        if not chosen:
            _refuse_empty(place, others, format)
        others += [name for name, _ in chosen if name in linked]
        chosen = [(name, kind) for name, kind in chosen if name not in linked]
        for name, kind in sorted(chosen):
            if is_s3(name):
                files.setdefault(name, InputFile(name, show(name), kind, options, place.versions[name]))
            else:
                files.setdefault(os.path.abspath(name), InputFile(name, show(name), kind, version=local_version(_require_file(name))))
        ignored += [show(name) for name in others]
    return list(files.values()), sorted(set(ignored))


def glob_matches(entry: str, path: str) -> bool:
    """Whether `entry` is a glob that would take the file, if it were there, whatever its suffix."""
    if not glob.has_magic(entry) or is_s3(entry) != is_s3(path):
        return False
    if is_s3(entry):
        return key_matches(entry, path)
    root, pattern = _split_glob(entry)
    below = os.path.relpath(os.path.realpath(path), os.path.realpath(root)).split(os.sep)
    return below[0] != os.pardir and any(isinstance(how, str) for how in match_parts(below, pattern))


def _find_links(paths: list[str]) -> set[str]:
    """The links to files that are here under their own names, or under an earlier link's: their rows would be there twice."""
    own = {os.path.abspath(path) for path in paths if not os.path.islink(path)}
    links = set()
    for path in sorted(path for path in paths if os.path.islink(path)):
        real = os.path.realpath(path)
        if real in own:
            links.add(path)
        own.add(real)
    return links


def _find(entry: str) -> Place:
    try:
        mode = os.stat(entry).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return _find_glob(entry)
    except OSError as error:
        raise UserError(f"input.path '{entry}' cannot be read: {error.strerror}") from None
    if stat.S_ISDIR(mode):
        return Place(entry, entry, [], *_walk(entry))
    return Place(entry, os.path.dirname(entry), named=[entry])


def _find_glob(pattern: str) -> Place:
    root, parts = _split_glob(pattern)
    place = Place(pattern, root)
    if parts:
        _match(root, parts, place)
    elif os.path.lexists(pattern):  # a link to nothing
        place.named.append(pattern)
    if not (place.named or place.found or place.ignored):
        hint = "" if parts else did_you_mean(pattern)
        raise UserError(f"input.path '{pattern}' matches no file{hint}; allowed: a file, a folder or a glob that exists")
    return place


def _match(folder: str, parts: list[str], place: Place) -> None:
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
        if (is_hidden(name) and part[0] != name[0]) or (is_folder and os.path.islink(path) and glob.has_magic(part)):
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
        skipped = [name for name in folders if is_hidden(name) or os.path.islink(os.path.join(folder, name))]
        folders[:] = [name for name in folders if name not in skipped]
        ignored += [os.path.join(folder, name) for name in [*skipped, *filter(is_hidden, names)]]
        found += [os.path.join(folder, name) for name in names if not is_hidden(name)]
    return found, ignored


def _refuse_folder(error: OSError) -> NoReturn:
    raise UserError(f"input folder '{error.filename}' cannot be read: {error.strerror}") from None


def _require_file(path: str) -> os.stat_result:
    try:
        status = os.stat(path)
    except OSError as error:
        what = f"is a link to nothing ('{os.readlink(path)}')" if os.path.islink(path) else f"cannot be read: {error.strerror}"
        raise UserError(f"input file '{path}' {what}") from None
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"input file '{path}' is no regular file; allowed: files, which can be read twice")
    return status


def _refuse_empty(place: Place, others: list[str], format: str) -> None:
    show = _name_by_root([place])
    known = ", ".join(suffixes(format))
    if place.named == [place.entry]:
        raise UserError(f"input.path '{place.entry}' has no known suffix; allowed: {known}, or input.format={_FORMATS}")
    seen = f"; found: {', '.join(show(name) for name in others[:5])}" if others else ""
    raise UserError(
        f"input.path '{place.entry}' holds no input file; allowed: names that end in {known}, or a file or glob with "
        f"input.format={_FORMATS}{seen}"
    )


def _name_by_root(places: list[Place]) -> Callable[[str], str]:
    """What makes a name of a path: relative to the root of all places, with slashes, and without the bytes that are no UTF-8."""
    local = [os.path.abspath(place.root) for place in places if not is_s3(place.entry)]
    remote = [place.root.split("/") for place in places if is_s3(place.entry)]
    root = os.path.commonpath(local) if local else None
    num_shared = 0 if local else sum(1 for _ in itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*remote, strict=False)))

    def show(path: str) -> str:
        if is_s3(path):
            return "/".join(path.split("/")[num_shared:])
        return os.fsencode(os.path.relpath(os.path.abspath(path), root).replace(os.sep, "/")).decode("utf-8", "replace")

    return show


def _split_glob(pattern: str) -> tuple[str, list[str]]:
    """The folder before the first part that has a wildcard, and the other parts: `data/*/a.jsonl` -> `data`, [`*`, `a.jsonl`]."""
    parts = pattern.split(os.sep)
    num_fixed = next((index for index, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    root = os.sep.join(parts[:num_fixed]) or (os.sep if num_fixed else "")
    return root, [part for part in parts[num_fixed:] if part]
