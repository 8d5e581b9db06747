"""Rows of cells as aligned text, and numbers of things."""


def table(rows: list[list[str]]) -> list[str]:
    """Rows of cells as aligned lines; columns that are empty throughout are left out."""
    columns = [index for index in range(len(rows[0])) if any(row[index] for row in rows[1:])]
    widths = [max(len(row[index]) for row in rows) for index in columns]
    return [
        "  ".join(row[index].ljust(width) for index, width in zip(columns, widths, strict=True)).rstrip()
        for row in rows
    ]


def count_of(number: int, noun: str, plural: str = "s") -> str:
    """As in "1 rank", "2 ranks"; plural: what the noun ends with then."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"
