"""Silence about trainers that are built to be measured, not to train."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torchtitan.tools.logging import logger


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torchtitan's story of building a trainer to itself: none of it is news here."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
