"""Text to packed rows: tokenizers, document readers, mixtures, and lanes that resume exactly.

Imports neither torch nor torchtitan; rows are NumPy arrays.
"""

from titan_relay.data.documents import DataError
from titan_relay.data.lane import IGNORE_INDEX, PackedRow
from titan_relay.data.prefetch import PrefetchingReader
from titan_relay.data.reader import LaneReader, lane_key, num_valid_tokens
from titan_relay.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "IGNORE_INDEX",
    "DataError",
    "LaneReader",
    "PackedRow",
    "PrefetchingReader",
    "Tokenizer",
    "lane_key",
    "load_tokenizer",
    "num_valid_tokens",
]
