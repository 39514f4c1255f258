"""Worst differences of the parity tests, by model and case: shown by `pytest -v tests/parity`."""

import pytest

ROWS: dict[tuple[str, str], tuple[float, float]] = {}


@pytest.fixture(scope="session")
def record_difference():
    """``record(model, case, found, allowed)``: remember the worst of each (model, case)."""

    def record(model, case, found, allowed):
        worst = max(found, ROWS.get((model, case), (0.0, 0.0))[0])
        ROWS[model, case] = (worst, allowed)

    return record


def pytest_terminal_summary(terminalreporter, config):
    if not ROWS or config.option.verbose < 0:
        return
    terminalreporter.section("worst differences from transformers")
    terminalreporter.write_line(f"{'model':<22}{'case':<42}{'found':>10}{'allowed':>10}")
    for (model, case), (found, allowed) in sorted(ROWS.items()):
        terminalreporter.write_line(f"{model:<22}{case:<42}{found:>10.2e}{allowed:>10.0e}")
