"""Buttons that write what is seen into files for other programs."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from html import escape

import ipywidgets

from l2l_core.trace import format_bytes
from workbench.panels.choices import control_layout
from workbench.panels.panel import Panel, failure_html
from workbench.pictures import Picture, Table
from workbench.runs import EXPORTS, ExportedFile, export
from workbench.session import Snapshot

DEFAULT_FOLDER = "exports"  # beside the notebook, where its kernel works


class ExportPanel(Panel):
    """Writes the step that is seen for Perfetto and PyTorch's memory viewer, the run so far for TensorBoard and as a report.

    Files go into a folder that a person may name; what is there already is never written over.
    """

    has_own_caption = True

    def build(self) -> ipywidgets.Box:
        self._status = ipywidgets.HTML()
        undrawn = ipywidgets.HTML()  # the first child, where `fail` writes
        self._folder = ipywidgets.Text(
            value=DEFAULT_FOLDER,
            description="into the folder",
            tooltip="Relative to the kernel's folder, usually that of the notebook",
            continuous_update=False,
            **control_layout("260px"),
        )
        row = ipywidgets.HBox([ipywidgets.Label("Write for"), *map(self._button, EXPORTS), self._folder])
        row.add_class("l2l-buttons")
        return ipywidgets.VBox([undrawn, row, self._status])

    def draw(self, snapshot: Snapshot) -> None:
        # only what `fail` has written; what a button has said stays to be read until the next one
        self.widget.children[0].value = ""

    def still(self, snapshot: Snapshot) -> Sequence[Picture | Table]:
        return []

    def _button(self, name: str) -> ipywidgets.Button:
        button = ipywidgets.Button(
            description=name, icon="download", tooltip=EXPORTS[name].tip, layout={"width": "auto"}
        )
        button.on_click(lambda _: self._write_export(name))
        return button

    def _write_export(self, name: str) -> None:
        """Write it here and now; drawing goes on meanwhile."""
        self._show_status(f"{name}: writing …")
        try:
            written = export(name, self.session, self._folder.value.strip() or ".")
        except (ValueError, ModuleNotFoundError) as error:
            self._status.value = failure_html(f"{name}: {error}", traceback.format_exc())
        except OSError as error:
            why = f"{name}: {error.strerror or error} ({error.filename or self._folder.value})"
            self._status.value = failure_html(why, traceback.format_exc(), "Nothing was written: name another folder.")
        except Exception as error:
            self._status.value = failure_html(f"{name} could not be written: {error!r}", traceback.format_exc())
        else:
            self._status.value = _written_html(written)

    def _show_status(self, words: str) -> None:
        self._status.value = f'<span class="l2l-caption" role="status">{escape(words)}</span>'


def _written_html(written: ExportedFile) -> str:
    path = written.path.resolve()
    size = f", {format_bytes(path.stat().st_size)}" if path.is_file() else ""  # TensorBoard gets a folder
    site = f'At <a href="{escape(written.viewer_url)}" target="_blank" rel="noopener"><u>{escape(written.viewer_url)}</u></a>: '
    what = f"{written.description[:1].upper()}{written.description[1:]}"
    words = f"{escape(what)} written{size}: <code>{escape(str(path))}</code><br>"
    return f'<div class="l2l-written" role="status">{words}{site if written.viewer_url else ""}{escape(written.next_step)}.</div>'
