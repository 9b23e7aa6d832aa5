"""Tiers behind the cache, in any order of calls: what a ticket reads is what was stored there, and nothing is leaked.

Long runs: `LMCACHE_MODEL_EXAMPLES=5000 pytest tests/core/test_tiering_model.py`.
"""

import os

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from tiering_model import TieringModel

EXAMPLES = int(os.environ.get("LMCACHE_MODEL_EXAMPLES", "60"))
STEPS = int(os.environ.get("LMCACHE_MODEL_STEPS", "50"))


def test_no_order_of_calls_makes_a_tier_serve_foreign_bytes_or_leak_a_cell() -> None:
    run_state_machine_as_test(
        TieringModel,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
