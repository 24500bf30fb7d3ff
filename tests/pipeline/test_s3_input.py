"""Input from a bucket: what is found, that it reads as on a disk, and what is said when it cannot be read."""

import gzip
import hashlib
import io
import json
import os
import pickle
import random
import subprocess
import sys
import time
from contextlib import ExitStack

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs

from engine.errors import RowError, UserError
from pipeline import s3_reader
from pipeline.files import find_files
from pipeline.formats import READERS
from pipeline.input_file import InputFile
from tests.pipeline.test_streams import TEXT, ZSTD_WITH_CHECKSUM, pack
from tests.s3 import make_bucket, serve

TREE = ("a.jsonl", "b.CSV", "README.md", "_part.jsonl", "sub/c.txt.gz", "sub/d.parquet", ".git/e.jsonl", "z/a.jsonl", "z//x y%+é.txt")


def find(bucket, path, format="auto"):
    """`path`: keys, of which the `s3://` paths are made."""
    entries = [f"s3://{bucket.name}/{key}" for key in ([path] if isinstance(path, str) else path)]
    return find_files(entries if isinstance(path, list) else entries[0], format, bucket.options)


def names(bucket, path, format="auto") -> list[str]:
    return [file.name for file in find(bucket, path, format)[0]]


def read_all(file: InputFile, **start) -> list:
    """What the reader of its format gives, in a form that can be compared."""
    found = READERS[file.format].read_records(file, **start)
    return [(number, offset, str(record) if isinstance(record, RowError) else record) for number, offset, record in found]


def to_parquet(table: pa.Table, **options) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


@pytest.fixture(scope="module")
def tree(s3_server):
    bucket = make_bucket(s3_server)
    for name in (*TREE, "", "sub/", "empty/", "both"):
        bucket.put(f"in/{name}")
    bucket.put("in/both/f.txt")
    bucket.put("in-other/g.jsonl")
    return bucket


@pytest.mark.parametrize(
    ("path", "format", "expected"),
    [
        ("in/a.jsonl", "auto", ["a.jsonl"]),
        ("in/README.md", "text", ["README.md"]),
        ("in/_part.jsonl", "auto", ["_part.jsonl"]),
        ("in", "auto", ["a.jsonl", "b.CSV", "both/f.txt", "sub/c.txt.gz", "sub/d.parquet", "z//x y%+é.txt", "z/a.jsonl"]),
        ("in/", "csv", ["b.CSV"]),
        ("in/*.jsonl", "auto", ["a.jsonl"]),
        ("in/*", "auto", ["a.jsonl", "b.CSV", "both/f.txt", "sub/c.txt.gz", "sub/d.parquet", "z//x y%+é.txt", "z/a.jsonl"]),
        ("in/*.md", "text", ["README.md"]),
        ("in/s*/*", "auto", ["sub/c.txt.gz", "sub/d.parquet"]),
        ("in/**/*.jsonl", "auto", ["a.jsonl", "z/a.jsonl"]),
        ("in/**/[ac].*", "auto", ["a.jsonl", "sub/c.txt.gz", "z/a.jsonl"]),
        ("in/s?b/d.parquet", "auto", ["sub/d.parquet"]),
        ("in/s?b/", "auto", ["sub/c.txt.gz", "sub/d.parquet"]),
        ("in/.g*/*", "jsonl", [".git/e.jsonl"]),
        ("in/_*", "auto", ["_part.jsonl"]),
        ("i*/*.jsonl", "auto", ["in-other/g.jsonl", "in/a.jsonl"]),
        ("", "jsonl", ["in-other/g.jsonl", "in/a.jsonl", "in/z/a.jsonl"]),
        ("in/both/", "auto", ["f.txt"]),
        ("in/both", "text", ["both"]),
        ("in/z//x y%+é.txt", "auto", ["x y%+é.txt"]),
        (["in/z", "in/sub/d.parquet"], "auto", ["z//x y%+é.txt", "z/a.jsonl", "sub/d.parquet"]),
        (["in/z", "in/z/a.jsonl", "in/z/*.jsonl"], "jsonl", ["a.jsonl"]),
        (["in/a.jsonl", "in-other"], "auto", ["in/a.jsonl", "in-other/g.jsonl"]),
    ],
)
def test_names_are_keys_relative_to_the_root_and_each_object_is_there_once(tree, path, format, expected):
    assert names(tree, path, format) == expected


