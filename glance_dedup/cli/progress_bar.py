# SPDX-License-Identifier: Apache-2.0

"""Shows the progress of long work: a bar on a terminal, otherwise lines."""

import os
import sys
import time

from glance_dedup.base import units


class Progress:
    """Shows on `stream` how far some work is.

    Work that ends within `INTERVAL` shows nothing.

    :param what: a few words for the work
    :param total: the amount of work; None if it is not known
    :param unit: the unit of the amounts; None: bytes
    """

    INTERVAL = {True: 0.1, False: 5.0}      # seconds, by being a terminal
    BAR = 20

    def __init__(self, what, total=None, *, unit=None, stream=None,
                 quiet=False, clock=time.monotonic):
        self.what = what
        self.total = total
        self.unit = unit
        self.stream = sys.stderr if stream is None else stream
        self.quiet = quiet or self.stream is None
        self.clock = clock
        self.terminal = not self.quiet and self.stream.isatty()
        self.started = self.told = clock()
        self.done = 0
        self.lines = 0
        self.width = 0

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.finish()

    def update(self, done: int, total: int | None = None, what=None):
        """Note how much is done; the signature fits all progress callbacks."""
        self.done = done
        if total is not None:
            self.total = total
        now = self.clock()
        if now - self.told >= self.INTERVAL[self.terminal]:
            self.told = now
            self._tell(now)

    def step(self, done: int, total: int, what: str):
        """Note progress as `update` does, for work that names its phases."""
        self.what = what
        self.update(done, total)

    def finish(self):
        """Show the final state, if anything was shown before."""
        if self.lines:
            self._tell(self.clock())
            if self.terminal:
                self._write('\n')
            self.lines = 0

    def _line(self, now: float) -> str:
        elapsed = max(now - self.started, 1e-6)
        rate = self.done / elapsed
        words = [self.what + ':']
        if self.total:
            part = min(1.0, self.done / self.total)
            if self.terminal:
                full = int(part * self.BAR)
                words.append(f'[{"#" * full}{"." * (self.BAR - full)}]')
            words.append(f'{int(part * 100)} %,')
        words.append(self._amount(self.done))
        if self.total:
            words.append(f'of {self._amount(self.total)}')
        if self.unit:
            words[-1] += f' {self.unit}, {rate:.0f}/s'
        else:
            words[-1] += f', {units.size(rate)}/s'
        if self.total and rate and self.done < self.total:
            left = (self.total - self.done) / rate
            words[-1] += f', {units.duration(left)} left'
        else:
            words[-1] += f', {units.duration(elapsed)}'
        return ' '.join(words)

    def _amount(self, number):
        return str(number) if self.unit else units.size(number)

    def _tell(self, now):
        if self.quiet:
            return
        line = self._line(now)
        if self.terminal:
            try:
                columns = os.get_terminal_size(self.stream.fileno()).columns
            except (OSError, ValueError):
                columns = 80
            line = line[:max(columns - 1, 10)]
            self._write('\r' + line.ljust(self.width))
            self.width = len(line)
        else:
            self._write(line + '\n')
        self.lines += 1

    def _write(self, text):
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError):
            # The work goes on even if its progress is not seen.
            self.quiet = True
