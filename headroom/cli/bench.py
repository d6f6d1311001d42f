"""`headroom bench cpu`: how fast the CPU kernels are, against what the memory allows."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from headroom.errors import KernelError

if TYPE_CHECKING:
    from headroom.kernels.native.measure import Measured


def bench(
    what: Annotated[Literal["cpu"], typer.Argument(help="what to measure")],
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 for all cores")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Measure products and experts against the machine's read bandwidth."""
    # torch takes seconds to import; --help must not wait for it.
    from headroom.kernels.native.measure import SIZE, measure_kernels
    from headroom.kernels.native.module import MISSING, MODULE, POOL

    if MODULE is None:
        raise KernelError("There are no C++ kernels to measure.", hint=f"The module is {MISSING}.")
    if threads:
        POOL.set(threads)
    rows = list(measure_kernels())
    head = {"isa": POOL.ops.isa, "threads": POOL.ops.threads, "size": SIZE}
    if as_json:
        print(json.dumps(head | {"kernels": [asdict(row) for row in rows]}))
        return
    title = f"{head['isa']} kernels on {head['threads']} threads, {SIZE} x {SIZE}"
    Console().print(kernel_table(title, rows))


def kernel_table(title: str, rows: "list[Measured]") -> Table:
    """Return what was measured as a table."""
    table = Table("kernel", "GB/s", "of read bandwidth", title=title)
    for row in rows:
        table.add_row(row.name, f"{row.gb_per_s:.1f}", f"{100 * row.share:.0f} %")
    return table
