"""Bytes of a fuzzer as choices; past their end every choice is the first one."""

import numpy as np


class Choices:
    def __init__(self, data: bytes):
        self._data, self._at = data, 0

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def number(self, low: int, high: int) -> int:
        """low .. high."""
        span, value, room = high - low + 1, 0, 1
        while room < span:
            value, room = value * 256 + self.byte(), room * 256
        return low + value % span

    def one_of(self, options):
        return options[self.number(0, len(options) - 1)]

    def rarely(self, one_in: int = 16) -> bool:
        """Never past the end."""
        return self.byte() % one_in == 1

    def generator(self):
        return np.random.default_rng(self.number(0, 65535))
