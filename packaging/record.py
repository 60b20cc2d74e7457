#!/usr/bin/env python3
"""Prints a JSON line about packages of build.sh: record.py COMMAND ARCH WHEEL PROGRAM [NAME=SECONDS...]"""

import datetime
import json
import os
import platform
import subprocess
import sys


def said(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


command, arch, wheel, program, *times = sys.argv[1:]
line = {
    "date": datetime.date.today().isoformat(),
    "commit": said("git", "rev-parse", "HEAD"),
    "changed": said("git", "status", "--porcelain", "--untracked-files=no") != "",
    "command": command,
    "arch": arch,
    "cpus": len(os.sched_getaffinity(0)),
    "python": platform.python_version(),
    "wheel_bytes": os.path.getsize(wheel),
    "program_bytes": os.path.getsize(program),
    "glibc": said(os.path.join(os.path.dirname(__file__), "glibc.sh"), wheel),
}
print(json.dumps(line | {name: round(float(seconds), 2) for name, seconds in (time.split("=") for time in times)}))
