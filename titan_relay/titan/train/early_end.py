"""What asks a run to end before its last step: a signal to this rank, or the time that the run has.

A rank only notes it; at the next step boundary all ranks know of it (`BalanceStep`), save and end.

Signals are read by a thread, from where the system's handler writes their numbers: a rank that is
stuck in a collective, where Python runs no handlers, can still be told to end at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

EXIT_ENDED_EARLY = 75  # EX_TEMPFAIL of sysexits.h: start the same command again
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_REASONS = (*(each.name for each in SIGNALS), "training.max_minutes")
# A batch system and torchrun both pass a signal on: what comes so close together is one wish.
_ONE_WISH_SECONDS = 1.0


class EarlyEnd:
    """Notes what asks this rank for an early end.

    Args:
        max_minutes: the run's, from now on; 0: no limit. Given to one rank, it holds for all.
        clock: seconds; one that never jumps.

    Attributes:
        is_training: whether signals are noted; before and after, they end the process at once.
        is_over: whether they mean nothing any more, because nothing is left to save.
    """

    def __init__(
        self, max_minutes: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.is_training = self.is_over = False
        self._clock = clock
        self._ends_at = clock() + 60 * max_minutes if max_minutes else float("inf")
        self._noted_at: dict[int, float] = {}

    def requests(self) -> tuple[bool, ...]:
        """What this rank knows of; as many on every rank."""
        by_signal = (number in self._noted_at for number in SIGNALS)
        return (*by_signal, self._clock() >= self._ends_at)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note signals meanwhile, of which a second one ends the process at once."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        usual = {number: signal.signal(number, _leave_to_thread) for number in SIGNALS}
        for number in SIGNALS:  # native code's calls of the system are not interrupted
            signal.siginterrupt(number, False)
        usual_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        listens = True

        def restore() -> None:
            nonlocal listens
            if listens:
                signal.set_wakeup_fd(usual_writer)
                for number, handler in usual.items():
                    signal.signal(number, handler)
            listens = False

        # A forked child would write its own signals here, and not end by them.
        os.register_at_fork(after_in_child=restore)
        thread = threading.Thread(target=self._listen, args=(reader,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            restore()
            os.close(writer)
            thread.join()
            os.close(reader)

    def _listen(self, reader: int) -> None:
        while byte := os.read(reader, 1):
            if byte[0] in SIGNALS and not self.is_over:  # Ctrl-C is Python's
                self._note(byte[0])

    def _note(self, number: int) -> None:
        now = self._clock()
        first = min(self._noted_at.values(), default=now)
        self._noted_at.setdefault(number, now)
        if not self.is_training or now - first > _ONE_WISH_SECONDS:
            when = "again" if self.is_training else "outside of training"
            os.write(2, f"{signal.Signals(number).name} {when}: ended at once\n".encode())
            os._exit(128 + number)


def reasons(requests: Sequence[bool]) -> str:
    """What asked, in words; empty if nothing did."""
    asked = (name for name, is_asked in zip(_REASONS, requests, strict=False) if is_asked)
    return " and ".join(asked)


def _leave_to_thread(number: int, frame: object) -> None:
    """The system's handler writes numbers only of signals for which Python has a handler."""
