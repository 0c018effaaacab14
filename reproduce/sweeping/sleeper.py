"""A cell for reproduce/kill_sweep.py: sleeps a while, then prints a record that depends on its flags alone.

python reproduce/sweeping/sleeper.py --index 3 --size 1000 --seconds 0.05 --tag found-by-this
"""

import hashlib
import json
import random
import sys
import time

flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
index, size = int(flags["--index"]), int(flags["--size"])
time.sleep(random.Random(index).uniform(0, float(flags["--seconds"])))
digest = hashlib.sha256(str(index).encode()).hexdigest()
print(json.dumps({"index": index, "text": (digest * (size // len(digest) + 1))[:size]}))
