"""The ledger's arithmetic on its own: totals, nested windows, resets, break-downs."""

import random

from titan_relay.measure.ledger import Label, Ledger

A = Label("forward", "op.a")
B = Label("backward", "op.b")


def test_peak_is_the_highest_running_total() -> None:
    ledger = Ledger()
    ledger.grow(0, 100, A)
    ledger.grow(1, 50, B)
    ledger.shrink(0, 100, A)
    ledger.grow(2, 70, A)
    assert ledger.live_bytes == 120
    assert ledger.root.peak_bytes == 150
    assert ledger.root.peak.label == B
    assert ledger.root.peak.by_label == {A: 100, B: 50}


def test_a_reset_inside_a_window_keeps_the_outer_peaks() -> None:
    ledger = Ledger()
    outer = ledger.open("outer")
    ledger.grow(0, 100, A)
    inner = ledger.open("inner")
    ledger.grow(1, 900, B)
    ledger.shrink(1, 900, B)
    ledger.reset()
    ledger.grow(2, 10, A)
    assert inner.peak_bytes == 110
    assert outer.peak_bytes == ledger.root.peak_bytes == 1000
    ledger.close(inner)
    ledger.close(outer)
    assert ledger.root.peak.by_label == {A: 100, B: 900}
    ledger.reset()
    assert ledger.root.peak_bytes == 110


def test_a_closed_window_keeps_its_peak_and_ignores_what_follows() -> None:
    ledger = Ledger()
    window = ledger.open("window")
    ledger.grow(0, 5, A)
    ledger.close(window)
    ledger.grow(1, 500, B)
    assert window.peak_bytes == 5
    assert window.peak.by_label == {A: 5}
    assert ledger.root.peak_bytes == 505


def test_random_histories_agree_with_a_slow_recount() -> None:
    # The slow truth keeps the whole history and takes maxima over slices of it.
    generator = random.Random(0)
    for _ in range(50):
        ledger, alive, history = Ledger(), {}, [0]
        windows: list[tuple] = []
        for serial in range(60):
            action = generator.random()
            if action < 0.5 or not alive:
                label = generator.choice((A, B))
                alive[serial] = (generator.randrange(1, 1000), label)
                ledger.grow(serial, *alive[serial])
            elif action < 0.8:
                victim = generator.choice(list(alive))
                ledger.shrink(victim, *alive.pop(victim))
            elif action < 0.9:
                windows.append((ledger.open("w"), len(history) - 1))
            elif windows:
                window, start = windows.pop()
                assert window.peak_bytes == max(history[start:])
                ledger.close(window)
            history.append(sum(num_bytes for num_bytes, _ in alive.values()))
            assert ledger.live_bytes == history[-1]
            for window, start in windows:
                assert window.peak_bytes == max(history[start:])
        peak = ledger.root.peak
        assert peak.live_bytes == max(history) == sum(peak.by_label.values())
        assert sum(peak.by_phase().values()) == sum(peak.by_op().values()) == peak.live_bytes
