"""S3 through s3fs. Every process builds its own filesystem from the default chain of credentials (environment, ~/.aws, instance role);
`storage_options` say where the store is, never who asks, so no secret can get into a file, a log or a pickle.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from engine.errors import UserError, unknown_name

SCHEME = "s3://"

#: what `storage_options` may hold: parameters of s3fs.S3FileSystem
OPTIONS = ("endpoint_url", "anon", "profile", "use_ssl", "requester_pays", "config_kwargs", "client_kwargs")

_SECRET = re.compile("^key$|username|secret|password|token|access_key", re.IGNORECASE)  # in the name of what holds a credential
_LOGIN = re.compile(r"""(://|^[^/?#\s]*:(?!//))[^\s'"]*@""")  # in front of a host, with a scheme or without

#: What a request of preflight may take, with all its attempts. Later ones may take minutes: a store that was away comes back.
ANSWER_S = 30.0

#: of botocore; `storage_options.config_kwargs` go over them. An endpoint that refuses connections is given up after seconds.
_CONFIG = {"connect_timeout": 5, "read_timeout": 15, "retries": {"mode": "standard", "max_attempts": 3}}
_ATTEMPTS = 3  # of s3fs, around those of botocore, for what breaks off in the middle of an answer

_NO_PERMISSION = ("AccessDenied", "AllAccessDisabled", "AccountProblem", "InvalidPayer", "NotSignedUp", "RequestTimeTooSkewed")
_WRONG_CREDENTIALS = (
    *("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidClientTokenId", "InvalidSecurity", "MissingSecurityHeader"),
    *("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"),
)
_ELSEWHERE = ("PermanentRedirect", "TemporaryRedirect", "Redirect", "301", "307", "AuthorizationHeaderMalformed")


def is_s3(path: str) -> bool:
    return path.startswith(SCHEME)


def split(path: str) -> tuple[str, str]:
    """(bucket, key)."""
    bucket, _, key = path.removeprefix(SCHEME).partition("/")
    return bucket, key


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises UserError for an option that is unknown, or holds a credential; a credential's value is not shown.

    name: of the option in the job file, for the message.
    """
    for secret in _find_secrets(name, options):
        raise UserError(
            f"{secret}: credentials do not belong into a job file; allowed: the environment (AWS_ACCESS_KEY_ID, ...), "
            f"{name}.profile of ~/.aws, or the machine's role"
        )
    _check_names(name, options, OPTIONS)
    for group in ("client_kwargs", "config_kwargs"):
        _check_map(f"{name}.{group}", options.get(group))
    if config := options.get("config_kwargs"):
        _check_config(f"{name}.config_kwargs", config)
    url = options.get("endpoint_url")
    if url is not None and not str(url).startswith(("http://", "https://")):
        raise UserError(f"{name}.endpoint_url={url!r}; allowed: a URL, for instance http://127.0.0.1:9000")


def _check_config(name: str, config: Mapping[str, Any]) -> None:
    """What botocore does not look at itself: an unknown name in its option `s3` has no effect."""
    from botocore.config import Config
    from botocore.configprovider import DEFAULT_S3_CONFIG_VARS

    _check_names(name, config, Config.OPTION_DEFAULTS)
    _check_map(f"{name}.s3", config.get("s3"))
    _check_names(f"{name}.s3", config.get("s3") or {}, DEFAULT_S3_CONFIG_VARS)


def _check_map(name: str, value: Any) -> None:
    if not isinstance(value or {}, Mapping):
        raise UserError(f"{name} is a {type(value).__name__}; allowed: a map")


def _check_names(name: str, options: Mapping[str, Any], allowed: Collection[str]) -> None:
    for key in options:
        if key not in allowed:
            raise UserError(unknown_name(f"option in '{name}'", key, allowed))


def connect(options: Mapping[str, Any]):
    """The process's filesystem for these options; it keeps no listings. Raises UserError for options that cannot be used."""
    import s3fs  # here, as it takes a third of a second
    from botocore.exceptions import BotoCoreError
    from botocore.handlers import add_expect_header

    config = {**_CONFIG, **(options.get("config_kwargs") or {})}
    try:
        filesystem = s3fs.S3FileSystem(**{**options, "config_kwargs": config, "use_listings_cache": False})
        filesystem.retries = _ATTEMPTS
        filesystem.connect()
    except (TypeError, ValueError, BotoCoreError) as error:
        names = ", ".join(options) or "none is set"
        raise UserError(f"storage_options ({names}) cannot be used: {hide_login(' '.join(str(error).split()))}") from None
    filesystem.s3.meta.events.unregister("before-call.s3", add_expect_header)  # aiohttp waits for the answer to it without an end
    filesystem.loop.set_exception_handler(_pass_over_lost_connections)
    return filesystem


def _pass_over_lost_connections(loop, context: dict) -> None:
    """A request that loses its connection raises; the task of aiohttp that was to write it fails as well, and nobody asks for that."""
    import aiohttp

    if not isinstance(context.get("exception"), aiohttp.ClientError):
        loop.default_exception_handler(context)


def failures() -> tuple[type[Exception], ...]:
    """What s3fs raises when something is wrong with the store, or on the way to it."""
    import aiohttp
    from botocore.exceptions import BotoCoreError, ClientError

    return OSError, BotoCoreError, ClientError, aiohttp.ClientError


@contextmanager
def explained(path: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Raises UserError in place of what s3fs raises. path: an `s3://` path, for the message."""
    try:
        yield
    except failures() as error:
        raise explain(error, path, options) from None


def explain(error: Exception, path: str, options: Mapping[str, Any]) -> UserError:
    """What an error of s3fs comes to: the path, the endpoint, what is wrong, and what is allowed."""
    return UserError(f"'{path}' at {endpoint(options)}: {_describe(error, *split(path))}")


def endpoint(options: Mapping[str, Any]) -> str:
    """Where requests go, as far as options and environment say."""
    given = options.get("endpoint_url") or (options.get("client_kwargs") or {}).get("endpoint_url")
    return hide_login(given or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "AWS")


def hide_login(text: str) -> str:
    """`text` with dots in place of what stands between `://` and `@`."""
    return _LOGIN.sub(r"\1...@", text)


def error_code(error: BaseException | None) -> str | None:
    """What the store answered: `NoSuchBucket`, or `404` where there was no text; None for an error that is not an answer."""
    while error is not None:
        if isinstance(response := getattr(error, "response", None), Mapping):
            return response.get("Error", {}).get("Code")
        error = error.__cause__
    return None


def _describe(error: Exception, bucket: str, key: str) -> str:
    from botocore import exceptions as boto

    code = error_code(error)
    said = hide_login(" ".join(str(error).split()))
    place = f"key '{key}' in bucket '{bucket}'" if key else f"bucket '{bucket}'"
    if code == "NoSuchBucket":
        return f"there is no bucket '{bucket}'; allowed: a bucket that exists"
    if code in ("NoSuchKey", "404") or isinstance(error, FileNotFoundError):
        return f"there is no {place}"
    if code == "PreconditionFailed" or code == "412":
        return f"{place} is no longer what it was; allowed: objects that stay as they are while a job runs"
    if code in _NO_PERMISSION:
        return f"no permission for {place} ({code}: {said}); allowed: credentials that may read it, and write it if it is output"
    if code in _WRONG_CREDENTIALS:
        return f"the credentials are refused ({code}: {said}); {_CREDENTIALS}"
    if code in ("403", "400"):  # of a HEAD, whose answer has no text
        return f"no permission for {place}, or wrong credentials ({code} {said}); {_CREDENTIALS}"
    if code in _ELSEWHERE:
        return f"{place} is in another region ({code}: {said}); allowed: its own in client_kwargs.region_name, or in AWS_DEFAULT_REGION"
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError | boto.CredentialRetrievalError | boto.TokenRetrievalError):
        return f"no credentials ({said}); {_CREDENTIALS}, or storage_options.anon=true for a public bucket"
    if isinstance(error, boto.ReadTimeoutError | TimeoutError):
        return f"the endpoint does not answer, for {place}"
    if isinstance(error, boto.ConnectionError | boto.HTTPClientError):
        return f"the endpoint cannot be reached, for {place} ({said})"
    return f"{code or type(error).__name__}: {said} ({place})"


_CREDENTIALS = "allowed: those of the environment (AWS_ACCESS_KEY_ID, ...), of a storage_options.profile in ~/.aws, or of the machine"


def _find_secrets(name: str, value: Any) -> Iterator[str]:
    """The names of options that hold a credential, at any depth."""
    if isinstance(value, Mapping):
        for key, nested in value.items():
            if _SECRET.search(str(key)):
                yield f"{name}.{key}"
            else:
                yield from _find_secrets(f"{name}.{key}", nested)
    elif isinstance(value, list | tuple):
        for index, nested in enumerate(value):
            yield from _find_secrets(f"{name}.{index}", nested)
    elif isinstance(value, str) and _LOGIN.search(value):
        yield name
