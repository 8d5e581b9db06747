"""The store of one rank and step: columns keyed by (field, layout). No communication."""

import concurrent.futures
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from siirl.data.rows import widened
from siirl.errors import DagError, DeadlineError
from siirl.observe.spans import phase
from siirl.types import FIELDS, FieldKey

Column = Any
"""A tensor [B, ...], or an object column (see siirl.data.rows)."""


@dataclass(frozen=True)
class _Pending:
    """Columns that one op still computes beside the instructions that follow it."""

    rows: "Future[TensorDict]"
    keys: tuple[FieldKey, ...]


class FieldStore:
    """This rank's rows: a column for each (field, layout id). All columns of a layout have the same rows.

    Columns are shared, not copied: nobody changes one in place.
    """

    def __init__(self, deadline_s: float):
        """deadline_s: how long `view` and `drop` wait for rows that were put as a Future."""
        self._deadline_s = deadline_s
        self._columns: dict[tuple[FieldKey, str], Column | _Pending] = {}
        self._num_rows: dict[str, int] = {}
        self.routes: dict[tuple[str, str], Any] = {}
        """What the transport remembers of rows that it has brought from one layout to another."""

    def put(
        self, rows: "TensorDict | Future[TensorDict]", agent: int, layout_id: str, names: Iterable[str]
    ) -> None:
        """Keep the columns `names` of rows as fields of `agent`; a Future is waited for when first read.

        DagError if rows lack one of the names, hold another number of rows than the layout's columns, or
        write a column twice. Further columns of rows are not kept.
        """
        keys = tuple(FieldKey(agent, name) for name in names)
        for key in keys:
            if (key, layout_id) in self._columns:
                raise DagError(f"{key} is written twice in layout {layout_id!r}: a field has one writer.")
        if isinstance(rows, Future):
            pending = _Pending(rows, keys)
            self._columns |= {(key, layout_id): pending for key in keys}
        else:
            self._keep(rows, keys, layout_id)

    def view(self, keys: Sequence[FieldKey], layout_id: str, agent: int | None = None) -> TensorDict:
        """The columns `keys` as one TensorDict [B], named by field.

        Columns of response tokens have one width, that of the widest: a column that went to other ranks and
        came back is as wide as their longest row. With `agent` given, fields of other agents are named in
        full, e.g. "agent_1.score". DagError if a column is not there or two would have the same name;
        DeadlineError if pending rows do not arrive; whatever their computation raised.
        """
        columns: dict[str, Column] = {}
        for key in keys:
            name = key.name if agent in (None, key.agent) else str(key)
            if name in columns:
                raise DagError(
                    f"{key} and another agent's field would both be called {name!r}: name the reader."
                )
            columns[name] = self.column(key, layout_id)
        rows = TensorDict({}, batch_size=[self.num_rows(layout_id) or 0])
        for name, column in _of_one_width(columns).items():
            rows.set(name, column)
        return rows

    def view_others(self, entries: Iterable[tuple[FieldKey, str]]) -> dict[int, TensorDict]:
        """Columns (field, layout id) of several agents: agent -> its rows; the waits and errors of `view`."""
        keys: dict[tuple[int, str], list[FieldKey]] = {}
        for key, layout_id in entries:
            keys.setdefault((key.agent, layout_id), []).append(key)
        return {agent: self.view(of_agent, layout_id) for (agent, layout_id), of_agent in keys.items()}

    def column(self, key: FieldKey, layout_id: str) -> Column:
        """One column; the same waits and errors as `view`."""
        column = self._columns.get((key, layout_id))
        if isinstance(column, _Pending):
            self._resolve(column, layout_id)
            column = self._columns[key, layout_id]
        if column is None:
            raise DagError(self._explain_missing(key, layout_id))
        return column

    def fields(self, layout_id: str) -> list[FieldKey]:
        """The fields that are in the layout, finished or not."""
        return [key for key, layout in self._columns if layout == layout_id]

    def num_rows(self, layout_id: str) -> int | None:
        """Rows of this rank in the layout; None while it has no (finished) column there."""
        return self._num_rows.get(layout_id)

    def __contains__(self, entry: tuple[FieldKey, str]) -> bool:
        return entry in self._columns

    def drop(self, entries: Iterable[tuple[FieldKey, str]]) -> None:
        """Forget columns (field, layout id).

        Pending rows are not waited for while another column of theirs is kept, whose reader will wait; else
        they are, because their errors count.
        """
        layouts = set()
        for key, layout_id in entries:
            column = self._columns.pop((key, layout_id), None)
            if column is None:
                raise DagError(self._explain_missing(key, layout_id))
            if isinstance(column, _Pending) and not any(kept is column for kept in self._columns.values()):
                self._wait(column, layout_id)
            layouts.add(layout_id)
        for layout_id in layouts - {layout_id for _, layout_id in self._columns}:
            self._num_rows.pop(layout_id, None)

    def num_bytes(self) -> int:
        """Memory held by tensor columns, in bytes; a column shared by two layouts counts once."""
        tensors = {
            id(column): column for column in self._columns.values() if isinstance(column, torch.Tensor)
        }
        return sum(column.numel() * column.element_size() for column in tensors.values())

    def _resolve(self, pending: _Pending, layout_id: str) -> None:
        kept = tuple(key for key in pending.keys if self._columns.get((key, layout_id)) is pending)
        self._keep(self._wait(pending, layout_id), kept, layout_id)

    def _wait(self, pending: _Pending, layout_id: str) -> TensorDict:
        try:
            with phase("wait", rows=", ".join(map(str, pending.keys))):
                return pending.rows.result(self._deadline_s)
        except concurrent.futures.TimeoutError:
            if pending.rows.done():
                raise
            waited_for = ", ".join(map(str, pending.keys))
            raise DeadlineError(f"waited {self._deadline_s:g} s for {waited_for} in {layout_id!r}") from None

    def _keep(self, rows: TensorDict, keys: tuple[FieldKey, ...], layout_id: str) -> None:
        if not isinstance(rows, TensorDictBase) or len(rows.batch_size) != 1:
            given = type(rows).__name__
            if isinstance(rows, TensorDictBase):
                given = f"batch size {list(rows.batch_size)}"
            raise DagError(
                f"rows for layout {layout_id!r} are a TensorDict with one batch dimension, not {given}: an "
                "op returns TensorDict({field: column}, batch_size=rows.batch_size)."
            )
        present = set(rows.keys())
        if missing := [str(key) for key in keys if key.name not in present]:
            raise DagError(
                f"rows for layout {layout_id!r} lack {', '.join(missing)}; they hold {sorted(present)}."
            )
        num_rows = rows.batch_size[0]
        held = self._num_rows.setdefault(layout_id, num_rows)
        if num_rows != held:
            others = [str(key) for key, layout in self._columns if layout == layout_id and key not in keys]
            raise DagError(
                f"{', '.join(map(str, keys))} have {num_rows} rows, but layout {layout_id!r} has {held} "
                f"({', '.join(others)}): an op writes one row for each row it reads unless it is declared to "
                "change rows."
            )
        self._columns |= {(key, layout_id): rows.get(key.name) for key in keys}

    def _explain_missing(self, key: FieldKey, layout_id: str) -> str:
        there = sorted(str(other) for other, layout in self._columns if layout == layout_id)
        elsewhere = sorted(layout for other, layout in self._columns if other == key)
        where = f" It is in layout {', '.join(elsewhere)}." if elsewhere else ""
        return f"{key} is not in layout {layout_id!r}, which has: {', '.join(there) or 'nothing'}.{where}"


def _of_one_width(columns: dict[str, Column]) -> dict[str, Column]:
    """The columns, those of response tokens filled up to the widest of them."""
    of_tokens = {
        name: column
        for name, column in columns.items()
        if (spec := FIELDS.get(name.rpartition(".")[2])) is not None and spec.dims[:1] == ("T",)
    }
    width = max((column.shape[1] for column in of_tokens.values()), default=0)
    found = {name: widened(column, name.rpartition(".")[2], width) for name, column in of_tokens.items()}
    return columns | found
