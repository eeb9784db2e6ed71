"""Rows as text, and kept for the JSON file."""


class Report:
    """What was measured, part by part."""

    def __init__(self):
        self.rows = []

    def table(self, part, title, rows):
        """Prints `rows`, dicts with the same keys, and keeps them."""
        self.rows += [{"part": part, "table": title, **row} for row in rows]
        header = list(rows[0])
        cells = [header] + [[text(row[key]) for key in header] for row in rows]
        widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
        print(f"\n{title}\n")
        for number, line in enumerate(cells):
            print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |")
            if number == 0:
                print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
        print(flush=True)


def text(value):
    """As a table shows it."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def of_ours(row, **more):
    """The columns of a row of `multirail bench`."""
    ratio = None if row["percent_of_limit"] is None else row["percent_of_limit"] / 100
    # The same of the medians: far from it where something held up a few operations.
    medians = None if row["limit_p50_us"] is None else row["limit_p50_us"] / row["p50_us"]
    speeds = {"GB/s": row["gbytes_per_s"], "one copy GB/s": row["limit_gbytes_per_s"], "ratio": ratio,
              "p50 of one copy / of ours": medians}
    return {**more, "src": row["src"], "dst": row["dst"], "page": size(row["size"]), "pages": row["pages"], **speeds,
            "verified": "yes" if row["verified"] else "no"}


def size(count):
    """Bytes as people write them."""
    for unit, bytes_ in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= bytes_ and count % bytes_ == 0:
            return f"{count // bytes_} {unit}"
    return f"{count} B"
