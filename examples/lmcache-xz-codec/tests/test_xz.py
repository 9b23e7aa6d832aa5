"""The codec keeps every promise of a codec."""

import pytest
from lmcache_xz_codec.codec import Xz

from lmcache.errors import ConfigError
from lmcache.plugins.testing import CodecSuite


class TestPromises(CodecSuite):
    def make_codec(self) -> Xz:
        return Xz({})


def test_a_preset_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="use a number from 0 to 4"):
        Xz({"preset": "9"})