def test_what_is_left_out_is_told(tree):
    assert find(tree, "in")[1] == [".git", "README.md", "_part.jsonl", "both"]
    assert find(tree, "in/*")[1] == [".git", "README.md", "_part.jsonl", "both"]
    assert find(tree, "in/**/*.jsonl")[1] == [".git", "_part.jsonl"]


def test_a_bucket_and_a_folder_with_the_same_files_give_the_same(tree, tmp_path, monkeypatch):
    for name in TREE[:-1]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    for key in (*TREE[:-1], "empty/", "both/f.txt"):
        tree.put(f"same/{key}")
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "f.txt").touch()
    for path in ("*", "**", "**/*", "*/*", "**/*.*", "*/**/a.*", "**/**/*.jsonl", "s*", "[!z]*/*.parquet", ".g*/*", "z/*"):
        local, ignored = find_files(path, "auto")
        remote, ignored_keys = find(tree, f"same/{path}")
        assert [(file.name, file.format) for file in remote] == [(file.name, file.format) for file in local], path
        assert ignored_keys == ignored, path


def test_roots_of_several_buckets_and_of_disk_and_bucket_together(tree, s3_bucket, tmp_path):
    other = s3_bucket.put("in/a.jsonl")
    found = [f"s3://{tree.name}/in/a.jsonl", other]
    assert [file.name for file in find_files(found, "auto", tree.options)[0]] == [f"{tree.name}/in/a.jsonl", f"{s3_bucket.name}/in/a.jsonl"]
    (tmp_path / "x").mkdir()
    for name in ("a.jsonl", "x/b.jsonl"):
        (tmp_path / name).touch()
    files, _ = find_files([str(tmp_path / "x"), other, str(tmp_path / "a.jsonl")], "auto", tree.options)
    assert [file.name for file in files] == ["x/b.jsonl", other, "a.jsonl"]
    assert [bool(file.storage_options) for file in files] == [False, True, False]


def test_a_listing_of_many_pages_is_read_to_its_end(s3_bucket):
    expected = [f"{i}.jsonl" for i in range(5)]
    for name in expected:
        s3_bucket.put(f"in/{name}")

    def two_at_a_time(app):
        def call(environ, start_response):
            if "list-type" in environ["QUERY_STRING"]:
                environ["QUERY_STRING"] += "&max-keys=2"
            return app(environ, start_response)

        return call

    with serve(two_at_a_time) as server:
        files, _ = find_files(f"s3://{s3_bucket.name}/in", "auto", {"endpoint_url": server.url})
    assert [file.name for file in files] == expected


