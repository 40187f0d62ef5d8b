"""Tests of the trainer. torchtitan is adapted to this machine before a test module imports it."""

import titan_relay.titan  # noqa: F401
