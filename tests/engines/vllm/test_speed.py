"""How fast an engine computes prompts, from what its scheduler sees."""

from lmcache.engines.vllm.speed import REMEMBERED, PrefillSpeed


def test_the_fastest_of_the_last_large_steps_counts() -> None:
    speed = PrefillSpeed()
    assert speed.tokens_per_s == 0.0
    for tokens, now in ((1000, 10.0), (2000, 10.5), (64, 11.0), (500, 11.001), (500, 99.0)):
        speed.step(tokens, now)

    # 1000 in half a second, 2000 in half a second; 64 are too few to tell, and in 88 s the engine was idle
    assert speed.tokens_per_s == 4000.0


def test_what_is_long_ago_is_forgotten() -> None:
    speed = PrefillSpeed()
    for step in range(REMEMBERED + 2):
        speed.step(9000 if step == 0 else 1000, float(step))
    assert speed.tokens_per_s == 1000.0
