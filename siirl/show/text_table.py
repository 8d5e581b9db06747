"""Rows of cells as aligned text."""


def table(rows: list[list[str]]) -> list[str]:
    """Rows of cells as aligned lines; columns that are empty throughout are left out."""
    columns = [index for index in range(len(rows[0])) if any(row[index] for row in rows[1:])]
    widths = [max(len(row[index]) for row in rows) for index in columns]
    return [
        "  ".join(row[index].ljust(width) for index, width in zip(columns, widths, strict=True)).rstrip()
        for row in rows
    ]
