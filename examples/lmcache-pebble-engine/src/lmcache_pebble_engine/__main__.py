"""Ask Pebble one prompt twice; in between it forgets, and the server at the address given (localhost:5555) does not."""

import random
import sys

from lmcache.core.client import ClientSettings, ServerAddress
from lmcache_pebble_engine.connector import LMCache
from lmcache_pebble_engine.engine import VOCABULARY, Pebble

engine = Pebble(seed=1)
engine.cache = cache = LMCache(engine, ServerAddress.parse(*sys.argv[1:] or ["127.0.0.1"]), ClientSettings())
prompt = random.Random(0).choices(range(VOCABULARY), k=1000)  # noqa: S311  # no secret
for _ in range(2):
    (request,) = engine.answer([prompt], max_tokens=8)
    print(f"{request.cached} of {len(prompt)} tokens came from the cache; the answer is {request.generated}")
    engine.drop_own_cache()
cache.close()
