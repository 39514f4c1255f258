"""The modules of the placard's page that need no page, run by node where there is one."""

import shutil
import subprocess
from pathlib import Path

import pytest

from mmserve.demos.placard.app import STATIC

CHECKS = Path(__file__).parents[2] / "helpers" / "placard_modules.mjs"
NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="no node on the path; the tests in a browser check the same")
def test_labels_are_read_while_they_are_written_states_lead_on_and_languages_say_the_same():
    program = (
        f'import {{ checked }} from "{CHECKS.as_uri()}"; console.log(await checked("{STATIC.as_uri()}"))'
    )
    done = subprocess.run(
        [NODE, "--input-type=module", "--eval", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "checked", done.stderr