_RECORDS = b'{"prompt": "one"}\n\n{"prompt": 2}\nbroken\n\xff\n{"prompt": "six"}'
_TABLE = pa.table({"prompt": [f"{i} " + "x" * 99 for i in range(3000)], "n": range(3000)})


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", _RECORDS),
        ("a.jsonl", b"\xef\xbb\xbf" + _RECORDS),
        ("a.jsonl", b""),
        ("a.jsonl.gz", gzip.compress(_RECORDS, mtime=0)),
        ("a.jsonl.zst", pack(_RECORDS, "zst")),
        ("a.txt", TEXT * 2),
        ("a.txt.gz", pack(TEXT, "gz")),
        ("a.txt.gz", pack(TEXT, "gz")[:-1000]),
        ("a.txt.gz", pack(TEXT, "gz") + b"junk"),
        ("a.txt.zst", pack(TEXT, "zst")),
        ("a.txt.zst", pack(TEXT, "zst")[:-1000]),
        ("a.txt.zst", ZSTD_WITH_CHECKSUM[:-1] + b"\0"),
        ("a.csv", b'id,prompt\n1,"a\nb"\n2\n3,"' + TEXT[:100]),
        ("a.csv.gz", gzip.compress(b"id,prompt\n1,a\n2,b\n", mtime=0)[:-4]),
        ("a.parquet", to_parquet(_TABLE, row_group_size=700)),
    ],
)
def test_an_object_reads_as_a_file_does(s3_bucket, tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    ((local,), _) = find_files(str(tmp_path / name), "auto")
    s3_bucket.put(f"in/{name}", content)
    ((remote,), _) = find(s3_bucket, f"in/{name}")
    assert READERS[local.format].read_columns(remote) == READERS[local.format].read_columns(local)
    records = read_all(local)
    assert read_all(remote) == records
    if not name.endswith(("gz", "zst")):
        for number, offset, _ in records[1 :: max(1, len(records) // 3)]:
            assert read_all(remote, offset=offset, first=number) == read_all(local, offset=offset, first=number)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'[{"prompt": "x"}]', "is one JSON array"),
        ("a.jsonl", pack(b"x\n", "gz"), "is a gzip file"),
        ("a.jsonl.gz", b"", "is no gzip file"),
        ("a.txt", "x".encode("utf-16"), "is UTF-16"),
        ("a.csv", b",prompt\n1,x\n", "column 1 has no name"),
        ("a.parquet", b"PAR1", "is not readable Parquet"),
        ("a.parquet", to_parquet(_TABLE)[:-9], "is not readable Parquet"),
    ],
)
def test_an_object_that_is_not_what_its_name_says_is_refused(s3_bucket, name, content, message):
    path = s3_bucket.put(name, content)
    ((file,), _) = find(s3_bucket, name)
    with pytest.raises(UserError, match=f"input file '{path}'.*{message}"):
        read_all(file)


class Traffic:
    """A middleware that notes (method, key, bytes of the answer) of requests for objects."""

    def __init__(self):
        self.requests: list[tuple[str, str, int]] = []

    def __call__(self, app):
        def call(environ, start_response):
            body = b"".join(app(environ, start_response))
            if environ["PATH_INFO"].count("/") > 1:
                self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"].rpartition("/")[2], len(body)))
            return [body]

        return call

    def take(self) -> tuple[int, int]:
        """(requests, bytes) since the last call."""
        taken, self.requests = self.requests, []
        return len(taken), sum(size for *_, size in taken)


def test_an_object_can_be_read_from_any_place(s3_bucket, monkeypatch):
    monkeypatch.setattr(s3_reader, "_LEAST_BYTES", 1 << 14)
    monkeypatch.setattr(s3_reader, "_MOST_BYTES", 1 << 16)
    s3_bucket.put("a.txt", TEXT)
    choose = random.Random(0)
    ((file,), _) = find(s3_bucket, "a.txt")
    with file.open() as source:
        assert source.read() == TEXT
        assert (source.read(), source.tell()) == (b"", len(TEXT))
        for _ in range(60):
            place, size = choose.randrange(len(TEXT) + 100), choose.choice([1, 100, 1 << 14, 1 << 17])
            assert source.seek(place) == place
            assert source.read(size) == TEXT[place : place + size]
        source.seek(-9, os.SEEK_END)
        assert source.readline() == TEXT[-9:]


