"""Problems for the search with a known best split: drawn, and judged exhaustively."""
