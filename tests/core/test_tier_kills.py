"""A short run of kills; the long one is `python tests/_plugins/tier_rounds.py --rounds 100 --seed 7`."""

from pathlib import Path

import pytest
from tier_rounds import run_rounds


@pytest.mark.timeout(300)
def test_after_a_kill_every_hit_is_right_and_reaches_as_far_as_the_files(tmp_path: Path) -> None:
    found = run_rounds(tmp_path, 10, seed=7)
    # otherwise nothing was tried
    assert found["blobs"] > 100
    assert found["full folders"] > 0
    assert found["chunks hit"] > 100
    assert found["loaded"] > 100