def test_no_more_is_read_than_what_is_needed(s3_bucket):
    table = pa.table({name: [os.urandom(500).hex() for _ in range(2000)] for name in ("prompt", "note")})
    content = to_parquet(table, row_group_size=500, use_dictionary=False, compression=None)
    text = b"".join(b"%06d %s\n" % (i, b"x" * 992) for i in range(8000))
    s3_bucket.put("a.parquet", content)
    s3_bucket.put("a.txt", text)
    traffic = Traffic()
    with serve(traffic) as server:
        ((parquet, plain), _) = find_files(f"s3://{s3_bucket.name}", "auto", {"endpoint_url": server.url})
        assert parquet.content_hash() == f"etag:{hashlib.md5(content).hexdigest()}:{len(content)}"
        assert traffic.take() == (0, 0)  # the listing said it all
        assert READERS["parquet"].read_columns(parquet) == ["prompt", "note"]
        num_requests, num_bytes = traffic.take()
        assert num_requests == 2 and num_bytes < 70_000
        assert len(read_all(parquet, offset=2)) == 1000
        num_requests, num_bytes = traffic.take()
        assert num_bytes < 0.55 * len(content) and num_requests < 12
        assert len(read_all(plain)) == 8000
        num_requests, num_bytes = traffic.take()
        assert num_bytes < 1.05 * len(text) and num_requests < 10  # HEAD, the first bytes, and ranges that grow
        records = READERS["text"].read_records(plain, offset=4_000_000, first=4001)
        assert next(records)[2]["prompt"].startswith("004000")
        records.close()
        assert traffic.take() == (2, 1 << 18)


@pytest.fixture
def fresh_credentials(monkeypatch):
    """What a test sets in the environment holds: this process keeps filesystems that know the credentials of before."""
    s3fs.S3FileSystem.clear_instance_cache()
    yield monkeypatch
    s3fs.S3FileSystem.clear_instance_cache()


def refusal(paths, options, read=True, seconds=60) -> str:
    """What is said of an input that cannot be used. It takes under a second or two; this machine may be busy."""
    start = time.monotonic()
    with pytest.raises(UserError) as caught:
        for file in find_files(paths, "auto", options)[0]:
            read_all(file)
    assert time.monotonic() - start < seconds
    return str(caught.value)


def test_what_is_not_there_is_named(s3_bucket):
    s3_bucket.put("in/data.jsonl", _RECORDS)
    s3_bucket.put("folder/input/data.jsonl", _RECORDS)
    name, url = s3_bucket.name, s3_bucket.url
    for key in ("", "/in/data.jsonl", "/in/", "/in/*.jsonl"):
        assert refusal(f"s3://no-{name}{key}", s3_bucket.options) == (
            f"'s3://no-{name}{key}' at {url}: there is no bucket 'no-{name}'; allowed: a bucket that exists"
        )
    allowed = "allowed: a key, a folder or a glob that exists"
    for key, near in (
        ("in/dota.jsonl", "in/data.jsonl"),
        ("folder/imput", "folder/input/"),
        ("in/date*.jsonl", "in/data.jsonl"),
        ("zzz/*", None),
    ):
        hint = f"; did you mean 's3://{name}/{near}'?" if near else ""
        expected = f"input.path 's3://{name}/{key}' matches no key of bucket '{name}' at {url}{hint}; {allowed}"
        assert refusal(f"s3://{name}/{key}", s3_bucket.options) == expected
    s3_bucket.put("other/README.md")
    assert "'other' holds no" in refusal(f"s3://{name}/other", s3_bucket.options).replace(f"s3://{name}/", "")
    assert "found: README.md" in refusal(f"s3://{name}/other", s3_bucket.options)
    assert refusal("s3://", s3_bucket.options) == "input.path 's3://' names no bucket; allowed: s3://bucket, s3://bucket/key"
    assert "Invalid bucket name" in refusal("s3://Not a bucket/a", s3_bucket.options)


