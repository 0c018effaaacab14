"""For the commands of this folder, whose first import it is: the checkout's own `common`, and its other packages."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
__path__ = [str(ROOT / "common")]
