"""`python -m superoffload`: replace this process by the program of this environment."""

import os
import sys

from ._program import program

path = program()
os.execv(path, [os.fspath(path), *sys.argv[1:]])