def test_an_endpoint_that_cannot_be_reached_is_named_within_seconds(s3_bucket):
    message = refusal("s3://some/in.jsonl", {"endpoint_url": "http://127.0.0.1:9"})
    assert message.startswith(
        "'s3://some/in.jsonl' at http://127.0.0.1:9: the endpoint cannot be reached, for key 'in.jsonl' in bucket 'some' ("
    )
    message = refusal(f"s3://{s3_bucket.name}/in", {"endpoint_url": s3_bucket.url.replace("http:", "https:")})
    assert "the endpoint cannot be reached" in message and "SSL" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint_url": "127.0.0.1:9000"}, "Invalid endpoint: 127.0.0.1:9000"),
        ({"profile": "nobody"}, r"config profile \(nobody\) could not be found"),
        ({"client_kwargs": {"regoin": "S3CRET"}}, "unexpected keyword argument 'regoin'"),
        ({"config_kwargs": {"tries": "S3CRET"}}, "unexpected keyword argument 'tries'"),
    ],
)
def test_options_that_cannot_be_used_are_refused(s3_credentials, options, message):
    with pytest.raises(UserError, match=rf"storage_options \({next(iter(options))}\) cannot be used: .*{message}") as caught:
        find_files("s3://some/in.jsonl", "auto", options)
    assert "S3CRET" not in str(caught.value)


def test_without_credentials(s3_bucket, fresh_credentials):
    path = s3_bucket.put("in.jsonl", _RECORDS, ACL="public-read")
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        fresh_credentials.delenv(name)
        s3fs.S3FileSystem.clear_instance_cache()
        message = refusal(path, s3_bucket.options)
        assert "redentials" in message and "AWS_" in message
    assert message.startswith(
        f"'{path}' at {s3_bucket.url}: no credentials (Unable to locate credentials); allowed: those of the environment"
    )
    ((file,), _) = find_files(path, "auto", {**s3_bucket.options, "anon": True})
    assert len(read_all(file)) == 5


