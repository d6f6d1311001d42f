"""Many clients at once, for a short time; `python -m tests.server.soak` does it for long."""

import pytest

from tests.server.soak import soak_server


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_clients_that_leave_and_stall_cost_nothing_and_change_no_answer() -> None:
    assert soak_server(minutes=1.0, connections=96, streams=24) == []
