#!/usr/bin/env python3
"""Packs generated PTX text as NAME.ptx.zst, without comment lines, or unpacks it.

    pack.py pack TEXT PACKED       pack.py unpack PACKED TEXT
"""
import pathlib
import sys

import zstandard

# 22 takes longer and saves 0.1 %.
LEVEL = 19

verb, source, target = sys.argv[1:]
data = pathlib.Path(source).read_bytes()
if verb == "pack":
    data = zstandard.ZstdCompressor(level=LEVEL).compress(data)
else:
    data = zstandard.ZstdDecompressor().stream_reader(data).read()
pathlib.Path(target).write_bytes(data)
