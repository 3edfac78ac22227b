"""The table: every name, operator and node of TileLang in one row."""

from __future__ import annotations

from .buffers import ROWS_OF_BUFFERS
from .expressions import ROWS_OF_EXPRESSIONS
from .others import ROWS_OF_OTHERS
from .row import Row
from .statements import ROWS_OF_STATEMENTS
from .tile_operations import ROWS_OF_TILE_OPERATIONS

TABLE: tuple[Row, ...] = (
    *ROWS_OF_STATEMENTS,
    *ROWS_OF_EXPRESSIONS,
    *ROWS_OF_TILE_OPERATIONS,
    *ROWS_OF_BUFFERS,
    *ROWS_OF_OTHERS,
)