@pytest.fixture
def enforced(s3_server, s3_bucket, fresh_credentials):
    """A function that makes the server check who asks, and this process a user who may do what (action, resource) pairs say."""
    from moto.core.authorization import enable_iam_authentication  # here, as most tests do without the second that moto takes

    iam = s3_server.client("iam")
    user = s3_bucket.name
    iam.create_user(UserName=user)
    key = iam.create_access_key(UserName=user)["AccessKey"]

    def allow(*statements: tuple[str, str]) -> None:
        allowed = [{"Effect": "Allow", "Action": action, "Resource": f"arn:aws:s3:::{place}"} for action, place in statements]
        iam.put_user_policy(UserName=user, PolicyName="p", PolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": allowed}))
        fresh_credentials.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
        fresh_credentials.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
        s3fs.S3FileSystem.clear_instance_cache()
        stack.enter_context(enable_iam_authentication())

    with ExitStack() as stack:
        yield allow


def test_no_permission(s3_bucket, enforced):
    path, name = s3_bucket.put("in/a.jsonl", _RECORDS), s3_bucket.name
    enforced(("s3:ListBucket", "elsewhere"))
    for entry in (path, f"s3://{name}/in", f"s3://{name}"):
        place = entry.removeprefix(f"s3://{name}").lstrip("/")
        place = f"key '{place}' in bucket '{name}'" if place else f"bucket '{name}'"
        message = refusal(entry, s3_bucket.options)
        assert message.startswith(f"'{entry}' at {s3_bucket.url}: no permission for {place} (AccessDenied: Access Denied); allowed: ")


def test_permission_to_list_but_not_to_read(s3_bucket, enforced):
    path, name = s3_bucket.put("in/a.jsonl", _RECORDS), s3_bucket.name
    enforced(("s3:ListBucket", name))
    for entry in (path, f"s3://{name}/in"):
        assert refusal(entry, s3_bucket.options).startswith(
            f"'{path}' at {s3_bucket.url}: no permission for key 'in/a.jsonl' in bucket '{name}'"
        )


def test_permission_to_read_one_object_is_enough_for_it(s3_bucket, enforced):
    name = s3_bucket.name
    s3_bucket.put("in/a.jsonl", _RECORDS)
    enforced(("s3:GetObject", f"{name}/in/*"))
    ((file,), _) = find(s3_bucket, "in/a.jsonl")
    assert len(read_all(file)) == 5
    assert "no permission" in refusal(f"s3://{name}/in", s3_bucket.options)


@pytest.mark.parametrize(
    ("variable", "code"), [("AWS_ACCESS_KEY_ID", "InvalidAccessKeyId"), ("AWS_SECRET_ACCESS_KEY", "SignatureDoesNotMatch")]
)
def test_wrong_credentials(s3_bucket, enforced, fresh_credentials, variable, code):
    path = s3_bucket.put("in/a.jsonl", _RECORDS)
    enforced(("s3:*", "*"))
    assert len(read_all(find(s3_bucket, "in/a.jsonl")[0][0])) == 5
    secret = os.environ["AWS_SECRET_ACCESS_KEY"]
    fresh_credentials.setenv(variable, "AKIAWRONG")
    s3fs.S3FileSystem.clear_instance_cache()
    for entry in (path, f"s3://{s3_bucket.name}/in/*"):
        message = refusal(entry, s3_bucket.options)
        assert message.startswith(f"'{entry}' at {s3_bucket.url}: the credentials are refused ({code}: ")
        assert secret not in message and "AKIAWRONG" not in message


_NOISE = b"".join(os.urandom(50).hex().encode() + b"\n" for _ in range(10_000))
_LONG = {
    "a.txt": TEXT,
    "a.txt.gz": gzip.compress(_NOISE, mtime=0),
    "a.txt.zst": pack(_NOISE, "zst"),
    "a.csv": b"prompt\n" + TEXT,
    "a.parquet": to_parquet(pa.table({"prompt": [os.urandom(500).hex() for _ in range(1000)]}), row_group_size=100, use_dictionary=False),
}


@pytest.mark.parametrize("name", _LONG)
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("is_gone", [False, True])
def test_an_object_that_changes_or_vanishes_while_it_is_read(s3_bucket, name, is_open, is_gone, monkeypatch):
    monkeypatch.setattr(s3_reader, "_LEAST_BYTES", 1 << 14)
    monkeypatch.setattr(s3_reader, "_MOST_BYTES", 1 << 14)
    path = s3_bucket.put(f"in/{name}", _LONG[name])
    ((file,), _) = find(s3_bucket, f"in/{name}")
    records = READERS[file.format].read_records(file)
    if is_open:
        assert not isinstance(next(records)[2], RowError)
    if is_gone:
        s3_bucket.client.delete_object(Bucket=s3_bucket.name, Key=f"in/{name}")
        s3_bucket.put(f"in/{name}/below")
    else:
        s3_bucket.put(f"in/{name}", _LONG[name][:-1] + b"!")
    with pytest.raises(UserError) as caught:
        for _, _, record in records:
            assert not isinstance(record, RowError)
    message = str(caught.value)
    assert message.startswith(f"'{path}' at {s3_bucket.url}")
    assert ("there is no key" if is_gone else "is no longer what it was" if is_open else "changed after the input was listed") in message


def test_a_pickle_holds_no_secret_and_is_read_elsewhere(s3_bucket):
    s3_bucket.put("in/a.jsonl", _RECORDS)
    ((file,), _) = find(s3_bucket, "in/a.jsonl")
    read_all(file)  # a filesystem that is in use must not come along
    data = pickle.dumps(file)
    for secret in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert os.environ[secret].encode() not in data
    code = (
        "import os, pickle, sys\n"
        "from pipeline.formats import READERS\n"
        "file = pickle.load(sys.stdin.buffer)\n"
        "print(len(list(READERS[file.format].read_records(file))), flush=True)\n"
        "del os.environ['AWS_ACCESS_KEY_ID'], os.environ['AWS_SECRET_ACCESS_KEY']\n"
        "type(file.open().raw._file.fs).clear_instance_cache()\n"
        "file.open()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, timeout=200)
    assert (done.stdout, done.returncode) == (b"5\n", 1)
    assert b"UserError" in done.stderr and b"no credentials" in done.stderr


def test_files_can_be_put_into_sets_and_compared():
    files = [InputFile("s3://b/k", "k", "text", {"endpoint_url": url}) for url in ("x", "x", "y")]
    assert files[0] == files[1] != files[2]
    assert len(set(files)) == 2
