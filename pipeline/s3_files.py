"""The objects that an `s3://` entry of `input.path` names. A bucket has no folders: they are what keys have before a slash."""

from __future__ import annotations

import difflib
import functools
import glob
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from engine.errors import UserError
from pipeline.places import Place, look_below, match_parts
from pipeline.s3 import ANSWER_S, SCHEME, connect, endpoint, error_code, explained, split
from pipeline.s3_reader import version_of


def find_objects(entry: str, options: Mapping[str, Any]) -> Place:
    """What a key, a folder (with or without a slash at its end) or a glob names; a key goes before a folder of the same name.

    Hidden keys, those with a part that begins with `.` or `_`, are left out as in folders, and the empty objects that stand for folders.

    Raises UserError, within half a minute, for a store, bucket or key that cannot be reached or read, and for an entry that names nothing.
    """
    bucket, key = split(entry)
    if not bucket:
        raise UserError(f"input.path '{entry}' names no bucket; allowed: s3://bucket, s3://bucket/key")
    ask = functools.partial(connect(options).call_s3, timeout=ANSWER_S)
    with explained(entry, options):
        place = _find_object(ask, entry, bucket, key) or _find_folder(ask, entry, bucket, key)
        if place is None and glob.has_magic(key):
            place = _find_glob(ask, entry, bucket, key)
        if place is None or not (place.named or place.found or place.ignored):
            near = _find_near(ask, bucket, key) if key else None
            hint = f"; did you mean '{SCHEME}{bucket}/{near}'?" if near else ""
            raise UserError(
                f"input.path '{entry}' matches no key of bucket '{bucket}' at {endpoint(options)}{hint}; "
                f"allowed: a key, a folder or a glob that exists"
            )
    return place


def key_matches(entry: str, path: str) -> bool:
    """Whether the glob `entry` would take an object, if it were there."""
    (bucket, key), (other, name) = split(entry), split(path)
    _, folder, pattern = _split_glob(key)
    is_below = bucket == other and name.startswith(folder) and pattern
    return is_below and any(isinstance(how, str) for how in match_parts(name.removeprefix(folder).split("/"), pattern))


def _find_object(ask: Callable, entry: str, bucket: str, key: str) -> Place | None:
    if not key or key.endswith("/"):
        return None
    try:
        head = ask("head_object", Bucket=bucket, Key=key)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error_code(error) is None:
            raise
        # The answer to a HEAD is but a number: what is wrong stands in the answer to a listing, which may be refused as well. If not, only
        # a key that is there may not be read; of all keys that begin with it, it is the first.
        page = ask("list_objects_v2", Bucket=bucket, Prefix=key, MaxKeys=1)
        if [item["Key"] for item in page.get("Contents", [])] == [key]:
            raise
        return None
    return Place(entry, _parent(entry), named=[entry], versions={entry: version_of(head.get("ETag", ""), head["ContentLength"])})


def _find_folder(ask: Callable, entry: str, bucket: str, key: str) -> Place | None:
    prefix = key if not key or key.endswith("/") else key + "/"
    place = Place(entry, _parent(f"{SCHEME}{bucket}/{prefix}"))
    _add_keys(place, ask, bucket, prefix, prefix, pattern=None)
    return place if place.found or place.ignored else None


def _find_glob(ask: Callable, entry: str, bucket: str, key: str) -> Place:
    """`data/*/a-*.jsonl`: all keys below `data/`, of which those that begin with what stands before the first wildcard are listed."""
    start, folder, pattern = _split_glob(key)
    place = Place(entry, _parent(f"{SCHEME}{bucket}/{folder}"))
    _add_keys(place, ask, bucket, start, folder, pattern)
    return place


def _split_glob(key: str) -> tuple[str, str, list[str]]:
    """What stands before the first wildcard, the folder in that, and the parts of the pattern below the folder."""
    start = re.split(r"[*?[]", key, maxsplit=1)[0]
    folder = start[: start.rfind("/") + 1]
    return start, folder, [part for part in key.removeprefix(folder).split("/") if part]


def _add_keys(place: Place, ask: Callable, bucket: str, prefix: str, folder: str, pattern: list[str] | None) -> None:
    """Sorts all keys that begin with `prefix` into the place. pattern: of a glob below `folder`; None for all that is in the folder."""
    ignored = set()
    for item in _list(ask, bucket, prefix):
        key, size = item["Key"], item["Size"]
        if key.endswith("/") and size == 0:
            continue
        parts = key.removeprefix(folder).split("/")
        kinds = set(look_below(parts) if pattern is None else match_parts(parts, pattern))
        path = f"{SCHEME}{bucket}/{key}"
        if "named" in kinds:
            place.named.append(path)
        elif "found" in kinds:
            place.found.append(path)
        else:  # the part that is hidden, as the folder that it is
            ignored |= {f"{SCHEME}{bucket}/{folder}{'/'.join(parts[: len(parts) - num_below])}" for num_below in kinds}
            continue
        place.versions[path] = version_of(item.get("ETag", ""), size)
    place.ignored = sorted(ignored)


def _list(ask: Callable, bucket: str, prefix: str) -> Iterator[dict]:
    """Key, Size and ETag of all objects that begin with `prefix`, page by page."""
    page = {"NextContinuationToken": None}
    while "NextContinuationToken" in page:
        token = page["NextContinuationToken"]
        more = {"ContinuationToken": token} if token else {}
        page = ask("list_objects_v2", Bucket=bucket, Prefix=prefix, **more)
        yield from page.get("Contents", [])


def _find_near(ask: Callable, bucket: str, key: str) -> str | None:
    """The nearest name beside a key that is not there, of the first page."""
    folder, _, name = key.rstrip("/").rpartition("/")
    prefix = f"{folder}/" if folder else ""
    page = ask("list_objects_v2", Bucket=bucket, Prefix=prefix, Delimiter="/")
    keys = [item["Key"] for item in page.get("Contents", [])] + [item["Prefix"] for item in page.get("CommonPrefixes", [])]
    near = difflib.get_close_matches(name, [key.removeprefix(prefix) for key in keys], n=1)
    return prefix + near[0] if near else None


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
