"""gpu_calls.sh: its steps name programs, tests and cells that exist, and a call has to be named."""

import re
import shlex
import subprocess

from common.checkout import ROOT
from reproduce import gpu_speed

SCRIPT = ROOT / "reproduce" / "gpu_calls.sh"


def test_planned_steps_name_what_exists() -> None:
    text = SCRIPT.read_text().replace("\\\n", " ")
    cells = [cell for line in re.findall(r"^ +speed (\d.*)", text, re.MULTILINE) for cell in shlex.split(line)[2:]]
    assert cells and {*cells} <= {*gpu_speed.CELLS}
    programs = [*re.findall(r"tests/\w\S*\.py", text), *re.findall(r"-m (reproduce\.\w+)", text)]
    assert len(programs) > 4
    assert all((ROOT / f"{name.removesuffix('.py').replace('.', '/')}.py").is_file() for name in programs)


def test_a_call_has_to_be_named(tmp_path) -> None:
    ended = subprocess.run(["bash", SCRIPT, "c", tmp_path], capture_output=True, text=True)
    assert ended.returncode == 2 and "a, b or wheels" in ended.stderr and not [*tmp_path.iterdir()]
