"""The table of formats and contracts in the documents stands on tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
SECTION = re.compile(r"^## What may be sent$(.*?)^## ", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def section():
    return SECTION.search((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")).group(1)


def test_every_test_named_in_the_table_exists():
    named = NAMED.findall(section())
    assert len(named) > 50
    for file, name in named:
        code = (Path(__file__).parent / file).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {name}\(", code, re.MULTILINE), f"{file}::{name}"


def test_every_row_of_the_table_names_a_test():
    rows = [line for line in section().splitlines() if line.startswith("| ")]
    heads = [row for row in rows if row.endswith("| test |")]
    assert len(heads) == 2
    assert [row for row in rows if not NAMED.search(row) and row not in heads] == []
