"""Options of an S3 store, and what its errors come to."""

import pytest

from engine.errors import UserError
from pipeline.s3 import check_options, connect, endpoint, explain, explained, hide_login


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"endpoint_url": "http://127.0.0.1:9000", "anon": True, "requester_pays": True},
        {"profile": "work", "client_kwargs": {"region_name": "eu-central-1", "verify": False}},
        {"endpoint_url": None, "config_kwargs": {"s3": {"addressing_style": "path"}, "proxies": {"https": "http://proxy:3128"}}},
        {"config_kwargs": {"s3": None, "retries": {"mode": "standard"}, "signature_version": "s3v4", "max_pool_connections": 50}},
    ],
)
def test_options_that_are_taken(options):
    check_options("input.storage_options", options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "x"}, "in 'input.storage_options' 'endpoint'; did you mean 'endpoint_url'"),
        ({"endpoint_url": "127.0.0.1:9000"}, "endpoint_url='127.0.0.1:9000'; allowed: a URL, for instance"),
        ({"client_kwargs": "S3CRET"}, "client_kwargs is a str; allowed: a map"),
        ({"secret": "S3CRET"}, "input.storage_options.secret: credentials do not belong"),
        ({"client_kwargs": {"aws_secret_access_key": "S3CRET"}}, "client_kwargs.aws_secret_access_key: credentials do not belong"),
        ({"config_kwargs": {"proxies": {"https": "http://me:S3CRET@proxy"}}}, "config_kwargs.proxies.https: credentials do not belong"),
        (
            {"config_kwargs": {"proxies": ["http://proxy", {"http": "http://me:S3CRET@proxy"}]}},
            r"config_kwargs\.proxies\.1\.http: credentials do not belong",
        ),
        (
            {"config_kwargs": {"conect_timeout": 1}},
            r"config_kwargs' 'conect_timeout'; did you mean 'connect_timeout'\? .allowed: region_name",
        ),
        ({"config_kwargs": {"s3": {"adressing_style": "path"}}}, r"config_kwargs\.s3' 'adressing_style'; did you mean 'addressing_style'"),
        ({"config_kwargs": {"s3": "S3CRET"}}, r"config_kwargs\.s3 is a str; allowed: a map"),
        ({"config_kwargs": {"s3": {"secret_key": "S3CRET"}}}, r"config_kwargs\.s3\.secret_key: credentials do not belong"),
        ({"client_kwargs": {"a": [{"Session-Token": "S3CRET"}]}}, r"client_kwargs\.a\.0\.Session-Token: credentials do not belong"),
        ({"config_kwargs": {"proxies_config": {"proxy_password": "S3CRET"}}}, r"proxy_password: credentials do not belong"),
        ({"client_kwargs": ["http://me:S3CRET@proxy"]}, r"client_kwargs\.0: credentials do not belong"),
        ({"endpoint_url": "https://me:S3CRET@store"}, "input.storage_options.endpoint_url: credentials do not belong"),
        ({"endpoint_url": "https://me:S3/CRET@store"}, "input.storage_options.endpoint_url: credentials do not belong"),
        ({"endpoint_url": "me:S3CRET@store"}, "input.storage_options.endpoint_url: credentials do not belong"),
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
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://me:S3CRET@s3")
    assert endpoint({}) == "http://...@s3"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3a://KEY:SEC/RET@bucket/in", "s3a://...@bucket/in"),
        ("no way to 'https://me:SECRET@host/a@b' and http://host/a b@c", "no way to 'https://...@b' and http://host/a b@c"),
        ("s3://bucket/in, me@host, 12:30", "s3://bucket/in, me@host, 12:30"),
    ],
)
def test_a_login_is_not_shown(text, shown):
    assert hide_login(text) == shown


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
    assert str(explain(TimeoutError(), "s3://b/k", {})) == "'s3://b/k' at AWS: the endpoint does not answer, for key 'k' in bucket 'b'"
    with pytest.raises(UserError, match="as it was"), explained("s3://b/k", {}):
        raise UserError("as it was")
    with pytest.raises(ZeroDivisionError), explained("s3://b/k", {}):  # a mistake of ours is none of the store
        raise ZeroDivisionError
