"""Lines multiplied out: what is printed is computed again, number by number."""

import re
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import settings as example_settings

from headroom.errors import OptionError
from headroom.options import Options
from headroom.plan.known import known_shape
from headroom.plan.plan import Plan, make_plan
from headroom.plan.show.explain import explain_line
from headroom.units import GIB, MIB
from tests.plan.drawn_plans import drawn_plans
from tests.plan.shapes import cpu, gpu, host, laguna, smollm2

FIRST = re.compile(r"(\w+) on (.+?): ([\d,]+) bytes? \(.*?\), (.+)")
PRODUCT = re.compile(r"    ((?:[\d,]+ [a-zA-Z -]+? x )*[\d,]+ bytes?)(?: = ([\d,]+) bytes)?\b.*")


def number(text: str) -> int:
    return int(text.replace(",", ""))


def computed(row: str) -> int:
    """Return the product of a printed row, which must be what the row says that it is."""
    found = PRODUCT.fullmatch(row)
    assert found is not None, row
    product = prod(number(part.split()[0]) for part in found[1].split(" x "))
    assert found[2] is None or number(found[2]) == product
    return product


def check_explained(text: str, name: str) -> dict[str, int]:
    """Compute every printed block again; return the bytes by place."""
    found: dict[str, int] = {}
    for block in re.split(r"\n(?=\w)", text):
        head, *rows = block.splitlines()
        first = FIRST.fullmatch(head)
        assert first is not None, head
        assert first[1] == name
        together = [row for row in rows if row.startswith("    together ")]
        products = [row for row in rows if row not in together]
        assert len(together) == (len(products) > 1)
        assert sum(map(computed, products)) == number(first[3])
        found[first[2]] = number(first[3])
    return found


@example_settings(max_examples=60)
@given(drawn_plans())
def test_every_line_of_every_plan_is_the_sum_of_its_printed_products(plan: Plan) -> None:
    places = {device.name: device.lines for device in plan.devices}
    if plan.host.lines:
        places["host memory"] = plan.host.lines
    for name in {line.name for lines in places.values() for line in lines}:
        expected = {
            place: line.bytes
            for place, lines in places.items()
            for line in lines
            if line.name == name
        }
        assert check_explained(explain_line(plan, name), name) == expected


def test_rows_are_multiplied_by_the_vocabulary_and_the_bytes_of_a_value() -> None:
    plan = make_plan([smollm2()], [cpu(24)], Options())
    assert explain_line(plan, "logits") == (
        "logits on cpu: 786,432 bytes (768.0 KiB), 4 rows x 49152, f32\n"
        "    4 rows x 49,152 tokens x 4 bytes = 786,432 bytes"
    )


def test_several_terms_are_added_up() -> None:
    plan = make_plan([laguna()], [gpu(12), host(64)], Options())
    rows = explain_line(plan, "kv").splitlines()
    assert any(" window layers x " in row for row in rows)
    assert any(" full-attention layers x " in row for row in rows)
    size = next(line.bytes for line in plan.devices[0].lines if line.name == "kv")
    assert rows[-1] == f"    together {size:,} bytes"


def test_a_line_that_is_not_there_is_refused_with_those_that_are() -> None:
    plan = make_plan([smollm2()], [cpu(24)], Options())
    with pytest.raises(OptionError, match=r"The plan has no line 'kvs'\. It has core_weights, "):
        explain_line(plan, "kvs")


def test_a_reserve_names_what_is_kept_free_and_who_holds_the_rest() -> None:
    card = replace(gpu(24), available_bytes=23 * GIB, driver_bytes=300 * MIB)
    plan = make_plan([smollm2()], [card, host(64)], Options())
    assert explain_line(plan, "reserve").splitlines()[1:5] == [
        "    536,870,912 bytes kept free (512 MiB, or a sixteenth of the memory if that is less)",
        "    314,572,800 bytes held by an idle driver (an estimate)",
        "    759,169,024 bytes held by others",
        "    together 1,610,612,736 bytes",
    ]


def test_the_weights_of_a_draft_are_those_of_its_layers_and_others() -> None:
    draft = known_shape("qwen3.5-27b-dflash:q8_0")
    plan = make_plan([known_shape("qwen3.5-27b:q4_k_m"), draft], [gpu(24), host(64)], Options())
    inner, whole = sum(layer.core_bytes for layer in draft.layers), 1_838_535_680
    assert draft.norm_bytes == whole - inner
    assert explain_line(plan, "draft_weights").splitlines()[1:] == [
        f"    5 layers x {inner // 5:,} bytes = {inner:,} bytes",
        f"    {whole - inner:,} bytes outside the layers",
        f"    together {whole:,} bytes",
    ]
