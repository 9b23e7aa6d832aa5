"""A short run of kills; the long one is `python tests/_plugins/peer_rounds.py --rounds 100 --seed 3`."""

import pytest
from peer_rounds import run_rounds


@pytest.mark.timeout(300)
@pytest.mark.may_leave("pyzmq keeps a thread for messages that are sent without a copy, until the process ends")
def test_no_chunk_is_wrong_and_nothing_is_held_whichever_server_is_killed() -> None:
    seen = run_rounds(10, seed=3)
    # otherwise nothing was tried
    assert seen["stored"] > 50
    assert seen["loaded"] > 10
    assert seen["read back"] > 50
    assert seen["calls that were lost"] > 0
