"""Which files `input.path` names, under which names, and what is told of the rest."""

import os
from pathlib import Path

import pytest

from engine.errors import UserError
from pipeline import files as files_module
from pipeline.files import find_files


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name in ("a.jsonl", "b.CSV", "README.md", "_part.jsonl", "sub/c.txt.gz", "sub/d.parquet", ".git/e.jsonl", "z/a.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(path, format="auto") -> list[str]:
    return [file.name for file in find_files(path, format)[0]]


@pytest.mark.parametrize(
    ("path", "format", "expected"),
    [
        ("a.jsonl", "auto", ["a.jsonl"]),
        ("sub/d.parquet", "auto", ["d.parquet"]),
        ("README.md", "text", ["README.md"]),
        ("_part.jsonl", "auto", ["_part.jsonl"]),
        (".", "auto", ["a.jsonl", "b.CSV", "sub/c.txt.gz", "sub/d.parquet", "z/a.jsonl"]),
        (".", "csv", ["b.CSV"]),
        ("*.jsonl", "auto", ["a.jsonl"]),
        ("*", "auto", ["a.jsonl", "b.CSV", "sub/c.txt.gz", "sub/d.parquet", "z/a.jsonl"]),
        ("*.md", "text", ["README.md"]),
        ("s*/*", "auto", ["sub/c.txt.gz", "sub/d.parquet"]),
        ("**/*.jsonl", "auto", ["a.jsonl", "z/a.jsonl"]),
        ("**/[ac].*", "auto", ["a.jsonl", "sub/c.txt.gz", "z/a.jsonl"]),
        ("**", "auto", ["a.jsonl", "b.CSV", "sub/c.txt.gz", "sub/d.parquet", "z/a.jsonl"]),
        ("s?b/d.parquet", "auto", ["sub/d.parquet"]),
        ("s?b/", "auto", ["sub/c.txt.gz", "sub/d.parquet"]),
        (".g*/*", "jsonl", [".git/e.jsonl"]),
        ("_*", "auto", ["_part.jsonl"]),
        (["z", "sub/d.parquet"], "auto", ["z/a.jsonl", "sub/d.parquet"]),
        (["z/a.jsonl"], "auto", ["a.jsonl"]),
        (["z", "z/a.jsonl", "./z/../z/*.jsonl"], "auto", ["a.jsonl"]),
        (["sub/*", "sub/d.parquet"], "auto", ["c.txt.gz", "d.parquet"]),
        (["a.jsonl", "*/a.jsonl"], "auto", ["a.jsonl", "z/a.jsonl"]),
    ],
)
def test_names_are_relative_to_the_root_and_each_file_is_there_once(tree, path, format, expected):
    assert names(path, format) == expected
    absolute = str(tree / path) if isinstance(path, str) else [str(tree / entry) for entry in path]
    assert names(absolute, format) == expected


def test_what_is_left_out_is_told(tree):
    (tree / "link").symlink_to("sub")
    (tree / "circle").symlink_to(".")
    assert find_files(".", "auto")[1] == [".git", "README.md", "_part.jsonl", "circle", "link"]
    assert find_files("*", "auto")[1] == [".git", "README.md", "_part.jsonl", "circle", "link"]
    assert find_files("**/*.jsonl", "auto")[1] == [".git", "_part.jsonl", "circle", "link"]
    assert names("**/*.jsonl") == ["a.jsonl", "z/a.jsonl"]
    assert names("*/c.*") == ["sub/c.txt.gz"]
    assert names("link") == ["c.txt.gz", "d.parquet"]


def test_links_to_files_are_files(tree):
    (tree / "sub" / "link.jsonl").symlink_to(tree / "a.jsonl")
    assert names("sub") == ["c.txt.gz", "d.parquet", "link.jsonl"]


@pytest.mark.parametrize("path", [".", "*", "*.jsonl", "gone.jsonl", ["a.jsonl", "."]])
def test_a_link_to_nothing_is_refused(tree, path):
    (tree / "gone.jsonl").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"gone.jsonl' is a link to nothing \('nowhere'\)"):
        find_files(path, "auto")


@pytest.mark.parametrize("path", [".", "pipe.jsonl"])
def test_a_pipe_is_refused(tree, path):
    os.mkfifo("pipe.jsonl")
    with pytest.raises(UserError, match="is no regular file"):
        find_files(path, "auto")


@pytest.mark.parametrize("path", [".", "*/*.parquet", "*", "s*/d.parquet", "sub"])
def test_a_folder_that_cannot_be_listed_is_refused(tree, monkeypatch, path):
    scandir = os.scandir

    def refuse(folder="."):  # root may list every folder, so a mode of 0 would not do
        if Path(folder).name == "sub":
            raise PermissionError(13, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr(files_module.os, "scandir", refuse)
    with pytest.raises(UserError, match=r"input folder '.*sub' cannot be read: Permission denied"):
        find_files(path, "auto")


@pytest.mark.parametrize(
    ("path", "format", "message"),
    [
        ("nope.jsonl", "auto", "'nope.jsonl' matches no file"),
        ("a.json", "auto", r"'a.json' matches no file; did you mean 'a.jsonl'\?; allowed: a file"),
        ("./sub/d.parqet", "auto", r"did you mean './sub/d.parquet'\?"),
        ("nope*", "auto", r"'nope\*' matches no file"),
        (["a.jsonl", "nope"], "auto", "'nope' matches no file"),
        ("README.md", "auto", r"has no known suffix; allowed: .jsonl, .jsonl.gz.*or input.format=jsonl or parquet"),
        (["a.jsonl", "sub"], "jsonl", "'sub' holds no input file; allowed: names that end in .jsonl, .*found: c.txt.gz, d.parquet"),
        ("a.jsonl/x", "auto", "matches no file"),
    ],
)
def test_an_entry_without_files_is_refused(tree, path, format, message):
    with pytest.raises(UserError, match=message):
        find_files(path, format)


def test_names_that_are_no_text_can_be_shown(tree):
    os.rename(b"a.jsonl", b"a\xff.jsonl")
    assert names("*.jsonl") == ["a\ufffd.jsonl"]


def test_a_link_beside_its_file_is_read_once(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "b.jsonl").write_text("{}")
    (tmp_path / "elsewhere.jsonl").write_text("{}")
    for name, target in (("a.jsonl", "b.jsonl"), ("c.jsonl", "../elsewhere.jsonl"), ("d.jsonl", "../elsewhere.jsonl")):
        (folder / name).symlink_to(target)
    files, ignored = find_files(str(folder), "auto")
    assert [file.name for file in files] == ["b.jsonl", "c.jsonl"]
    assert ignored == ["a.jsonl", "d.jsonl"]
    files, _ = find_files([str(folder / "a.jsonl"), str(folder / "b.jsonl")], "auto")
    assert [file.name for file in files] == ["b.jsonl"]
