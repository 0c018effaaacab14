"""A cell of a sweep that sleeps a while, then prints a record which depends on its flags alone.

python tests/sleeper.py --letters 1000 --seconds 0.05 --index 3
"""

import json
import random
import sys
import time

flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
time.sleep(random.Random(flags["--index"]).uniform(0, float(flags["--seconds"])))
print(json.dumps({"index": int(flags["--index"]), "text": flags["--index"] * int(flags["--letters"])}))
