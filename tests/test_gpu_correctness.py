"""What has to hold on a device holds on this machine's: a GPU where there is one, at full sizes, or else the CPU."""

import pytest
import torch
from gpu_correctness import cells

from reproduce.gpu_parts.cells import DONE, Cell, Options, Skip

HERE = Options("cuda", quick=False) if torch.cuda.is_available() else Options("cpu", quick=True)
pytestmark = [pytest.mark.slow] if HERE.on_cuda else []  # kernels are compiled for minutes


@pytest.mark.parametrize("cell", cells(HERE), ids=lambda cell: cell.name)
def test_a_check_holds(cell: Cell) -> None:
    try:
        record = cell.run()
    except Skip as reason:
        pytest.skip(str(reason))
    assert record["status"] == DONE, record
