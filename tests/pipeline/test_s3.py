"""Options of an S3 store, and what its errors come to."""

import pytest

from engine.errors import UserError
from pipeline.s3 import check_options, connect, endpoint, explain, explained


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"endpoint_url": "http://127.0.0.1:9000", "anon": True, "requester_pays": True},
        {"profile": "work", "client_kwargs": {"region_name": "eu-central-1", "verify": False}},
        {"endpoint_url": None, "config_kwargs": {"s3": {"addressing_style": "path"}, "proxies": {"https": "http://proxy:3128"}}},
    ],
)
def test_options_that_are_taken(options):
    check_options("input.storage_options", options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "x"}, "input.storage_options.endpoint is unknown; allowed: endpoint_url, anon"),
        ({"endpoint_url": "127.0.0.1:9000"}, "endpoint_url='127.0.0.1:9000'; allowed: a URL, for instance"),
        ({"client_kwargs": "x"}, "client_kwargs='x'; allowed: a map"),
        ({"secret": "S3CRET"}, "input.storage_options.secret: credentials do not belong"),
        ({"client_kwargs": {"aws_secret_access_key": "S3CRET"}}, "client_kwargs.aws_secret_access_key: credentials do not belong"),
        ({"config_kwargs": {"proxies": {"https": "http://me:S3CRET@proxy"}}}, "config_kwargs.proxies.https: credentials do not belong"),
        ({"endpoint_url": "https://me:S3CRET@store"}, "input.storage_options.endpoint_url: credentials do not belong"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(UserError, match=message) as caught:
        check_options("input.storage_options", options)
    assert "S3CRET" not in str(caught.value)


def test_the_endpoint_is_that_of_the_options_or_of_the_environment(monkeypatch, s3_credentials):
    assert endpoint({}) == "AWS"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://all")
    assert endpoint({"anon": True}) == "http://all"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3")
    assert endpoint({}) == "http://s3"
    assert endpoint({"client_kwargs": {"endpoint_url": "http://client"}}) == "http://client"
    assert endpoint({"endpoint_url": "http://option"}) == "http://option"


def test_a_filesystem_keeps_no_listing(s3_bucket):
    filesystem = connect(s3_bucket.options)
    s3_bucket.put("in/a", b"1")
    assert filesystem.find(f"{s3_bucket.name}/in") == [f"{s3_bucket.name}/in/a"]
    s3_bucket.put("in/a", b"22")
    s3_bucket.put("in/b")
    assert filesystem.info(f"{s3_bucket.name}/in/a")["size"] == 2
    assert len(filesystem.find(f"{s3_bucket.name}/in")) == 2


def test_errors_of_other_kinds_keep_what_they_say():
    assert (
        str(explain(OSError(5, "disk on fire"), "s3://b/k", {}))
        == "'s3://b/k' at AWS: OSError: [Errno 5] disk on fire (key 'k' in bucket 'b')"
    )
    assert "the endpoint cannot be reached" in str(explain(TimeoutError(), "s3://b/k", {}))
    with pytest.raises(UserError, match="as it was"), explained("s3://b/k", {}):
        raise UserError("as it was")
    with pytest.raises(ZeroDivisionError), explained("s3://b/k", {}):  # a mistake of ours is none of the store
        raise ZeroDivisionError
