"""A host whose wall clock is off: what Python is told of it, that is. Monotonic clocks are right, as on any host."""

import os
import time

_offset_s = float(os.environ.get("CLOCK_OFFSET_S", "0"))
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + _offset_s
time.time_ns = lambda: _time_ns() + int(_offset_s * 1e9)
