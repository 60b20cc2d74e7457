"""`python -m superoffload`: the program of this environment, in place of this process."""

import os
import sys

from ._program import program

path = program()
os.execv(path, [os.fspath(path), *sys.argv[1:]])
