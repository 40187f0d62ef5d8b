"""What happens to a bad document: `[data] bad_documents` is applied here and nowhere else."""

import logging
from collections import Counter

from titan_relay.data.documents import BadDocument
from titan_relay.data.errors import DataError

logger = logging.getLogger(__name__)

_MAX_WARNINGS = 5


class SkipPolicy:
    """Counts bad documents ("skip") or ends the run at the first one ("stop").

    The first five of each source are logged with file and row, later ones only counted; `counts`
    is per source name and only for this process since it started.
    """

    def __init__(self, bad_documents: str) -> None:
        self._stop = bad_documents == "stop"
        self.counts: Counter[str] = Counter()

    def handle(self, source_name: str, bad: BadDocument) -> None:
        """Raises DataError under "stop"; a blank line of JSON Lines is not a bad document."""
        if bad.blank_line:
            return
        if self._stop:
            raise DataError(
                f'{bad.where}: {bad.reason}; mend it, or set data.bad_documents = "skip"'
            )
        self.counts[source_name] += 1
        count = self.counts[source_name]
        if count <= _MAX_WARNINGS:
            logger.warning("source %s: skipped %s: %s", source_name, bad.where, bad.reason)
        if count == _MAX_WARNINGS:
            logger.warning("source %s: further bad documents are only counted", source_name)
