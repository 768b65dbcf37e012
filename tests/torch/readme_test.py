"""The README's commands for PyTorch jobs, run as they stand: readme_test.py [TAG]."""
import os
import pathlib
import subprocess
import sys

SOURCE = pathlib.Path(__file__).resolve().parents[2]

tag = sys.argv[1] if len(sys.argv) > 1 else "torch"
folder = str(pathlib.Path(sys.executable).parent)  # python3 and torchrun are this one's
command = ["bash", SOURCE / "tests/readme_test.sh", SOURCE, os.environ["FORKPOINT_BUILD"], tag]
sys.exit(subprocess.run(command, env=os.environ | {"PATH": folder + os.pathsep + os.environ["PATH"]}).returncode)
