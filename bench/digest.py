"""How fast is the digest that every byte of a checkpoint goes through, as a multiple of copying and of reading the bytes?

    python bench/digest.py [--mib 512] [--repeat 7] [--directory DIR]

One thread. In memory: CRC-32C of a buffer against `memcpy` of it. From a file: verifying it against a plain read of it, both
out of the page cache, in pieces of 4 MiB. Seconds are of processor time of this thread, so that a busy machine disturbs
them little; in brackets the smallest and the largest.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import tempfile
import time

import crc32c

from ckptd.tiers.base import CHUNK
from ckptd_shim.digest import crc32c_file

parser = argparse.ArgumentParser()
parser.add_argument("--mib", type=int, default=512)
parser.add_argument("--repeat", type=int, default=7)
parser.add_argument("--directory", default=None, help="for the file; default: the usual one for temporary files")
args = parser.parse_args()
size = args.mib << 20


def measured(work):
    """Seconds of processor time of each repetition, after one that warms up."""
    work()
    found = []
    for _ in range(args.repeat):
        begun = time.thread_time()
        work()
        found.append(time.thread_time() - begun)
    return found


def told(what, seconds, base=None):
    middle = statistics.median(seconds)
    times = "" if base is None else f", {middle / statistics.median(base):.2f} times that"
    low, high = size / max(seconds) / 1e9, size / min(seconds) / 1e9
    print(f"{what:32} {size / middle / 1e9:6.2f} GB/s ({low:.2f} to {high:.2f}){times}")


source, target = bytearray(os.urandom(1 << 20) * args.mib), bytearray(size)
into = (ctypes.c_char * size).from_buffer(target)
out_of = (ctypes.c_char * size).from_buffer(source)
copying = measured(lambda: ctypes.memmove(into, out_of, size))
told("memcpy", copying)
told("CRC-32C of a buffer", measured(lambda: crc32c.crc32c(source)), copying)

with tempfile.NamedTemporaryFile(dir=args.directory) as file:
    file.write(source)
    file.flush()
    buffer = memoryview(bytearray(CHUNK))

    def read():
        with open(file.name, "rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass

    reading = measured(read)
    told("read of a file", reading)
    told("read and CRC-32C of a file", measured(lambda: crc32c_file(file.name)), reading)
