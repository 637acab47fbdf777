"""Tables on the console."""

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def new_table(title: str, *columns: str) -> Table:
    """Without lines at the sides; the first column is to the left, the others to the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    return table


def print_table(table: Table) -> None:
    """All of it: where the terminal is too narrow, or is a file, rich would leave out ends of cells."""
    console = Console(highlight=False, markup=False)
    wanted = Measurement.get(console, console.options.update(width=10_000), table).maximum
    console.width = max(console.width, wanted)
    console.print(table)
