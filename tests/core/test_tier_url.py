"""What may stand after `--l2`, and what is said of what may not."""

import pytest

from lmcache.core.tier import TierLocation
from lmcache.core.tier_url import StorePolicy, TierSettings, TierURL
from lmcache.errors import ConfigError

OPTIONS = {"size_gb": "how large", "path_of": "a path"}
SECRETS = {"password": "what the server asks for"}
CODEC = {"level": "how hard"}


def settle(url):
    return TierURL.parse(url).settle(OPTIONS, SECRETS, CODEC)


def test_a_bare_url_has_the_settings_that_most_want():
    settings, codec = settle("disk:///cache")
    assert settings == TierSettings(
        TierLocation("disk", path="/cache"), StorePolicy.WRITE_THROUGH, threads=4, timeout_s=5.0, codec=""
    )
    assert codec == {}


def test_each_option_goes_to_who_knows_it():
    settings, codec = settle("disk:///c?size_gb=2&store=on-evict&threads=7&timeout_s=0.5&codec=zstd&level=3")
    assert settings.location.options == {"size_gb": "2"}
    assert settings.store_policy is StorePolicy.ON_EVICT
    assert (settings.threads, settings.timeout_s, settings.codec) == (7, 0.5, "zstd")
    assert codec == {"level": "3"}


def test_a_plus_sign_is_a_plus_sign_and_escapes_are_resolved():
    settings, _ = settle("disk:///with%20space+plus?codec=zstd+aes-gcm&path_of=/a%26b+c")
    assert settings.location.path == "/with space+plus"
    assert settings.codec == "zstd+aes-gcm"
    assert settings.location.options == {"path_of": "/a&b+c"}


@pytest.mark.parametrize(
    ("url", "host", "port", "path"),
    [
        ("REDIS://Host:6379/2", "Host", 6379, "/2"),
        ("redis://host", "host", None, ""),
        ("redis://[::1]:7/", "::1", 7, "/"),
        ("redis://a:1,b:2/0", "a:1,b:2", None, "/0"),
        ("s3://My.Bucket/pre/fix", "My.Bucket", None, "/pre/fix"),
    ],
)
def test_host_port_and_path_are_taken_apart(url, host, port, path):
    location = settle(url)[0].location
    assert (location.host, location.port, location.path) == (host, port, path)
    assert location.scheme == url.partition(":")[0].lower()


def test_secrets_come_from_the_environment_or_a_file_and_are_not_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_OF_TEST", "hush-1")
    (tmp_path / "secret").write_text("hush-2\n")
    for query, value in [("password_env=SECRET_OF_TEST", "hush-1"), (f"password_file={tmp_path}/secret", "hush-2")]:
        settings, _ = settle(f"redis://host?{query}")
        assert settings.location.secrets == {"password": value}
        assert "hush" not in f"{settings!r} {settings.location} {settings.location!r}"
    assert settle("redis://host")[0].location.secrets == {}


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("/folder", "--l2 /folder is no URL of a tier; write it like disk:///path?size_gb=100"),
        ("disk:/folder", "--l2 disk:/folder is no URL of a tier; write it like disk:///path?size_gb=100"),
        ("", "--l2  is no URL of a tier; write it like disk:///path?size_gb=100"),
        (
            "disk:///c?size=1",
            (
                "--l2 disk:// has no option 'size'; the options are codec, level, password_env, password_file, "
                "path_of, size_gb, store, threads, timeout_s"
            ),
        ),
        ("disk:///c?size_gb", "--l2 disk:// has the option 'size_gb' without a value; write size_gb=VALUE"),
        ("disk:///c?size_gb=1&size_gb=2", "--l2 disk:// has the option 'size_gb' twice; drop one of the two"),
        ("disk:///c?store=often", "--l2 disk:// has store=often; use write-through, on-evict, never"),
        ("disk:///c?threads=0", "--l2 disk:// has threads=0; use a number from 1 to 64"),
        ("disk:///c?threads=65", "--l2 disk:// has threads=65; use a number from 1 to 64"),
        ("disk:///c?threads=many", "--l2 disk:// has threads=many; use a number from 1 to 64"),
        ("disk:///c?timeout_s=-1", "--l2 disk:// has timeout_s=-1; use a positive number"),
        ("disk:///c?timeout_s=nan", "--l2 disk:// has timeout_s=nan; use a positive number"),
        ("disk:///c#d", "--l2 disk:// has a '#' in it; write %23 where you mean one"),
        (
            "redis://host:x",
            (
                "--l2 redis://host:x has no such host and port; write HOST or HOST:PORT, with brackets around an "
                "IPv6 address"
            ),
        ),
        (
            "redis://host:70000",
            (
                "--l2 redis://host:70000 has no such host and port; write HOST or HOST:PORT, with brackets around an "
                "IPv6 address"
            ),
        ),
        (
            "redis://host?password_env=NOT_SET_IN_TESTS",
            (
                "--l2 redis:// takes password from the variable NOT_SET_IN_TESTS, which is not set; set it in the "
                "environment of the server"
            ),
        ),
        (
            "redis://host?password_env=A&password_file=B",
            "--l2 redis:// has both password_env and password_file; drop one of the two",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(url, says):
    with pytest.raises(ConfigError) as refused:
        settle(url)
    assert str(refused.value) == says


def test_a_secret_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"takes password from .*/none, which cannot be read: .*No such file"):
        settle(f"redis://host?password_file={tmp_path}/none")


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:hush@host",
        "redis://:hush@host:6379/0",
        "redis://host?password=hush",
        "user:hush@host",
        "redis:/user:hush@host?x",
    ],
)
def test_a_secret_in_the_url_is_refused_and_not_repeated(url):
    with pytest.raises(ConfigError) as refused:
        settle(url)
    assert "hush" not in str(refused.value)
