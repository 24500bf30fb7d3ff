"""Lines of plain and compressed files, whole and damaged."""

import errno
import gzip
import io
import random

import pyarrow as pa
import pytest

from engine.errors import RowError, UserError
from pipeline.input_file import InputFile
from pipeline.streams import read_lines

_WORDS = random.Random(0).choices(["sea", "stone", "river", "light", "wind"], k=60_000)
TEXT = "".join(f"{i} {' '.join(_WORDS[i * 20 : i * 20 + 20])}\n" for i in range(3000)).encode()


def pack(text: bytes, suffix: str) -> bytes:
    if suffix == "gz":
        return gzip.compress(text, mtime=0)
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(text)
    return sink.getvalue().to_pybytes()


def input_file(path) -> InputFile:
    return InputFile(str(path), path.name, "text")


def read(path, **start) -> tuple[list[bytes], str | None]:
    """The whole lines, numbered and placed as they should be, and what the file ended in."""
    found = list(read_lines(input_file(path), **start))
    place = start.get("offset", 0)
    lines, damage = [], None
    for number, (read_number, offset, line) in enumerate(found, start=start.get("first", 1)):
        assert (read_number, offset) == (number, place)
        if isinstance(line, RowError):
            assert number == len(lines) + 1 == len(found)
            damage = line.message
        else:
            lines.append(line)
            place += len(line)
    return lines, damage


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("text", [TEXT, b"one\n", b"one\n\n\xff\xff\n" * 3 + b"no end", b"\n", b"x" * 300_000 + b"\ny\n"])
def test_a_compressed_file_gives_the_lines_of_a_plain_one(tmp_path, suffix, text):
    (tmp_path / "plain").write_bytes(text)
    (tmp_path / f"packed.{suffix}").write_bytes(pack(text, suffix))
    assert read(tmp_path / "plain") == read(tmp_path / f"packed.{suffix}") == (text.splitlines(keepends=True), None)


def test_a_plain_file_can_be_read_from_a_line_on(tmp_path):
    (tmp_path / "plain").write_bytes(TEXT)
    lines = TEXT.splitlines(keepends=True)
    assert read(tmp_path / "plain", offset=sum(map(len, lines[:7])), first=8)[0] == lines[7:]


def test_a_byte_order_mark_is_before_the_first_line(tmp_path):
    (tmp_path / "plain").write_bytes(b"\xef\xbb\xbfone\ntwo\n")
    assert list(read_lines(input_file(tmp_path / "plain"))) == [(1, 3, b"one\n"), (2, 7, b"two\n")]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_file_that_is_cut_short_gives_its_whole_lines(tmp_path, suffix, share):
    packed = pack(TEXT, suffix)
    path = tmp_path / f"cut.{suffix}"
    path.write_bytes(packed[: int(len(packed) * share)])
    lines, damage = read(path)
    assert lines == TEXT.splitlines(keepends=True)[: len(lines)]
    assert f"cut short: no whole line can be read after byte {sum(map(len, lines))} of" in damage.replace(" or damaged", "")
    unpacked_at_once = 128 << 10 if suffix == "zst" else 0
    assert sum(map(len, lines)) > 0.8 * len(TEXT) * share - unpacked_at_once


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_small_frames_before_the_cut_are_not_lost(tmp_path, suffix):
    path = tmp_path / f"frames.{suffix}"
    path.write_bytes(pack(b"one\ntwo\n", suffix) + pack(b"three\nfo", suffix) + pack(TEXT, suffix)[:9])
    lines, damage = read(path)
    assert lines == [b"one\n", b"two\n", b"three\n"]  # "fo" may be the beginning of a line
    assert "cut short" in damage


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("junk", [b"junk", b"\x00junk"])
def test_what_follows_the_compressed_data_is_told(tmp_path, suffix, junk):
    path = tmp_path / f"junk.{suffix}"
    path.write_bytes(pack(TEXT, suffix) + junk)
    lines, damage = read(path)
    assert b"".join(lines) == TEXT
    assert damage is not None


#: b"one\ntwo\n" by the program zstd, with a checksum
ZSTD_WITH_CHECKSUM = bytes.fromhex("28b52ffd04584100006f6e650a74776f0ae6a60e40")


def test_a_wrong_checksum_takes_no_line_with_it(tmp_path):
    packed = pack(TEXT, "gz")
    (tmp_path / "a.gz").write_bytes(packed[:-8] + bytes([packed[-8] ^ 1]) + packed[-7:])
    lines, damage = read(tmp_path / "a.gz")
    assert b"".join(lines) == TEXT
    assert "CRC" in damage
    (tmp_path / "b.zst").write_bytes(ZSTD_WITH_CHECKSUM)
    assert read(tmp_path / "b.zst") == ([b"one\n", b"two\n"], None)
    (tmp_path / "b.zst").write_bytes(ZSTD_WITH_CHECKSUM[:-1] + b"\0")
    lines, damage = read(tmp_path / "b.zst")
    assert lines == [b"one\n", b"two\n"]
    assert "checksum" in damage


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.gz", b'{"prompt": "x"}\n', "is no gzip file; allowed: gzip data, or a name without '.gz'"),
        ("a.zst", b'{"prompt": "x"}\n', "is no zstd file"),
        ("b.zst", pack(b"x\n", "gz"), "is a gzip file; allowed: a name that ends in '.gz'"),
        ("a.gz", b"", "is no gzip file"),
        ("a.jsonl", pack(b"x\n", "zst"), "is a zstd file; allowed: a name that ends in '.zst'"),
        ("a.jsonl", '{"prompt": "x"}\n'.encode("utf-16"), "is UTF-16; allowed: UTF-8"),
        ("a.gz", pack('{"prompt": "x"}\n'.encode("utf-16"), "gz"), "is UTF-16"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    for path in (tmp_path / "nowhere.gz", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            read(path)


def test_a_disk_that_fails_in_the_middle_is_no_bad_line(tmp_path, monkeypatch):
    path = tmp_path / "in.txt"
    path.write_bytes(TEXT)

    class Failing(io.BytesIO):
        def readline(self, *size):
            if self.tell() > 1000:
                raise OSError(errno.EIO, "Input/output error")
            return super().readline(*size)

        __next__ = readline

    monkeypatch.setattr(InputFile, "open", lambda self: Failing(TEXT))
    with pytest.raises(UserError, match="cannot be read: Input/output error"):
        list(read_lines(input_file(path)))
