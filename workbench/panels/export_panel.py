"""Buttons that export the step or the run to files for other programs."""

from __future__ import annotations

import base64
import mimetypes
import traceback
from collections.abc import Sequence
from html import escape
from pathlib import Path

import ipywidgets

from l2l_core.trace import format_bytes
from workbench.panels.controls import control_layout, make_button, make_row
from workbench.panels.panel import Panel, failure_html
from workbench.pictures import Picture, Table
from workbench.runs import EXPORTS, ExportedFile, export
from workbench.session import Snapshot

_MAX_DOWNLOAD_BYTES = 8 << 20  # the file travels in the page's messages
DEFAULT_FOLDER = "exports"  # relative to the kernel's working folder


class ExportPanel(Panel):
    """Exports the step for Perfetto and PyTorch's memory viewer, and the run for TensorBoard and as a report.

    Existing files in the folder are never overwritten.
    """

    has_own_caption = True

    def build(self) -> ipywidgets.Box:
        self._status = ipywidgets.HTML()
        self._folder = ipywidgets.Text(
            value=DEFAULT_FOLDER,
            description="into the folder",
            tooltip="Relative to the kernel's folder, usually that of the notebook",
            continuous_update=False,
            **control_layout("260px"),
        )
        row = make_row(ipywidgets.Label("Write for"), *map(self._button, EXPORTS), self._folder)
        return ipywidgets.VBox([row, self._status])

    def draw(self, snapshot: Snapshot) -> None:
        """Do nothing: the status of the last export stays until the next one."""

    def still(self, snapshot: Snapshot) -> Sequence[Picture | Table]:
        return []

    def _button(self, name: str) -> ipywidgets.Button:
        button = make_button(name, "download", EXPORTS[name].tip)
        button.on_click(lambda _: self._write_export(name))
        return button

    def _write_export(self, name: str) -> None:
        """Write the files on this thread; the refresh loop continues to draw."""
        self._status.value = f'<span class="l2l-caption" role="status">{escape(name)}: writing …</span>'
        try:
            written = export(name, self.session, self._folder.value.strip() or ".")
        except (ValueError, ModuleNotFoundError) as error:
            self._status.value = failure_html(f"{name}: {error}", traceback.format_exc())
        except OSError as error:
            reason = f"{name}: {error.strerror or error} ({error.filename or self._folder.value})"
            self._status.value = failure_html(
                reason, traceback.format_exc(), "Nothing was written: name another folder."
            )
        except Exception as error:
            self._status.value = failure_html(f"{name} could not be written: {error!r}", traceback.format_exc())
        else:
            self._status.value = _written_html(written)


def _written_html(written: ExportedFile) -> str:
    path = written.path.resolve()
    size = f", {format_bytes(path.stat().st_size)}" if path.is_file() else ""  # a folder for TensorBoard
    site = f'At <a href="{escape(written.viewer_url)}" target="_blank" rel="noopener"><u>{escape(written.viewer_url)}</u></a>: '
    description = f"{written.description[:1].upper()}{written.description[1:]}"
    words = f"{escape(description)} written{size}: <code>{escape(str(path))}</code>{_download_link(path)}<br>"
    return f'<div class="l2l-written" role="status">{words}{site if written.viewer_url else ""}{escape(written.next_step)}.</div>'


def _download_link(path: Path) -> str:
    """Return a link that saves a file from the page, which works where the kernel's folder is on another machine."""
    if not path.is_file() or path.stat().st_size > _MAX_DOWNLOAD_BYTES:
        return ""
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f' <a download="{escape(path.name)}" href="data:{kind};base64,{data}"><u>Download</u></a>'
