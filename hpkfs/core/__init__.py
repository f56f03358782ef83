"""The pure part: formats, policy and plans; no I/O, no clock, no randomness."""
