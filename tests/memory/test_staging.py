"""What the planner counts for cold experts on their way to a GPU."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from headroom.memory.known import known_shape
from headroom.memory.staging import BUFFER_BYTES, buffer_bytes, downs_bytes, staging_bytes
from headroom.units import GIB, MIB

LAYERS = known_shape("qwen3.6-27b:q4_k_m").layers


@given(size=st.integers(1, 1 << 28))
def test_a_buffer_holds_whole_experts_and_at_least_one(size: int) -> None:
    found = buffer_bytes(size)
    assert size <= found
    assert found % 256 == 0
    assert found < max(size, BUFFER_BYTES) + 256
    assert found > BUFFER_BYTES - size


def test_staging_is_two_buffers_and_the_downs_of_one_group() -> None:
    routed = replace(
        LAYERS[0], experts=256, experts_used=8, expert_width=512, expert_bytes=1_900_544
    )
    assert staging_bytes([routed], 2048, GIB) == 2 * 35 * 1_900_544 + 512 * MIB
    assert staging_bytes([routed, LAYERS[0]], 2048, 64 * MIB) == 2 * 35 * 1_900_544 + 32 * MIB
    wider = replace(routed, expert_bytes=3_000_064)
    assert staging_bytes([routed, wider], 2048, 64 * MIB) == 2 * 22 * 3_000_064 + 32 * MIB


def test_a_group_of_one_has_room_however_little_may_be_unpacked() -> None:
    assert downs_bytes(8, 512, 2048, 1) == 2 * 512 * 2048


def test_dense_layers_stage_nothing() -> None:
    assert staging_bytes(LAYERS, 2048, GIB) == 0
