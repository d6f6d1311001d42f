"""The scratch of a step multiplied out, buffer by buffer."""

from dataclasses import replace

from headroom.options import Options
from headroom.plan.known import known_shape
from headroom.plan.plan import make_plan
from headroom.plan.show.explain import explain_line
from tests.plan.shapes import cpu, gpu, host, smollm2


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_the_scratch_of_a_step_is_given_buffer_by_buffer() -> None:
    native = replace(cpu(24), native=True)
    plan = make_plan([smollm2()], [native], Options(parallel=4, chunk=512, threads=2))
    rows = explain_line(plan, "workspace").splitlines()[1:]
    assert plan.settings.rows == 516
    in_24_bits = 576 // 32 * 128  # of a row: digits, a scale and sums of every 32 columns
    assert rows[:2] == [
        "    516 rows x 576 values x 4 bytes = 1,188,864 bytes of normed rows (f32)",
        "    516 rows x 576 values x 4 bytes = 1,188,864 bytes of queries (f32)",
    ]
    inputs = next(row for row in rows if "inputs in 24 bits" in row)
    assert number(inputs.split()[3]) == 516 * in_24_bits + 2 * 64  # and room to align it
    assert rows[-1].startswith("    together ")


def test_the_scratch_of_a_gpu_is_given_buffer_by_buffer_with_its_gaps() -> None:
    plan = make_plan([known_shape("qwen3.6-35b-a3b:q4_k_m")], [gpu(12), host(64)], Options())
    rows = explain_line(plan, "workspace").splitlines()[1:]
    step = plan.settings.rows
    # The projection of gated linear attention: queries, keys and values of 8192 values in all.
    row = f"    {step:,} rows x 8,192 values x 4 bytes = {step * 8192 * 4:,} bytes of rows (f32)"
    assert row in rows
    assert len(rows) > 8
