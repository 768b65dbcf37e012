"""Starts a program N times as ranks 0 to N-1 of one job that meets in a file: ranks.py N PROGRAM [ARGUMENT...].

Ends with the first status that is not 0. Lighter than torchrun, which imports torch itself.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

count, program = int(sys.argv[1]), pathlib.Path(__file__).resolve().parent / sys.argv[2]
with tempfile.TemporaryDirectory(prefix="forkpoint-ranks-") as folder:
    environment = os.environ | {"WORLD_SIZE": str(count), "MEETING": f"file://{folder}/meeting", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([sys.executable, program, *sys.argv[3:]], env=environment | {"RANK": str(rank)})
        for rank in range(count)
    ]
    statuses = [rank.wait() for rank in ranks]
sys.exit(next((status if status > 0 else 128 - status for status in statuses if status), 0))
