"""The number formats that products take their factors in."""

from __future__ import annotations

# Unit roundoff of each precision: half the distance of 1 to the next number that a factor can hold.
ROUNDOFF = {
    "fp32": 2.0**-24,
    "fp16x3": 2.0**-22,
    "bf16x3": 2.0**-17,
    "tf32": 2.0**-11,
    "fp16": 2.0**-11,
    "bf16": 2.0**-8,
}

# The low half of a float16 split is scaled up, so that it does not fall below the smallest normal float16.
LOW_SCALE = 2048.0
