"""Memory: measuring live tensor bytes. Needs torch only."""

from titan_relay.measure.ledger import Event, Label, Peak, Window
from titan_relay.measure.live_bytes import LiveBytes

__all__ = ["Event", "Label", "LiveBytes", "Peak", "Window"]
