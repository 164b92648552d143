from __future__ import annotations

from rich.console import Console

from router.app.matrix import LEAST_POSITIONS, grid, matrix_table

MATRIX = {
    "math": {
        "math": {"agreement": 0.9, "positions": 300.0},
        "code": {"agreement": 0.4, "positions": LEAST_POSITIONS - 1.0},
    },
    "code": {
        "code": {"agreement": 0.7, "positions": 200.0},
        "math": {"agreement": 0.2, "positions": LEAST_POSITIONS},
    },
}


def test_rows_and_columns_share_one_order_and_thin_cells_say_nothing() -> None:
    laid = grid(MATRIX)
    assert laid.columns == ("code", "math")
    assert [row.name for row in laid.rows] == ["code", "math"]
    assert [[cell.text for cell in row.cells] for row in laid.rows] == [["0.70", "0.20"], ["–", "0.90"]]
    assert [[cell.own for cell in row.cells] for row in laid.rows] == [[True, False], [False, True]]


def test_a_draft_without_traffic_of_its_own_has_a_row_and_no_column() -> None:
    laid = grid({**MATRIX, "base": {"math": {"agreement": 0.1, "positions": 100.0}}})
    assert laid.columns == ("code", "math")
    assert [row.name for row in laid.rows] == ["code", "math", "base"]
    assert [cell.text for cell in laid.rows[-1].cells] == ["–", "0.10"]


def test_the_diagonal_is_bold_on_the_terminal() -> None:
    console = Console(force_terminal=True, width=80, color_system="standard")
    with console.capture() as capture:
        console.print(matrix_table("experts", MATRIX))
    shown = capture.get()
    for text in ("0.70", "0.90"):
        assert f"\x1b[1m{text}" in shown
    assert "\x1b[1m0.20" not in shown
    assert "0.20" in shown
