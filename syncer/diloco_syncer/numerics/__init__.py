"""The arithmetic of merging: arrays in, arrays out, bit-identical whatever the number of threads.

It may import ``diloco_protocol.arrays`` and the spec. Never here: I/O, time, state between calls.
"""
